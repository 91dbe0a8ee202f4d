"""The held-out loss of a training, on whatever joins its ranks."""

from dataclasses import dataclass

from torch import nn

from tightfit.memory.settings import private_pool
from tightfit.ranks.processes.ranks import Ranks
from tightfit.training.config import Config
from tightfit.training.data.prepare import PreparedData
from tightfit.training.evaluation import HeldOutSums, held_out_sums
from tightfit.training.fitting import LeversInForce
from tightfit.training.interrupt import Interrupt, Interrupted
from tightfit.training.joining import agree_on_signal
from tightfit.training.objective import Objective
from tightfit.training.reporter import Reporter
from tightfit.training.sharded.steps import held_out_in_lockstep


@dataclass(frozen=True)
class Validation:
    """Evaluates the model with the levers in force. `own` is the configuration of this rank's step.

    `is_sharded` says that FSDP2 joins the ranks, which then have to run each micro-batch together.
    """

    model: nn.Module
    data: PreparedData
    loss: Objective
    levers: LeversInForce
    own: Config
    is_sharded: bool
    ranks: Ranks
    interrupt: Interrupt
    reporter: Reporter

    def __call__(self) -> float | None:
        """The mean loss over all samples that are held out; None where a signal has come."""
        sums = self._in_lockstep() if self.is_sharded else self._apart()
        return None if sums is None else HeldOutSums(*self.ranks.total(sums)).mean

    @property
    def _rows(self) -> int:
        """Of a micro-batch: as many as in training, so that it needs no more memory."""
        return self.own.training.batch_size // self.levers.fitted.micro_batches

    def _in_lockstep(self) -> HeldOutSums | None:
        return held_out_in_lockstep(
            self.model,
            self.data.validation,
            self.loss,
            micro_batch_size=self._rows,
            ranks=self.ranks,
            stop=lambda: agree_on_signal(self.ranks, self.interrupt),
        )

    def _apart(self) -> HeldOutSums | None:
        """Each rank runs its own samples at its own pace."""
        found, interrupt = None, self.interrupt
        try:
            with private_pool(next(self.model.parameters()).device):  # its sizes are not those of a training step
                found = interrupt.cuttable(
                    lambda: held_out_sums(
                        self.model,
                        self.data.validation,
                        self.loss,
                        micro_batch_size=self._rows,
                        precision=self.own.training.precision,
                        stop=lambda: interrupt.received is not None,
                        note=self.reporter.on_note,
                        ranks=self.ranks,
                    )
                )
        except Interrupted:
            pass
        if self.ranks.any(found is None):
            agree_on_signal(self.ranks, interrupt)
            return None
        return found
