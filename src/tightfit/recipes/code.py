"""A recipe as a script for another library, with the guest of tightfit that keeps it within its budget.

Each script is complete: `python train.py MODEL DATA` with a folder of a model and a file of JSON lines.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tightfit.errors import InputError
from tightfit.names import OPTIMIZERS, facts_of, parse_optimizer
from tightfit.planner.levers import MicroBatches, allowed_levers
from tightfit.recipes.choices import EXTRAS, install_line, needed_packages
from tightfit.recipes.lines import in_short
from tightfit.recipes.records import FEW_BITS, Outcome, Recipe

DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}
RATES = {True: "2e-4", False: "1e-5"}  # of adapters, which start at zero, and of whole models that are fine-tuned


@dataclass(frozen=True)
class Job:
    """The training of a script: a recipe, and the batch and the budget that it was found for.

    `model` is a folder or a name, which the script's first argument may replace. `levers` are those that the plan may
    use, as for `tightfit.plan`. `batch_size` is that of an optimizer's step, in `micro_batches` parts. Gradients are
    clipped together to the norm `grad_clip`, where that is not None, and the recipe does not step in backward.
    """

    recipe: Recipe
    model: str
    budget: int | str
    batch_size: int = 1
    sequence_length: int = 1024
    levers: str | Sequence[str] | None = None
    micro_batches: int = 1
    grad_clip: float | None = None

    @classmethod
    def of(
        cls,
        outcome: Outcome,
        model: str,
        budget: int | str,
        *,
        batch_size: int,
        sequence_length: int,
        levers: str | Sequence[str] | None = None,
        grad_clip: float | None = None,
    ) -> "Job":
        """The job of an outcome, in as many micro-batches as it has."""
        count = outcome.micro_batches if outcome.plan is None else outcome.plan.micro_batches
        clip = None if outcome.recipe.step_in_backward else grad_clip
        return cls(outcome.recipe, model, budget, batch_size, sequence_length, levers, count, clip)


def as_code(library: str, job: Job) -> str:
    """The job as a script for `transformers`, `trl` or `lightning`.

    Raises `InputError` for another library, and for what none of them can run.
    """
    if library not in WRITERS:
        raise InputError(f"--as {library!r} is not known: choose one of {', '.join(WRITERS)}")
    if job.recipe.step_in_backward and job.micro_batches > 1:
        raise InputError(
            f"--as {library}: {job.recipe.name} needs {job.micro_batches} micro-batches, and the loop of {library} "
            "cannot step in backward then: pick another recipe, or write YAML"
        )
    if job.batch_size % job.micro_batches:
        raise InputError(
            f"--as {library}: {job.batch_size} sequences do not split in {job.micro_batches} equal micro-batches: make "
            "the batch a multiple"
        )
    return WRITERS[library](job)


def _transformers(job: Job) -> str:
    return _script(
        job,
        "transformers",
        imports=[
            "from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments",
            "",
            "from tightfit.integrations.hf import FrugalTrainer",
        ],
        data=_ROWS,
        training=f"""\
arguments = TrainingArguments(
    output_dir=options.output,
    max_steps=options.steps,
    {_trainer_settings(job)}
)
trainer = FrugalTrainer(
    model=model,
    args=arguments,
    train_dataset=rows,
    optimizers=(optimizer, None),
    {_trainer_memory(job)}
)
trainer.train()
print(trainer.memory_plan)
trainer.save_model(options.output)
tokenizer.save_pretrained(options.output)
""",
    )


def _trl(job: Job) -> str:
    return _script(
        job,
        "trl",
        imports=[
            "from datasets import Dataset",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "from trl import SFTConfig, SFTTrainer",
            "",
            "from tightfit.integrations.hf import FrugalTrainer",
        ],
        data="""\
with open(options.data, encoding="utf-8") as lines:
    records = Dataset.from_list([json.loads(line) for line in lines])
""",
        classes="""\
class FrugalSFTTrainer(FrugalTrainer, SFTTrainer):
    \"\"\"SFTTrainer within a memory budget.\"\"\"


""",
        training=f"""\
arguments = SFTConfig(
    output_dir=options.output,
    max_steps=options.steps,
    max_length=LENGTH,
    gradient_checkpointing=False,  # the plan chooses what to recompute
    {_trainer_settings(job)}
)
trainer = FrugalSFTTrainer(
    model=model,
    args=arguments,
    train_dataset=records,
    processing_class=tokenizer,
    optimizers=(optimizer, None),
    {_trainer_memory(job)}
)
trainer.train()
print(trainer.memory_plan)
trainer.save_model(options.output)
""",
    )


def _lightning(job: Job) -> str:
    clips_itself = (
        job.grad_clip is not None and job.recipe.optimizer == "adamw_fused" and job.recipe.precision != "fp32"
    )
    if clips_itself and job.recipe.precision == "fp16":
        raise InputError(
            "--as lightning: fused AdamW scales fp16 gradients itself, and lightning clips none beside it: leave "
            "--grad-clip out, or pick another recipe"
        )
    mixed = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[job.recipe.precision]
    return _script(
        job,
        "lightning",
        imports=[
            "from pytorch_lightning import LightningModule, Trainer",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            "from tightfit.integrations.lightning import MemoryBudget",
        ],
        data=_ROWS,
        classes=f"""\
class Learner(LightningModule):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.made = optimizer

    def training_step(self, batch):
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return self.made
{_CLIPPING if clips_itself else ""}

""",
        training=f"""\
loader = torch.utils.data.DataLoader(rows, batch_size=BATCH // PARTS, shuffle=True, drop_last=True)
budget = MemoryBudget(BUDGET, levers=LEVERS, max_length=LENGTH)
trainer = Trainer(
    default_root_dir=options.output,
    max_steps=options.steps,
    accumulate_grad_batches=PARTS,
    precision="{mixed}",
    gradient_clip_val={job.grad_clip},
    callbacks=[budget],
)
trainer.fit(Learner(model, optimizer), loader)
print(budget.plan)
model.save_pretrained(options.output)
tokenizer.save_pretrained(options.output)
""",
        moved=True,
    )


# Lightning refuses to clip beside a fused optimizer under autocast, in bf16 too, where nothing is scaled.
_CLIPPING = """
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)
"""

WRITERS: dict[str, Callable[[Job], str]] = {"transformers": _transformers, "trl": _trl, "lightning": _lightning}
LIBRARIES = tuple(WRITERS)

# Rows of one length, cut from the texts one after the other.
_ROWS = """\
with open(options.data, encoding="utf-8") as lines:
    texts = [json.loads(line)["text"] for line in lines]
ids = [i for text in texts for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
pieces = [torch.tensor(ids[i : i + LENGTH]) for i in range(0, len(ids) - LENGTH + 1, LENGTH)]
rows = [{"input_ids": piece, "labels": piece} for piece in pieces]
if len(rows) < BATCH:
    raise SystemExit(f"{options.data}: {len(ids)} tokens are fewer than a batch of {BATCH} x {LENGTH}")
"""


def _script(
    job: Job, library: str, *, imports: list[str], data: str, training: str, classes: str = "", moved: bool = False
) -> str:
    """The parts that all scripts share, around the library's own."""
    recipe = job.recipe
    third, ours = imports[: imports.index("")], imports[imports.index("") + 1 :]
    facts = facts_of(recipe.optimizer)
    name, settings = facts.made, f", {facts.settings}" if facts.settings else ""
    if name.startswith("tightfit."):
        home, _, name = name.rpartition(".")
        ours.append(f"from {home} import {name}")
    elif facts.package is not None:
        third.append(f"import {facts.home if recipe.optimizer not in OPTIMIZERS else facts.package}")
    third += ["import torch", *(["import peft"] if recipe.adapter is not None else [])]
    if recipe.step_in_backward:
        ours = _with_name(ours, "step_in_backward")
    if recipe.adapter is not None and recipe.adapter.base in FEW_BITS:
        ours.append("from tightfit.ops.weights.low_bit import freeze_in_low_bits")
    plain = sorted(line for line in third if line.startswith("import"))
    named = sorted(line for line in third if not line.startswith("import"))
    levers = sorted(allowed_levers(job.levers) - {MicroBatches.name})
    short = in_short(levers)
    is_class = len(short) == 1 and short[0] in ("exact", "rounding")
    levers_text = _quoted(short[0]) if is_class else _list(short)
    budget = job.budget if isinstance(job.budget, int) else _quoted(job.budget)
    return f'''\
"""Trains {_in_docstring(job.model)}: {recipe.name}. Written by tightfit.

    {_install_line(job.recipe, library)}
    python THIS_FILE [MODEL] DATA

MODEL is a folder or a name. DATA has a JSON object with a "text" on each line. A step stays within {job.budget}.
"""

import argparse
import json

{_lines(plain)}{_lines(named)}
{_lines(sorted(ours))}
BUDGET = {budget}  # the peak memory of a step
LEVERS = {levers_text}  # what the plan may use
BATCH, LENGTH = {job.batch_size}, {job.sequence_length}  # sequences in an optimizer's step, and tokens in each
PARTS = {job.micro_batches}  # micro-batches, whose gradients accumulate
LEARNING_RATE = {RATES[recipe.adapter is not None]}

parser = argparse.ArgumentParser()
parser.add_argument("model", nargs="?", default={_quoted(job.model)})
parser.add_argument("data")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--output", default="trained")
options = parser.parse_args()


{classes}{_model(recipe, moved)}
{_optimizer(recipe, name, settings)}
{data}
{training}'''


def _install_line(recipe: Recipe, library: str) -> str:
    """The command that installs what the script imports."""
    extras = {"hf", *(EXTRAS[package] for package in needed_packages(recipe))}
    if library == "lightning":
        extras.add(library)
    return install_line(sorted(extras)) + (f" {library}" if library == "trl" else "")


def _in_docstring(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _lines(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _with_name(lines: list[str], name: str) -> list[str]:
    """The imports with one more name of `tightfit.optim`."""
    own = "from tightfit.optim import "
    found = next((line for line in lines if line.startswith(own)), None)
    others = [line for line in lines if line is not found]
    return [*others, f"{own}{name}" if found is None else f"{found}, {name}"]


def _model(recipe: Recipe, moved: bool) -> str:
    """The tokenizer, and the model in the recipe's dtype and under its adapters."""
    adapter = recipe.adapter
    base = recipe.dtype if adapter is None or adapter.base in FEW_BITS else adapter.base
    lines = [
        "tokenizer = AutoTokenizer.from_pretrained(options.model)",
        "tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token",
        f"model = AutoModelForCausalLM.from_pretrained(options.model, dtype={DTYPES[base]})",
    ]
    if adapter is not None and adapter.base in FEW_BITS:
        lines.append(f'freeze_in_low_bits(model, "{adapter.base}")')
    if adapter is not None and adapter.config is not None:
        keys = f"peft.PeftConfig.from_json_file({_quoted(adapter.config)})"
        lines.append(f"model = peft.get_peft_model(model, peft.PeftConfig.from_peft_type(**{keys}))")
    elif adapter is not None:
        named = adapter.target_modules
        targets = "None" if named is None else f'"{named}"' if isinstance(named, str) else _list(named)
        lines += [
            "lora = peft.LoraConfig(",
            '    task_type="CAUSAL_LM",',
            f"    r={adapter.r},",
            f"    lora_alpha={adapter.alpha:g},",
            f"    lora_dropout={adapter.dropout:g},",
            f"    target_modules={targets},",
            ")",
            "model = peft.get_peft_model(model, lora)",
        ]
    if moved or facts_of(recipe.optimizer).on_host:
        # An optimizer is made over parameters that lie on their device already.
        lines.append('model.to("cuda" if torch.cuda.is_available() else "cpu")')
    return _lines([*lines, "model.train()"])


def _list(names: Sequence[str]) -> str:
    return f"[{', '.join(_quoted(name) for name in names)}]"


def _optimizer(recipe: Recipe, name: str, settings: str) -> str:
    fraction = parse_optimizer(recipe.optimizer).fraction
    if fraction is not None:
        settings += f", fraction={fraction:g}"
    lines = [
        "trained = [parameter for parameter in model.parameters() if parameter.requires_grad]",
        f"optimizer = {name}(trained, lr=LEARNING_RATE{settings})",
    ]
    if recipe.step_in_backward:
        lines.append("step_in_backward(optimizer, trained)")
    return _lines(lines)


def _trainer_settings(job: Job) -> str:
    recipe = job.recipe
    clip = "0.0,  # none" if job.grad_clip is None else f"{job.grad_clip},"
    settings = [
        "per_device_train_batch_size=BATCH // PARTS,",
        "gradient_accumulation_steps=PARTS,",
        "learning_rate=LEARNING_RATE,",
        f"max_grad_norm={clip}",
        f"bf16={recipe.precision == 'bf16'},",
        f"fp16={recipe.precision == 'fp16'},",
        "use_cpu=not torch.cuda.is_available(),  # else autocast is refused there",
        "logging_steps=1,",
        'save_strategy="no",',
        "report_to=[],",
    ]
    return "\n    ".join(settings)


def _trainer_memory(job: Job) -> str:
    return "\n    ".join(["memory_budget=BUDGET,", "memory_levers=LEVERS,", "memory_max_length=LENGTH,"])
