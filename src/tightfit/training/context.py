"""A checkpoint's record of its training beside the state: the conditions of a resume, and the plan."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from tightfit.devices.spec import DeviceSpec
from tightfit.errors import DataError
from tightfit.planner.plans import Plan
from tightfit.planner.step_figures import fingerprint
from tightfit.training.buckets import Bucket
from tightfit.training.checkpoint.stored import Checkpoint
from tightfit.training.config import Config
from tightfit.training.corrections import Corrections, corrections_of
from tightfit.training.data.prepare import PreparedData
from tightfit.training.fitting import Fit, fit_of
from tightfit.training.loop import StepHistory
from tightfit.training.reporter import Reporter
from tightfit.training.storage import PLAN
from tightfit.version import package_version

_BEFORE = {"ranks": 1}  # what a checkpoint of an earlier version does not say


@dataclass(frozen=True)
class Context:
    """The circumstances of a training."""

    config: Config
    device: DeviceSpec
    data: str  # a fingerprint of the samples
    around: Mapping[str, Any]  # what may change the last bits of a result
    purpose: Mapping[str, str]  # hashes of what the training has beside its data, such as a teacher

    @classmethod
    def of(
        cls,
        config: Config,
        data: PreparedData,
        device: DeviceSpec,
        purpose: Mapping[str, str] | None = None,
        ranks: int = 1,
    ) -> "Context":
        around = {
            "device": device.name,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "tightfit": package_version(),
            "ranks": ranks,
        }
        return cls(config, device, data.fingerprint, around, dict(purpose or {}))

    def to_dict(self, fitted: Fit) -> dict[str, Any]:
        """As JSON, with the configuration."""
        return {
            "config": self.config.model_dump(mode="json"),
            "max_steps": self.config.training.max_steps,
            "data": self.data,
            "around": self.around,
            "purpose": self.purpose,
            "copy_bytes": fitted.copy_bytes,
            "buckets": [asdict(bucket) for bucket in fitted.buckets],
        }

    @staticmethod
    def files(fitted: Fit) -> dict[str, bytes]:
        """The plan, a file of the checkpoint: lists of checkpoints read the record of each."""
        return {} if fitted.plan is None else {PLAN: json.dumps(fitted.plan.to_dict()).encode()}

    def resumed(self, checkpoint: Checkpoint, reporter: Reporter) -> StepHistory:
        """The history of the steps before the checkpoint. Raises `DataError` where the data is other data now.

        The reporter is told of circumstances that may change the last bits of the results.
        """
        stored = checkpoint.record
        if stored["data"] != self.data:
            raise DataError(
                f"data.source {self.config.data.source}: the samples are not those that {checkpoint.path} was trained "
                "on: put the data back as it was, or begin anew with output.overwrite=true and without --resume"
            )
        for name, digest in self.purpose.items():
            if stored.get("purpose", {}).get(name) != digest:
                raise DataError(
                    f"{name} is not the one that {checkpoint.path} was trained with: put it back as it was, or begin "
                    "anew with output.overwrite=true and without --resume"
                )
        changed = [
            f"{name} {before} is {now} now"
            for name, now in self.around.items()
            if (before := stored["around"].get(name, _BEFORE.get(name))) != now
        ]
        if changed:
            reporter.on_note(f"equal to rounding, no longer to the bit, from here on: {', '.join(changed)}")
        return StepHistory(**stored["counts"])

    def corrections(self, checkpoint: Checkpoint | None, fitted: Fit | None, rank: int) -> Corrections:
        """The corrections that a rank had learnt until the checkpoint; none where the plan that it began with is
        not gone on with, or where the device or the section `memory` is another now.
        """
        if checkpoint is None or not self._is_same(checkpoint):
            return Corrections()
        if fitted is None and PLAN in checkpoint.manifest.files:
            return Corrections()
        try:
            return corrections_of(checkpoint.record["corrections"], rank)
        except (LookupError, TypeError, ValueError):  # of another version
            return Corrections()

    def _is_same(self, checkpoint: Checkpoint) -> bool:
        """True if the training runs on the same device, with the same section `memory` and on as many ranks as before
        the checkpoint.
        """
        stored = checkpoint.record
        same = stored["config"]["memory"] == self.config.model_dump(mode="json")["memory"]
        same = same and stored["around"].get("ranks", _BEFORE["ranks"]) == self.around["ranks"]
        return same and stored["around"]["device"] == self.around["device"]

    def fitted(self, checkpoint: Checkpoint | None, model: nn.Module) -> Fit | None:
        """The plan of a checkpoint as it is, so that the steps after it are the same ones; None where there is none, or
        where the device or the section `memory` is another now.
        """
        if checkpoint is None or PLAN not in checkpoint.manifest.files:
            return None
        stored = checkpoint.record
        if not self._is_same(checkpoint):
            return None
        try:
            plan = Plan.from_dict(json.loads(checkpoint.read_file(PLAN)))
        except (KeyError, TypeError, ValueError):  # of another version
            return None
        buckets = tuple(Bucket(**bucket) for bucket in stored["buckets"])
        fitted = replace(fit_of(plan, model, self.config, self.device), buckets=buckets)
        fits = fitted.copy_bytes == stored["copy_bytes"] and plan.fingerprint == fingerprint(model)
        return fitted if fits else None
