"""One training in its folder: data, model, plan, steps, evaluation, sample, files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from tightfit.checkpoint.stored import Checkpoint
from tightfit.config import Config
from tightfit.data.packing import BatchStream, StreamPosition
from tightfit.data.prepare import PreparedData, check_fits, prepare_data
from tightfit.devices.present import lookup_present
from tightfit.devices.spec import DeviceSpec
from tightfit.errors import CannotFit, CheckpointError, VerificationFailed
from tightfit.memory.settings import private_pool, set_allocator
from tightfit.models.loading import build_model, position_limit, vocabulary_size
from tightfit.models.masks import put_masks, source_masks
from tightfit.models.saving import saved_bytes
from tightfit.planner.blocks.find import find_blocks
from tightfit.planner.plans import Plan
from tightfit.processes.ranks import Ranks, SeveralRanks
from tightfit.step import StepSettings
from tightfit.training.boundaries import demand_boundaries
from tightfit.training.context import Context
from tightfit.training.evaluation import HeldOutSums, held_out_sums
from tightfit.training.files import RunFiles
from tightfit.training.fitting import Fit, LeversInForce, fit, fit_of
from tightfit.training.interrupt import Cut, Interrupt
from tightfit.training.joining import OtherCannotFit, agree_on_signal
from tightfit.training.loop import Record, run_steps
from tightfit.training.objective import CausalLMLoss, Objective, counted
from tightfit.training.objectives import plannable
from tightfit.training.optimizer import OptimizerRecipe, rounding_note
from tightfit.training.outcome import result_of
from tightfit.training.purpose import Purpose
from tightfit.training.random_states import seed_generators
from tightfit.training.recovery import RecoveringStepper, StepPlanner
from tightfit.training.reference import Reference
from tightfit.training.reporter import Reporter, Start
from tightfit.training.result import TrainResult
from tightfit.training.sampling import sample_text
from tightfit.training.saving import Saver
from tightfit.training.several import (
    config_of_a_rank,
    device_of_a_rank,
    plan_digest,
    shared_fit,
    split_in_words,
)
from tightfit.training.sharded.fitting import fit_shards
from tightfit.training.sharded.model import WholeModel, demand_shardable_model, may_be_sharded, shard
from tightfit.training.sharded.steps import ShardedStepper, held_out_in_lockstep
from tightfit.training.state import edges_digest
from tightfit.training.stepper import Stepper
from tightfit.training.storage import METRICS, RunFolder


@dataclass
class Run:
    """One training in its folder, from a checkpoint on or from the start."""

    config: Config
    folder: RunFolder
    reporter: Reporter
    interrupt: Interrupt
    checkpoint: Checkpoint | None
    purpose: Purpose
    ranks: Ranks

    def __post_init__(self) -> None:
        # Whether FSDP2 joins the ranks. With `auto`, the plan says so.
        self.is_sharded = self.ranks.is_several and self.config.training.parallel == "fsdp2"

    def run(self) -> TrainResult | None:
        """All that is left to do. None where a signal came before the first step was made: then nothing is in the
        folder that was not there before.
        """
        config, checkpoint, ranks = self.config, self.checkpoint, self.ranks
        training = config.training
        if config.memory.allocator is not None:
            set_allocator(config.memory.allocator)  # before anything starts CUDA
        notice = self.reporter.on_note
        with ranks.first_goes_ahead():
            device = lookup_present(None if training.device == "auto" else training.device, notice=notice)
        device = device_of_a_rank(device, ranks)
        with ranks.first_goes_ahead():
            data = plannable(prepare_data(config.data, config.model, objective=training.objective, notice=notice))
        data = self.purpose.prepared(data, config, device, self.reporter)
        context = Context.of(config, data, device, self.purpose.identity, ranks.size)
        record = Record() if checkpoint is None else context.resumed(checkpoint, self.reporter)
        model = build_model(config.model, seed=training.seed)
        if removed := source_masks(config.model):
            put_masks(model, removed)
            self.reporter.on_note(_what_is_masked(removed))
        check_fits(data.tokenizer, vocabulary_size(model), config.data.sequence_length, position_limit(model))
        if self.is_sharded:
            demand_shardable_model(model, config, data.objective)
        self.purpose.begin(model, data, config)
        self.folder.demand_room(saved_bytes(model))  # before a plan is made, which may take long
        self.reporter.on_note(_what_is_trained(model, data))
        if (rounding := rounding_note(model, training.optimizer)) is not None:
            self.reporter.on_note(rounding)
        if config.data.packing != "none":
            demand_boundaries(model, vocabulary=data.tokenizer.vocab_size, longest=config.data.sequence_length)
        own = self.own(data)
        longest, *shorter = [counted(batch) for batch in data.for_dry_runs(own.training.batch_size)]
        stored = context.fitted(checkpoint, model) if ranks.is_first else None
        if stored is not None and training.parallel != "auto" and stored.is_sharded != self.is_sharded:
            stored = None
        fitted = stored or (self._fit(model, longest, data, own, device, shorter) if ranks.is_first else None)
        blocks: list[str] = []
        if isinstance(ranks, SeveralRanks):
            fitted, is_stored = shared_fit(ranks, fitted, config, is_stored=stored is not None)
            stored = fitted if is_stored else None
            self.is_sharded = fitted.is_sharded
            self.reporter.on_note(split_in_words(config, ranks, data.training.rows, is_sharded=self.is_sharded))
            blocks = find_blocks(model) if self.is_sharded else []
            self._demand_same(model, data, fitted, blocks)
        assert fitted is not None, "rank 0 plans for all"
        whole = WholeModel(model, ranks) if fitted.is_sharded else None
        if whole is None:  # shards are moved one block at a time
            model.to(device.kind)
        self.purpose.to(device.kind)
        if fitted.plan is not None:
            self.reporter.on_plan(fitted.plan)
            if config.memory.verify:
                with ranks.first_goes_ahead():
                    if ranks.is_first:
                        rows = own.training.batch_size
                        first = {name: tensor[:rows] for name, tensor in next(_batches(config, data)).items()}
                        _verify(model, counted(first, device.kind), self.loss(data), fitted.plan, self.reporter)
        files = RunFiles(config, data.tokenizer, model, fitted)
        if ranks.is_first:
            files.demand_room(self.folder)
        with self.interrupt:
            files.write_beginning(self.folder, is_resumed=checkpoint is not None)
            corrected = context.corrections(checkpoint, stored).corrected_plan()
            in_force = fitted if corrected is None else fit_of(corrected, model, own, device)
            with LeversInForce(in_force, model) as levers:
                if fitted.is_sharded:
                    shard(
                        model,
                        blocks,
                        ranks,
                        precision=training.precision,
                        reshard_after_forward=in_force.reshard_after_forward,
                    )
                if data.objective == "dpo":
                    reference = Reference(self.folder, ranks, self.reporter, self.interrupt, own.training)
                    referenced = reference.beside(data, model, levers, is_resumed=checkpoint is not None)
                    if referenced is None:
                        return None
                    data = referenced
                stepper = self._stepper(model, self.loss(data), levers, device, longest, own)
                if checkpoint is None:
                    seed_generators(
                        training.seed, ranks.rank
                    )  # dropout's numbers do not depend on what was planned before
                else:
                    stepper.corrections = context.corrections(checkpoint, stored)
                    self._restore(stepper, checkpoint, record)
                batches = _batches(config, data, record.position)
                evaluate = partial(self._validation, model, levers, data)
                with self._saver(stepper, levers, data, context, fitted, record) as saver:
                    self._steps(stepper, batches, levers.fitted, record, saver, evaluate)
                if not record.steps:
                    self.folder.clear()
                    return None
                fitted = levers.fitted  # out of memory may have put another one in force
                validation = record.held_out()
                if validation is None:
                    validation = evaluate()
            record.measured_peak_bytes = ranks.most(record.measured_peak_bytes)
            trained = model if whole is None else whole.filled(model)
            sample = self._sample(trained, data) if ranks.is_first else ""
            is_cut = agree_on_signal(ranks, self.interrupt)
            saver.end(record, is_cut=is_cut)
            self.purpose.end(trained)
            result = result_of(
                config,
                trained,
                fitted,
                record,
                is_cut=is_cut,
                validation=validation,
                device=device.name,
                sample=sample,
                skipped_lines=data.skipped_lines,
                resumed_from=None if checkpoint is None else checkpoint.step,
            )
            if ranks.is_first:
                replace(files, model=trained).write_end(result, record.lines(), self.folder, self.reporter)
        return result

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
                return fit(model, longest, self.loss(data), own, device, shorter)
            except CannotFit as error:
                is_free = self.ranks.is_several and own.training.parallel == "auto"
                if not (is_free and may_be_sharded(own, model, data.objective)):
                    raise
                unsharded = str(error)  # its frames hold what they traced
            self.is_sharded = True
            self.reporter.on_note(f"ddp: {unsharded}; planning for fsdp2")
        return fit_shards(model, longest, self.loss(data), own, device, self.ranks.size)

    def own(self, data: PreparedData) -> Config:
        """The configuration of this rank's step."""
        return config_of_a_rank(self.config, self.ranks, data.training.rows)

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

    def loss(self, data: PreparedData) -> Objective:
        """What is minimised."""
        return self._in_fp32(self.purpose.loss(data, self.config))

    def _in_fp32(self, loss: Objective) -> Objective:
        """FSDP2 casts weights and activations, and there is no autocast that would convert the logits."""
        is_cast = self.is_sharded and self.config.training.precision != "fp32"
        return replace(loss, in_fp32=True) if is_cast and isinstance(loss, CausalLMLoss) else loss

    def _stepper(
        self,
        model: nn.Module,
        loss: Objective,
        levers: LeversInForce,
        device: DeviceSpec,
        longest: Mapping[str, Any],
        own: Config,
    ) -> Stepper:
        training, memory = self.config.training, self.config.memory
        parts: dict[str, Any] = {
            "model": model,
            "optimizer": OptimizerRecipe(training)(model.parameters()),
            "loss": loss,
            "settings": StepSettings(training.precision, training.grad_clip),
            "micro_batches": levers.fitted.micro_batches,
            "micro_batches_for": levers.fitted.micro_batches_for if levers.fitted.buckets else None,
            "ranks": self.ranks,
        }
        if self.is_sharded:
            # Weights and activations are cast by FSDP2, not by autocast.
            parts |= {"settings": StepSettings("fp32", training.grad_clip), "micro_batches_for": None}
            return ShardedStepper(**parts, planned_bytes=levers.fitted.planned.peak_bytes)
        if not memory.recover:
            return Stepper(**parts)
        planner = StepPlanner(model, loss, own, device, longest)
        note, slowdown = self.reporter.on_note, memory.max_slowdown
        return RecoveringStepper(**parts, levers=levers, planner=planner, note=note, max_slowdown=slowdown)

    def _restore(self, stepper: Stepper, checkpoint: Checkpoint, record: Record) -> None:
        """The state of a checkpoint, and metrics.jsonl as it was then."""
        try:
            stepper.state.restore(checkpoint)
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint.path}: {error}") from error
        lacking = self.folder.truncate(METRICS, checkpoint.record["metrics_bytes"])
        if lacking:
            where = self.folder.path / METRICS
            self.reporter.on_note(f"{where}: lacks {lacking} bytes of the steps before the checkpoint")
        # The last step of a run is logged whatever its number; it is not the last one of a longer run.
        was_last = checkpoint.record["max_steps"] == record.steps < self.config.training.max_steps
        is_else_logged = record.steps == 1 or record.held_out() is not None
        if was_last and record.steps % self.config.training.log_every and not is_else_logged:
            self.folder.drop_last_line(METRICS, f'"step": {record.steps},')

    def _saver(
        self,
        stepper: Stepper,
        levers: LeversInForce,
        data: PreparedData,
        context: Context,
        fitted: Fit,
        record: Record,
    ) -> Saver:
        return Saver(
            stepper=stepper,
            settings=self.config.checkpoint,
            folder=self.folder,
            reporter=self.reporter,
            context=context.to_dict(fitted),
            files=context.files(fitted),
            max_steps=self.config.training.max_steps,
            held_out_loss=lambda: self._validation(stepper.model, levers, data),
            saved=record.steps or None,
        )

    def _steps(
        self,
        stepper: Stepper,
        batches: BatchStream,
        fitted: Fit,
        record: Record,
        saver: Saver,
        evaluate: Callable[[], float | None],
    ) -> None:
        training = self.config.training
        saver.announce(fitted.state_bytes)
        self.reporter.on_start(
            Start(
                max_steps=training.max_steps,
                log_every=training.log_every,
                predicted_peak_bytes=fitted.peak_bytes,
                predicted_step_seconds=fitted.planned.step_seconds,
                budget_bytes=fitted.whole_budget_bytes,
                device=stepper.device.type,
            )
        )
        try:
            run_steps(
                stepper,
                batches,
                training,
                self.folder,
                self.reporter,
                self.interrupt,
                record=record,
                save=saver.after_step,
                copied_bytes=lambda: saver.copied_bytes,
                evaluate=evaluate,
            )
        except (CannotFit, OtherCannotFit) as error:
            if isinstance(error, OtherCannotFit):
                stepper.undo()
            if record.steps and not stepper.is_sharded:  # the step that failed was undone: those before it are not lost
                saver.save(record, now=True)
                self.reporter.on_note(f"step {record.steps} is in a checkpoint: go on with --resume and other memory.*")
            raise

    def _validation(self, model: nn.Module, levers: LeversInForce, data: PreparedData) -> float | None:
        """The held-out loss; None where a signal has come."""
        training, interrupt = self.own(data).training, self.interrupt
        found, device = None, next(model.parameters()).device
        if self.is_sharded:
            found = held_out_in_lockstep(
                model,
                data.validation,
                self._in_fp32(self.purpose.held_out_loss(data, self.config)),
                micro_batch_size=training.batch_size // levers.fitted.micro_batches,
                ranks=self.ranks,
                stop=lambda: agree_on_signal(self.ranks, interrupt),
            )
            return None if found is None else HeldOutSums(*self.ranks.total(found)).mean
        try:
            with private_pool(device):  # its sizes are not those of a training step
                found = interrupt.cuttable(
                    lambda: held_out_sums(
                        model,
                        data.validation,
                        self.purpose.held_out_loss(data, self.config),
                        micro_batch_size=training.batch_size // levers.fitted.micro_batches,
                        precision=training.precision,
                        stop=lambda: interrupt.received is not None,
                        note=self.reporter.on_note,
                        ranks=self.ranks,
                    )
                )
        except Cut:
            pass
        if self.ranks.any(found is None):
            agree_on_signal(self.ranks, interrupt)
            return None
        assert found is not None, "it is None on no rank"
        return HeldOutSums(*self.ranks.total(found)).mean

    def _sample(self, model: nn.Module, data: PreparedData) -> str:
        """A sample of the trained model; empty where a signal has come."""
        try:
            return self.interrupt.cuttable(lambda: sample_text(model, data, seed=self.config.training.seed))
        except Cut:
            return ""


def _what_is_masked(removed: Mapping[str, torch.Tensor]) -> str:
    zeros, known = sum(int(mask.sum()) for mask in removed.values()), sum(mask.numel() for mask in removed.values())
    return f"masks keep {zeros:,} of {known:,} weights of {len(removed)} matrices at zero"


def _batches(config: Config, data: PreparedData, position: Mapping[str, int] | None = None) -> BatchStream:
    """The training's batches from a position on."""
    where = None if position is None else StreamPosition(**position)
    return data.batches(config.training.batch_size, seed=config.data.seed, shuffle=config.data.shuffle, position=where)


def _what_is_trained(model: nn.Module, data: PreparedData) -> str:
    count = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    which = "" if trained == count else f" ({trained:,} trained)"
    return (
        f"{count / 1e6:.1f}M parameters{which}, vocabulary {data.tokenizer.vocab_size}; {data.training} to train on, "
        f"{len(data.validation)} held out"
    )


def _verify(model: nn.Module, batch: dict[str, Any], loss: Objective, plan: Plan, reporter: Reporter) -> None:
    from tightfit.verification import verify

    reporter.on_note("verifying the plan: the plain step against the planned one")
    report = verify(model, batch, plan, loss=loss)
    if not report.ok:
        raise VerificationFailed(f"memory.verify: {report}")
    reporter.on_note(str(report))
