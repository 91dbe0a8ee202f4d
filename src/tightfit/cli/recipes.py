"""`fit`: which recipes train a model on a device, best first."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tightfit.cli import options
from tightfit.cli.asking import columns, show, write
from tightfit.cli.question import LENGTH, SIZE, Question
from tightfit.cli.waiting import Waiting, seldom_collecting
from tightfit.errors import CannotFit, InputError

if TYPE_CHECKING:
    from tightfit.cli.subject import Subject
    from tightfit.recipes.records import Outcome
    from tightfit.recipes.table import Recipes

THE_RECIPES = "The recipes"


@options.asking(
    {name: option for name, option in {**options.OF_A_PLAN, **options.OF_RANKS}.items() if name != "micro_batches"}
)
def fit(
    question: Question,
    tokens_per_step: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Tokens in a step, instead of --batch-size: each recipe takes the largest micro-batch that fits.",
            rich_help_panel=options.THE_STEP,
        ),
    ] = None,
    pick: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="The recipe of this number, for --output (else 1).", rich_help_panel=THE_RECIPES
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write that recipe there as a CONFIG to plan and train.", rich_help_panel=THE_RECIPES
        ),
    ] = None,
    as_: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="KIND",
            help="With --output: yaml, or a script for transformers, trl or lightning (else yaml).",
            rich_help_panel=THE_RECIPES,
        ),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--all", help="Show every recipe that does not fit too.", rich_help_panel=options.THE_ANSWER)
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Find how a model can be trained on a device, best first.

    A recipe is the dtype of the weights, what is trained (all, or LoRA),
    the optimizer and the precision. Each is run dry, with the levers that
    a plan for the budget takes. Options that are given are not searched.
    Where no recipe fits, the exit code is 3. With --world-size, rows are
    of training on 2, 4, 8 cards up to so many, with FSDP2 and DDP: all weights, and adapters.

    [dim]tightfit fit --model llama-3.1-8b --device rtx4090 --seq-len 2048[/]

    [dim]tightfit fit examples/quickstart.yaml --device rtx3060 --budget 100% --output run.yaml[/]
    """
    if pick is not None and output is None:
        raise InputError("--pick says which recipe --output writes, which is not given: give a file")
    if as_ is not None and output is None:
        raise InputError("--as says how --output is written, which is not given: give a file")
    check_kind(as_)
    if output is not None and question.world_size is not None:
        raise InputError("--output writes a recipe of one process, and --world-size is given: leave one out")
    question = _with_tokens(question, tokens_per_step)
    from tightfit.cli.recipe_subject import after_writing, recipe_subject, refusal
    from tightfit.recipes.table import describe_recipes

    with seldom_collecting():
        subject = recipe_subject(question)
        with Waiting() as waiting:
            found, chosen = _answered(subject, pick, output, as_, waiting)
    show(found.to_dict() if as_json else describe_recipes(found, columns(), whole=whole))
    if output is None and found.fitting and not as_json:
        show("\nNext: add --pick N --output run.yaml to write row N, to plan and train it.")
    if chosen is not None and output is not None and not as_json:
        show("\n".join(["", f"Written to {output}: {chosen.name}.", *after_writing(subject, chosen, output, as_)]))
    if not found.fitting:
        least = min(outcome.needed_bytes for outcome in found)
        raise CannotFit(found.sentence, least, refusal=refusal(subject, found))


def check_kind(as_: str | None) -> None:
    """Raise `InputError` for a kind of text that no recipe is written as, before recipes are looked for."""
    from tightfit.recipes.written import KINDS

    if as_ is not None and as_ not in KINDS:
        raise InputError(f"--as {as_} is not known: choose one of {', '.join(KINDS)}")


def _answered(
    subject: "Subject", pick: int | None, output: Path | None, as_: str | None, notice: Callable[[str], None]
) -> "tuple[Recipes, Outcome | None]":
    from tightfit.cli.recipe_subject import planned_as, recipe_text, recipes

    found = recipes(subject, notice)
    if output is None or not found.fitting:
        return found, None
    number = pick or 1
    if number > len(found.fitting):
        raise InputError(f"--pick {number}: {len(found.fitting)} recipes fit: give a number up to that")
    picked = found[number - 1]
    if as_ in (None, "yaml"):
        _write_text(recipe_text(subject, picked), output)
        notice(f"{output}: planned in full")
        chosen = planned_as(subject, picked, output)
    else:
        recipe_text(subject, picked, as_)  # raises before the plan is made
        notice(f"{output}: planned in full")
        with tempfile.TemporaryDirectory() as folder:
            _write_text(recipe_text(subject, picked), config := Path(folder) / "run.yaml")
            chosen = planned_as(subject, picked, config)
        _write_text(recipe_text(subject, chosen, as_), output)
    outcomes = [chosen if index == number else each for index, each in enumerate(found, start=1)]
    return replace(found, outcomes=tuple(outcomes)), chosen


def _write_text(text: str, path: Path) -> None:
    write("recipe", lambda file: file.write_text(text, "utf-8"), path)


def _with_tokens(question: Question, tokens: int | None) -> Question:
    """The question with the batch that has so many tokens, in as few micro-batches as fit. Raises `InputError`."""
    if tokens is None:
        return question
    if question.batch_size is not None:
        raise InputError("--tokens-per-step and --batch-size are both given: keep one of them")
    if question.model is None and question.seq_len is None:
        raise InputError("--tokens-per-step needs --seq-len beside a CONFIG: give it too")
    length = question.seq_len or LENGTH
    if tokens % length:
        raise InputError(f"--tokens-per-step {tokens} is no multiple of the {length} tokens of a sequence: make it one")
    return replace(question, batch_size=max(SIZE, tokens // length), micro_batches="auto")
