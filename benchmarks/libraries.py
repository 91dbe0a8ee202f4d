"""What CUDA's libraries take of the host's memory, by set of imports: each in a process of its own.

    python benchmarks/libraries.py --card PYTHON [--real] [--output FILE] [--figures FILE]

PYTHON is a Python whose PyTorch has CUDA; it runs on a null card, or with `--real` on the card of this machine. A null
card's driver, cuBLAS and cuDNN are stubs, so its rows say what PyTorch's own CUDA code takes, and no more. The figures
that predictions read (`src/tightfit/devices/libraries.toml`) are written from the results: those of a build from a null
card's, beside which the same release was measured without CUDA; those of first steps from a real card's, where there
are any.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from environment import environment

RESULTS = Path(__file__).parent / "results" / "libraries.json"
FIGURES = Path(__file__).parents[1] / "src" / "tightfit" / "devices" / "libraries.toml"
IMPORTS = {"torch": "import torch", "torch and transformers": "import torch; from transformers import LlamaForCausalLM"}
# Prints resident bytes: when a training is predicted, and after a context and two steps on the card.
CHILD = """
import json, sys
exec(sys.argv[1])
import torch
import tightfit
from tightfit.memory.counters import this_process
from tightfit.memory.process import process_bytes

def resident():
    return this_process().memory_info().rss

found = {"predicting_bytes": process_bytes([], tidied=True), "cuda": torch.version.cuda, "torch": torch.__version__}
if torch.cuda.is_available():
    found["card"] = torch.cuda.get_device_name()
    torch.zeros(1, device="cuda")
    found["context_bytes"] = resident()
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3), torch.nn.Flatten(), torch.nn.Linear(288, 64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    heads = torch.zeros(1, 4, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        (model(torch.zeros(2, 8, 8, 8, device="cuda")).square().mean() + attended.float().mean()).backward()
        optimizer.step()
    torch.cuda.synchronize()
    found["steps_bytes"] = resident()
print(json.dumps(found))
"""


def measured(python: str, imports: str, card: str | None) -> dict[str, Any]:
    """The bytes of a process with these imports; `card` is the null card on which it runs."""
    command = [python, "-c", CHILD, imports]
    if card is not None:
        command = [python, "-m", "tightfit.devices.nullcard", card, "--", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{imports} with {python}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def figures(results: dict[str, Any]) -> str:
    """The file that predictions read: the most of all sets of imports."""
    where = "card" if "card" in results else "null card"
    without, build_rows = results["cpu"]["rows"], results["null card"]["rows"]
    rows = results[where]["rows"]
    build = max(build_rows[name]["predicting_bytes"] - without[name]["predicting_bytes"] for name in build_rows)
    steps = max(row["steps_bytes"] - row["predicting_bytes"] for row in rows.values())
    return (
        f"# What CUDA takes of the host's memory, measured on a {where}: written by `python benchmarks/libraries.py`.\n"
        "# build_bytes: of PyTorch's CUDA build beside its CPU build. steps_bytes: of a context and of first steps.\n"
        f'measured_on = "{where}"\nbuild_bytes = {max(0, build)}\nsteps_bytes = {max(0, steps)}\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--card", metavar="PYTHON", required=True)
    parser.add_argument("--real", action="store_true", help="the machine has a card")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--figures", type=Path, default=FIGURES)
    given = parser.parse_args()
    results = json.loads(given.output.read_text("utf-8")) if given.output.exists() else {}
    where = {"cpu": (sys.executable, None), "null card": (given.card, "rtx4090")}
    if given.real:
        where = {"card": (given.card, None)}
    for name, (python, card) in where.items():
        rows = {what: measured(python, imports, card) for what, imports in IMPORTS.items()}
        results[name] = {"environment": environment(), "rows": rows}
    given.output.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    given.figures.write_text(figures(results), "utf-8")
    print(given.figures.read_text("utf-8"))


if __name__ == "__main__":
    main()
