"""The preparation of a training: its data, its model, and the step on which all ranks agree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tightfit.devices.present import lookup_present
from tightfit.devices.spec import DeviceSpec
from tightfit.errors import CannotFit
from tightfit.models.adapters import demand_adapters
from tightfit.models.loading import build_model, position_limit, vocabulary_size
from tightfit.models.masks import put_masks, source_masks
from tightfit.models.saving import saved_bytes
from tightfit.ops.weights.low_bit import count_weights
from tightfit.planner.blocks.find import find_blocks
from tightfit.ranks.processes.ranks import Ranks, SeveralRanks
from tightfit.training.boundaries import demand_boundaries
from tightfit.training.checkpoint.stored import Checkpoint
from tightfit.training.config import Config
from tightfit.training.context import Context
from tightfit.training.data.packing import BatchStream, StreamPosition
from tightfit.training.data.prepare import PreparedData, check_fits
from tightfit.training.fitting import Fit, fit
from tightfit.training.loop import StepHistory
from tightfit.training.objective import Objective, counted
from tightfit.training.optimizer import rounding_note
from tightfit.training.purpose import Purpose, loss_of_step
from tightfit.training.reporter import Reporter
from tightfit.training.several import (
    config_of_a_rank,
    device_of_a_rank,
    plan_digest,
    shared_fit,
    split_in_words,
)
from tightfit.training.sharded.fitting import fit_shards
from tightfit.training.sharded.model import demand_shardable_model, may_be_sharded
from tightfit.training.state import edges_digest
from tightfit.training.storage import RunFolder
from tightfit.units import format_count


@dataclass(frozen=True)
class Prepared:
    """All that the steps need, with no lever in force yet.

    `own` is the configuration of this rank's step, and `longest` the batch for which it is planned. `blocks` are the
    modules that FSDP2 shards one by one. `stored` is the plan of the checkpoint, where the training goes on with it.
    """

    data: PreparedData
    model: nn.Module
    device: DeviceSpec
    context: Context
    record: StepHistory
    own: Config
    longest: Mapping[str, Any]
    fitted: Fit
    stored: Fit | None
    blocks: Sequence[str]

    def batches(self, config: Config, position: Mapping[str, int] | None = None) -> BatchStream:
        """The training's batches from a position on."""
        where = None if position is None else StreamPosition(**position)
        settings, size = config.data, config.training.batch_size
        return self.data.batches(size, seed=settings.seed, shuffle=settings.shuffle, position=where)


@dataclass
class Preparation:
    """Makes a training ready. Mutable: whether FSDP2 joins the ranks, which with `auto` the plan says."""

    config: Config
    folder: RunFolder
    reporter: Reporter
    checkpoint: Checkpoint | None
    purpose: Purpose
    ranks: Ranks

    def __post_init__(self) -> None:
        self.is_sharded = self.ranks.is_several and self.config.training.parallel == "fsdp2"

    def prepared(self) -> Prepared:
        config, checkpoint, ranks = self.config, self.checkpoint, self.ranks
        demand_adapters(config.model)  # before a device is measured and data are read, which may take long
        training, notice = config.training, self.reporter.on_note
        with ranks.first_goes_ahead():
            device = lookup_present(None if training.device == "auto" else training.device, notice=notice)
        device = device_of_a_rank(device, ranks)
        with ranks.first_goes_ahead():
            data = self.purpose.data(config, notice)
        data = self.purpose.prepared(data, config, device, self.reporter)
        context = Context.of(config, data, device, self.purpose.identity, ranks.size)
        record = StepHistory() if checkpoint is None else context.resumed(checkpoint, self.reporter)
        model = self._model(data)
        own = config_of_a_rank(config, ranks, data.training.rows)
        longest, *shorter = [counted(batch) for batch in data.for_dry_runs(own.training.batch_size)]
        stored = context.fitted(checkpoint, model) if ranks.is_first else None
        if stored is not None and training.parallel != "auto" and stored.is_sharded != self.is_sharded:
            stored = None
        fitted = stored or (self._fit(model, longest, data, own, device, shorter) if ranks.is_first else None)
        blocks: list[str] = []
        if isinstance(ranks, SeveralRanks):
            fitted, is_stored = shared_fit(ranks, fitted, config, is_stored=stored is not None)
            stored = fitted if is_stored else None
            notice(split_in_words(config, ranks, data.training.rows, is_sharded=fitted.is_sharded))
            blocks = find_blocks(model) if fitted.is_sharded else []
            self._demand_same(model, data, fitted, blocks)
        assert fitted is not None, "rank 0 plans for all"
        return Prepared(data, model, device, context, record, own, longest, fitted, stored, blocks)

    def _model(self, data: PreparedData) -> nn.Module:
        """The model on the CPU, once it is known that the training can be done with it."""
        config, notice = self.config, self.reporter.on_note
        model = build_model(config.model, seed=config.training.seed)
        if removed := source_masks(config.model):
            put_masks(model, removed)
            notice(_what_is_masked(removed))
        check_fits(data.tokenizer, vocabulary_size(model), config.data.sequence_length, position_limit(model))
        if self.is_sharded:
            demand_shardable_model(model, config, data.objective)
        self.purpose.begin(model, data, config)
        self.folder.demand_room(saved_bytes(model))  # before a plan is made, which may take long
        notice(_what_is_trained(model, data))
        if (rounding := rounding_note(model, config.training.optimizer)) is not None:
            notice(rounding)
        if config.data.packing != "none":
            demand_boundaries(model, vocabulary=data.tokenizer.vocab_size, longest=config.data.sequence_length)
        return model

    def _fit(
        self,
        model: nn.Module,
        longest: Mapping[str, Any],
        data: PreparedData,
        own: Config,
        device: DeviceSpec,
        shorter: Sequence[Mapping[str, Any]],
    ) -> Fit:
        """The step of a rank. Where a budget has room for it in shards only, it is sharded. Raises as `fit` does."""
        if not self.is_sharded:
            try:
                return fit(model, longest, self._loss(data), own, device, shorter)
            except CannotFit as error:
                is_free = self.ranks.is_several and own.training.parallel == "auto"
                if not (is_free and may_be_sharded(own, model, data.objective)):
                    raise
                unsharded = str(error)  # its frames hold what they traced
            self.is_sharded = True
            self.reporter.on_note(f"ddp: {unsharded}; planning for fsdp2")
        return fit_shards(model, longest, self._loss(data), own, device, self.ranks.size)

    def _loss(self, data: PreparedData) -> Objective:
        return loss_of_step(self.purpose, data, self.config, is_sharded=self.is_sharded)

    def _demand_same(self, model: nn.Module, data: PreparedData, fitted: Fit, blocks: Sequence[str]) -> None:
        """Before the first collective: ranks that differ here would train different things."""
        checkpoint = self.checkpoint
        self.ranks.demand_same(
            {
                "configuration": self.config.model_dump_json(),
                "checkpoint in output.folder": "none" if checkpoint is None else str(checkpoint.step),
                "data": data.fingerprint,
                "model": edges_digest(model) + edges_digest(model, trained=True),
                "plan": plan_digest(fitted),
                "split into blocks": " ".join(blocks),
            }
        )


def _what_is_masked(removed: Mapping[str, torch.Tensor]) -> str:
    zeros, known = sum(int(mask.sum()) for mask in removed.values()), sum(mask.numel() for mask in removed.values())
    return f"masks keep {zeros:,} of {known:,} weights of {len(removed)} matrices at zero"


def _what_is_trained(model: nn.Module, data: PreparedData) -> str:
    count = count_weights(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    which = "" if trained == count else f" ({trained:,} trained)"
    return (
        f"{format_count(count)} parameters{which}, vocabulary {data.tokenizer.vocab_size}; "
        f"{data.training} to train on, {len(data.validation)} held out"
    )
