"""`score`: how likely a trained model finds a text, however long."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tightfit import TextScore

LEAST_TOKENS = 2  # each is scored after those before it


def score(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.", show_default=False)],
    file: Annotated[Path, typer.Option(metavar="FILE", help="The text, in UTF-8.", show_default=False)],
    chunk_size: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens that are read at a time.")] = 512,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Read at most so many tokens, from the start.")
    ] = None,
) -> None:
    """Log-likelihood and perplexity of a text, read piece by piece.

    Keys and values of what was read are kept, so that the score is that of
    one pass, in the memory of one piece.

    [dim]tightfit score runs/quickstart --file LICENSE --chunk-size 256[/]
    """
    import torch

    from tightfit import score as score_ids
    from tightfit.data.corpus import read_text
    from tightfit.data.tokenizer import load_tokenizer
    from tightfit.errors import DataError
    from tightfit.models.saving import load_model

    model, tokenizer = load_model(run), load_tokenizer(run)
    ids = tokenizer.encode(read_text(file))[:max_tokens]
    if len(ids) < LEAST_TOKENS:
        raise DataError(f"{file}: holds too little text, {len(ids)} tokens: give at least {LEAST_TOKENS}")
    typer.echo(outcome(score_ids(model, torch.tensor(ids), chunk_size=chunk_size)))


def outcome(scored: "TextScore") -> str:
    """The figures, a line each."""
    return "\n".join(
        (
            f"tokens scored    {scored.tokens:,}",
            f"log-likelihood   {scored.log_likelihood:.2f} nats, {scored.log_likelihood / scored.tokens:.4f} a token",
            f"perplexity       {scored.perplexity:.2f}",
        )
    )
