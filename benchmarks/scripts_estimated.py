"""What `estimate` says of other people's scripts whose step can be said: beside what they took of a null card.

    python benchmarks/scripts_estimated.py --repositories FOLDER [--only nanoGPT]     # after scripts_on_cards.py

The model is the repository's own, built dry; the batch has the script's shape, and the loss is called as its loop calls
it: what a loop keeps of a forward until the next one lives as long here. Nothing of the script itself is run. Writes
`estimated_bytes` into the rows of benchmarks/results/scripts_on_cards.json for one card.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripts_on_cards import ESTIMATED as CARD
from scripts_on_cards import RESULTS


class Kept:
    """The loss of a loop that keeps what its model returned: until the next forward has run, or ends it before."""

    def __init__(self, forward: Callable[..., Any], loss: Callable[[Any], Any], *, dropped_before: bool) -> None:
        self.forward, self.loss, self.dropped_before, self.result = forward, loss, dropped_before, None

    def __call__(self, model: Any, batch: Any) -> Any:
        if self.dropped_before:
            self.result = None
        self.result = self.forward(model, batch)
        return self.loss(self.result)


def of_nanogpt(checkout: Path) -> int:
    """`logits, loss = model(X, Y)`: both live until the next forward of two micro-batches has returned."""
    from tightfit import estimate
    from tightfit.tracing.build import build_dry

    nanogpt = _imported(checkout, "model")
    sizes = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304, "bias": False}
    model = build_dry(lambda: nanogpt.GPT(nanogpt.GPTConfig(**sizes, dropout=0.0)))
    kept = Kept(lambda model, batch: model(*batch), lambda result: result[1], dropped_before=False)
    return estimate(
        model, _ids(2 * 12, 1024), loss=kept, optimizer="adamw_fused", precision="bf16", device=CARD, micro_batches=2,
        grad_clip=1.0,
    ).peak_bytes  # fmt: skip


def of_minimind(rows: int, length: int, micro_batches: int) -> Callable[[Path], int]:
    """`res = model(...)`, which the loop deletes behind each backward."""

    def found(checkout: Path) -> int:
        from tightfit import estimate
        from tightfit.tracing.build import build_dry

        minimind = _imported(checkout, "model.model_minimind")
        model = build_dry(lambda: minimind.MiniMindForCausalLM(minimind.MiniMindConfig()))
        ids, labels = _ids(rows * micro_batches, length)
        kept = Kept(
            lambda model, batch: model(batch["input_ids"], labels=batch["labels"]),
            lambda result: result.loss + result.aux_loss,
            dropped_before=True,
        )
        return estimate(
            model, {"input_ids": ids, "labels": labels}, loss=kept, optimizer="adamw", precision="bf16", device=CARD,
            micro_batches=micro_batches, grad_clip=1.0,
        ).peak_bytes  # fmt: skip

    return found


def of_run_clm(checkout: Path) -> int:
    """As `--model` with a folder says it: the Trainer's own fused AdamW, clipping and autocast."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tightfit import TokenBatch, estimate
    from tightfit.tracing.build import build_dry

    config = AutoConfig.from_pretrained(checkout.parent / "data" / "qwen")
    model = build_dry(lambda: AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
    batch = TokenBatch(size=2, length=1024, vocab_size=config.vocab_size)
    return estimate(
        model, batch, optimizer="adamw_fused", precision="bf16", device=CARD, grad_clip=1.0
    ).peak_bytes  # fmt: skip


def of_stable_diffusion(checkout: Path) -> int:
    """By its name, as `estimate --model sd1.5 --adapter r=16,alpha=16 --phase train` says it; VAE and CLIP encode."""
    import torch

    from tightfit import estimate
    from tightfit.models.adapters import add_adapter
    from tightfit.models.diffusion import build_denoiser, denoising_batch, denoising_loss
    from tightfit.models.diffusion_parts import PARTS
    from tightfit.models.diffusion_phases import estimate_phases
    from tightfit.models.published import published
    from tightfit.tracing.build import build_dry
    from tightfit.training.config import AdapterConfig

    known = published()["sd1.5"]
    model: Any = build_dry(lambda: build_denoiser(known.config, torch.float16))
    targets = ("to_k", "to_q", "to_v", "to_out.0")
    model = build_dry(lambda: add_adapter(model, AdapterConfig(r=16, alpha=16, target_modules=targets)))
    batch = denoising_batch(model, 1, 512, None)
    step = estimate(model, batch, loss=denoising_loss(model), precision="fp16", device=CARD, grad_clip=1.0)
    phases = estimate_phases(model, batch, PARTS[known.source], step, phases=("train",), precision="fp16", device=CARD)
    return next(row.peak_bytes for row in phases.rows if row.parts == "resident")


SAID: Mapping[str, tuple[str, Callable[[Path], int]]] = {
    "nanoGPT": ("nanoGPT", of_nanogpt),
    "MiniMind pretrain": ("minimind", of_minimind(32, 340, 8)),
    "MiniMind SFT": ("minimind", of_minimind(16, 768, 1)),
    "transformers run_clm.py": ("transformers", of_run_clm),
    "diffusers text_to_image_lora": ("diffusers", of_stable_diffusion),
}


def _imported(checkout: Path, name: str) -> Any:
    """A module of a checkout, whatever another checkout has under that name."""
    import importlib

    for loaded in [key for key in sys.modules if key.partition(".")[0] == name.partition(".")[0]]:
        del sys.modules[loaded]
    sys.path.insert(0, str(checkout))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(checkout))


def _ids(rows: int, length: int) -> tuple[Any, Any]:
    import torch

    return torch.zeros(rows, length, dtype=torch.long), torch.zeros(rows, length, dtype=torch.long)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repositories", type=Path, required=True)
    parser.add_argument("--only", nargs="*")
    given = parser.parse_args()
    record = json.loads(RESULTS.read_text())
    rows = {row["script"]: row for row in record["rows"] if row["card"] == CARD}
    for name, (folder, found) in SAID.items():
        if given.only and name not in given.only:
            continue
        peak = found(given.repositories.resolve() / folder)
        rows[name]["estimated_bytes"] = peak
        print(name, f"{peak:,} of {rows[name]['peak_bytes']:,}: {peak / rows[name]['peak_bytes'] - 1:+.2%}", flush=True)
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
