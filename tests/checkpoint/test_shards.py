"""Checkpoints whose tensors several ranks have written: whole and in rows, verified, and refused where damaged."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tightfit.errors import CheckpointError, OutputError
from tightfit.training.checkpoint.files import FILES
from tightfit.training.checkpoint.manifest import MANIFEST, TensorsFile, parse_manifest, shard_name
from tightfit.training.checkpoint.reading import digest_of
from tightfit.training.checkpoint.store import Checkpoints
from tightfit.training.checkpoint.stored import Checkpoint
from tightfit.training.checkpoint.tensors import write_tensors

ROWS = (3, 3, 1, 0)  # of four ranks that share seven
WHOLE = {"bias": torch.arange(7.0), "weight": torch.arange(35.0).view(7, 5)}
REST = {"count": torch.tensor(4.0), "tied": torch.ones(2, 2)}
REST["tied_too"] = REST["tied"]


def shard_of(rank: int) -> dict[str, Tensor]:
    return {name: tensor.split(ROWS)[rank].clone() for name, tensor in WHOLE.items()}


@dataclass
class Others:
    """The other ranks, which write when rank 0 says where."""

    count: int = len(ROWS) - 1
    fails: bool = False
    files: list[TensorsFile] = field(default_factory=list)

    def begin(self, part: Path) -> None:
        self.files = [write_tensors(FILES, part / shard_name(r), shard_of(r)) for r in range(1, len(ROWS))]

    def written(self) -> tuple[TensorsFile, ...]:
        if self.fails:
            raise OutputError("rank 2: no space left")
        return tuple(self.files)


def saved(folder: Path, **other: bool) -> Path:
    return Checkpoints(folder).save(4, {**shard_of(0), **REST}, {"kind": "x"}, others=Others(**other))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    saved(tmp_path)
    found = Checkpoints(tmp_path).newest_intact()
    assert found.passed_over == ()
    assert found.checkpoint is not None
    return found.checkpoint


@pytest.mark.keeps("checkpoint-whose-tensors-several")
def test_tensors_are_whole_however_many_ranks_have_written_them(checkpoint: Checkpoint):
    expected = {**WHOLE, **REST}
    assert {name: spec.shape for name, spec in checkpoint.specs.items()} == {n: t.shape for n, t in expected.items()}
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in expected.items())
    read = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    checkpoint.read_into(read)
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())


@pytest.mark.keeps("checkpoint-whose-tensors-several")
@pytest.mark.parametrize("count", [1, 2, 3, 7, 9])
def test_other_numbers_of_ranks_read_their_rows(checkpoint: Checkpoint, count: int):
    each = -(-7 // count)
    for rank in range(count):
        first = min(rank * each, 7)
        own = {name: torch.zeros_like(tensor[first : first + each]) for name, tensor in WHOLE.items()}
        checkpoint.read_rows({name: (first, tensor) for name, tensor in own.items()})
        assert all(torch.equal(own[name], tensor[first : first + each]) for name, tensor in WHOLE.items())


def test_rows_are_read_from_what_one_process_has_written(tmp_path: Path):
    Checkpoints(tmp_path).save(1, {**WHOLE, "transposed": WHOLE["weight"].t()}, {})
    stored = Checkpoints(tmp_path).newest_intact().checkpoint
    assert stored is not None
    for name, tensor in (*WHOLE.items(), ("transposed", WHOLE["weight"].t())):
        rows = torch.zeros_like(tensor[2:4])
        stored.read_rows({name: (2, rows)})
        assert torch.equal(rows, tensor[2:4])


@pytest.mark.keeps("checkpoint-whose-tensors-several")
@pytest.mark.parametrize("rank", range(3))
def test_a_damaged_shard_is_found(tmp_path: Path, rank: int):
    path = saved(tmp_path) / shard_name(rank)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    found = Checkpoints(tmp_path).newest_intact()
    assert found.checkpoint is None
    assert "damaged" in found.passed_over[0]
    path.unlink()
    assert f"{shard_name(rank)} is missing" in Checkpoints(tmp_path).newest_intact().passed_over[0]


@pytest.mark.keeps("checkpoint-whose-tensors-several")
def test_where_one_rank_cannot_write_nothing_is_left(tmp_path: Path):
    Checkpoints(tmp_path).save(3, WHOLE, {})
    with pytest.raises(OutputError, match="rank 2: no space left"):
        saved(tmp_path, fails=True)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.keeps("checkpoint-whose-tensors-several")
@pytest.mark.parametrize("change", ["shape", "dtype", "name", "none", "same_as", "file"])
def test_shards_that_do_not_belong_together_are_refused(tmp_path: Path, change: str):
    content = json.loads((saved(tmp_path) / MANIFEST).read_bytes())["content"]
    shard = content["shards"][1]
    entry = shard["entries"]["weight"]
    if change == "shape":
        entry["shape"] = [1, 4]
    elif change == "dtype":
        entry["dtype"] = "float64"
    elif change == "name":
        shard["entries"]["other"] = shard["entries"].pop("weight")
    elif change == "none":
        content["shards"] = []
    elif change == "same_as":
        shard["same_as"] = {"count": "weight"}
    else:
        shard["file"] = "../tensors-00002.safetensors"
    text = json.dumps(content).encode()
    with pytest.raises(ValueError, match=r"shard|names a file"):
        parse_manifest(b'{"blake2b": "%s", "content": %s}\n' % (digest_of(text).encode(), text))


def test_a_tensor_that_is_not_there_is_one_line(checkpoint: Checkpoint):
    with pytest.raises(CheckpointError, match="no tensor 'other'"):
        checkpoint.read("other")
