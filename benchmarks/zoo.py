"""Every causal language model class of `transformers`, tiny: estimated, planned and verified.

    python benchmarks/zoo.py --output benchmarks/results/zoo.json --table docs/zoo.md [--only NAME ...] [--jobs 2]

Each class runs in a process of its own. Its plain step is measured by the CPU allocator's own record (the second
step, AdamW) and compared with `estimate`; then it is planned at 0.6x of its plain peak with exact levers only, or
at the least that fits, measured under that plan and verified bit-equal. Results are written after each class, and
a class that the output file already holds is not run again.
"""

import argparse
import importlib
import json
import multiprocessing
import time
import traceback
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import nn

from card_cases import tiny_causal_lms
from environment import environment
from tightfit import Plan, estimate, plan, verify
from tightfit.errors import CannotFit, TightfitError
from tightfit.memory.allocator import measured_peak
from tightfit.step import Part, Precision, StepSettings, forward_backward, model_loss, update
from tightfit.training.loop import resident_tensors
from zoo_page import page

BUDGET = "0.6x"
SECONDS = 300  # after which a class is given up


def examine(name: str, precision: Precision) -> dict[str, Any]:
    """All questions about one class; stops at the first that cannot be answered, and says why."""
    zoo = tiny_causal_lms()
    row: dict[str, Any] = {"class": name, "precision": precision, "outcome": "does not run"}
    try:
        model, batch = zoo.tiny_model(name), zoo.tiny_batch(name)
        measured = measure(model, batch, precision)
    except Exception as error:
        return row | {"why": one_line(error)}
    row |= {"parameters": sum(p.numel() for p in model.parameters()), "measured": measured, "outcome": "not estimated"}
    try:
        found = estimate(model, batch, precision=precision)
        row |= {
            "predicted": found.peak_bytes,
            "depends_on_data": any("the peak depends on it" in told for told in found.assumptions),
            "outcome": "not planned",
        }
        made = least_plan(model, batch, precision)
        with made.apply(model):
            row |= {"blocks": len(made.choices), "budget": made.budget_bytes, "planned_predicted": made.peak_bytes}
            row |= {"outcome": "not verified", "planned_measured": measure(model, batch, precision)}
        report = verify(model, batch, made)
    except TightfitError as error:
        return row | {"outcome": "refused", "why": one_line(error)}
    except Exception as error:
        return row | {"why": one_line(error)}
    outcome = "not repeatable" if not report.repeatable else "bit-equal" if report.ok else "NOT EQUAL"
    return row | {"outcome": outcome, "why": "" if report.ok else str(report)}


def least_plan(model: nn.Module, batch: Any, precision: Precision) -> Plan:
    """The plan at the budget, or at the least that fits."""
    try:
        return plan(model, batch, BUDGET, precision=precision)
    except CannotFit as error:
        return plan(model, batch, error.least_bytes, precision=precision)


def measure(model: nn.Module, batch: Any, precision: Precision) -> int:
    """Bytes of the second real step, by the allocator's own record."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

    def step() -> None:
        forward_backward(model, [Part(batch, 1.0)], model_loss, precision)
        update(model, optimizer, StepSettings(precision))

    step()
    return measured_peak(step, resident_tensors(model, optimizer, batch))


def one_line(error: BaseException) -> str:
    """Kind and text of an exception, and the line that raised it unless it is one of ours."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, TightfitError):
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({Path(frame.filename).name}:{frame.lineno})"


def report_to(connection: Connection, name: str, precision: Precision) -> None:
    warnings.simplefilter("ignore")
    connection.send(examine(name, precision))


def examined(names: list[str], precision: Precision, jobs: int) -> Iterator[dict[str, Any]]:
    """The results of all classes as they come, each from a process of its own."""
    importlib.import_module("transformers.models.llama.modeling_llama")  # what all of them import is imported once
    context = multiprocessing.get_context("fork")
    waiting, running = names[::-1], {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=report_to, args=(sender, name, precision))
            process.start()
            sender.close()
            running[receiver] = (name, process, time.monotonic() + SECONDS)
        ready = wait(list(running), timeout=1.0)
        for receiver, (name, process, deadline) in list(running.items()):
            if receiver not in ready and time.monotonic() < deadline:
                continue
            row = {"class": name, "precision": precision, "outcome": "does not end", "why": f"after {SECONDS} s"}
            if receiver in ready:
                try:
                    row = receiver.recv()
                except EOFError:
                    row |= {"outcome": "process died", "why": f"exit code {process.exitcode}"}
            process.kill()
            process.join()
            del running[receiver]
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="default: all classes")
    parser.add_argument("--precision", choices=("fp32", "bf16"), nargs="+", default=["fp32"])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    zoo = tiny_causal_lms()
    results, where = read(options.output)
    names = options.only or list(zoo.classes())
    for precision in options.precision:
        done = {row["class"] for row in results if row["precision"] == precision}
        for row in examined([n for n in names if options.only or n not in done], precision, options.jobs):
            print(line(row), end="", flush=True)
            results = [r for r in results if (r["class"], r["precision"]) != (row["class"], precision)] + [row]
            results.sort(key=lambda r: (r["precision"], r["class"]))
            if options.output:
                options.output.write_text(json.dumps({"environment": where, "results": results}, indent=1) + "\n")
    if options.table:
        options.table.write_text(page(results, where))


def read(path: Path | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What an earlier run left, and where it ran; nothing, and where this one does."""
    if path is not None and path.exists():
        record = json.loads(path.read_text())
        return record["results"], record["environment"]
    where = environment()
    where["versions"]["transformers"] = version("transformers")
    return [], where


def line(row: dict[str, Any]) -> str:
    error = f"{row['predicted'] / row['measured'] - 1:+.4%}" if "predicted" in row else ""
    within = "" if "planned_measured" not in row else "" if row["planned_measured"] <= row["budget"] else "OVER"
    return f"{row['class']} | {row['precision']} | {error} | {within} | {row['outcome']} | {row.get('why', '')}\n"


if __name__ == "__main__":
    main()
