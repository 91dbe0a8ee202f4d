"""`export`: what a run has trained, for `transformers` and all that reads its layout; and back."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tightfit.cli import options

if TYPE_CHECKING:
    from tightfit.models.compress.gguf_file import Weights
    from tightfit.models.decoder import Decoder


GGUF: dict[str, "Weights"] = {"gguf_f16": "f16", "gguf_bf16": "bf16", "gguf_q8_0": "q8_0"}


class To(StrEnum):
    """The formats that `export` writes."""

    TRANSFORMERS = "transformers"
    DECODER = "decoder"
    GGUF_F16 = "gguf_f16"
    GGUF_BF16 = "gguf_bf16"
    GGUF_Q8_0 = "gguf_q8_0"


def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a finished run, or of a model.", show_default=False)
    ],
    output: options.NewFolder,
    to: Annotated[
        To,
        typer.Option(
            help="A model of transformers; or from one the reference decoder, which model.path can name; or a GGUF "
            "file for llama.cpp, with its matrices in that dtype."
        ),
    ] = To.TRANSFORMERS,
) -> None:
    """Write a trained model as transformers reads it, with equal logits.

    Adapters are merged. A shape that no architecture of transformers has is
    refused by its key.

    [dim]tightfit export runs/quickstart --output exported[/]

    [dim]tightfit export runs/quickstart --to gguf_q8_0 --output exported[/]
    """
    if to.value in GGUF:
        from tightfit.models.compress.gguf_file import export_gguf

        name = f"{export_gguf(run, output, weights=GGUF[to.value])} as GGUF"
        typer.echo(f"{output}: {name}, {_size(output)}")
        return
    from tightfit.training.data.tokenizer_files import tokenizer_files
    from tightfit.training.run_folders.loading import tokenizer_sources

    files = tokenizer_files(run, *tokenizer_sources(run))
    name = _as_decoder(run, output, files) if to is To.DECODER else _for_transformers(run, output, files)
    typer.echo(f"{output}: {name}, {_size(output)}{'' if files else ', without a tokenizer'}")


def _size(folder: Path) -> str:
    from tightfit.units import format_bytes

    return format_bytes(sum(path.stat().st_size for path in folder.iterdir()))


def _for_transformers(run: Path, output: Path, files: dict[str, bytes]) -> str:
    from tightfit.models.export import export_model
    from tightfit.models.saving import load_model
    from tightfit.training.data.tokenizer import load_tokenizer

    end = load_tokenizer(run).end_of_text if files else None
    return export_model(load_model(run), output, end_of_text=end, beside=files)


def _as_decoder(source: Path, output: Path, files: dict[str, bytes]) -> str:
    from tightfit.models.export import import_to

    model: Decoder = import_to(source, output, beside=files)
    return f"Decoder of {sum(p.numel() for p in model.parameters()):,} parameters"
