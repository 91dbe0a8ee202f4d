"""The arguments and options that several commands share, and how a command gets those of a question."""

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tightfit.cli.adapter import BASES
from tightfit.cli.question import ATTENTIONS, LEVERS, OF_THE_DECODER, Question
from tightfit.names import OPTIMIZERS
from tightfit.planner.levers import lever_types

THE_MODEL, THE_STEP, THE_BUDGET, THE_ANSWER = "The model", "The step", "The budget", "The answer"

Config = Annotated[str | None, typer.Argument(metavar="CONFIG", help="YAML configuration of a training.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE...", help="Laid over the file: training.batch_size=4, memory.budget=0.5x."),
]
TrainsOn = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="training.device: cpu, or cuda (else as CONFIG says, or the card that is there)."
    ),
]
RunsOn = Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda or cuda:1.")]


def on_device(overrides: list[str] | None, device: str | None) -> tuple[str, ...]:
    """The overrides of a training with those of `--device`."""
    return (*(overrides or ()), *(() if device is None else (f"training.device={device}",)))


Phase = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Of training a diffusion model by name: cache (VAE and text encoders run), train, sample, or all, with "
        "VAE and text encoders resident, offloaded or gone. Of a CONFIG with training.objective grpo: generation, "
        "log_probs, update, or all.",
        rich_help_panel=THE_STEP,
    ),
]


def count_or_auto(text: str) -> Any:
    """A count above zero, or `auto`."""
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is not a count above zero, nor auto")
    return int(text)


Json = Annotated[
    bool,
    typer.Option("--json", help="Write JSON to stdout, with the field names of Python.", rich_help_panel=THE_ANSWER),
]
Html = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write a page for the browser too, all in one file (needs plotly).",
        rich_help_panel=THE_ANSWER,
    ),
]
Png = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write a picture of the step's memory too (needs matplotlib).", rich_help_panel=THE_ANSWER
    ),
]
Curve = Annotated[
    bool,
    typer.Option(
        "--curve",
        help="Show what memory costs in time, from the plain step down to the least; in FILE of --html and --png too.",
        rich_help_panel=THE_ANSWER,
    ),
]
Maximise = Annotated[
    str | None,
    typer.Option(
        metavar="WHAT",
        help="Find the largest sequence_length, batch_size or hidden_size that has a plan, and plan that.",
        rich_help_panel=THE_BUDGET,
    ),
]
MultipleOf = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Of what --maximise looks for (else 64 tokens, a batch that splits, a width that heads divide).",
        rich_help_panel=THE_BUDGET,
    ),
]

Inference = Annotated[
    bool,
    typer.Option(
        "--inference",
        help="Read prompts and generate text instead of training: weights, keys and values, activations.",
        rich_help_panel=THE_STEP,
    ),
]
NewTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Tokens that --inference generates for each prompt (else 128).",
        rich_help_panel=THE_STEP,
    ),
]

# Of the commands that read or go on with a run, or run a script.
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the newest intact checkpoint of output.folder; without one, begin.")
]
ScriptArguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGUMENTS...", help="The script's own arguments and options.")
]

# Of the commands that make a folder with a model out of another one.
Source = Annotated[
    Path, typer.Argument(metavar="SOURCE", help="The folder of a run, or a Hugging Face folder.", show_default=False)
]
NewFolder = Annotated[
    Path, typer.Option(metavar="FOLDER", help="Where to write: a folder that is not there yet.", show_default=False)
]
ReportPng = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw before and after too (needs matplotlib).", rich_help_panel=THE_ANSWER),
]


def _option(
    metavar: str | None, text: str, kind: Any = str, panel: str = THE_STEP, flags: Any = (), **more: Any
) -> Any:
    """An option of a question, which is None where it is not given."""
    annotated: Any = Annotated  # for type checkers, which want to read each annotation
    return annotated[kind | None, typer.Option(*flags, metavar=metavar, help=text, rich_help_panel=panel, **more)]


# By the names that they have in a `Question`.
OF_A_STEP: dict[str, Any] = {
    "config": Config,
    "overrides": Overrides,
    "model": _option(
        "MODEL",
        "Instead of CONFIG: a Hugging Face folder, config.json or hub name, a run's folder, a YAML, a published "
        "model (llama-3.1-8b, 'Qwen 2.5 72B', gpt-oss-20b, whisper-small, ...), a preset (cpu8, cpu26, mm26, mm104, "
        "lite-moe, 1b), or module:function that returns a module, or a module and a batch.",
        panel=THE_MODEL,
    ),
    "dtype": _option(
        "NAME",
        "Dtype of the weights: fp32, bf16, or auto for that of the checkpoint (else CONFIG's, or fp32).",
        panel=THE_MODEL,
    ),
    "adapter": _option(
        "KEY=VALUE,...",
        "Train low-rank adapters (LoRA) alone: keys of model.adapter with commas "
        "between, such as r=16,alpha=32 or target_modules=q_proj+v_proj; or default; or FILE.json with any PeftConfig.",
        panel=THE_MODEL,
    ),
    "base": _option(
        "NAME", f"How the frozen weights below adapters are held: {', '.join(BASES)} (else fp32).", panel=THE_MODEL
    ),
    "attention": _option(
        "NAME",
        f"{', '.join(ATTENTIONS)}, of models of transformers (else its own choice); {OF_THE_DECODER}, of the "
        "reference decoder.",
        panel=THE_MODEL,
    ),
    "batch_size": _option("N", "Sequences in a batch, all micro-batches together (else 1).", kind=int, min=1),
    "seq_len": _option("TOKENS", "Tokens in a sequence (else 1024).", kind=int, min=1),
    "image": _option(
        "PIXELS",
        "Height and width of the images of a diffusion model (else those it was made for); --seq-len is then the "
        "text's.",
        kind=int,
        min=1,
    ),
    "precision": _option("NAME", "fp32, or autocast to bf16 or fp16 (else fp32)."),
    "optimizer": _option(
        "NAME",
        f"{', '.join(OPTIMIZERS)} (else adamw); offloaded_adamw:0.5 for half of the states; module:Class for any "
        "other one.",
    ),
    "optimizer_args": _option(
        "KEY=VALUE,...", "Arguments of the class that --optimizer names: lr=0.001,betas=(0.9,0.99)."
    ),
    "step_in_backward": _option(
        None,
        "Update each weight once its gradient is ready, and free the gradient: without clipping and fp16.",
        kind=bool,
        flags=("--step-in-backward",),
        show_default=False,
    ),
    "micro_batches": _option(
        "N",
        "Micro-batches whose gradients accumulate (else 1); auto: as few as fit the budget.",
        kind=int,
        parser=count_or_auto,
    ),
    "grad_clip": _option("NORM", "Clip all gradients together to this norm (else not).", kind=float),
    "device": _option(
        "NAME",
        "cpu, cuda, a card such as rtx4090 (else the one present), or figures of your own: rtx3080,memory=8GiB; "
        "`devices --help` says which.",
    ),
    "host": _option(
        "NAME",
        "The machine of the card: desktop, workstation, server, or memory=64GiB,bandwidth=80GB/s, or both with "
        "commas between. Its memory is the --host-budget, where none is given.",
    ),
}
OF_RANKS: dict[str, Any] = {
    "world_size": _option(
        "N",
        "Ranks that train together, each with a --device; the batch is that of one rank (else one process).",
        kind=int,
    ),
    "nodes": _option("M", "Machines that the ranks are spread over (else 1).", kind=int),
    "parallel": _option(
        "NAME",
        "How the ranks are joined: fsdp2 (each repeated block sharded, then the rest), hsdp (fsdp2 within each of "
        "--nodes, with a copy on every one), ddp, tp (tensor parallel, one batch for all ranks), or cp (context "
        "parallel: fsdp2 with one batch, whose sequences the blocks share) (else fsdp2).",
    ),
}
OF_A_PLAN: dict[str, Any] = {
    **OF_A_STEP,
    "budget": _option(
        "BYTES", "Peak memory of a step: 22GiB, 24GB, 80% (of the device), 0.5x (of the plain peak).", panel=THE_BUDGET
    ),
    "host_budget": _option(
        "BYTES",
        "Most of the host's memory that the training may take, the process included: 32GiB (else no limit).",
        panel=THE_BUDGET,
    ),
    "levers": _option(
        "NAMES",
        "What a plan may use, with commas between: exact (bit-equal), rounding (also equal to rounding), "
        f"{', '.join(kind.name for kind in lever_types())} (else CONFIG's; with --model "
        f"{LEVERS} for fit and --maximise, and exact otherwise).",
        panel=THE_BUDGET,
    ),
    "blocks": _option(
        "GLOB", "Module paths of the repeated blocks, such as 'layers.*' (else found by themselves).", panel=THE_BUDGET
    ),
}


def asking(shared: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these arguments and options in the place of its parameter `question`, which is made of them.

    Where that parameter has a default, the command may be given none of them.
    """

    def with_options(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function).parameters
        is_needed = own["question"].default is inspect.Parameter.empty

        @functools.wraps(function)
        def command(**values: Any) -> None:
            given = {name: values.pop(name) for name in shared}
            if is_needed or any(given.values()):
                values["question"] = Question.of(given)
            function(**values)

        parameters: list[inspect.Parameter] = []
        for name, parameter in own.items():
            if name == "question":
                parameters += [_optional(option, annotation) for option, annotation in shared.items()]
            else:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        command.__dict__["__signature__"] = inspect.Signature(parameters)  # which typer reads
        return command

    return with_options


def _optional(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
