"""`prune`: whole parts of a model taken out, or single weights set to zero."""

from typing import Annotated, Any

import typer

from tightfit.cli import options
from tightfit.cli.asking import show_report
from tightfit.cli.options import THE_ANSWER

PARTS, SINGLE, RANKING, FIT = "Whole parts (save memory)", "Single weights (save no memory)", "Which ones", "A budget"


def _ratio(what: str) -> Any:
    return typer.Option(metavar="SHARE", help=what, show_default=False, rich_help_panel=PARTS)


def prune(
    source: options.Source,
    output: options.NewFolder,
    layers: Annotated[float | None, _ratio("Whole layers.")] = None,
    ffn: Annotated[float | None, _ratio("Channels of each MLP and of each expert.")] = None,
    heads: Annotated[float | None, _ratio("Key and value heads of each layer, with their query heads.")] = None,
    width: Annotated[float | None, _ratio("Hidden channels.")] = None,
    sparsity: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Weights that become zero; masks.safetensors keeps them so in `train`.",
            rich_help_panel=SINGLE,
        ),
    ] = None,
    pattern: Annotated[
        str, typer.Option(metavar="NAME", help="magnitude, wanda or 2:4.", rich_help_panel=SINGLE)
    ] = "magnitude",
    scope: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="magnitude: the lowest of each layer's matrix, or global.", rich_help_panel=SINGLE
        ),
    ] = "layer",
    permanent: Annotated[
        bool,
        typer.Option(
            "--permanent", help="Write SOURCE without its masks. The zeros stay zeros.", rich_help_panel=SINGLE
        ),
    ] = False,
    by: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="norm of the weights, activation or gradient on real text (else activation with --calibration, norm "
            "without).",
            rich_help_panel=RANKING,
        ),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help='Real text: a text file, JSON lines of {"text"}, or default.', rich_help_panel=RANKING
        ),
    ] = None,
    to_fit: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Take out the least that lets a training step fit: 3GiB, 0.5x. The shares are then the most that may "
            "go.",
            rich_help_panel=FIT,
        ),
    ] = None,
    inference: Annotated[
        bool, typer.Option("--inference", help="Let a generation fit, not a training step.", rich_help_panel=FIT)
    ] = False,
    seq_len: Annotated[
        int | None, typer.Option(metavar="TOKENS", min=1, help="Tokens of a row (else 256).", rich_help_panel=FIT)
    ] = None,
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Rows of a batch.", rich_help_panel=FIT)] = 1,
    new_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens that a generation adds.", rich_help_panel=FIT)
    ] = 8,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="The device to fit (else this CPU).", rich_help_panel=FIT)
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Held-out text, for the perplexity before and after.", rich_help_panel=THE_ANSWER
        ),
    ] = None,
    as_json: options.Json = False,
    png: options.ReportPng = None,
) -> None:
    """Make a trained model smaller, or sparser, and report what that saves and costs.

    Each share is what is taken out, the same from every layer. The output is
    a folder that transformers reads.

    [dim]tightfit prune runs/quickstart --ffn 0.25 --output pruned[/]

    [dim]tightfit prune runs/quickstart --to-fit 0.5x --seq-len 256 --batch-size 8 --output smaller[/]

    [dim]tightfit prune runs/quickstart --sparsity 0.5 --pattern wanda --calibration LICENSE --output sparse[/]
    """
    from tightfit.models.compress.pruning.pipeline import prune as pruned

    settings: dict[str, Any] = {
        "layers": layers, "ffn": ffn, "heads": heads, "width": width, "sparsity": sparsity, "pattern": pattern,
        "scope": scope, "by": by, "calibration": calibration, "to_fit": to_fit, "inference": inference,
        "seq_len": seq_len, "batch_size": batch_size, "new_tokens": new_tokens, "device": device, "text": text,
        "permanent": permanent,
    }  # fmt: skip
    show_report(pruned(source, output=output, **settings), as_json, png)
