"""Samples of a training together with what a store keeps of its teacher's distributions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tightfit.errors import DataError
from tightfit.levers.micro_batch import IGNORE_INDEX
from tightfit.models.compress.losses import TEACHER_IDS, TEACHER_TAIL, TEACHER_WEIGHTS
from tightfit.models.compress.teacher_store import TeacherStore
from tightfit.training.data.samples import SamplesWith


def labelled(labels: Tensor) -> Tensor:
    """Which positions (B, T) predict a token that counts: those whose next label is not ignored."""
    found = torch.zeros_like(labels, dtype=torch.bool)
    found[:, :-1] = labels[:, 1:] != IGNORE_INDEX
    return found


@dataclass(frozen=True)
class StoredSamples(SamplesWith):
    """Samples with the teacher's entries in each batch."""

    store: TeacherStore

    def batch(self, samples: Sequence[int] | np.ndarray) -> dict[str, Tensor]:
        batch = self.samples.batch(samples)
        entries, counts = self._empty(*batch["labels"].shape), labelled(batch["labels"])
        for row, sample in enumerate(np.asarray(samples).tolist()):
            found, positions = self.store.read(sample), counts[row]
            if len(found.ids) != int(positions.sum()):
                raise DataError(
                    f"distil.store {self.store.folder}: has {len(found.ids)} entries of sample {sample}, which has "
                    f"{int(positions.sum())} labels: remove the folder, so that it is written again"
                )
            entries[TEACHER_IDS][row, positions] = found.ids
            entries[TEACHER_WEIGHTS][row, positions] = found.weights
            if found.tail is not None:
                entries[TEACHER_TAIL][row, positions] = found.tail
        return {**batch, **entries}

    def fullest(self, size: int, length: int) -> dict[str, Tensor]:
        return {**self.samples.fullest(size, length), **self._empty(size, length)}

    def _empty(self, size: int, length: int) -> dict[str, Tensor]:
        identity = self.store.identity
        entries = {
            TEACHER_IDS: torch.zeros(size, length, identity.k, dtype=torch.int32),
            TEACHER_WEIGHTS: torch.zeros(size, length, identity.k, dtype=torch.float16),
        }
        return {**entries, TEACHER_TAIL: torch.zeros(size, length)} if identity.method == "topk" else entries
