"""`score`: how likely a trained model finds a text, however long, or the choices of questions."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tightfit.cli import options
from tightfit.cli.asking import columns, show
from tightfit.cli.generating import loaded
from tightfit.errors import InputError

if TYPE_CHECKING:
    from tightfit import ChoiceScores, TextScore

LEAST_TOKENS = 2  # each is scored after those before it
A_TEXT, QUESTIONS = "A text", "Multiple choice"


def score(
    run: options.Run,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The text, in UTF-8.", rich_help_panel=A_TEXT)
    ] = None,
    chunk_size: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens that are read at a time.", rich_help_panel=A_TEXT)
    ] = 512,
    max_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=2, help="Read at most so many tokens, from the start.", rich_help_panel=A_TEXT),
    ] = None,
    choices: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Questions: JSON lines of question, choices and answer, or CSV as C-Eval or MMLU lay it out; or a "
            "folder of such files, one subject each.",
            rich_help_panel=QUESTIONS,
        ),
    ] = None,
    prompt: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="text: the likelihood of each choice's text; letters: of its letter, the choices listed before; auto: "
            "letters for CSV.",
            rich_help_panel=QUESTIONS,
        ),
    ] = "auto",
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Peak memory of the evaluation: 2GiB, 80% (of the device). It decides how many rows run at once.",
            rich_help_panel=QUESTIONS,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Rows at once, instead of --budget (else 8).", rich_help_panel=QUESTIONS),
    ] = None,
    device: options.RunsOn = "cpu",
    as_json: options.Json = False,
) -> None:
    """Log-likelihood and perplexity of a text, or accuracy on multiple-choice questions.

    A text is read piece by piece. Keys and values of what was read are kept,
    so that the score is that of one pass, in the memory of one piece.

    [dim]tightfit score runs/quickstart --file LICENSE --chunk-size 256[/]

    Questions run in batches, as large as the budget allows by a dry run.

    [dim]tightfit score runs/quickstart --choices questions.jsonl --budget 1GiB[/]
    """
    if (file is None) == (choices is None):
        given = "none of them is" if file is None else "both are"
        raise InputError(f"score takes --file TEXT or --choices QUESTIONS, and {given} given: give one")
    if file is not None:
        scored = scored_text(run, file, chunk_size, max_tokens, device)
        show(text_figures(scored) if as_json else text_lines(scored))
        return
    assert choices is not None, "one of the two is given"
    from tightfit import score_choices
    from tightfit.training.multiple_choice.prompts import PROMPTS

    if prompt not in PROMPTS:
        raise InputError(f"--prompt {prompt!r} is unknown: use {', '.join(PROMPTS[:-1])} or {PROMPTS[-1]}")
    model, tokenizer = loaded(run, device)
    found = score_choices(model, choices, tokenizer=tokenizer, prompt=prompt, budget=budget, batch_size=batch_size)
    show(found.to_dict() if as_json else choice_lines(found, columns()))


def scored_text(run: Path, file: Path, chunk_size: int, max_tokens: int | None, device: str) -> "TextScore":
    import torch

    from tightfit import score as score_ids
    from tightfit.errors import DataError
    from tightfit.training.data.corpus import read_text

    model, tokenizer = loaded(run, device)
    ids = tokenizer.encode(read_text(file))[:max_tokens]
    if len(ids) < LEAST_TOKENS:
        raise DataError(f"{file}: holds too little text, {len(ids)} tokens: give at least {LEAST_TOKENS}")
    return score_ids(model, torch.tensor(ids), chunk_size=chunk_size)


def text_lines(scored: "TextScore") -> str:
    """The figures, a line each."""
    return "\n".join(
        (
            f"tokens scored    {scored.tokens:,}",
            f"log-likelihood   {scored.log_likelihood:.2f} nats, {scored.log_likelihood / scored.tokens:.4f} a token",
            f"perplexity       {scored.perplexity:.2f}",
        )
    )


def text_figures(scored: "TextScore") -> dict[str, Any]:
    return {"tokens": scored.tokens, "log_likelihood": scored.log_likelihood, "perplexity": scored.perplexity}


def choice_lines(found: "ChoiceScores", width: int) -> str:
    """A line for each subject and one for all; then the memory that it took."""
    from tightfit.planner.report.terminal import rendered, table_of
    from tightfit.units import format_bytes, format_seconds

    table = table_of("", "questions", "accuracy", "by length")
    several = len(found.subjects) > 1
    for one in (*found.subjects, found.overall) if several else found.subjects:
        table.add_row(
            one.name,
            f"{one.questions:,}",
            _share(one.accuracy, one.standard_error),
            _share(one.accuracy_normalised, one.standard_error_normalised),
        )
    budget = "" if found.budget_bytes is None else f", budget {format_bytes(found.budget_bytes)}"
    notes = [
        "accuracy: the choice with the highest log-likelihood; by length: the highest for each of its characters.",
        f"{found.rows:,} rows in {found.batches:,} batches of at most {found.batch_size}, in "
        f"{format_seconds(found.seconds)}.",
        f"Peak memory: predicted {format_bytes(found.predicted_peak_bytes)}, measured "
        f"{format_bytes(found.measured_peak_bytes)}{budget}.",
    ]
    if found.cut:
        notes.append(f"{found.cut:,} contexts were longer than the model's positions and lost their beginning.")
    return rendered(table, "", *notes, width=width)


def _share(share: float, error: "float | None") -> str:
    return f"{share:.1%}" if error is None else f"{share:.1%} ± {error:.1%}"
