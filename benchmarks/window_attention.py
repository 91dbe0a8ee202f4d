"""How memory and time of attention within a window grow with the sequence, beside full attention under a mask.

    python benchmarks/window_attention.py --output benchmarks/results/window_attention.json \\
        --png docs/window_attention.png

Forward and backward of causal attention, fp32 on the CPU, from 1,024 to 32,768 tokens. Ours is
`tightfit.ops.attention(..., window=...)`; beside it `scaled_dot_product_attention` with the window as a boolean mask,
which is made beforehand and not timed. The extra memory is the allocator's own record of one pass above what it began
with, the mask counted. A time is processor time on one thread, the least of its rounds, so that
what else the machine does disturbs it less.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from environment import environment
from tightfit.memory.allocator import cpu_rise
from tightfit.ops import attention
from tightfit.units import format_bytes

HEADS, KEY_HEADS, WIDTH = 2, 1, 64
LENGTHS = tuple(1024 * 2**power for power in range(6))
ROUNDS_UP_TO = 8192  # beyond it one round: full attention takes a minute
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def inputs(length: int) -> list[Tensor]:
    """q, k and v of one sequence, with gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, length, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def window_mask(length: int, window: int) -> Tensor:
    """(length, length) booleans: what a causal window lets through."""
    i = torch.arange(length)
    return (i[:, None] >= i) & (i[:, None] - i < window)


def passes(attend: Attend, tensors: list[Tensor]) -> Callable[[], Any]:
    gradient = torch.ones_like(tensors[0])
    return lambda: torch.autograd.grad(attend(*tensors), tensors, gradient)


def seconds(step: Callable[[], Any]) -> float:
    started = time.process_time()
    step()
    return time.process_time() - started


def measure(length: int, window: int, rounds: int) -> dict[str, Any]:
    """Bytes and seconds of both at one length, and how far apart their outputs are."""
    tensors = inputs(length)
    mask = window_mask(length, window)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, window=window)

    def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    with torch.no_grad():
        apart = (ours(*tensors) - full(*tensors)).abs().max().item()
    steps = {"window": passes(ours, tensors), "full": passes(full, tensors)}
    held = {"window": 0, "full": mask.nbytes}
    row: dict[str, Any] = {"tokens": length, "largest_difference": apart}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds if length <= ROUNDS_UP_TO else 1):
        for name, step in steps.items():
            times[name].append(seconds(step))
    for name, step in steps.items():
        row[name] = {"seconds": min(times[name]), "extra_bytes": cpu_rise(step) + held[name]}
    return row


def draw(rows: list[dict[str, Any]], window: int, path: Path) -> None:
    """Two curves of memory and two of time, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tokens = [row["tokens"] for row in rows]
    labels = {"window": f"tightfit, window of {window}", "full": "full attention under a window mask"}
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, key, unit, scale in (
        (axes[0], "extra_bytes", "extra memory, MiB", 2**20),
        (axes[1], "seconds", "processor seconds", 1),
    ):
        for name, label in labels.items():
            axis.plot(tokens, [row[name][key] / scale for row in rows], marker="o", label=label)
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel=unit)
        axis.set_xticks(tokens, [f"{count // 1024}k" for count in tokens])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle("Sliding-window attention, forward and backward")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--longest", type=int, default=LENGTHS[-1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--png", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for length in LENGTHS:
        if length <= options.longest:
            rows.append(row := measure(length, options.window, options.rounds))
            print(f"{length:6d} tokens, apart by {row['largest_difference']:.1e}:", end=" ")
            print(
                ", ".join(
                    f"{name} {row[name]['seconds']:.3f} s {format_bytes(row[name]['extra_bytes'])}"
                    for name in ("window", "full")
                )
            )
    if options.output:
        shape = {"window": options.window, "heads": HEADS, "key_heads": KEY_HEADS, "width": WIDTH}
        options.output.write_text(
            json.dumps({"environment": environment(), "shape": shape, "results": rows}, indent=1) + "\n"
        )
    if options.png:
        draw(rows, options.window, options.png)


if __name__ == "__main__":
    main()
