"""`quantise`: a model with its linear layers in few bits."""

from pathlib import Path
from typing import Annotated

import typer

from tightfit.cli import options
from tightfit.cli.asking import show_report
from tightfit.cli.options import THE_ANSWER
from tightfit.names import METHODS

THE_QUALITY = "The quality"


def quantise(
    source: options.Source,
    to: Annotated[
        str,
        typer.Option(
            metavar="METHOD", help="; ".join(f"{name}: {text}" for name, text in METHODS.items()), show_default=False
        ),
    ],
    output: options.NewFolder,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="For int8_static: the text whose activations are measured.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The held-out text for perplexity (else what a run has held out, or one that every machine has).",
            rich_help_panel=THE_QUALITY,
        ),
    ] = None,
    max_loss: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="Write nothing where perplexity rises by more than this share.",
            rich_help_panel=THE_QUALITY,
        ),
    ] = 0.1,
    force: Annotated[
        bool, typer.Option("--force", help="Write whatever the loss.", rich_help_panel=THE_QUALITY)
    ] = False,
    batch_size: Annotated[
        int, typer.Option(metavar="N", min=1, help="Prompts whose reading is measured.", rich_help_panel=THE_ANSWER)
    ] = 1,
    seq_len: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS", min=2, help="Tokens of each, and of a row of text (else 512).", rich_help_panel=THE_ANSWER
        ),
    ] = None,
    as_json: options.Json = False,
    png: options.ReportPng = None,
) -> None:
    """Write a model with its linear layers in 8 or 4 bits, measured before and after.

    The folder is for generate, score and estimate --inference. Embeddings,
    norms and the output head are not quantised. Needs torchao.

    [dim]tightfit quantise runs/quickstart --to int8 --output small[/]

    [dim]tightfit quantise runs/quickstart --to int8_static --calibration LICENSE --output small[/]
    """
    from tightfit import quantise as quantised

    report = quantised(
        source,
        to=to,
        output=output,
        calibration=calibration,
        text=text,
        max_loss=max_loss,
        force=force,
        batch_size=batch_size,
        seq_len=seq_len,
    )
    show_report(report, as_json, png)
