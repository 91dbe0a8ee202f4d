"""Predicted peaks beside PyTorch's own CUDA allocator, on null cards: a runtime that computes nothing.

    PY=.venv-card/bin/python; $PY -m tightfit.devices.nullcard rtx4090 -- $PY -m benchmarks.card \\
        --output benchmarks/results/card.json [--only TEXT] [--each 3] [--resume]

Each step runs in a process of its own, forked from one for each card that has not begun to use it. The allocator, the
operators' host code, autocast and the optimizers are PyTorch's. No kernel runs, but for those whose numbers decide
which operators follow (`devices.nullcard.deciding`). `docs/accuracy.md` has the table, and what this does not show.
"""

import argparse
import gc
import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.card_cases import CARDS, Step, compiled_steps, kind, steps, zoo_steps
from benchmarks.environment import environment as described

SECONDS = 600  # after which a step is given up
STEPS = 3  # the third is like all that follow; the peak is that of all


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default="", help="steps in whose names this occurs")
    parser.add_argument("--each", type=int, default=3, help="steps of each kind on each card")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="leave out the steps that the output holds")
    parser.add_argument("--again", action="store_true", help="with --resume: but run those that are not to the byte")
    parser.add_argument("--zoo", action="store_true", help="the causal language models of transformers, tiny, instead")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    grid = list(zoo_steps() if given.zoo else [*steps(given.each, given.seed), *compiled_steps(given.seed)])
    chosen = [step for step in grid if given.only in step.name]
    if given.worker:
        return _work([step for step in chosen if step.card == given.worker])
    known = json.loads(given.output.read_text())["steps"] if given.resume and given.output.exists() else []
    again = {step.name for step in chosen} if given.again else set()
    of_grid = {step.name for step in grid}
    rows = [row for row in known if row["name"] in of_grid and (row["name"] not in again or is_exact(row))]
    done = {row["name"] for row in rows}
    commit = described()["commit"]
    for card in CARDS:
        left = [step for step in chosen if step.card == card and step.name not in done]
        for row in _on(card, left, given):
            rows.append({**row, "commit": commit and commit[:7]})
            print(f"{len(rows)} rows; {said(row)}", flush=True)
            write(given.output, rows)
    return 0


def _on(card: str, left: list[Step], given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run steps on a null card in a process of its own."""
    from tightfit.devices.nullcard.card import card_of, environment

    if not left:
        return
    command = [sys.executable, "-m", "benchmarks.card", "--worker", card, "--output", os.devnull]
    command += ["--only", given.only, "--each", str(given.each), "--seed", str(given.seed)] + ["--zoo"] * given.zoo
    names = json.dumps([step.name for step in left])
    process = subprocess.Popen(
        command, env=environment(card_of(card)), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(names + "\n")
    process.stdin.close()
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)
    process.wait()


def _work(of_card: list[Step]) -> int:
    """In the process of a card: a fork for each step that is asked for on stdin. Prints a JSON line for each."""
    import torch
    import transformers  # noqa: F401 (imported once, before the forks)

    import tightfit  # noqa: F401

    torch.set_num_threads(1)
    wanted = set(json.loads(sys.stdin.readline()))
    for step in of_card:
        if step.name in wanted:
            print(json.dumps({**asdict(step), "name": step.name, **_forked(step)}), flush=True)
    return 0


def _forked(step: Step) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(step, there))
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(SECONDS) else {"error": f"no answer within {SECONDS} s"}
    except EOFError:
        process.join()
        return {"error": f"the process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def _answer(step: Step, connection: Connection) -> None:
    try:
        connection.send(examine(step))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).splitlines()[0][:300] if str(error) else ""
        connection.send({"error": f"{type(error).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"})


def examine(step: Step) -> dict[str, Any]:
    """Predict a step, then run it, and compare."""
    import torch

    from tightfit import estimate, plan, recompute
    from tightfit.devices.known import find
    from tightfit.errors import CannotFit
    from tightfit.levers.micro_batch import as_parts, split_batch
    from tightfit.optim.by_name import build_optimizer
    from tightfit.planner.blocks.find import find_blocks
    from tightfit.step import Part, model_loss

    known = find(step.card)
    assert known is not None
    chosen = kind(step.kind)
    torch.manual_seed(0)
    model = chosen.build(step.attention)
    if step.precision == "weights":
        model = model.to(torch.bfloat16)
    batch = chosen.batch(step.size, step.length)
    if step.precision == "weights":
        batch = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in batch.items()}
    precision = "fp32" if step.precision == "weights" else step.precision
    optimizer = _optimizers()[step.optimizer]
    asked: dict[str, Any] = {"optimizer": optimizer, "precision": precision, "device": known.spec}
    made = None
    if step.lever == "plain":
        predicted = estimate(model, batch, **asked).step_figures
    elif step.lever == "blocks":
        for path in find_blocks(model):
            recompute(model, path)
        predicted = estimate(model, batch, **asked).step_figures
    else:
        levers, _, budget = step.lever.partition(" at ")
        asked["levers"] = ["exact", levers] if levers in ("offload", "compile") else levers
        try:
            made = plan(model, batch, budget, **asked)
        except CannotFit as error:  # then the tightest that fits
            made = plan(model, batch, error.least_bytes, **asked)
        predicted = made.planned
    found = {"predicted": predicted.peak_bytes, "predicted_reserved": predicted.reserved_bytes}
    if made is not None:
        found |= {"budget": made.budget_bytes, "micro_batches": made.micro_batches}
    model = model.cuda()
    count = 1 if made is None else made.micro_batches
    weights = [part.weight for part in as_parts(split_batch(batch, count), model_loss)]  # counted on the host
    batch = {name: t.cuda() for name, t in batch.items()}
    parts = [Part(part, weight) for part, weight in zip(split_batch(batch, count), weights, strict=True)]
    built = build_optimizer(optimizer, model.parameters())
    levers_on: AbstractContextManager[Any] = nullcontext() if made is None else made.apply(model)
    with levers_on:
        run = _step(model, parts, built, precision)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(STEPS):
            gc.collect()
            run()
    return {
        **found,
        "measured": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def _optimizers() -> dict[str, Any]:
    import torch

    return {
        "adamw fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
        "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
        "adamw loop": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
        "sgd": "sgd",
        "adamw8bit": "adamw8bit",
    }


def _step(model: Any, parts: Any, optimizer: Any, precision: Any) -> Callable[[], None]:
    import torch

    from tightfit.devices.nullcard.deciding import true_decisions
    from tightfit.step import StepSettings, forward_backward, model_loss, update

    scaler = torch.amp.GradScaler("cuda") if precision == "fp16" else None

    def run() -> None:
        with true_decisions():
            forward_backward(model, parts, model_loss, precision, scaler=scaler)
            update(model, optimizer, StepSettings(precision), scaler=scaler)

    return run


def off(row: dict[str, Any]) -> float | None:
    """How far a prediction is from what was measured, in per cent; negative: too low."""
    return 100 * (row["predicted"] / row["measured"] - 1) if "measured" in row else None


def is_exact(row: dict[str, Any]) -> bool:
    """Whether allocated and reserved bytes were predicted to the byte."""
    return "measured" in row and (row["predicted"], row["predicted_reserved"]) == (row["measured"], row["reserved"])


def said(row: dict[str, Any]) -> str:
    found = off(row)
    if found is None:
        return f"{row['name']}: {row['error']}"
    exact = "to the byte" if row["predicted"] == row["measured"] else f"{found:+.4f}%"
    over = " OVER ITS BUDGET" if row["measured"] > row.get("budget", row["measured"]) else ""
    reserved = 100 * (row["predicted_reserved"] / row["reserved"] - 1)
    return f"{row['name']}: {exact}, reserved {reserved:+.3f}%{over}"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts and worst errors of all steps that were measured."""
    measured = [row for row in rows if "measured" in row]
    errors = sorted(abs(off(row) or 0.0) for row in measured)
    reserved = sorted(abs(100 * (row["predicted_reserved"] / row["reserved"] - 1)) for row in measured)
    return {
        "steps": len(rows),
        "measured": len(measured),
        "to_the_byte": sum(row["predicted"] == row["measured"] for row in measured),
        "within_a_hundredth_of_a_per_cent": sum(error <= 0.01 for error in errors),
        "within_a_tenth_of_a_per_cent": sum(error <= 0.1 for error in errors),
        "median_per_cent": errors[len(errors) // 2] if errors else None,
        "worst_per_cent": errors[-1] if errors else None,
        "reserved_within_a_tenth_of_a_per_cent": sum(error <= 0.1 for error in reserved),
        "reserved_worst_per_cent": reserved[-1] if reserved else None,
        "planned": sum("budget" in row for row in measured),
        "over_budget": sum(row["measured"] > row["budget"] for row in measured if "budget" in row),
        "failed": sum("error" in row for row in rows),
    }


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"environment": described(), "summary": summary(rows), "steps": rows}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
