"""Runs what others have measured on graphics cards on null cards, and compares: the instrument's own error.

    python -m benchmarks.published.on_card                # in the environment of `make test-card`

The rows of single operators in peaks.json, their scripts as they are (operators.py, head_losses.py), on a null card of
the row's kind, with the allocator of the PyTorch that is installed: rows are of other releases, which is part of the
error. Writes benchmarks/results/published_on_card.json.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from benchmarks.environment import environment
from benchmarks.published.peaks import SCRIPTS, Row, compare, described, rows
from benchmarks.published.process import CARDS, REPEATS

RESULTS = Path(__file__).resolve().parent.parent / "results" / "published_on_card.json"
ROOMY = "1TiB"  # nothing runs out of memory: the question is the peak


def measured(row: Row) -> int:
    """Bytes of PyTorch's own counter, as the row's script took them."""
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()
    if row.blas_handles:  # products that the process made before, in forward and in autograd's thread
        x = torch.zeros(8, 8, requires_grad=row.blas_handles > 1)
        y = x @ x
        if row.blas_handles > 1:
            y.backward(y)
        del x, y
    script = SCRIPTS[row.work](row.configuration, row.mode, row.provider)
    before = 0
    for _ in range(REPEATS):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        script()
    return torch.cuda.max_memory_allocated() - (before if row.above else 0)


def of_card(card: str) -> list[dict[str, Any]]:
    """The rows of one card, in this process."""
    torch.set_default_device("cuda")
    results = []
    for row in rows():
        if row.card != card or row.work not in SCRIPTS:
            continue
        try:
            size = measured(row)
        except Exception as error:  # named in the results, and counted
            results.append(described(row) | {"failed": f"{type(error).__name__}: {str(error)[:200]}"})
            continue
        found = compare(row, size)
        results.append(described(row) | {"measured": found["predicted"], "measured_bytes": size, **_errors(found)})
    return results


def _errors(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("error", "rounds_to_it")}


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """How far the null card is from the cards, over the rows that are not ambiguous."""
    clear = [row for row in results if not row["ambiguous"] and "failed" not in row]
    errors = [abs(row["error"]) for row in clear]
    return {
        "rows": len(clear),
        "failed": sum("failed" in row for row in results),
        "median": statistics.median(errors),
        "worst": max(errors),
        "within_0.1%": sum(error <= 0.001 for error in errors),
        "equal_in_all_digits": sum(bool(row["rounds_to_it"]) for row in clear),
    }


def sentence(record: dict[str, Any]) -> str:
    """The result in words, for docs/run.md."""
    found = record["summary"]
    return (
        f"{found['rows']} measurements that others have published of single operators on seven kinds of cards, with "
        f"other releases of PyTorch, were run again on null cards: {found['within_0.1%']} are within 0.1%, the median "
        f"is off by {found['median']:.2%}, the worst by {found['worst']:.1%}. "
        f"{found['failed']} more could not be run.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", help="only one, in this process: what the command calls itself with")
    given = parser.parse_args()
    if given.card:
        print(json.dumps(of_card(given.card)))
        return
    results: list[dict[str, Any]] = []
    outside = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "TIGHTFIT_NULLCARD")}
    for card, facts in CARDS.items():
        figures = f"memory={ROOMY},bandwidth=1TB/s,fp32=1TFLOPS,sms={facts.multiprocessors}"
        figures += f",capability={facts.capability[0]}.{facts.capability[1]}"
        words = [sys.executable, "-m", "tightfit.devices.nullcard", figures, "--", sys.executable, "-m", __spec__.name]
        ran = subprocess.run([*words, "--card", card], env=outside, stdout=subprocess.PIPE, text=True, check=True)
        results += json.loads(ran.stdout.splitlines()[-1])
        print(card, len(results), flush=True)
    record = {"environment": environment(), "summary": summary(results), "results": results}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(record["summary"])


if __name__ == "__main__":
    main()
