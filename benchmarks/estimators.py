"""Who predicts the peak of a training step, and how well: tightfit, and estimators of others (peer_estimators.py).

    pip install --no-deps --target PEERS deepspeed hjson msgpack py-cpuinfo einops torchinfo llm-analysis fire termcolor
    PYTHONPATH=PEERS python benchmarks/estimators.py --output benchmarks/results/estimators.json && make benchmarks

The same steps go to every estimator. The truth on the CPU is the allocator's own record of the second step, measured in
a process of its own. For graphics cards it is what others have measured and published: the whole trainings of
benchmarks/published/peaks.json. An estimator that is not installed, or makes no statement about a step, has no answer
there, and the reason is kept. `--cell` makes single steps anew and keeps the rest of the output file; `--missing` asks
about those that the file lacks.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.published import litgpt, peaks

from environment import environment
from peer_estimators import ESTIMATORS, NotAsked, Question, Shape, Weights, trainer_of, versions
from tightfit import TokenBatch, build_dry, estimate
from tightfit.memory.allocator import measured_peak
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.training.loop import resident_tensors

OURS = "tightfit"
HERE = Path(__file__).resolve().parent
SECONDS = 900  # after which a measurement is given up
NOTABLE = 0.001  # a shortage below this share is counted apart: a few bytes are no surprise on a real card
SHAPES = {
    "MiniMind 26M": Shape(8, 512, 8, 2, 1408, 6400, True),
    "GPT-2 14M": Shape(6, 384, 6, 6, 1536, 8000, False),
    "Llama 20M": Shape(6, 448, 7, 7, 1216, 8000, True),
    "GPT-2 124M": Shape(12, 768, 12, 12, 3072, 50257, False),
    "SmolLM2-135M": Shape(30, 576, 9, 3, 1536, 49152, True),
}
# Batches, and the precisions of each: small enough that a step takes seconds on one core
SHORT = ((1, 64, "fp32", "bf16", "bf16 weights"), (2, 256, "fp32"))
BATCHES: dict[str, Sequence[tuple[Any, ...]]] = {
    "MiniMind 26M": ((1, 64, "fp32", "bf16"), (4, 128, "fp32", "bf16"), (2, 512, "fp32", "bf16", "bf16 weights")),
    "GPT-2 124M": ((1, 128, "fp32"),),
    "SmolLM2-135M": ((1, 128, "fp32"),),
}
CHECKPOINTED = {"MiniMind 26M": (2, 512), "GPT-2 14M": (1, 64), "Llama 20M": (1, 64)}


def minimind(shape: Shape, checkpointed: bool) -> nn.Module:
    config = DecoderConfig(
        hidden_size=shape.hidden,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        intermediate_size=shape.inner,
        vocab_size=shape.vocabulary,
    )
    model = Decoder(config).train()
    if checkpointed:
        for layer in model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return model


def from_transformers(kind: str, shape: Shape, checkpointed: bool) -> nn.Module:
    import transformers

    if kind == "GPT2":
        config = transformers.GPT2Config(
            vocab_size=shape.vocabulary, n_embd=shape.hidden, n_layer=shape.layers, n_head=shape.heads, use_cache=False
        )
    else:
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.inner,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.hidden // shape.heads,
            tie_word_embeddings=True,
            use_cache=False,
        )
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


BUILDERS: dict[str, Callable[[Shape, bool], nn.Module]] = {
    "MiniMind": minimind,
    "GPT-2": partial(from_transformers, "GPT2"),
    "Llama": partial(from_transformers, "Llama"),
    "SmolLM2-135M": partial(from_transformers, "Llama"),
}


def built(name: str, checkpointed: bool, precision: Weights) -> nn.Module:
    shape = SHAPES[name]
    model = BUILDERS[name.partition(" ")[0]](shape, checkpointed)
    return model.to(torch.bfloat16) if precision == "bf16 weights" else model


def question(name: str, size: int, length: int, precision: Weights, checkpointed: bool = False) -> Question:
    shape = SHAPES[name]
    return Question(
        build=partial(built, name, checkpointed, precision),
        make_batch=lambda: TokenBatch(size, length, shape.vocabulary).tensors(),
        shape=shape,
        size=size,
        length=length,
        precision=precision,
        checkpointed=checkpointed,
    )


def cells() -> dict[str, Question]:
    """The steps on a CPU, by name."""
    found = {}

    def add(name: str, size: int, length: int, precision: Weights, checkpointed: bool = False) -> None:
        how = f"{name}, {size} x {length}, {precision}{', blocks checkpointed' if checkpointed else ''}"
        found[how] = question(name, size, length, precision, checkpointed)

    for name in SHAPES:
        for size, length, *precisions in BATCHES.get(name, SHORT):
            for precision in precisions:
                add(name, size, length, precision)
        if name in CHECKPOINTED:
            add(name, *CHECKPOINTED[name], "bf16", True)
    return found


@dataclass(frozen=True)
class Published:
    """A whole training on a card that others have measured."""

    row: peaks.Row

    @property
    def name(self) -> str:
        c = self.row.configuration
        return f"litgpt {c['method']} {c['model']}, {c['micro_batch']} x {c['length']}"

    @property
    def question(self) -> Question:
        c = self.row.configuration

        def batch() -> dict[str, Any]:
            ids = torch.zeros(c["micro_batch"], c["length"], dtype=torch.int64)
            return {"ids": ids, "labels": ids, "accumulated": c["batch"] // c["micro_batch"]}

        s = litgpt.SHAPES[c["model"]]
        return Question(
            build=lambda: litgpt.Model(c["model"], c["method"], c["length"]),
            make_batch=batch,
            shape=Shape(s.layers, s.width, s.heads, s.heads, s.inner or 4 * s.width, s.vocabulary, s.llama),
            size=c["micro_batch"],
            length=c["length"],
            precision="bf16 weights",
            loss=litgpt.Loss(),
        )


def published() -> dict[str, Published]:
    found = [Published(row) for row in peaks.rows() if row.work == "litgpt"]
    return {each.name: each for each in found}


WHOLE_WEIGHTS = "prices the training of all weights; these train an adapter"
REAL_CARD = "runs the step, which needs the card"


def predicted_for(row: peaks.Row) -> int:
    """Our estimate, as `make published` made it: dry runs of models of up to 13B take minutes on a busy machine."""
    rows = json.loads(peaks.RESULTS.read_text("utf-8"))["results"]
    (found,) = (each for each in rows if each["work"] == row.work and each["configuration"] == row.configuration)
    return found["predicted_bytes"]


def answer_about_card(each: Published, who: str) -> int:
    if who == OURS:
        return predicted_for(each.row)
    if who == "PyTorch MemTracker":
        raise NotAsked(REAL_CARD)
    if who != "PyTorch MemTracker under FakeTensorMode":
        raise NotAsked(WHOLE_WEIGHTS)
    return ESTIMATORS[who].ask(each.question)


def measure(asked: Question) -> int:
    torch.manual_seed(0)
    model = asked.build()
    optimizer, step = trainer_of(asked, model)
    step()
    return measured_peak(step, resident_tensors(model, optimizer, asked.make_batch()))


def ours(asked: Question) -> int:
    model = build_dry(asked.build)
    return estimate(model, dict(asked.make_batch()), precision=asked.autocast, optimizer=torch.optim.AdamW).peak_bytes


def answer(cell: str, who: str) -> dict[str, Any]:
    """What an estimator says about a step, or why it says nothing."""
    on_cards = published()
    try:
        if cell in on_cards:
            return {"bytes": answer_about_card(on_cards[cell], who)}
        asked = cells()[cell]
        return {"bytes": ours(asked) if who == OURS else ESTIMATORS[who].ask(asked)}
    except NotAsked as reason:
        return {"not_asked": str(reason)}
    except ImportError as error:
        return {"missing": f"{error.name or error} is not installed"}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def measured_apart(cell: str) -> int:
    """The truth about a step on the CPU, from a process of its own."""
    command = [sys.executable, str(HERE / "estimators.py"), "--measure", cell]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=True)
    return int(done.stdout.splitlines()[-1])


def cell_row(name: str) -> dict[str, Any]:
    """One step: the truth, and every estimator's answer."""
    on_cards = published()
    asked = on_cards.get(name)
    if asked is not None:
        row = asked.row
        figures = {"cell": name, "card": row.card, "unit": row.unit, "measured": round(row.published * row.unit_bytes)}
    else:
        figures = {"cell": name, "card": None, "measured": measured_apart(name)}
    return {**figures, "answers": {who: answer(name, who) for who in (OURS, *ESTIMATORS)}}


def summaries(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each estimator's figures over the steps that it answered."""
    return {
        who: summary([row for row in results if "bytes" in row["answers"][who]], who) for who in (OURS, *ESTIMATORS)
    }


def summary(rows: Sequence[Mapping[str, Any]], who: str) -> dict[str, Any]:
    errors = [row["answers"][who]["bytes"] / row["measured"] - 1 for row in rows]
    if not errors:
        return {"cells": 0}
    return {
        "cells": len(errors),
        "median": statistics.median(abs(error) for error in errors),
        "worst": max(errors, key=abs),
        "short": sum(error < 0 for error in errors),
        "notably_short": sum(error < -NOTABLE for error in errors),
    }


def kept(path: Path | None, made: Sequence[str]) -> list[dict[str, Any]]:
    if path is None or not path.exists():
        return []
    return [row for row in json.loads(path.read_text("utf-8"))["results"] if row["cell"] not in made]


def record(results: Sequence[Mapping[str, Any]], where: Mapping[str, Any]) -> dict[str, Any]:
    on_cpu = [row for row in results if row["card"] is None]
    on_cards = [row for row in results if row["card"] is not None]
    return {
        "environment": where,
        "packages": versions(ESTIMATORS.values()),
        "estimators": {who: {"counts": e.counts, "source": e.source} for who, e in ESTIMATORS.items()},
        "cpu": summaries(on_cpu),
        "published": summaries(on_cards),
        "results": list(results),
    }


def run(names: Sequence[str], output: Path | None) -> Iterator[dict[str, Any]]:
    order = [*cells(), *published()]
    results, where = kept(output, names), environment()
    for name in names:
        row = cell_row(name)
        results.append(row)
        results.sort(key=lambda each: order.index(each["cell"]))
        if output is not None:
            output.write_text(json.dumps(record(results, where), indent=1) + "\n", encoding="utf-8")
        yield row


def line(row: Mapping[str, Any]) -> str:
    said = []
    for who, found in row["answers"].items():
        if "bytes" in found:
            said.append(f"{who} {found['bytes'] / row['measured'] - 1:+.2%}")
        elif "not_asked" not in found:
            said.append(f"{who}: {next(iter(found.values()))}")
    return f"{row['cell']}: {row['measured']:,} B; {'; '.join(said)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", action="append", help="a step by name, several times; default: all")
    parser.add_argument("--missing", action="store_true", help="only steps that the output file lacks")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(measure(cells()[options.measure]))
        return
    names = options.cell or [*cells(), *published()]
    if options.missing:
        there = {row["cell"] for row in kept(options.output, [])}
        names = [name for name in names if name not in there]
    for row in run(names, options.output):
        print(line(row), flush=True)


if __name__ == "__main__":
    main()
