"""`flash_adamw` beside AdamW: the error of an update by the codes of its moments, and loss curves.

    python benchmarks/flash_adamw.py --output benchmarks/results/flash_adamw.json --png docs/flash_adamw.png

Codes: both moments of random gradients go through their codes after every step. The error is that of AdamW's last
update (the norm of the difference by the norm), in fp64 throughout but for the codes. Gradients within a group differ
in size by a factor of e to `spread`. "Published" is FlashOptim's arrangement (arXiv:2602.23349): groups of 32, scales
in fp16, softsign and square root, a code for zero. Curves: a decoder trained on this repository's pages, from the same
weights with the same batches.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from environment import ROOT, environment
from tightfit.models.loading import build_model
from tightfit.optim import companding
from tightfit.optim.by_name import build_optimizer
from tightfit.planner.report.picture import HEIGHT, PALETTE, new_figure, png
from tightfit.step import model_loss
from tightfit.training.config import parse_config
from tightfit.training.data.prepare import prepare_data

Codes = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
NUMBERS, CODED_STEPS, BETA1 = 8192, 1000, 0.9
SHAPE = {"hidden_size": 128, "num_layers": 4, "num_heads": 4, "vocab_size": 512, "max_position_embeddings": 64}
STEPS, SMALL_STEPS, BATCH, LENGTH, RATE, LAST = 400, 4, 8, 64, 2e-3, 40
# Name in the picture: the optimizer and the dtype of the weights.
CURVES = {
    "AdamW, fp32 weights": ("adamw", torch.float32),
    "AdamW, bf16 weights, fp32 masters": ("adamw_bf16", torch.bfloat16),
    "flash_adamw, bf16 weights": ("flash_adamw", torch.bfloat16),
    "adamw8bit, bf16 weights": ("adamw8bit", torch.bfloat16),
    "AdamW, bf16 weights, stochastic": ("adamw_bf16_stochastic", torch.bfloat16),
}


def ours(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Both moments after their codes."""
    rows = first.float().view(-1, companding.GROUP)
    codes, scale = companding.signed_encoded(rows)
    roots, root_scale = companding.roots_encoded(second.sqrt().float().view_as(rows))
    signed = companding.signed_decoded(codes.to(torch.int8), scale)
    squares = companding.squares_decoded(roots.to(torch.uint8), root_scale)
    return signed.double().flatten(), squares.double().flatten()


def published(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    rows, roots = first.float().view(-1, 32), second.sqrt().float().view(-1, 32)
    scale, root_scale = (t.abs().amax(1, keepdim=True).clamp_min(1e-12) for t in (rows, roots))
    shares = rows / scale
    signed = (254 * shares / (1 + shares.abs())).round() / 127
    found = signed / (2 - signed.abs()) * scale.half().float()
    squares = ((roots / root_scale * 255).round() / 255 * root_scale.half().float()).square()
    return found.double().flatten(), squares.double().flatten()


def error(codes: Codes, spread: float, size: float, beta2: float, steps: int) -> float:
    """The error of the last update."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(NUMBERS, generator=generator, dtype=torch.float64)

    sizes, means = size * (spread * draw()).exp(), 0.3 * draw()
    exact = coded = (torch.zeros(NUMBERS, dtype=torch.float64),) * 2
    updates = exact
    for step in range(1, steps + 1):
        gradient = sizes * (draw() + means)
        exact, coded = ((m.lerp(gradient, 1 - BETA1), v.lerp(gradient.square(), 1 - beta2)) for m, v in (exact, coded))
        updates = tuple(m / (1 - BETA1**step) / ((v / (1 - beta2**step)).sqrt() + 1e-8) for m, v in (exact, coded))
        coded = codes(*coded)
    return float((updates[1] - updates[0]).norm() / updates[0].norm())


def errors(steps: int) -> list[dict[str, Any]]:
    return [
        {"spread": spread, "size": size, "beta2": beta2, "steps": steps}
        | {codes.__name__: error(codes, spread, size, beta2, steps) for codes in (ours, published)}
        for spread in (0.3, 1.0)
        for size in (1e-2, 1e-5)
        for beta2 in (0.95, 0.999)
    ]


def curves(steps: int) -> dict[str, Any]:
    """The losses of each training, and its seconds of processor time."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.txt"
        corpus.write_text("\n\n".join(path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md"))))
        config = parse_config({
            "model": SHAPE,
            "data": {"source": str(corpus), "sequence_length": LENGTH, "vocab_size": SHAPE["vocab_size"]},
        })  # fmt: skip
        data = prepare_data(config.data, config.model)
        batches = [batch for batch, _ in zip(data.batches(BATCH), range(steps), strict=False)]
        for name, (kind, dtype) in CURVES.items():
            model = build_model(config.model, seed=0).to(dtype)
            optimizer = build_optimizer(kind, model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
            began, losses = time.process_time(), []
            for batch in batches:
                loss = model_loss(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            found[name] = {"losses": losses, "last": sum(losses[-LAST:]) / len(losses[-LAST:]),
                           "processor_seconds": time.process_time() - began}  # fmt: skip
            print(f"{name:40s} last {found[name]['last']:.4f}  {found[name]['processor_seconds']:.0f} s", flush=True)
    return found


def draw(found: dict[str, Any]) -> bytes:
    """The losses, and their differences from AdamW with fp32 masters."""
    figure = new_figure(HEIGHT)
    grid = figure.add_gridspec(2, 1, height_ratios=(3, 2))
    losses, apart = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
    base = found["AdamW, bf16 weights, fp32 masters"]["losses"]
    for (name, curve), colour in zip(found.items(), ("#000000", *PALETTE), strict=False):
        smooth = smoothed(curve["losses"])
        losses.plot(range(len(smooth)), smooth, color=colour, linewidth=1.5, label=name)
        differences = smoothed([a - b for a, b in zip(curve["losses"], base, strict=True)])
        apart.plot(range(len(differences)), differences, color=colour, linewidth=1.5)
    losses.set_ylabel("loss (nats a token)")
    losses.set_title("The same batches from the same weights, means of 20 steps")
    losses.legend(frameon=False)
    apart.set_ylabel("minus that with fp32 masters")
    apart.set_xlabel("optimizer steps")
    for axis in (losses, apart):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3, axis="y")
    return png(figure)


def smoothed(values: list[float], width: int = 20) -> list[float]:
    return [sum(values[i : i + width]) / width for i in range(len(values) - width + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help=f"{SMALL_STEPS} steps")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--png", type=Path)
    options = parser.parse_args()
    record = {
        "environment": environment(),
        "shape": SHAPE,
        "tokens": [BATCH, LENGTH],
        "learning_rate": RATE,
        "last_steps": LAST,
        "codes": errors(SMALL_STEPS if options.small else CODED_STEPS),
        "curves": curves(SMALL_STEPS if options.small else STEPS),
    }
    for row in record["codes"]:
        print("spread {spread} size {size} beta2 {beta2}: ours {ours:.4f} published {published:.4f}".format(**row))
    if options.output:
        options.output.write_text(json.dumps(record) + "\n")
    if options.png:
        options.png.write_bytes(draw(record["curves"]))


if __name__ == "__main__":
    main()
