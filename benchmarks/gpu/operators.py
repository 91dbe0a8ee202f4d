"""What the operators of tests/card/test_operators.py allocate on the card that is present, beside their rules.

python -m benchmarks.gpu.operators --output benchmarks/results/gpu_operators.json
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.environment import ROOT, environment

sys.path.insert(0, str(ROOT / "tests" / "card"))


def compared() -> dict[str, dict[str, Any]]:
    """By kind of calls and dtype: how many operators were compared, and those that differ, in words."""
    import test_operators as rules

    properties = torch.cuda.get_device_properties(0)
    role = rules.CudaRole((properties.major, properties.minor), properties.multi_processor_count)
    found: dict[str, dict[str, Any]] = {}
    for cases in rules.KINDS:
        for dtype in rules.DTYPES:
            mode = rules.compare(cases, dtype, role)
            found.setdefault(cases.__name__, {})[str(dtype)] = {"compared": mode.seen, "differ": mode.other}
            print(f"{cases.__name__}, {dtype}: {len(mode.other)} of {mode.seen} differ", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device: run it on a card, or on a null card (tightfit.devices.nullcard)")
    content = {"environment": environment(), "results": compared()}
    options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
