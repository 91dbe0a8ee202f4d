"""`export`: what a run has trained, for `transformers` and all that reads its layout; and back."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tightfit.cli import options

if TYPE_CHECKING:
    from tightfit.models.decoder import Decoder


class To(StrEnum):
    """What `export` writes."""

    TRANSFORMERS = "transformers"
    DECODER = "decoder"


def export(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The folder of a finished run, or of a model.", show_default=False),
    ],
    output: options.NewFolder,
    to: Annotated[
        To,
        typer.Option(help="A model of transformers, or from one the reference decoder, which model.path can name."),
    ] = To.TRANSFORMERS,
) -> None:
    """Write a trained model as transformers reads it, with equal logits.

    Adapters are merged. A shape that no architecture of transformers has is
    refused by its key.

    [dim]tightfit export runs/quickstart --output exported[/]
    """
    from tightfit.data.tokenizer_files import tokenizer_files
    from tightfit.run_folders.tokenizer_sources import tokenizer_sources
    from tightfit.units import format_bytes

    files = tokenizer_files(run, *tokenizer_sources(run))
    name = _as_decoder(run, output, files) if to is To.DECODER else _for_transformers(run, output, files)
    size = format_bytes(sum(path.stat().st_size for path in output.iterdir()))
    typer.echo(f"{output}: {name}, {size}{'' if files else ', without a tokenizer'}")


def _for_transformers(run: Path, output: Path, files: dict[str, bytes]) -> str:
    from tightfit.data.tokenizer import load_tokenizer
    from tightfit.models.export import export_model
    from tightfit.models.saving import load_model

    end = load_tokenizer(run).end_of_text if files else None
    return export_model(load_model(run), output, end_of_text=end, beside=files)


def _as_decoder(source: Path, output: Path, files: dict[str, bytes]) -> str:
    from tightfit.models.export import import_to

    model: Decoder = import_to(source, output, beside=files)
    return f"Decoder of {sum(p.numel() for p in model.parameters()):,} parameters"
