"""PEFT's comparison of methods for images (FLUX.2-klein), by dry runs, beside the bytes that PEFT has published.

    python -m benchmarks.published.images --repository FOLDER --rows FILE [--only lora] [--again]

The repository is a checkout of huggingface/peft; the file has the published rows, as JSON: experiment, reserved bytes
of an L40S less those at the start, trained parameters, versions. Of `method_comparison/image-gen` the step of `run.py`
is run dry: FLUX.2-klein-base-4B in bf16 with its gradient checkpoints, adapters in fp32, AdamW, clipped, two images of
512 pixels. Beside the model lie DINOv2 (base, fp32) and what VAE and text encoder made of 14 images, as there. Writes
benchmarks/results/published_images.json.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT, environment

RESULTS = ROOT / "benchmarks" / "results" / "published_images.json"
COMPARISON = Path("method_comparison", "image-gen")
CARD, MODEL, PIXELS, TOKENS, ROWS = "l40s", "flux.2-klein-4b", 512, 512, 2
TRAINED = 14  # of 20 images: 2 and 4 are held out, as default_training_params.json says
DINO: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 518,
    "patch_size": 14,
}
LONG = {"boft": "not run dry: it fills its matrices of permutations one number at a time, which takes hours"}
AT_START = 2 << 20  # run.py takes off what is reserved before: one segment, which it fills later


def predicted(experiment: str, repository: Path) -> dict[str, Any]:
    """Reserved and allocated bytes of the step of one experiment."""
    import torch
    from torch import nn

    from tightfit import estimate
    from tightfit.devices.known import find
    from tightfit.models.adapters import add_adapter
    from tightfit.models.diffusion import build_denoiser, denoising_batch, denoising_loss
    from tightfit.models.published import published
    from tightfit.tracing.build import build_dry
    from tightfit.training.config import AdapterConfig

    file = repository / COMPARISON / "experiments" / experiment / "adapter_config.json"
    if not file.exists():  # run again with another learning rate alone, from PEFT's default configuration
        file = (
            repository / COMPARISON / "experiments" / experiment.partition("/")[0] / "flux2-klein-default" / file.name
        )

    def build() -> nn.Module:
        model: Any = build_denoiser(published()[MODEL].config, torch.bfloat16)
        model.enable_gradient_checkpointing()
        adapted = add_adapter(model, AdapterConfig(config=str(file), base="bf16"))
        for tensor in (*adapted.parameters(), *adapted.buffers()):  # views of larger ones, until run.py moves the model
            if tensor.untyped_storage().nbytes() > tensor.nbytes:
                tensor.data = tensor.data.clone()
        return adapted

    model = build_dry(build).train()
    batch = denoising_batch(model, ROWS, PIXELS, TOKENS)
    of_batch, beside = denoising_loss(model), build_dry(_beside)
    cached = {name: torch.zeros(TRAINED, *value.shape[1:], dtype=value.dtype) for name, value in batch.items()}
    known = find(CARD)
    assert known is not None, CARD

    class Loss:
        """The loss of run.py, which picks a batch out of what it has cached."""

        modules_beside = (beside,)

        def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
            drawn = torch.zeros(ROWS, dtype=torch.long, device=batch["latents"].device)
            return of_batch(model, {name: value.index_select(0, drawn) for name, value in batch.items()})

    found = estimate(model, cached, loss=Loss(), optimizer=torch.optim.AdamW, device=known.spec, grad_clip=1.0)
    assert found.reserved_bytes is not None, "of a card"
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "predicted_bytes": found.reserved_bytes - AT_START,
        "predicted_allocated_bytes": found.peak_bytes,
        "trained_parameters_here": trained,
    }


def _beside() -> Any:
    from transformers import Dinov2Config, Dinov2Model

    return Dinov2Model(Dinov2Config(**DINO)).requires_grad_(False).eval()


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and worst errors, and how many are within 1%."""
    errors = [abs(row["error"]) for row in rows if "error" in row]
    return {
        "rows": len(rows),
        "predicted": len(errors),
        "median": statistics.median(errors) if errors else None,
        "worst": max(errors, default=None),
        "within_1%": sum(error <= 0.01 for error in errors),
    }


def section(record: dict[str, Any]) -> str:
    """The section of docs/accuracy.md."""
    found, rows = record["summary"], record["rows"]
    said = f"median error {found['median']:.1%}, worst {found['worst']:.1%}, {found['within_1%']} within 1%"
    return f"""\
## Methods of PEFT on images, published by PEFT

Reserved bytes of PEFT's comparison of methods for images: FLUX.2-klein-base-4B in bf16 with gradient checkpoints, two
images of 512 pixels, 1,000 steps on an L40S (torch 2.12 and 2.13), beside a dry run of that step (torch \
{record["environment"]["versions"]["torch"]}).
Beside the model lie DINOv2 and what VAE and text encoder made of 14 images, as in `run.py`. A dry run begins with
nothing held, while the script has encoded, evaluated and emptied its cache every 25 steps: what the allocator still
holds of other sizes is not predicted, and which method leaves how much was not looked into. `run.py` itself was not
run on a null card: that needs its text encoder, VAE and data set.
Predicted: {found["predicted"]} of {found["rows"]}, {said}. `python -m benchmarks.published.images`.

| method | trained parameters | published | predicted | error | cause |
|---|---|---|---|---|---|
{chr(10).join(map(line, rows))}
"""


def line(row: dict[str, Any]) -> str:
    cells = [row["experiment"], f"{row['trained_parameters']:,}", f"{row['published_bytes']:,}"]
    predicted, error = row.get("predicted_bytes"), row.get("error")
    cells += ["" if predicted is None else f"{predicted:,}", "" if error is None else f"{error:+.1%}"]
    return "| " + " | ".join([*cells, (row.get("failed") or row.get("cause") or "").replace("|", "/")]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--only", default="", help="experiments in whose names this occurs")
    parser.add_argument("--again", action="store_true", help="those that the output answers too")
    given = parser.parse_args()
    known = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    rows = {row["experiment"]: row for row in known}
    for published in json.loads(given.rows.read_text("utf-8")):
        row = rows.setdefault(published["experiment"], published)
        if given.only not in row["experiment"] or ("error" in row and not given.again):
            continue
        row.pop("failed", None)
        if why := LONG.get(row["experiment"].partition("/")[0]):
            row["failed"] = why
            continue
        try:
            row |= predicted(row["experiment"], given.repository.resolve())
            row["error"] = row["predicted_bytes"] / row["published_bytes"] - 1
        except Exception as error:  # named in the table, and counted
            row["failed"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
        print(row["experiment"], row["published_bytes"], row.get("error", row.get("failed")), flush=True)
        content = {"environment": environment(), "summary": summary([*rows.values()]), "rows": [*rows.values()]}
        RESULTS.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
