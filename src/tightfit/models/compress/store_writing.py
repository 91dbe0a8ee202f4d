"""Writes a store of a teacher's distributions: the teacher reads all samples once, within the budget.

The teacher reads as many samples at a time as the dry run of its forward says that the budget has room for. Its logits
exist for a chunk of tokens at a time. Random numbers are seeded for each batch and chunk, so an interrupted store
gets the same bytes as any other.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.devices.spec import DeviceSpec
from tightfit.errors import CannotFit
from tightfit.memory.allocator import measured_peak
from tightfit.models.compress.heads import head_input
from tightfit.models.compress.stored_samples import labelled
from tightfit.models.compress.teacher_store import SHARD_TOKENS, Entries, Identity, TeacherStore
from tightfit.ops import sampled_tokens, top_k_tokens
from tightfit.planner.request import role_of
from tightfit.runtime.nested import tensors_in
from tightfit.step import Precision, autocast
from tightfit.tracing.step import trace_inference
from tightfit.tracing.surroundings import held_by
from tightfit.training.config import Config
from tightfit.training.data.samples import Samples
from tightfit.units import format_bytes, format_seconds, is_share_of, parse_budget

CHUNK_BYTES = 8 * 2**20  # of the fp32 logits of a chunk of tokens


@dataclass(frozen=True)
class StoreFigures:
    """A store and what writing it took. `positions` are the tokens that have entries.

    `teacher_bytes` are the teacher's weights. The peaks are those of its forward and of what is drawn from it. They are
    None, as the seconds, where nothing was left to write.
    """

    folder: str
    positions: int
    disk_bytes: int
    shards: int
    written_shards: int
    samples_at_once: int
    teacher_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    seconds: float | None = None

    @property
    def bytes_per_token(self) -> float:
        """Bytes on disk for each token that has entries."""
        return self.disk_bytes / max(self.positions, 1)


@dataclass(frozen=True)
class TeacherReading:
    """How a teacher reads samples: the call that is predicted, measured and run."""

    identity: Identity
    precision: Precision

    def __call__(self, teacher: nn.Module, batch: Mapping[str, Any]) -> Entries:
        """The entries of a batch's tokens that have a label. `batch` has the model's inputs; `positions`, the places of
        those tokens among all of the batch's; and `first`, the number of its first sample.
        """
        inputs = {name: value for name, value in batch.items() if name not in ("labels", "positions", "first")}
        with autocast(self.precision, batch["input_ids"].device.type):
            found = head_input(teacher, inputs)
            hidden = found.hidden.flatten(0, 1).index_select(0, batch["positions"])
            weight, bias = found.weight, found.bias
            del found, inputs
            size = max(1, CHUNK_BYTES // (4 * len(weight)))
            chunks = [
                self._of_chunk(F.linear(hidden[start : start + size], weight, bias), batch["first"], start)
                for start in range(0, max(len(hidden), 1), size)
            ]
        tails = [chunk.tail for chunk in chunks if chunk.tail is not None]
        return Entries(
            torch.cat([chunk.ids for chunk in chunks]),
            torch.cat([chunk.weights for chunk in chunks]),
            torch.cat(tails) if tails else None,
        )

    def _of_chunk(self, logits: Tensor, first: int, start: int) -> Entries:
        identity = self.identity
        if identity.method == "topk":
            ids, weights, tail = top_k_tokens(logits, identity.k, temperature=identity.temperature)
        else:
            generator = torch.Generator(logits.device).manual_seed(seed_of(identity.seed, first, start))
            ids, weights, tail = sampled_tokens(logits, identity.k, generator, temperature=identity.temperature)
        return Entries(ids.cpu(), weights.half().cpu(), None if tail is None else tail.float().cpu())


def seed_of(seed: int, first: int, start: int) -> int:
    """The seed of the numbers for a chunk of tokens, of the batch that begins with a sample."""
    digest = hashlib.blake2b(f"{seed} {first} {start}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def batch_of(samples: Samples, numbers: range, device: str) -> tuple[dict[str, Any], list[int]]:
    """Some samples as `TeacherReading` takes them, and how many of each sample's tokens have a label."""
    batch = samples.batch(np.arange(numbers.start, numbers.stop))
    counted = labelled(batch["labels"])
    positions = counted.flatten().nonzero().squeeze(1)
    tensors = {name: tensor.to(device) for name, tensor in {**batch, "positions": positions}.items()}
    return {**tensors, "first": numbers.start}, counted.sum(dim=1).tolist()


def split(entries: Entries, counts: list[int]) -> list[Entries]:
    """The entries of a batch, a sample each."""
    tails = [None] * len(counts) if entries.tail is None else entries.tail.split(counts)
    parts = zip(entries.ids.split(counts), entries.weights.split(counts), tails, strict=True)
    return [Entries(ids, weights, tail) for ids, weights, tail in parts]


def shard_samples(samples: Samples) -> int:
    """The samples of a shard."""
    return max(1, SHARD_TOKENS // max(int(samples.lengths.max(initial=1)), 1))


@dataclass
class StoreWriter:
    """Mutable: writes the shards that a store lacks, and measures the heaviest batch."""

    teacher: nn.Module
    samples: Samples
    config: Config
    device: DeviceSpec
    note: Callable[[str], None]

    def __post_init__(self) -> None:
        self._measured = 0

    def begun(self, identity: Identity) -> tuple[Identity, int]:
        """The identity with the most samples that the teacher can read at once within the budget, at most a training
        batch, and the predicted peak. Raises `CannotFit` where one sample is too many.
        """
        count = min(self.config.training.batch_size, len(self.samples), identity.shard_samples)
        while True:
            identity = replace(identity, rows=count)
            peak = self.predicted_peak_bytes(identity)
            if self.fits(peak):
                return identity, peak
            if count == 1:
                raise CannotFit(
                    f"the budget of {self.config.memory.budget} cannot fit: the teacher reads one sample in "
                    f"{format_bytes(peak)}: raise memory.budget, shorten data.sequence_length, or hold the teacher in "
                    "fewer bits (distil.teacher_dtype)",
                    peak,
                )
            count //= 2

    def continued(self, store: TeacherStore) -> int:
        """The predicted peak of writing what a store lacks, with as many samples at once as it was begun with. Raises
        `CannotFit`.
        """
        peak = self.predicted_peak_bytes(store.identity)
        if not self.fits(peak):
            raise CannotFit(
                f"the budget of {self.config.memory.budget} cannot fit: distil.store {store.folder} was begun with "
                f"{store.identity.rows} samples at once, which take {format_bytes(peak)}: raise memory.budget, or "
                "remove the folder",
                peak,
            )
        return peak

    def fits(self, peak_bytes: int) -> bool:
        """True if a peak is within the budget. A share of the plain step says nothing about the teacher alone."""
        budget = self.config.memory.budget
        if budget is None or is_share_of(budget, "x"):
            return True
        return peak_bytes <= parse_budget(budget, device_bytes=self.device.memory_bytes)

    def predicted_peak_bytes(self, identity: Identity) -> int:
        """The peak of the heaviest batch, run dry."""
        batch, _ = batch_of(self.samples, self._heaviest(identity), "cpu")
        reading = TeacherReading(identity, self.config.training.precision)
        return trace_inference(self.teacher, batch, reading, role=role_of(self.device)).peak_bytes

    def write(self, store: TeacherStore, missing: list[int]) -> float:
        """Write these shards. Returns the seconds that it took. Raises `OutputError`."""
        began = time.perf_counter()
        heaviest = self._heaviest(store.identity)
        self.teacher.to(self.device.kind)
        for number, shard in enumerate(missing):
            batches = self._batches(store.identity, shard)
            store.write(shard, [each for rows in batches for each in self._read(store, rows, heaviest)])
            if number == 0 and len(missing) > 1:
                left = format_seconds((time.perf_counter() - began) * (len(missing) - 1))
                self.note(f"1 of {len(missing)} shards of the store is written; the others take about {left}")
        return time.perf_counter() - began

    def measure(self, store: TeacherStore) -> int:
        """The measured peak of the heaviest batch: as it was written, or read again where it was written before."""
        if not self._measured:
            self._read(store, self._heaviest(store.identity), self._heaviest(store.identity))
        return self._measured

    @torch.no_grad()
    def _read(self, store: TeacherStore, rows: range, heaviest: range) -> list[Entries]:
        reading, found = TeacherReading(store.identity, self.config.training.precision), []
        batch, counts = batch_of(self.samples, rows, self.device.kind)
        if rows == heaviest:
            resident = [*held_by([self.teacher]), *tensors_in(batch)]
            self._measured = measured_peak(lambda: found.append(reading(self.teacher, batch)), resident)
        else:
            found.append(reading(self.teacher, batch))
        return split(found[0], counts)

    def _batches(self, identity: Identity, shard: int) -> list[range]:
        whole = identity.samples_of(shard)
        return [
            range(first, min(first + identity.rows, whole.stop))
            for first in range(whole.start, whole.stop, identity.rows)
        ]

    def _heaviest(self, identity: Identity) -> range:
        """The batch with the most tokens, padding included."""
        lengths = self.samples.lengths
        batches = (rows for shard in range(identity.shards) for rows in self._batches(identity, shard))
        return max(batches, key=lambda rows: len(rows) * int(lengths[rows.start : rows.stop].max()))
