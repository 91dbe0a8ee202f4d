"""Damaged checkpoints are noticed, whatever was damaged, and the one before is taken."""

import random
from pathlib import Path

import pytest
from damages import damage
from tiny_checkpoints import newest, save, seed_of

from tightfit.training.checkpoint.store import Checkpoints


def check(folder: Path, count: int, seed: int) -> None:
    chance = random.Random(seed)
    other, step = save(folder, 10), save(folder, 20)
    checkpoints = Checkpoints(folder)
    for _ in range(count):
        what, undo = damage(chance, step, other)
        found = checkpoints.newest_intact()
        assert found.checkpoint is not None
        assert found.checkpoint.step == 10, what
        (line,) = found.passed_over
        assert line.isprintable(), line
        undo()
    assert newest(folder) == 20
    assert seed_of(found.checkpoint) == 10


@pytest.mark.keeps("10-000-damaged-checkpoints")
def test_300_damages_are_noticed(scratch: Path):
    check(scratch, 300, seed=0)


@pytest.mark.keeps("10-000-damaged-checkpoints")
@pytest.mark.slow  # 10,000 of them: half a minute
def test_10000_damages_are_noticed(scratch: Path):
    check(scratch, 10_000, seed=1)


@pytest.mark.keeps("10-000-damaged-checkpoints")
def test_each_bit_of_a_manifest_counts(scratch: Path):
    save(scratch, 10)
    step = save(scratch, 20)
    content = (step / "manifest.json").read_bytes()
    chance = random.Random(2)

    for at in chance.sample(range(len(content)), 200):
        damaged = bytearray(content)
        damaged[at] ^= 1 << chance.randrange(8)
        (step / "manifest.json").write_bytes(damaged)
        found = Checkpoints(scratch).newest_intact().checkpoint
        assert found is not None
        assert found.step == 10


def test_the_line_says_what_is_damaged(scratch: Path):
    step = save(scratch, 20)
    path = step / "tensors.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # the last tensor's
    path.write_bytes(content)

    found = Checkpoints(scratch).newest_intact()

    assert found.checkpoint is None
    assert found.passed_over == (f"{step}: tensors.safetensors holds the tensor 'model.norm' damaged",)


def test_what_is_damaged_after_it_was_verified_is_noticed_while_it_is_read(scratch: Path):
    from tightfit.errors import CheckpointError

    step = save(scratch, 20)
    checkpoint = Checkpoints(scratch).newest_intact().checkpoint
    assert checkpoint is not None
    path = step / "tensors.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    with pytest.raises(CheckpointError, match=r"'model\.norm' damaged"):
        checkpoint.read("model.norm")
    assert checkpoint.read("optimizer.step") == 20
