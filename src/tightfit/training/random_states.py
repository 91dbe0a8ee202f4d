"""The random generators of a training: seeded at its start, in each checkpoint, put back when it is resumed.

Of several ranks each has generators of its own, else all would drop the same activations. Those of rank 0 are seeded
and stored as those of one process are.
"""

import hashlib
import json
import random
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy
import safetensors.torch
import torch
from torch import Tensor

from tightfit.ranks.processes.ranks import ALONE, Ranks

RANDOM = "random"
_OF_OTHERS = "ranks"  # in the record: what is no tensor of the states of all ranks but the first


class CheckpointWithRandomStates(Protocol):
    """A checkpoint, as far as random states are read from one."""

    @property
    def record(self) -> Mapping[str, Any]: ...

    @property
    def specs(self) -> Mapping[str, Any]: ...

    def read(self, name: str) -> Tensor: ...


class StoredRandomStates(NamedTuple):
    """The generators' states: tensors by name, and what is no tensor, as JSON."""

    tensors: dict[str, Tensor]
    record: dict[str, Any]


def seed_generators(seed: int, rank: int = 0) -> None:
    """PyTorch's generators, Python's and numpy's at the start of a training: a model may draw from any of them."""
    if rank:  # a hash: seeds that follow each other are the seeds of other trainings
        seed = int.from_bytes(hashlib.sha256(f"{seed} {rank}".encode()).digest()[:7])
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def random_states() -> StoredRandomStates:
    """The generators as tensors; what little of Python's and numpy's is no list of numbers in the record."""
    version, numbers, gauss = random.getstate()
    _, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    tensors = {
        f"{RANDOM}.cpu": torch.get_rng_state(),
        f"{RANDOM}.python": torch.tensor(numbers, dtype=torch.int64),
        f"{RANDOM}.numpy": torch.from_numpy(keys.astype(numpy.int64)),  # pyright: ignore[reportAttributeAccessIssue]
    }
    if torch.cuda.is_initialized():
        tensors |= {f"{RANDOM}.cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return StoredRandomStates(
        tensors,
        {
            "python": {"version": version, "gauss": gauss},
            "numpy": {"position": position, "has_gauss": has_gauss, "cached": cached},
        },
    )


def random_bytes() -> int:
    """Bytes of the generators' tensors."""
    return sum(tensor.nbytes for tensor in random_states().tensors.values())


def random_states_of_all(ranks: Ranks) -> StoredRandomStates:
    """Those of every rank; the names of all but the first have the number of the rank."""
    own = random_states()
    if not ranks.is_several:
        return own
    found = ranks.gathered(safetensors.torch.save(own.tensors, {"record": json.dumps(own.record)}))
    tensors, records = dict(own.tensors), []
    for rank, content in enumerate(found):
        loaded = safetensors.torch.load(content)
        tensors |= loaded if rank == 0 else {_of_rank(name, rank): tensor for name, tensor in loaded.items()}
        records.append(_record_in(content))
    return StoredRandomStates(tensors, {**records[0], _OF_OTHERS: records[1:]})


def set_random_states(stored: CheckpointWithRandomStates, ranks: Ranks = ALONE) -> None:
    """Those of CUDA devices too, as far as the devices are there. A rank that the checkpoint does not know gets fresh
    ones: drawn by what rank 0 would draw next, and its number.
    """
    others = stored.record[RANDOM].get(_OF_OTHERS, [])
    if ranks.rank > len(others):
        generator = torch.Generator()
        generator.set_state(stored.read(f"{RANDOM}.cpu"))
        seed_generators(int(torch.randint(2**31, (1,), generator=generator)), ranks.rank)
        return
    record = stored.record[RANDOM] if ranks.rank == 0 else others[ranks.rank - 1]

    def read(name: str) -> Tensor:
        return stored.read(_of_rank(name, ranks.rank))

    torch.set_rng_state(read(f"{RANDOM}.cpu"))
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            name = f"{RANDOM}.cuda.{index}"
            if _of_rank(name, ranks.rank) in stored.specs:
                torch.cuda.set_rng_state(read(name), index)
    python, other = record["python"], record["numpy"]
    random.setstate((python["version"], tuple(read(f"{RANDOM}.python").tolist()), python["gauss"]))
    keys = read(f"{RANDOM}.numpy").numpy().astype(numpy.uint32)
    numpy.random.set_state(("MT19937", keys, other["position"], other["has_gauss"], other["cached"]))


def _of_rank(name: str, rank: int) -> str:
    return name if rank == 0 else name.replace(RANDOM, f"{RANDOM}.rank{rank}", 1)


def _record_in(content: bytes) -> dict[str, Any]:
    """The record beside tensors that `safetensors` has saved: in its header, behind the header's length."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["record"])
