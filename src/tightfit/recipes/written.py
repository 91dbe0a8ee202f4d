"""A recipe as a configuration that `tightfit train` and `tightfit plan` accept, or as a script for another library."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tightfit.errors import InputError
from tightfit.models.decoder_config import PRESETS
from tightfit.models.pretrained import find
from tightfit.models.published import published
from tightfit.planner.levers import Stream
from tightfit.recipes.code import LIBRARIES, RATES, Job, as_code
from tightfit.recipes.records import FEW_BITS, Outcome
from tightfit.training.config.load import parse_config
from tightfit.training.config.schema import AdapterConfig
from tightfit.training.config.yaml_text import write_yaml

YAML = "yaml"
KINDS = (YAML, *LIBRARIES)
SMALLEST_VOCABULARY, USUAL_VOCABULARY = 257, 6400  # of `data.vocab_size`
YOUR_DATA = "YOUR_DATA.jsonl"  # stands for the data of whoever trains on from weights


@dataclass(frozen=True)
class WrittenSections:
    """The part of a configuration beside the recipe: its sections, as far as they are known.

    `model` names the model: a preset, or a path. `sections` are laid under the recipe's own keys. `device` is the one
    that was asked about where that need not be the one of the training; None where `sections` name it.
    """

    model: Mapping[str, Any]
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    device: str | None = None
    budget: int | str | None = None
    levers: Any = "rounding"
    batch_size: int = 1
    sequence_length: int = 1024
    grad_clip: float | None = None
    vocabulary: int | None = None
    is_causal: bool = True  # whether the model predicts the next token: a script trains no other


def model_section(source: str) -> dict[str, Any]:
    """The section `model` for what `--model` names. Raises `InputError` where a configuration cannot name it."""
    if source in PRESETS:
        return {"preset": source}
    if ":" in source:
        raise InputError(
            f"--model {source}: a configuration cannot name a function: name a folder or a published model"
        )
    return {"path": source}


def written(outcome: Outcome, setting: WrittenSections, as_: str = YAML) -> str:
    """The recipe as text: a configuration whose plan is the recipe's, or a script for one of `LIBRARIES`.

    Raises `InputError` for another kind of text, and for what a script cannot train.
    """
    if as_ not in KINDS:
        raise InputError(f"--as {as_} is not known: choose one of {', '.join(KINDS)}")
    if as_ != YAML:
        return as_code(as_, _job(outcome, setting))
    text = write_yaml(configuration(outcome, setting))
    parse_config(configuration(outcome, setting))  # our own text has to be a configuration
    return f"# {outcome.name}, as `tightfit fit` chose it.\n{text}"


def next_steps(path: str, outcome: Outcome, setting: WrittenSections, as_: str = YAML) -> list[str]:
    """The next steps with the text that was written to `path`, a line each."""
    if as_ != YAML:
        return [f"Train: python {path} MODEL DATA"]
    sections = configuration(outcome, setting)
    own_data = sections["data"].get("source") == YOUR_DATA
    there = "" if setting.device is None else f" --device {setting.device}"
    needed = []
    if outcome.recipe.adapter is not None and not _holds_weights(setting):
        needed.append("model.path=FOLDER")  # of the weights that the adapters go on
    if own_data:
        needed.append(f"data.source={YOUR_DATA}")
    found = [f"Its plan: tightfit plan {path}{there}", f"Train: {' '.join(['tightfit train', path, *needed])}"]
    if sections["model"].get("random_init"):
        found.append("It begins with new weights: to train on from others, model.path=FOLDER model.random_init=false")
    return found


def _job(outcome: Outcome, setting: WrittenSections) -> Job:
    """The training of a script. Raises `InputError` for a model that `transformers` does not load by a name."""
    path = setting.model.get("path")
    if path is None:
        raise InputError(
            "--as: the model is tightfit's own decoder, which other libraries do not load: write YAML, or export the "
            "model first (tightfit export)"
        )
    if not setting.is_causal:
        raise InputError(
            f"--as: {path} has an encoder, and a script trains causal language models alone: write YAML, or plan its "
            "step in your own loop with tightfit.plan"
        )
    known = published().get(path)
    return Job.of(
        outcome,
        path if known is None else known.source,
        "80%" if setting.budget is None else setting.budget,
        batch_size=setting.batch_size,
        sequence_length=setting.sequence_length,
        levers=_levers(outcome, setting),
        grad_clip=setting.grad_clip,
    )


def configuration(outcome: Outcome, setting: WrittenSections) -> dict[str, Any]:
    """The sections of the configuration."""
    recipe = outcome.recipe
    sections = {name: dict(section) for name, section in setting.sections.items()}
    training = {
        **sections.get("training", {}),
        "batch_size": setting.batch_size,
        "gradient_accumulation_steps": outcome.micro_batches,
        "optimizer": recipe.optimizer,
        "precision": recipe.precision,
        "grad_clip": None if recipe.step_in_backward else setting.grad_clip,
    }
    if setting.device is not None:
        training["device"] = "auto"  # the card is asked about here, and the training runs on the one that is there
    if recipe.step_in_backward:
        training["step_in_backward"] = True
    data = {"sequence_length": setting.sequence_length, **sections.get("data", {})}
    if recipe.adapter is not None or _holds_weights(setting):
        # Weights are trained on: with the tokens that they know, at a rate that does not undo them.
        data = {"source": YOUR_DATA, "tokenizer": "model", **data}
        training.setdefault("learning_rate", float(RATES[recipe.adapter is not None]))
    elif setting.vocabulary is not None and "vocab_size" not in data:
        data["vocab_size"] = max(SMALLEST_VOCABULARY, min(USUAL_VOCABULARY, setting.vocabulary))
    memory = {**sections.get("memory", {}), "budget": setting.budget, "levers": _levers(outcome, setting)}
    found = {**sections, "model": _model(outcome, setting), "data": data, "training": training, "memory": memory}
    return {name: section for name, section in found.items() if section}


def _levers(outcome: Outcome, setting: WrittenSections) -> Any:
    """The levers that a plan may use. Streamed weights are among them only where they are named."""
    is_class = isinstance(setting.levers, str)
    return [setting.levers, Stream.name] if is_class and outcome.streamed_blocks else setting.levers


def _holds_weights(setting: WrittenSections) -> bool:
    """True if the model's section names weights, and not only their shape."""
    if "path" not in setting.model or setting.model.get("random_init"):
        return False
    return bool(setting.model.get("gguf_file")) or find(setting.model["path"]).has_weights


def _model(outcome: Outcome, setting: WrittenSections) -> dict[str, Any]:
    recipe, model = outcome.recipe, dict(setting.model)
    if "path" not in model:
        return {**model, "dtype": recipe.dtype}
    for key in ("adapter", "dtype", "random_init"):
        model.pop(key, None)
    if recipe.adapter is None:
        return {**model, "dtype": recipe.dtype, **({} if _holds_weights(setting) else {"random_init": True})}
    if recipe.adapter.base in FEW_BITS and recipe.dtype != "fp32":
        model["dtype"] = recipe.dtype
    return {**model, "adapter": _adapter(recipe.adapter)}


def _adapter(adapter: AdapterConfig) -> dict[str, Any]:
    """The keys of an adapter that are not as they would be anyway, and its rank, scale and base."""
    said = {"r": adapter.r, "alpha": adapter.alpha, "base": adapter.base}
    others = adapter.model_dump(mode="json", exclude_defaults=True)
    return {**said, **{key: value for key, value in others.items() if key not in said}}
