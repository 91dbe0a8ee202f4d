"""Small checkpoints, and what must come back from them."""

from pathlib import Path

import torch

from tightfit.training.checkpoint.files import FILES, Files
from tightfit.training.checkpoint.store import Checkpoints
from tightfit.training.checkpoint.stored import Checkpoint


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """A tied weight, one in 16 bits, one that is transposed, a count."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(6, 5, generator=generator)
    return {
        "model.embedding": weight,
        "model.head": weight,
        "model.norm": torch.randn(7, generator=generator).bfloat16(),
        "optimizer.moment": torch.randn(5, 6, generator=generator).t(),
        "optimizer.step": torch.tensor(seed, dtype=torch.int64),
    }


def record(seed: int) -> dict:
    return {"seed": seed, "position": {"epoch": 1, "row": 2**63 + seed}, "validation_loss": 1 / (1 + seed)}


def save(folder: Path, step: int, seed: int | None = None, files: Files = FILES) -> Path:
    seed = step if seed is None else seed
    return Checkpoints(folder, files).save(step, tensors(seed), record(seed), {"plan.json": f"plan {seed}".encode()})


def seed_of(checkpoint: Checkpoint) -> int:
    """Which save a checkpoint is of, having compared everything in it with what that save was given."""
    seed = checkpoint.record["seed"]
    assert checkpoint.record == record(seed)
    assert checkpoint.read_file("plan.json") == f"plan {seed}".encode()
    expected = tensors(seed)
    read = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    checkpoint.read_into(read)
    assert checkpoint.specs.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(read[name], tensor), name
    return seed


def newest(folder: Path) -> int | None:
    """The seed of the newest intact checkpoint."""
    found = Checkpoints(folder).newest_intact().checkpoint
    return None if found is None else seed_of(found)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
