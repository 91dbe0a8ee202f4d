"""The log-probabilities of a reference model, which are those of the trained model before its first step."""

from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from torch import nn

from tightfit.errors import OutputError
from tightfit.names import REFERENCE
from tightfit.ranks.processes.ranks import Ranks
from tightfit.training.config.schema import TrainingConfig
from tightfit.training.data.prepare import PreparedData
from tightfit.training.data.samples import Samples
from tightfit.training.fitting import LeversInForce
from tightfit.training.interrupt import Interrupt, Interrupted
from tightfit.training.preferences import ReferencedSamples, from_file, reference_log_probs, to_file
from tightfit.training.reporter import Reporter
from tightfit.training.storage import RunFolder


@dataclass
class ReferenceModel:
    """Where the log-probabilities are kept, and how they are computed: with this rank's settings of the training."""

    folder: RunFolder
    ranks: Ranks
    reporter: Reporter
    interrupt: Interrupt
    training: TrainingConfig

    def beside(
        self, data: PreparedData, model: nn.Module, levers: LeversInForce, *, is_resumed: bool
    ) -> PreparedData | None:
        """The pairs with their log-probabilities: those that the folder of a resumed run keeps, or computed now. None
        where a signal has come meanwhile.
        """
        path, kept = self.folder.path / REFERENCE, None
        if self.ranks.is_first:
            kept = from_file(path, data.fingerprint) if is_resumed else None
            kept = kept or self._computed(data, model, levers, is_resumed)
        if not self.ranks.found_by_first(lambda: b"" if kept is None else b"computed"):
            return None
        kept = kept or from_file(path, data.fingerprint)
        if kept is None:
            raise OutputError(f"{path}: rank {self.ranks.rank} does not see what rank 0 wrote there: use one folder")
        training, validation = kept
        return replace(
            data,
            training=replace(cast(ReferencedSamples, data.training), values=training),
            validation=replace(cast(ReferencedSamples, data.validation), values=validation),
        )

    def _computed(
        self, data: PreparedData, model: nn.Module, levers: LeversInForce, is_resumed: bool
    ) -> tuple[np.ndarray, np.ndarray] | None:
        self.reporter.on_note("computing the reference's log-probabilities of all answers")
        training, validation = (self._log_probs(model, levers, s) for s in (data.training, data.validation))
        if training is None or validation is None:
            if not is_resumed:
                self.folder.clear()
            return None
        self.folder.write(REFERENCE, to_file(training, validation, data.fingerprint))
        return training, validation

    def _log_probs(self, model: nn.Module, levers: LeversInForce, samples: Samples) -> np.ndarray | None:
        try:
            return self.interrupt.cuttable(
                lambda: reference_log_probs(
                    model,
                    samples,
                    micro_batch_size=self.training.batch_size // levers.fitted.micro_batches,
                    precision=self.training.precision,
                    stop=lambda: self.interrupt.received is not None,
                )
            )
        except Interrupted:
            return None
