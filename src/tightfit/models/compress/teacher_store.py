"""A teacher's distributions on disk: parts of each, for every token of a training that has a label.

The store is a folder of shards. Each shard is a checkpoint of `training.checkpoint`: written in one transaction, every
byte hashed, found again after a kill. Shard number n holds samples n * m to (n + 1) * m - 1, so a store that was
interrupted goes on with the shards that it lacks, and their bytes do not depend on the interruption.

A shard has the tensors `first` (samples + 1,) int64, where the entries of each sample begin, `ids` (entries, k) uint16,
or uint8 (entries, k, 3) for more than 65536 tokens, and `weights` (entries, k) fp16; of the likeliest tokens also
`tail` (entries,) fp32.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tightfit.errors import CheckpointError, DataError
from tightfit.training.checkpoint.manifest import TENSORS
from tightfit.training.checkpoint.names import name_of
from tightfit.training.checkpoint.store import Checkpoints
from tightfit.training.checkpoint.stored import Checkpoint
from tightfit.training.checkpoint.tensor_file import open_tensor_file

KEY = "distil.store"
FORMAT = 1
FIRST, IDS, WEIGHTS, TAIL = "first", "ids", "weights", "tail"
NARROW = 2**16  # tokens of a vocabulary whose ids take two bytes; others take three
WIDEST = 2**24
SHARD_TOKENS = 2**16  # of a shard, about: what a kill loses
_OPEN_SHARDS = 64  # each holds descriptors
# How an error names what a store was made from, and what to do.
_NAMES = {
    "data": "other data (data.source, its arrangement or its tokenizer)",
    "tokenizer": "another tokenizer",
    "teacher": "another teacher",
}


@dataclass(frozen=True)
class Identity:
    """All that decides the bytes of a store. `data`, `tokenizer` and `teacher` are hashes; `rows` are the samples that
    the teacher reads at a time, whose number may move the last bits.
    """

    data: str
    tokenizer: str
    teacher: str
    teacher_dtype: str
    precision: str
    method: str
    k: int
    temperature: float
    seed: int
    vocabulary: int
    samples: int
    shard_samples: int
    rows: int
    format: int = FORMAT

    @property
    def shards(self) -> int:
        return -(-self.samples // self.shard_samples)

    def samples_of(self, shard: int) -> range:
        """The samples of a shard."""
        return range(shard * self.shard_samples, min((shard + 1) * self.shard_samples, self.samples))


class Entries(NamedTuple):
    """Of some positions, (n, k) each: token ids int32 and weights fp16; `tail` (n,) fp32 where the store has one."""

    ids: Tensor
    weights: Tensor
    tail: Tensor | None


@dataclass(frozen=True)
class Shard:
    """A shard's tensors, mapped: read page by page when they are used."""

    first: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    tail: np.ndarray | None


@dataclass(frozen=True)
class TeacherStore:
    """A store in its folder, complete or not."""

    folder: Path
    identity: Identity
    _opened: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_opened", lru_cache(maxsize=_OPEN_SHARDS)(self._open))

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.folder)

    def missing(self) -> list[int]:
        """The shards that are not there, or whose bytes are not those that were written."""
        intact = {entry.step for entry in self.checkpoints.listed() if _is_intact(entry.checkpoint)}
        return [shard for shard in range(self.identity.shards) if shard not in intact]

    def write(self, shard: int, entries: list[Entries]) -> None:
        """A shard, from the entries of each of its samples. Raises `OutputError`."""
        counts = [len(each.ids) for each in entries]
        tensors = {
            FIRST: torch.tensor([0, *np.cumsum(counts).tolist()], dtype=torch.int64),
            IDS: packed_ids(torch.cat([each.ids for each in entries]), self.identity.vocabulary),
            WEIGHTS: torch.cat([each.weights for each in entries]),
        }
        tails = [each.tail for each in entries if each.tail is not None]
        if tails:
            tensors[TAIL] = torch.cat(tails)
        self.checkpoints.save(shard, tensors, {"store": asdict(self.identity)})

    def read(self, sample: int) -> Entries:
        """The entries of a sample: one for each of its tokens that has a label."""
        shard = self._opened(sample // self.identity.shard_samples)
        within = sample % self.identity.shard_samples
        first, last = int(shard.first[within]), int(shard.first[within + 1])
        ids = np.asarray(shard.ids[first:last])
        weights = torch.from_numpy(np.array(shard.weights[first:last]))
        tail = None if shard.tail is None else torch.from_numpy(np.array(shard.tail[first:last]))
        return Entries(unpacked_ids(ids), weights, tail)

    def positions(self) -> int:
        """The tokens that have entries, of a complete store."""
        return sum(int(self._opened(shard).first[-1]) for shard in range(self.identity.shards))

    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def _open(self, shard: int) -> Shard:
        path = self.folder / name_of(shard) / TENSORS
        layout = open_tensor_file(path).layout
        arrays = {
            name: np.memmap(path, place.spec.dtype, mode="r", offset=place.start, shape=place.spec.shape)
            for name, place in layout.places.items()
        }
        return Shard(arrays[FIRST], arrays[IDS], arrays[WEIGHTS], arrays.get(TAIL))


def _is_intact(checkpoint: Checkpoint | None) -> bool:
    if checkpoint is None:
        return False
    try:
        checkpoint.verify()
    except CheckpointError:
        return False
    return True


def open_store(folder: str | Path, wanted: Mapping[str, Any]) -> TeacherStore | None:
    """The store in a folder, complete or not; None where there is none yet.

    `wanted` are the fields of its identity that have to be these; a teacher that is None may be any. Raises `DataError`
    where the store is of something else, or the folder holds something else.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{KEY} {folder}: is a file: give a folder")
    held = _identity_in(folder)
    if held is None:
        if folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise DataError(f"{KEY} {folder}: holds other files and no store: give an empty folder, or a new one")
        return None
    for name, value in wanted.items():
        found = getattr(held, name)
        if value is not None and found != value:
            what = _NAMES.get(name, f"{name} {found}, and not of {value}")
            raise DataError(f"{KEY} {folder}: holds distributions of {what}: give another folder, or remove this one")
    return TeacherStore(folder, held)


def _identity_in(folder: Path) -> Identity | None:
    """The identity in the first shard that can be read."""
    for entry in Checkpoints(folder).listed():
        if entry.checkpoint is None:
            continue
        try:
            return Identity(**entry.checkpoint.record["store"])
        except (KeyError, TypeError):
            raise DataError(
                f"{KEY} {folder}: {entry.path.name} is no shard of a store that this version reads: give another folder"
            ) from None
    return None


def packed_ids(ids: Tensor, vocabulary: int) -> Tensor:
    """Token ids in two bytes, or in three (n, k, 3) for larger vocabularies."""
    assert vocabulary <= WIDEST, vocabulary
    if vocabulary <= NARROW:
        return torch.from_numpy(ids.numpy().astype(np.uint16))
    wide = np.ascontiguousarray(ids.numpy().astype("<u4"))
    return torch.from_numpy(wide.view(np.uint8).reshape(*wide.shape, 4)[..., :3].copy())


def unpacked_ids(packed: np.ndarray) -> Tensor:
    """The other way, as int32."""
    if packed.dtype == np.uint16:
        return torch.from_numpy(packed.astype(np.int32))
    parts = packed.astype(np.int32)
    return torch.from_numpy(parts[..., 0] | parts[..., 1] << 8 | parts[..., 2] << 16)
