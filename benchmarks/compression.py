"""What each method of compression saves and costs: one row each, on held-out text.

Without --model a small decoder is trained here first, on the Python standard library's own sources, of which every
eighth file is held out. With --model it is the model in a Hugging Face folder, on the same texts. A row is the report
that `tightfit prune` prints: parameters, bytes on disk, peaks of inference and of a training step (predicted, and by
the CPU allocator's record), tokens a second of one forward, perplexity.

    python benchmarks/compression.py [--model FOLDER --name NAME] [--methods "NAME,..."] [--steps 300] [--small]
                                     [--output results.json] [--page docs/compression_results.md]

Rows are added to those that the file of results has. `METHODS` has a line for each method.
"""

import argparse
import json
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from environment import ROOT, environment
from tightfit.compress.pruning.pipeline import prune
from tightfit.compress.quantising import quantise
from tightfit.compress.report import CompressionReport
from tightfit.config import parse_config
from tightfit.report.before_and_after import figure_in_words
from tightfit.training import train

RESULTS = ROOT / "benchmarks" / "results" / "compression.json"
PAGE = ROOT / "docs" / "compression_results.md"
HELD_OUT, CALIBRATION, LEAST_BYTES = 8, 7, 2000  # every so many files of the corpus; shorter files are left out
LITE = {"hidden_size": 128, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "vocab_size": 2048}
SMALL = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 300}


@dataclass(frozen=True)
class Subject:
    """A model's folder and the texts beside it: for calibration, and held out."""

    source: Path
    calibration: Path
    held_out: Path
    seq_len: int


Method = Callable[[Subject, Path], CompressionReport]


def pruned(subject: Subject, output: Path, *, on_text: bool = False, **settings: Any) -> CompressionReport:
    """`tightfit.prune`; `on_text` gives it the calibration text."""
    return prune(
        subject.source,
        output=output,
        text=subject.held_out,
        calibration=subject.calibration if on_text else None,
        seq_len=subject.seq_len,
        **settings,
    )


def groups_of_heads(subject: Subject, output: Path) -> CompressionReport:
    """A quarter of the groups, or one where a quarter is none."""
    groups = json.loads((subject.source / "config.json").read_text("utf-8"))
    count = groups.get("num_key_value_heads") or groups.get("num_kv_heads")
    return pruned(subject, output, heads=max(1, count // 4) / count, on_text=True)


def quantised(subject: Subject, output: Path, *, to: str) -> CompressionReport:
    """`tightfit.quantise`, whatever it costs in quality: the table says."""
    calibration = subject.calibration if to == "int8_static" else None
    return quantise(
        subject.source,
        to=to,
        output=output,
        text=subject.held_out,
        calibration=calibration,
        seq_len=subject.seq_len,
        force=True,
    )


METHODS: dict[str, Method] = {
    "layers 25%, activation": partial(pruned, layers=0.25, on_text=True),
    "FFN 25%, norm": partial(pruned, ffn=0.25),
    "FFN 25%, activation": partial(pruned, ffn=0.25, on_text=True),
    "FFN 25%, gradient": partial(pruned, ffn=0.25, by="gradient", on_text=True),
    "a quarter of the head groups, activation": groups_of_heads,
    "width 25%, activation": partial(pruned, width=0.25, on_text=True),
    "to fit 0.8x of a training step": partial(pruned, to_fit="0.8x", on_text=True),
    "to fit 0.8x, width too": partial(
        pruned, to_fit="0.8x", layers=0.75, ffn=0.75, heads=0.75, width=0.75, on_text=True
    ),
    "masks 50%, magnitude, each matrix": partial(pruned, sparsity=0.5),
    "masks 50%, magnitude, global": partial(pruned, sparsity=0.5, scope="global"),
    "masks 50%, Wanda": partial(pruned, sparsity=0.5, pattern="wanda", on_text=True),
    "masks 2:4, Wanda's scores": partial(pruned, sparsity=0.5, pattern="2:4", by="activation", on_text=True),
    "int8 weights": partial(quantised, to="int8"),
    "int8, dynamic": partial(quantised, to="int8_dynamic"),
    "int8, static": partial(quantised, to="int8_static"),
    "int4 weights": partial(quantised, to="int4"),
}


def texts(folder: Path, small: bool) -> dict[str, Path]:
    """Three texts of the standard library's files: to train on, to calibrate with (from the same), and held out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in library.glob("*.py") if path.stat().st_size > LEAST_BYTES)
    files = files[:16] if small else files
    kinds = {
        "held_out": files[::HELD_OUT],
        "training": [path for i, path in enumerate(files) if i % HELD_OUT],
        "calibration": [path for i, path in enumerate(files) if i % HELD_OUT == CALIBRATION],
    }
    found = {}
    for kind, paths in kinds.items():
        found[kind] = folder / f"{kind}.txt"
        found[kind].write_text("\n".join(path.read_text("utf-8", errors="replace") for path in paths), "utf-8")
    return found


def trained_here(folder: Path, corpus: Path, steps: int, small: bool) -> Path:
    """A decoder trained for that many steps."""
    shape = SMALL if small else LITE
    config = {
        "model": {**shape, "max_position_embeddings": 512},
        "data": {"source": str(corpus), "sequence_length": 128, "vocab_size": shape["vocab_size"]},
        "training": {
            "max_steps": steps,
            "batch_size": 8,
            "learning_rate": 2e-3,
            "warmup_steps": min(10, steps),
            "device": "cpu",
        },
        "output": {"folder": str(folder)},
    }
    train(parse_config(config))
    return folder


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder, instead of a model trained here")
    parser.add_argument("--name", help="what the table calls the model")
    parser.add_argument("--methods", help="names of METHODS with commas between, `;` where a name has one")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--small", action="store_true", help="a model and texts that take seconds")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=None, help="write the table there, from the file of results")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="tightfit-compression-") as temporary:
        folder = Path(temporary)
        found = texts(folder, options.small)
        steps = 4 if options.small else options.steps
        source = options.model or trained_here(folder / "run", found["training"], steps, options.small)
        name = options.name or (options.model.name if options.model else f"decoder trained here, {steps} steps")
        subject = Subject(source, found["calibration"], found["held_out"], options.seq_len)
        chosen = [n.strip() for n in options.methods.split(";")] if options.methods else list(METHODS)
        for method in chosen:
            began = time.perf_counter()
            report = METHODS[method](subject, folder / f"out-{len(list(folder.iterdir()))}")
            row = {**report.to_dict(), "seconds": time.perf_counter() - began}
            print(f"{name}: {method}\n{report}\n", file=sys.stderr, flush=True)
            add_row(options.output, name, method, row, options.seq_len)
    if options.page is not None:
        options.page.write_text(page(json.loads(options.output.read_text("utf-8"))), "utf-8")


def add_row(path: Path, model: str, method: str, row: Mapping[str, Any], seq_len: int) -> None:
    """Put a row into the file of results, which is whole after each one."""
    record = json.loads(path.read_text("utf-8")) if path.is_file() else {"models": {}}
    here = record["models"].setdefault(model, {"rows": {}})
    here["environment"], here["seq_len"] = environment(), seq_len
    here["rows"][method] = row
    path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


HEAD = """\
# Compression, measured

Written by `python benchmarks/compression.py --page docs/compression_results.md` from
`benchmarks/results/compression.json`. Each row is the report of one command. Nothing was healed afterwards. Perplexity
is on text that was neither trained on nor calibrated with: files of the Python standard library. Peaks are of one row
of tokens: of a generation, and of a training step with AdamW. [compression.md](compression.md) explains the methods.
"""
COLUMNS = ("parameters", "disk_bytes", "inference_peak_bytes", "step_peak_bytes", "tokens_per_second", "perplexity")
MEASURED = {"inference_peak_bytes": "measured_inference_peak_bytes", "step_peak_bytes": "measured_step_peak_bytes"}
NAMES = (
    "parameters",
    "on disk",
    "inference: predicted, measured",
    "step: predicted, measured",
    "tokens/s",
    "perplexity",
)


def page(record: Mapping[str, Any]) -> str:
    """The page: a table for each model."""
    parts = [HEAD]
    for name, model in record["models"].items():
        where = model["environment"]
        rows = list(model["rows"].items())
        lines = [
            f"\n## {name}\n",
            f"Rows of {model['seq_len']} tokens. {where['machine']['cpu']}, {where['threads']} thread(s), torch "
            f"{where['versions']['torch']}; tokens a second on a machine that others use too.\n",
            f"| method | {' | '.join(NAMES)} |",
            f"|---|{'---|' * len(NAMES)}",
            f"| unchanged | {' | '.join(cells(rows[0][1]['before']))} |",
            *(f"| {method} | {' | '.join(cells(row['after']))} |" for method, row in rows),
        ]
        parts.append("\n".join(lines) + "\n")
    return "".join(parts)


def cells(side: Mapping[str, Any]) -> list[str]:
    """The figures of a side of a report, in the order of `COLUMNS`."""
    found = []
    for key in COLUMNS:
        text = figure_in_words(key, side[key])
        if key in MEASURED and side[MEASURED[key]] is not None:
            text += f", {figure_in_words(key, side[MEASURED[key]])}"
        found.append(text)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
