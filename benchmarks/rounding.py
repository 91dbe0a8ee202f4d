"""How far the gradients of a step are from fp64 when only the number of samples in a pass changes.

    python benchmarks/rounding.py --output benchmarks/results/rounding.json

No kernel of ours takes part: the plain step runs on the whole batch and on 2, 4 and 8 parts of it, whose gradients are
added in fp32 as `.grad` adds them. What moves is how the matrix products of PyTorch round. This spread is what
`verify` grants a plan (`ROUNDING_SPREAD`).
"""

import argparse
import copy
import json
from dataclasses import replace
from pathlib import Path

import torch

from accuracy import cpu8
from environment import environment
from tightfit import TokenBatch, plan
from tightfit.planner.step_figures import fingerprint
from tightfit.step import model_loss
from tightfit.verification import relative_error, run, without_levers

PARTS = (1, 2, 4, 8)


def errors(seed: int) -> dict[str, float]:
    """Relative error of all gradients, by the number of parts."""
    torch.manual_seed(seed)
    model, batch = cpu8().eval(), TokenBatch(8, 256, 6400).tensors()
    plain = without_levers(plan(model, batch, "1x"))
    exact = copy.deepcopy(model).double()
    truth = run(exact, batch, model_loss, replace(plain, fingerprint=fingerprint(exact)))
    return {
        str(parts): relative_error(run(model, batch, model_loss, replace(plain, micro_batches=parts)), truth)
        for parts in PARTS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = []
    for seed in range(options.seeds):
        found = errors(seed)
        ratios = {parts: error / found["1"] for parts, error in found.items()}
        print(seed, {parts: f"{error:.3e} ({ratios[parts]:.4f})" for parts, error in found.items()}, flush=True)
        results.append({"seed": seed, "errors": found, "ratios": ratios})
    highest = max(ratio for row in results for ratio in row["ratios"].values())
    print(f"highest ratio {highest:.4f}")
    if options.output:
        report = {"environment": environment(), "highest_ratio": highest, "results": results}
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
