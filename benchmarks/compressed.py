"""What each method of compression saves and costs: one row each, on held-out text.

Without --model a small decoder is trained here first, on the Python standard library's own sources, of which every
eighth file is held out. With --model it is the model in a Hugging Face folder, on the same texts. A row is the report
that `tightfit prune` prints: parameters, bytes on disk, peaks of inference and of a training step (predicted, and by
the CPU allocator's record), tokens a second of one forward, perplexity.

    python benchmarks/compressed.py [--model FOLDER --name NAME] [--methods "NAME;..."] [--steps 1500] [--small]
                                     [--output results.json] [--page docs/compression_results.md]

A healed row is a pruned model that was distilled from the unpruned one; beside it is a model of the pruned shape with
new weights, trained on the same text for as many seconds. Rows are added to those that the file of results has.
`METHODS` has a line for each method.
"""

import argparse
import json
import math
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from environment import ROOT, environment
from tightfit.models.compress.distilling import distil
from tightfit.models.compress.pruning.pipeline import TEXT_ROWS, prune
from tightfit.models.compress.quantising import quantise
from tightfit.models.compress.report import CompressionReport, Side, measured, perplexity
from tightfit.models.compress.source import open_source
from tightfit.models.compress.texts import token_rows
from tightfit.models.saving import load_model
from tightfit.planner.report.before_and_after import figure_in_words
from tightfit.training.api import train
from tightfit.training.config import Config, parse_config
from tightfit.training.result import TrainResult

RESULTS = ROOT / "benchmarks" / "results" / "compression.json"
PAGE = ROOT / "docs" / "compression_results.md"
HELD_OUT, CALIBRATION, LEAST_BYTES = 8, 7, 2000  # every so many files of the corpus; shorter files are left out
LITE = {"hidden_size": 128, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "vocab_size": 2048}
RATE = 2e-3  # of new weights
HEALING_RATE = 4  # by which weights that were trained already are trained more slowly
TRIAL = 30  # steps of the short trainings whose seconds are compared
SMALL = {"hidden_size": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 300}


@dataclass
class Subject:
    """A model's folder and the texts beside it: to train on, for calibration, and held out. `batch` and `rate` are the
    rows of a training step and the learning rate of new weights. `notes` has what a method says of itself for its row.
    """

    source: Path
    training: Path
    calibration: Path
    held_out: Path
    seq_len: int
    text_rows: int
    healing_steps: int
    batch: int
    rate: float
    notes: dict[str, Any] = field(default_factory=dict)

    def rows(self) -> Tensor:
        """The held-out rows that every perplexity is of."""
        source = open_source(self.source)
        model = source.model()
        return token_rows(
            self.held_out, source.tokenizer, model, option="--text", length=self.seq_len, rows=self.text_rows
        )


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
    """`tightfit.quantise`, whatever it costs in quality: the table says. Its gate reads four rows of text, so both
    perplexities are measured here, on the rows of the other methods.
    """
    calibration = subject.calibration if to == "int8_static" else None
    report = quantise(
        subject.source,
        to=to,
        output=output,
        text=subject.held_out,
        calibration=calibration,
        seq_len=subject.seq_len,
        force=True,
    )
    rows = subject.rows()
    before, after = (perplexity(load_model(folder), rows) for folder in (subject.source, output))
    return replace(
        report,
        before=replace(report.before, perplexity=before),
        after=replace(report.after, perplexity=after),
    )


def healed(subject: Subject, output: Path, **ratios: float) -> CompressionReport:
    """A pruned model, distilled from the unpruned one on the training text."""
    shape = cut(subject, output, **ratios)
    config = training_config(subject, shape, output, steps=subject.healing_steps, rate=subject.rate / HEALING_RATE)
    result = distil(config, teacher=subject.source, teacher_dtype="fp32")
    assert result.training is not None, "a student was trained"
    return trained_report(subject, f"prune {ratios}, then distil", result.training)


def from_scratch(subject: Subject, output: Path, **ratios: float) -> CompressionReport:
    """New weights in the pruned shape, trained on the training text for as many seconds as the healing took: so many
    steps, by the seconds of a short training.
    """
    shape = cut(subject, output, **ratios)

    def config(name: str, steps: int) -> Config:
        folder = output.with_name(f"{output.name}-{name}")
        made = training_config(subject, shape, folder, steps=steps, rate=subject.rate)
        return parse_config(made.model_dump(mode="json"), ["model.random_init=true"])

    trial = training_config(subject, shape, output.with_name(f"{output.name}-healing"), steps=TRIAL, rate=subject.rate)
    healing = distil(trial, teacher=subject.source, teacher_dtype="fp32").training
    assert healing is not None, "a student was trained"
    scratch = train(config("trial", TRIAL))
    steps = math.ceil(subject.healing_steps * seconds_per_step(healing) / seconds_per_step(scratch))
    return trained_report(subject, f"the shape of prune {ratios}, trained from scratch", train(config("run", steps)))


def seconds_per_step(result: TrainResult) -> float:
    assert result.measured_step_seconds is not None, "of more than two steps"
    return result.measured_step_seconds


def cut(subject: Subject, output: Path, **ratios: float) -> Path:
    """The folder of the pruned model, by activation."""
    folder = output.with_name(f"{output.name}-pruned")
    prune(subject.source, output=folder, calibration=subject.calibration, seq_len=subject.seq_len, **ratios)
    return folder


def training_config(subject: Subject, model: Path, output: Path, *, steps: int, rate: float) -> Config:
    """A training of the model in a folder on the training text, with the tokenizer that it has."""
    return parse_config(
        {
            "model": {"path": str(model)},
            "data": {"source": str(subject.training), "sequence_length": subject.seq_len, "tokenizer": "model"},
            "training": {
                "max_steps": steps,
                "batch_size": subject.batch,
                "learning_rate": rate,
                "warmup_steps": min(10, steps),
                "device": "cpu",
            },
            "output": {"folder": str(output)},
        }
    )


def trained_report(subject: Subject, method: str, result: TrainResult) -> CompressionReport:
    """The unpruned model before, the trained one after; steps and seconds go into the row."""
    rows = subject.rows()
    subject.notes = {"steps": result.steps, "training_seconds": result.steps * seconds_per_step(result)}

    def side(folder: str | Path) -> Side:
        source = open_source(folder)
        return measured(source.transformers_model(), text=rows, seq_len=subject.seq_len, disk_bytes=source.weight_bytes)

    return CompressionReport(method, side(subject.source), side(result.folder))


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
    "FFN 25%, activation, healed": partial(healed, ffn=0.25),
    "FFN 25%, new weights": partial(from_scratch, ffn=0.25),
    "layers 25%, activation, healed": partial(healed, layers=0.25),
    "layers 25%, new weights": partial(from_scratch, layers=0.25),
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
    """A decoder trained for that many steps, in a folder of `transformers`, so that every method begins with the same
    code; one that the folder has already is used again.
    """
    exported = folder.with_name(f"{folder.name}-exported")
    if exported.is_dir():
        return exported
    shape = SMALL if small else LITE
    config = {
        "model": {**shape, "max_position_embeddings": 512},
        "data": {"source": str(corpus), "sequence_length": 128, "vocab_size": shape["vocab_size"]},
        "training": {
            "max_steps": steps,
            "batch_size": 8,
            "learning_rate": RATE,
            "warmup_steps": min(10, steps),
            "device": "cpu",
        },
        "output": {"folder": str(folder)},
    }
    train(parse_config(config))
    source = open_source(folder)
    source.write(source.transformers_model(), exported)
    return exported


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder, instead of a model trained here")
    parser.add_argument("--name", help="what the table calls the model")
    parser.add_argument("--methods", help="names of METHODS with commas between, `;` where a name has one")
    parser.add_argument("--steps", type=int, default=1500, help="of the decoder that is trained here")
    parser.add_argument("--keep", type=Path, help="a folder for that decoder: a later command uses it again")
    parser.add_argument("--healing-steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=8, help="rows of a step of a healing")
    parser.add_argument("--learning-rate", type=float, default=RATE, help="of new weights; a healing takes a fourth")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--text-rows", type=int, default=TEXT_ROWS, help="held-out rows that quantised and trained "
                        "models' perplexities are of")  # fmt: skip
    parser.add_argument("--small", action="store_true", help="a model and texts that take seconds")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=None, help="write the table there, from the file of results")
    parser.add_argument("--note", help="a sentence below the model's table: why it lacks rows")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="tightfit-compression-") as temporary:
        folder = Path(temporary)
        found = texts(folder, options.small)
        steps = 4 if options.small else options.steps
        place = options.keep or folder / "run"
        source = options.model or trained_here(place, found["training"], steps, options.small)
        name = options.name or (options.model.name if options.model else f"decoder trained here, {steps} steps")
        subject = Subject(
            source, found["training"], found["calibration"], found["held_out"], options.seq_len, options.text_rows,
            4 if options.small else options.healing_steps, options.batch_size, options.learning_rate,
        )  # fmt: skip
        chosen = list(METHODS) if options.methods is None else [n.strip() for n in options.methods.split(";") if n]
        for method in chosen:
            began = time.perf_counter()
            subject.notes = {}
            report = METHODS[method](subject, folder / f"out-{len(list(folder.iterdir()))}")
            row = {**report.to_dict(), "seconds": time.perf_counter() - began, **subject.notes}
            if options.text_rows != TEXT_ROWS:
                row["text_rows"] = options.text_rows
            print(f"{name}: {method}\n{report}\n", file=sys.stderr, flush=True)
            add_row(options.output, name, method, row, options.seq_len)
        if options.note is not None:
            add_note(options.output, name, options.note)
    if options.page is not None:
        options.page.write_text(page(json.loads(options.output.read_text("utf-8"))), "utf-8")


def add_row(path: Path, model: str, method: str, row: Mapping[str, Any], seq_len: int) -> None:
    """Put a row into the file of results, which is whole after each one."""
    record = json.loads(path.read_text("utf-8")) if path.is_file() else {"models": {}}
    here = record["models"].setdefault(model, {"rows": {}})
    here["environment"], here["seq_len"] = environment(), seq_len
    here["rows"][method] = row
    path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def add_note(path: Path, model: str, note: str) -> None:
    record = json.loads(path.read_text("utf-8"))
    record["models"][model]["note"] = note
    path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


HEAD = """\
# Compression, measured

Written by `python benchmarks/compressed.py --page docs/compression_results.md` from
`benchmarks/results/compression.json`. Each row is the report of one command. Perplexity is on text that was neither
trained on nor calibrated with: files of the Python standard library. Peaks are of one row of tokens: of a generation,
and of a training step with AdamW. Quantised models take no training step. Rows that say so were healed: distilled from
the unpruned model on the training text. Below each is a model of the same shape with new weights, trained on that text
alone for as many seconds, by what a step takes in two short trainings, one after the other. The seconds in brackets are
those of the long ones, on a machine that others use. No other row was trained after its compression.
[compression.md](compression.md) explains the methods.
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
        rows = [(method, model["rows"][method]) for method in METHODS if method in model["rows"]]
        lines = [
            f"\n## {name}\n",
            f"Rows of {model['seq_len']} tokens. {where['machine']['cpu']}, {where['threads']} thread(s), torch "
            f"{where['versions']['torch']}; tokens a second on a machine that others use too.\n",
            f"| method | {' | '.join(NAMES)} |",
            f"|---|{'---|' * len(NAMES)}",
            f"| unchanged | {' | '.join(cells(rows[0][1]['before']))} |",
            *(f"| {method}{told(row)} | {' | '.join(cells(row['after']))} |" for method, row in rows),
        ]
        if lacking := [method for method in METHODS if method not in model["rows"]]:
            lines.append(f"\nNot measured: {'; '.join(lacking)}. {model.get('note', '')}".rstrip())
        parts.append("\n".join(lines) + "\n")
    return "".join(parts)


def told(row: Mapping[str, Any]) -> str:
    """What a row says beside its method: how long it was trained, and of how much text its perplexity is."""
    said = []
    if "steps" in row:
        said.append(f"{row['steps']} steps in {row['training_seconds']:.0f} s")
    if "text_rows" in row:
        whole = figure_in_words("perplexity", row["before"]["perplexity"])
        said.append(f"perplexity of {row['text_rows']} rows, {whole} unchanged")
    return f" ({'; '.join(said)})" if said else ""


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
