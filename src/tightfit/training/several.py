"""One training in several processes: whether there are several, what is refused then, and what rank 0 hands to all."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tightfit.devices.spec import DeviceSpec
from tightfit.errors import ConfigError, DeviceError
from tightfit.planner.plans import Plan
from tightfit.planner.records import StepFigures
from tightfit.ranks.processes.launch import Launch, launched
from tightfit.ranks.processes.ranks import ALONE, Ranks, SeveralRanks
from tightfit.training.buckets import Bucket
from tightfit.training.config import Config
from tightfit.training.config.schema import TrainingConfig
from tightfit.training.data.tokenizer import TextTokenizer
from tightfit.training.fitting import Fit
from tightfit.training.sharded.model import demand_shardable
from tightfit.training.storage import RunFolder


def ranks_of(config: Config) -> Ranks:
    """The ranks that a training runs on: those that a launcher started, or this process alone.

    Raises `ConfigError` for what several cannot do, `DeviceError` where there are fewer cards than ranks on a machine,
    `RankError` where the others cannot be reached.
    """
    training, launch = config.training, launched()
    if launch is None:
        if training.parallel != "auto":
            raise ConfigError(
                f"training.parallel is {training.parallel}, and this is one process: start it with torchrun "
                "--nproc-per-node N -m tightfit train CONFIG, or set it to auto"
            )
        return ALONE
    if not launch.is_several:
        return ALONE
    if training.step_in_backward:
        raise ConfigError(
            f"training.step_in_backward updates weights before the gradients of {launch.size} ranks are added up: set "
            "it to false, or start one process"
        )
    if training.parallel == "fsdp2":
        demand_shardable(config)
    on_cuda = _on_cuda(training, launch)
    return SeveralRanks(launch, timeout_seconds=training.rank_timeout, on_cuda=on_cuda)


def _on_cuda(training: TrainingConfig, launch: Launch) -> bool:
    if training.device == "cpu" or not torch.cuda.is_available():
        return False
    cards = torch.cuda.device_count()
    if launch.local_rank >= cards:
        raise DeviceError(
            f"torchrun started {launch.local_size} ranks on this machine, and it has {cards} CUDA devices: "
            f"--nproc-per-node {cards}, or training.device=cpu"
        )
    torch.cuda.set_device(launch.local_rank)
    return True


def device_of_a_rank(device: DeviceSpec, ranks: Ranks) -> DeviceSpec:
    """The device as one rank has it: the ranks on a machine share its memory."""
    if isinstance(ranks, SeveralRanks) and device.kind == "cpu":
        return replace(device, memory_bytes=device.memory_bytes // ranks.launch.local_size)
    return device


def config_of_a_rank(config: Config, ranks: Ranks, together: int) -> Config:
    """The configuration with the batch of the rank that has most, in micro-batches of the same size; `together` rows of
    a batch are one sample.
    """
    if not ranks.is_several:
        return config
    training = config.training
    size = ranks.largest_share(training.batch_size // together) * together
    count = training.gradient_accumulation_steps
    update = {
        "batch_size": size,
        "gradient_accumulation_steps": count if count == "auto" else min(-(-count // ranks.size), size // together),
    }
    return config.model_copy(update={"training": training.model_copy(update=update)})


def split_in_words(config: Config, ranks: SeveralRanks, together: int, *, is_sharded: bool) -> str:
    """How the ranks share the work, and what of it is not predicted."""
    count, launch = config.training.batch_size // together, ranks.launch
    shares = [(r + 1) * count // launch.size - r * count // launch.size for r in range(launch.size)]
    most = f"{min(shares)} to {max(shares)}" if min(shares) < max(shares) else str(shares[0])
    sums = (
        "weights, gradients and states are sharded, and every micro-batch exchanges them"
        if is_sharded
        else "gradients are added up where they lie, after the last micro-batch"
    )
    return (
        f"{launch.size} ranks ({ranks.backend}): {most} of the {count} samples of a batch on each, the same tokens as "
        f"one process; {sums}; predicted is the largest rank's step, without what gloo and NCCL take"
    )


# One plan for all


def fit_as_json(fitted: Fit, *, is_stored: bool) -> bytes:
    """A fit for the other ranks; `is_stored`: it is that of the checkpoint."""
    raw = {
        "plain": asdict(fitted.plain),
        "planned": asdict(fitted.planned),
        "plan": None if fitted.plan is None else fitted.plan.to_dict(),
        "buckets": [asdict(bucket) for bucket in fitted.buckets],
        "is_stored": is_stored,
        **{name: getattr(fitted, name) for name in _NUMBERS},
    }
    return json.dumps(raw).encode()


def fit_from_json(content: bytes, config: Config) -> tuple[Fit, bool]:
    """The object that `fit_as_json` was given."""
    raw: dict[str, Any] = json.loads(content)
    fitted = Fit(
        plain=StepFigures.from_dict(raw["plain"]),
        planned=StepFigures.from_dict(raw["planned"]),
        plan=None if raw["plan"] is None else Plan.from_dict(raw["plan"]),
        recompute=None if raw["plan"] is not None else config.memory.recompute,
        buckets=tuple(Bucket(**bucket) for bucket in raw["buckets"]),
        **{name: raw[name] for name in _NUMBERS},
    )
    return fitted, raw["is_stored"]


def shared_fit(ranks: Ranks, fitted: Fit | None, config: Config, *, is_stored: bool) -> tuple[Fit, bool]:
    """Rank 0's fit for all, and whether it is that of the checkpoint. The others give None, and wait for it."""

    def encoded() -> bytes:
        assert fitted is not None, "rank 0 has planned"
        return fit_as_json(fitted, is_stored=is_stored)

    found = ranks.found_by_first(encoded)
    return fit_from_json(found, config) if fitted is None else (fitted, is_stored)


_NUMBERS = ("plain_micro_batches", "micro_batches", "compiles_blocks", "state_bytes", "copy_bytes", "is_sharded")


def plan_digest(fitted: Fit) -> str:
    """Of the levers that a rank is about to put in force, as it has them."""
    return hashlib.sha256(fit_as_json(fitted, is_stored=False)).hexdigest()


# Files


class ReadFolder(RunFolder):
    """The folder of a run for ranks that do not write: rank 0 does. All that changes it does nothing here."""

    @contextmanager
    def claimed(self, *, overwrite: bool, resume: bool = False) -> Iterator[bool]:
        yield True

    def demand_room(self, needed_bytes: int) -> None: ...

    def clear(self, *, keep: Sequence[str] = (), checkpoints: bool = True) -> None: ...

    def write(self, name: str, content: str | bytes) -> Path:
        return self.path / name

    def append(self, name: str, lines: Sequence[str]) -> None: ...

    def sync(self, name: str) -> None: ...

    def truncate(self, name: str, size: int) -> int:
        return 0

    def seconds_to_write(self, count: int) -> float:
        return 0.0

    def write_tokenizer(self, tokenizer: TextTokenizer) -> None: ...

    def write_model(self, model: nn.Module) -> None: ...

    def _write_files(self, write: Callable[[Path], None]) -> None: ...


def folder_of(config: Config, ranks: Ranks) -> RunFolder:
    """The run's folder as this rank has it."""
    return (RunFolder if ranks.is_first else ReadFolder)(config.output.folder)
