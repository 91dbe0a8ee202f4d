"""A question as something to run: the YAML of a training, commands, and Python."""

from typing import Any

from tightfit.cli.explorer.question import PageQuestion
from tightfit.cli.explorer.uploads import Described
from tightfit.models.decoder_config import PRESETS
from tightfit.names import FEW_BITS
from tightfit.training.config.yaml_text import write_yaml

FOLDER = "./model"  # stands for the place of a model that was uploaded as a config.json
DTYPES_OF_TORCH = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}


def nothing_to_run(question: PageQuestion) -> str:
    """The text in the place of a command to run where no plan fits."""
    return (
        f"# Nothing to run: this step does not fit {question.device} within {question.budget}.\n"
        "# The tab Recipes has what fits, or comes nearest.\n"
    )


def yaml_text(question: PageQuestion, described: Described) -> str:
    """A configuration that `tightfit train` and `tightfit plan` read."""
    training: dict[str, Any] = {
        "batch_size": question.batch_size,
        "optimizer": question.optimizer,
        "precision": question.precision,
        "grad_clip": None,
    }
    if question.step_in_backward:
        training["step_in_backward"] = True
    sections = {
        "model": _model(question, described),
        "data": {
            "source": "default",
            "sequence_length": question.sequence_length,
            "tokenizer": "model" if described.decoder is None else "train",
        },
        "training": training,
        "memory": {"budget": question.budget, "levers": question.allowed},
    }
    return (
        f"# tightfit plan run.yaml training.device={question.device}   (here, without the card)\n"
        "# tightfit train run.yaml                                     (on the card, with your data.source)\n"
        f"{_folder_note(described)}{_optimizer_note(question)}{write_yaml(sections)}"
    )


def _model(question: PageQuestion, described: Described) -> dict[str, Any]:
    if described.decoder is not None:
        preset = next((name for name in PRESETS if name == question.model and question.upload is None), None)
        own = {"preset": preset} if preset else _changed(described)
        return {**own, "dtype": question.dtype}
    section: dict[str, Any] = {"path": described.path or FOLDER}
    adapter = question.adapter
    if adapter is None:
        return {**section, "dtype": question.dtype}
    targets = adapter.target_modules
    kept = {"r": adapter.r, "alpha": adapter.alpha, "base": adapter.base}
    if targets is not None:
        kept["target_modules"] = list(targets) if isinstance(targets, tuple) else targets
    if adapter.base in FEW_BITS and question.dtype != "fp32":
        section["dtype"] = question.dtype  # of the weights that are not in few bits
    return {**section, "adapter": kept}


def _changed(described: Described) -> dict[str, Any]:
    """The keys of a decoder that differ from their defaults."""
    decoder = described.decoder
    assert decoder is not None, "the caller has looked"
    defaults = type(decoder)()
    return {key: value for key, value in vars(decoder).items() if value != getattr(defaults, key) and key != "dtype"}


def _folder_note(described: Described) -> str:
    needs = described.decoder is None and described.path is None
    return f"# {FOLDER}: the folder with the weights of {described.name}\n" if needs else ""


def _optimizer_note(question: PageQuestion) -> str:
    if question.optimizer != "adamw" or question.dtype != "bf16" or question.rank:
        return ""
    return "# On bf16 weights a training takes adamw for adamw_bf16_stochastic; its peak differs a little.\n"


def python_text(question: PageQuestion, described: Described) -> str:
    """A plan in a loop of one's own. It runs as it stands, on the card and off it."""
    levers = repr(question.allowed)
    lines = ["import torch", "import tightfit"]
    lines += _building(question, described)
    lines += [
        "",
        f"batch = tightfit.TokenBatch({question.batch_size}, {question.sequence_length}, model.config.vocab_size)",
        "plan = tightfit.plan(",
        f"    model, batch, {question.budget!r}, optimizer={question.optimizer!r}, precision={question.precision!r},",
        f"    device={question.device!r}, levers={levers},",
        *(["    step_in_backward=True,"] if question.step_in_backward else []),
        ")",
        "print(plan)",
        "",
        "with plan.apply(model):  # while it lasts, your own loop trains within the budget",
        "    ...",
    ]
    return "\n".join(lines) + "\n"


def _building(question: PageQuestion, described: Described) -> list[str]:
    if described.decoder is not None:
        keys = ", ".join(f"{key}={value!r}" for key, value in _changed(described).items())
        lines = [
            "from tightfit.models.decoder import Decoder",
            "from tightfit.models.decoder_config import DecoderConfig",
            "",
            f"model = Decoder(DecoderConfig({keys})).to({DTYPES_OF_TORCH[question.dtype]})",
        ]
    else:
        base = question.adapter.base if question.adapter is not None else question.dtype
        dtype = DTYPES_OF_TORCH.get(base, DTYPES_OF_TORCH[question.dtype])
        lines = [
            "from transformers import AutoModelForCausalLM",
            "",
            f"model = AutoModelForCausalLM.from_pretrained({described.path or FOLDER!r}, dtype={dtype}).train()",
        ]
    return [*lines, *_adapting(question)]


def _adapting(question: PageQuestion) -> list[str]:
    adapter = question.adapter
    if adapter is None:
        return []
    targets = adapter.target_modules
    keys = f"r={adapter.r}, alpha={adapter.alpha:g}, base={adapter.base!r}"
    if targets is not None:
        keys += f", target_modules={targets!r}"
    return [
        "from tightfit.training.config import AdapterConfig",
        "from tightfit.models.adapters import add_adapter",
        "",
        f"model = add_adapter(model, AdapterConfig({keys}))  # LoRA, through peft",
    ]
