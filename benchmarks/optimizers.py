"""Bytes a parameter, by kind of optimizer: what the allocator records, what the dry run predicts, what a card holds.

    python benchmarks/optimizers.py [--kinds adamw,muon] [--output benchmarks/results/optimizers.json] [--page]

The model is a decoder whose activations are small beside its weights. States are the storages of the optimizer's state;
the peak is that of the second step, by the CPU allocator's own record. The figures of a card are a dry run for it, with
its allocator's rounding. `--page` writes docs/optimizers.md from the results file, measuring nothing.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accuracy_page import RESULTS, ROOT, published_muon, rows, where
from environment import environment
from tightfit.devices.present import lookup
from tightfit.levers.micro_batch import as_parts
from tightfit.memory.allocator import measured_peak, storage_bytes
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.optim import step_in_backward
from tightfit.optim.by_name import build_optimizer, named_states
from tightfit.step import StepSettings, TokenBatch, forward_backward, model_loss, update
from tightfit.tracing.cuda import CudaRole
from tightfit.tracing.record import Category
from tightfit.tracing.step import trace_step

OUTPUT = RESULTS / "optimizers.json"
PAGE = ROOT / "docs" / "optimizers.md"
SHAPE = {"hidden_size": 256, "num_layers": 6, "num_heads": 8, "vocab_size": 600}
TOKENS = 16
CARD = "rtx4090"
FP32, BF16 = torch.float32, torch.bfloat16


def in_backward(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    """A factory of the named optimizer that steps in backward."""
    return lambda parameters: step_in_backward(lambda ps: build_optimizer(name, ps), list(parameters)).optimizer


# Name in the table: what is built, and the dtype of the weights.
KINDS: dict[str, tuple[Any, torch.dtype]] = {
    "adamw": ("adamw", FP32),
    "adamw_fused": ("adamw_fused", FP32),
    "adamw, step in backward": (in_backward("adamw"), FP32),
    "adamw8bit": ("adamw8bit", FP32),
    "adamw8bit, step in backward": (in_backward("adamw8bit"), FP32),
    "adamw4bit": ("adamw4bit", FP32),
    "flash_adamw": ("flash_adamw", FP32),
    "muon": ("muon", FP32),
    "muon8bit": ("muon8bit", FP32),
    "adafactor": ("adafactor", FP32),
    "offloaded_adamw:0.5": ("offloaded_adamw:0.5", FP32),
    "offloaded_adamw": ("offloaded_adamw", FP32),
    "adamw_bf16": ("adamw_bf16", BF16),
    "adamw_bf16, step in backward": (in_backward("adamw_bf16"), BF16),
    "adamw_bf16_stochastic": ("adamw_bf16_stochastic", BF16),
    "flash_adamw, bf16 weights": ("flash_adamw", BF16),
    "flash_adamw, bf16 weights, step in backward": (in_backward("flash_adamw"), BF16),
    "adamw8bit, bf16 weights, step in backward": (in_backward("adamw8bit"), BF16),
    "muon8bit, bf16 weights": ("muon8bit", BF16),
    "offloaded_adamw, bf16 weights": ("offloaded_adamw", BF16),
}


def measure(kind: str) -> dict[str, Any]:
    """Bytes a parameter of one kind."""
    optimizer, dtype = KINDS[kind]
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**SHAPE)).to(dtype)
    parts = as_parts([TokenBatch(1, TOKENS, SHAPE["vocab_size"]).tensors()], model_loss)
    count = sum(p.numel() for p in model.parameters())
    on_cpu = trace_step(model, parts, model_loss, optimizer=optimizer)
    card = lookup(CARD)
    role = CudaRole(card.compute_capability, card.sm_count)
    on_card = trace_step(model, parts, model_loss, optimizer=optimizer, role=role)
    states, peak = real(model, parts, optimizer)
    held = {str(category): size / count for category, size in on_card.by_category().items()}
    return {
        "kind": kind,
        "weights": str(dtype).removeprefix("torch."),
        "parameters": count,
        "weight_bytes": sum(p.nbytes for p in model.parameters()) / count,
        "state_bytes": states / count,
        "peak_bytes": peak / count,
        "predicted_peak_bytes": on_cpu.peak_bytes / count,
        "card": {
            "name": CARD,
            "peak_bytes": on_card.peak_bytes / count,
            "by_category": held,
        },
    }


def real(model: nn.Module, parts: list[Any], optimizer: Any) -> tuple[int, int]:
    """Bytes of the states, and the peak of the second step."""
    built = build_optimizer(optimizer, model.parameters())

    def step() -> None:
        forward_backward(model, parts, model_loss)
        update(model, built, StepSettings())

    step()
    states = [tensor for _, _, tensor in named_states(built)]
    resident = [*model.parameters(), *model.buffers(), *states, *(t for part in parts for t in part.batch.values())]
    return storage_bytes(states), measured_peak(step, resident)


def page(record: dict[str, Any]) -> str:
    """docs/optimizers.md."""
    return f"""\
# Optimizers

Written by `python benchmarks/optimizers.py --page`. Name an optimizer in `training.optimizer`, `--optimizer`, or
`optimizer=` of `estimate`, `plan` and the others. `tightfit.optim` has the classes for your own loops.

| name | what it is | result |
|---|---|---|
| `adamw`, `adamw_fused` | AdamW as PyTorch chooses it, or in one kernel | the reference |
| `offloaded_adamw`, `offloaded_adamw:0.5` | states (or that share of them, in whole parameters) on the host, which \
runs the step; gradients leave the device in backward | bit-equal to AdamW on the same device's arithmetic |
| `offloaded_adamw_fused`, `offloaded_adamw_fused:0.5` | the same with the host's update in one kernel, which passes \
over its memory once | bit-equal to `adamw_fused` on the host |
| `training.step_in_backward`, `step_in_backward(...)` | each weight is updated as soon as its gradient is computed, \
and the gradient is freed | bit-equal to stepping afterwards; excludes clipping and gradient scalers |
| `adamw_bf16` | bf16 weights, and 16 more bits beside them | bit-equal to AdamW on fp32 weights with the same \
gradients |
| `adamw_bf16_stochastic` | bf16 weights, rounded by chance | inexact |
| `flash_adamw` | 8-bit states, and for bf16 weights 8 more bits of each: 24-bit masters; no package, on every device \
| inexact; updates below a master's last bit count on average |
| `adamw8bit`, `adamw4bit` | 8-bit states (bitsandbytes), 4-bit states (torchao): `pip install 'tightfit[lowbit]'` | \
inexact |
| `muon` | Muon on parameters of two dimensions, AdamW on the rest | another optimizer |
| `muon8bit` | the same with momentum in 8 bits and `flash_adamw` for the rest; for bf16 weights 8 more bits of each \
| another optimizer; its momentum is that of `muon` within 1% |
| `adafactor`, `adam`, `sgd` | PyTorch's | other optimizers |
| `module:Class` | any subclass of `torch.optim.Optimizer`, as `torch.optim:RAdam`, \
`bitsandbytes.optim:Lion8bit`, or one of your own | as it is |

`adamw_bf16` and `adamw_bf16_stochastic` are for models with bf16 weights (`model.to(torch.bfloat16)`). For a model
without bf16 weights they would be plain AdamW, and are refused by name.

`flash_adamw` takes 7.125 bytes a parameter with bf16 weights: 2 of weight, 2 of gradient, 1 of the master's further
bits, 2 of states, and scales of 8 bytes for each 64 parameters. Without the gradient (step in backward) it takes 5.125.
It follows FlashOptim (arXiv:2602.23349) with other codes: the square root of the first moment and the fourth root of
the second one, which lose less where sizes differ within a group. No second moment becomes zero, and scales are fp32.
`notes/exactness.md` has the errors of both. An infinite or undefined gradient spoils its group of 64.

A class is imported from what is installed or from the working folder, and its own step is run dry. Its arguments stand
beside it: `--optimizer torch.optim:NAdam --optimizer-args "lr=0.01,betas=(0.8,0.9)"`, or
`training.optimizer: {{class: torch.optim:NAdam, lr: 0.01, betas: [0.8, 0.9]}}`, or
`optimizer="torch.optim:NAdam(lr=0.01)"`.
In a configuration the schedule gives its learning rate. What it does not name has the class's own default, except
`weight_decay`. An optimizer that wants a closure (LBFGS, SAM) is refused in a line. States of bitsandbytes' paged
optimizers are counted as memory of the card, which they leave only under pressure.

APOLLO and GaLore (apollo-torch 1.0.3, galore-torch 1.0) have no name of their own: their states hold projectors that a
checkpoint of a training cannot save, and they ask for the rank in groups of parameters. A class of yours in the working
folder makes the groups; its states are predicted as they are, and your own loop saves them:

```python
from apollo_torch import APOLLOAdamW


class Apollo(APOLLOAdamW):  # --optimizer apollo:Apollo --optimizer-args rank=256
    def __init__(self, params, lr=1e-3, rank=256):
        params = list(params)
        settings = {{"rank": rank, "proj": "random", "scale_type": "channel", "scale": 1}}
        settings |= {{"update_proj_gap": 200, "proj_type": "std"}}
        groups = [{{"params": [p for p in params if p.dim() != 2]}}]
        super().__init__([*groups, {{"params": [p for p in params if p.dim() == 2], **settings}}], lr=lr)
```

## Muon with 8-bit states, beside published figures

{published_muon()}
## Bytes per parameter

{where(record)}

A decoder of {record["results"][0]["parameters"] / 1e6:.1f}M parameters, one sequence of {TOKENS} tokens. States and
peak are measured on the CPU, the peak by the allocator's own record. "Predicted" is the dry run's peak. On a CPU the
host is the device, so offloading saves nothing there. The last columns are a dry run for a card ({CARD}), at its peak,
without activations and workspace.

{table(record["results"])}
On a card `offloaded_adamw` copies on its own stream. {on_a_card()}
"""


def on_a_card() -> str:
    """What a real card said of optimizers on the host, in a sentence."""
    record = json.loads((RESULTS / "gpu_optimizer_step.json").read_text("utf-8"))
    whole, half = (record["sides"][kind]["throughput_of_adamw"] for kind in ("offloaded_adamw", "offloaded_adamw:0.5"))
    preset, size, length = record["case"]
    return (
        f"An {record['environment']['machine']['gpu']} kept {whole:.0%} of AdamW's throughput with all\n"
        f"states on the host, and {half:.0%} with half of them ({preset}, {size} x {length})."
    )


def table(results: list[dict[str, Any]]) -> str:
    lines = []
    for found in results:
        card = found["card"]["by_category"]
        columns = (
            found["kind"],
            found["weights"],
            f"{found['state_bytes']:.2f}",
            f"{found['peak_bytes']:.2f}",
            f"{found['predicted_peak_bytes']:.2f}",
            *(f"{card[str(category)]:.2f}" for category in (Category.PARAMETER, Category.GRADIENT)),
            f"{card[str(Category.OPTIMIZER_STATE)]:.2f}",
        )
        lines.append(f"| {' | '.join(columns)} |")
    return rows("| optimizer | weights | states | peak | predicted | card: parameters | gradients | states |", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", help="with commas between; all by default")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--page", action="store_true", help="write the page from the results file")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(page(json.loads(options.output.read_text())))
        return
    kinds = options.kinds.split(",") if options.kinds else list(KINDS)
    record = {"environment": environment(), "results": [measure(kind) for kind in kinds]}
    options.output.write_text(json.dumps(record, indent=1) + "\n")
    for found in record["results"]:
        print(f"{found['kind']:45s} states {found['state_bytes']:6.2f}  peak {found['peak_bytes']:6.2f}  "
              f"predicted {found['predicted_peak_bytes']:6.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
