"""One training in its folder: levers, steps, evaluation, sample, files."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tightfit.errors import CannotFit, CheckpointError, RewardError, VerificationFailed
from tightfit.levers.micro_batch import IGNORE_INDEX
from tightfit.memory.settings import set_allocator
from tightfit.models.generation import continue_ids, generate_text
from tightfit.planner.plans import Plan
from tightfit.ranks.processes.ranks import Ranks
from tightfit.step import StepSettings
from tightfit.training.checkpoint.stored import Checkpoint
from tightfit.training.config import Config
from tightfit.training.data.prepare import PreparedData
from tightfit.training.data.prompts import PromptSamples
from tightfit.training.data.tokenizer import TextTokenizer
from tightfit.training.files import RunFiles
from tightfit.training.fitting import Fit, LeversInForce, fit_of
from tightfit.training.host import HostWatch
from tightfit.training.interrupt import Interrupt, Interrupted
from tightfit.training.joining import OtherCannotFit, agree_on_signal
from tightfit.training.loop import StepHistory, run_steps
from tightfit.training.objective import Objective, counted, on_device
from tightfit.training.optimizer import OptimizerRecipe
from tightfit.training.outcome import result_of
from tightfit.training.preparing import Preparation, Prepared
from tightfit.training.purpose import Purpose, Running, loss_held_out, loss_of_step
from tightfit.training.random_states import seed_generators
from tightfit.training.recovering import RecoveringStepper, StepPlanner
from tightfit.training.reference import ReferenceModel
from tightfit.training.reporter import Reporter, Start
from tightfit.training.result import TrainResult
from tightfit.training.saving import Saver
from tightfit.training.schedule import moved_schedule
from tightfit.training.sharded.fitting import planner_of_shards
from tightfit.training.sharded.model import WholeModel, shard
from tightfit.training.sharded.steps import ShardedStepper, Stranded
from tightfit.training.sharded.tightening import TighterPlans
from tightfit.training.stepper import Stepper
from tightfit.training.storage import METRICS, RunFolder
from tightfit.training.validating import Validation

PROMPT_TOKENS, SAMPLE_TOKENS = 12, 80  # of the sample: what begins it, and what the model adds
SAMPLE_TEMPERATURE, SAMPLE_TOP_K = 0.8, 50


@dataclass
class TrainingRun:
    """One training in its folder, from a checkpoint on or from the start."""

    config: Config
    folder: RunFolder
    reporter: Reporter
    interrupt: Interrupt
    checkpoint: Checkpoint | None
    purpose: Purpose
    ranks: Ranks
    note: Callable[[str], None]  # told what befalls this rank, whichever it is: `reporter` is rank 0's alone

    def run(self) -> TrainResult | None:
        """All that is left to do. None where a signal came before the first step was made: then nothing is in the
        folder that was not there before.
        """
        config, checkpoint, ranks = self.config, self.checkpoint, self.ranks
        host = HostWatch(config, self.reporter.on_note)
        if config.memory.allocator is not None:
            set_allocator(config.memory.allocator)  # before anything starts CUDA
        ready = Preparation(config, self.folder, self.reporter, checkpoint, self.purpose, ranks).prepared()
        model, fitted, record = ready.model, ready.fitted, ready.record
        if line := self.purpose.planned(model, ready.data, fitted, ready.own, ready.device):
            self.reporter.on_note(line)
        whole = WholeModel(model, ranks) if fitted.is_sharded else None
        if whole is None and (config.memory.verify or not fitted.streams):  # shards are moved one block at a time
            model.to(ready.device.kind)
        self.purpose.to(ready.device.kind)
        if fitted.plan is not None:
            self.reporter.on_plan(fitted.plan)
            if config.memory.verify:
                with ranks.first_goes_ahead():
                    if ranks.is_first:
                        self._verify(ready, fitted.plan)
        files = RunFiles(config, ready.data.tokenizer, model, fitted)
        if ranks.is_first:
            files.demand_room(self.folder)
        with self.interrupt:
            files.write_beginning(self.folder, is_resumed=checkpoint is not None)
            corrected = ready.context.corrections(checkpoint, ready.stored, ranks.rank).plan
            in_force = fitted if corrected is None else fit_of(corrected, model, ready.own, ready.device)
            if whole is None and not in_force.streams:  # else the card need not have room for all weights
                model.to(ready.device.kind)
            with LeversInForce(in_force, model) as levers:
                if fitted.is_sharded:
                    shard(model, ready.blocks, ranks, in_force.sharding, precision=config.training.precision)
                if ready.data.objective == "dpo":
                    reference = ReferenceModel(self.folder, ranks, self.reporter, self.interrupt, ready.own.training)
                    data = reference.beside(ready.data, model, levers, is_resumed=checkpoint is not None)
                    if data is None:
                        return None
                    ready = replace(ready, data=data)
                stepper = self._stepper(ready, levers, whole)
                if checkpoint is None:
                    # So dropout's numbers do not depend on what was planned before.
                    seed_generators(config.training.seed, ranks.rank)
                else:
                    stepper.corrections = ready.context.corrections(checkpoint, ready.stored, ranks.rank)
                    self._restore(stepper, checkpoint, record)
                evaluate = self._validation(ready, levers)
                with self._saver(stepper, ready, evaluate) as saver:
                    host.begin(levers.fitted, model)
                    running = Running(
                        config, ready.data, stepper, self.interrupt, self.reporter.on_note, record.steps, checkpoint
                    )
                    batches = self.purpose.batches(ready.batches(config, record.position), running)
                    self._steps(stepper, batches, levers.fitted, record, saver, evaluate, host)
                if not record.steps:
                    self.folder.clear()
                    return None
                fitted = levers.fitted  # out of memory may have put another one in force
                validation = record.held_out()
                if validation is None:
                    validation = evaluate()
            record.measured_peak_bytes = ranks.most(record.measured_peak_bytes)
            trained = model if whole is None else whole.filled(model)
            sample = self._sample(trained, ready.data) if ranks.is_first else ""
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
                held_out=self.purpose.held_out_loss(ready.data, config),
                device=ready.device.name,
                sample=sample,
                skipped_lines=ready.data.skipped_lines,
                resumed_from=None if checkpoint is None else checkpoint.step,
                host_by_category=host.by_category,
                predicted_phases=self.purpose.predicted,
                measured_phases=self.purpose.measured,
            )
            if ranks.is_first:
                replace(files, model=trained).write_end(result, record.lines(), self.folder, self.reporter)
        return result

    def _loss(self, ready: Prepared) -> Objective:
        """The loss that is minimised."""
        return loss_of_step(self.purpose, ready.data, self.config, is_sharded=ready.fitted.is_sharded)

    def _verify(self, ready: Prepared, plan: Plan) -> None:
        from tightfit.verification import verify

        self.reporter.on_note("verifying the plan: the plain step against the planned one")
        first = ready.longest
        if ready.data.objective != "grpo":  # whose batches are made by the model
            rows = ready.own.training.batch_size
            first = counted({name: tensor[:rows] for name, tensor in next(ready.batches(self.config)).items()})
        report = verify(ready.model, on_device(first, ready.device.kind), plan, loss=self._loss(ready))
        if not report.ok:
            raise VerificationFailed(f"memory.verify: {report}")
        self.reporter.on_note(str(report))

    def _stepper(self, ready: Prepared, levers: LeversInForce, whole: WholeModel | None) -> Stepper:
        training, memory, model, fitted = self.config.training, self.config.memory, ready.model, levers.fitted
        parts: dict[str, Any] = {
            "model": model,
            "optimizer": OptimizerRecipe(training)(model.parameters()),
            "loss": self._loss(ready),
            "settings": StepSettings(training.precision, training.grad_clip),
            "micro_batches": fitted.micro_batches,
            "micro_batches_for": fitted.micro_batches_for if fitted.buckets else None,
            "ranks": self.ranks,
        }
        if whole is not None:
            # Weights and activations are cast by FSDP2, not by autocast.
            parts |= {"settings": StepSettings("fp32", training.grad_clip), "micro_batches_for": None}
            found = {"planned_bytes": fitted.planned.peak_bytes, "note": self.note, "frozen": whole.frozen}
            plans = self._tighter_plans(ready, levers, whole, parts["loss"]) if memory.recover else None
            return ShardedStepper(**parts, **found, recovers=memory.recover, plans=plans)
        if not memory.recover:
            return Stepper(**parts)
        planner = StepPlanner(model, parts["loss"], ready.own, ready.device, ready.longest)
        slowdown = memory.max_slowdown
        return RecoveringStepper(**parts, levers=levers, planner=planner, note=self.note, max_slowdown=slowdown)

    def _tighter_plans(
        self, ready: Prepared, levers: LeversInForce, whole: WholeModel, loss: Objective
    ) -> TighterPlans:
        def within(budget_bytes: int) -> Fit:
            given = whole.unfilled, ready.longest, loss, ready.own, ready.device, self.ranks.size
            return planner_of_shards(*given, levers.fitted.sharding.apart)(budget_bytes)

        return TighterPlans(ready.model, levers, ready.own, self.ranks, within)

    def _restore(self, stepper: Stepper, checkpoint: Checkpoint, record: StepHistory) -> None:
        """The state of a checkpoint, and metrics.jsonl as it was then."""
        try:
            stepper.state.restore(checkpoint)
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint.path}: {error}") from error
        lacking = self.folder.truncate(METRICS, checkpoint.record["metrics_bytes"])
        if lacking:
            where = self.folder.path / METRICS
            self.reporter.on_note(f"{where}: lacks {lacking} bytes of the steps before the checkpoint")
        if (line := moved_schedule(checkpoint.record["max_steps"], record.steps, self.config.training)) is not None:
            self.reporter.on_note(line)
        # The last step of a run is logged whatever its number; it is not the last one of a longer run.
        was_last = checkpoint.record["max_steps"] == record.steps < self.config.training.max_steps
        is_else_logged = record.steps == 1 or record.held_out() is not None
        if was_last and record.steps % self.config.training.log_every and not is_else_logged:
            self.folder.drop_last_line(METRICS, f'"step": {record.steps},')

    def _saver(self, stepper: Stepper, ready: Prepared, evaluate: Callable[[], float | None]) -> Saver:
        return Saver(
            stepper=stepper,
            settings=self.config.checkpoint,
            folder=self.folder,
            reporter=self.reporter,
            context=ready.context.to_dict(ready.fitted),
            files=lambda: {**ready.context.files(ready.fitted), **self.purpose.files()},
            max_steps=self.config.training.max_steps,
            held_out_loss=evaluate,
            saved=ready.record.steps or None,
        )

    def _validation(self, ready: Prepared, levers: LeversInForce) -> Validation:
        is_sharded = ready.fitted.is_sharded
        return Validation(
            model=ready.model,
            data=ready.data,
            loss=loss_held_out(self.purpose, ready.data, self.config, is_sharded=is_sharded),
            levers=levers,
            own=ready.own,
            is_sharded=is_sharded,
            ranks=self.ranks,
            interrupt=self.interrupt,
            reporter=self.reporter,
        )

    def _steps(
        self,
        stepper: Stepper,
        batches: Iterator[dict[str, torch.Tensor]],
        fitted: Fit,
        record: StepHistory,
        saver: Saver,
        evaluate: Callable[[], float | None],
        host: HostWatch,
    ) -> None:
        training = self.config.training

        def after_step(history: StepHistory) -> None:
            saver.after_step(history)
            host.look()

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
                save=after_step,
                copied_bytes=lambda: saver.copied_bytes,
                evaluate=evaluate,
            )
        except (CannotFit, OtherCannotFit, RewardError) as error:
            if isinstance(error, OtherCannotFit):
                stepper.undo()
            # The step that failed was undone, or has not begun: those before it are not lost.
            if record.steps and not isinstance(error, Stranded):
                saver.save(record, now=True)
                todo = "" if isinstance(error, RewardError) else " and other memory.*"
                self.reporter.on_note(f"step {record.steps} is in a checkpoint: go on with --resume{todo}")
            raise

    def _sample(self, model: nn.Module, data: PreparedData) -> str:
        """A sample of the trained model; empty where a signal has come, or where there is none to be had."""
        try:
            return self.interrupt.cuttable(lambda: sample_text(model, data, seed=self.config.training.seed))
        except Interrupted:
            return ""
        except (
            Exception
        ) as error:  # no reason to lose a training: weights that diverged, tokens that a null card made up
            why = str(error).partition("\n")[0]
            self.reporter.on_note(f"the training is whole, but no text could be sampled: {type(error).__name__}: {why}")
            return ""


def sample_text(model: nn.Module, data: PreparedData, *, seed: int) -> str:
    """The beginning of a sample that was held out, if one was, and what the model makes of it."""
    samples = data.validation if len(data.validation) else data.training
    if isinstance(samples, PromptSamples):
        return _sample_answer(model, data.tokenizer, list(samples.ids[0]), samples.stop, seed=seed)
    if data.objective != "causal":
        batch = samples.batch([0])
        learnt = (batch["labels"][0] != IGNORE_INDEX).nonzero()
        asked = batch["input_ids"][0, : max(1, int(learnt[0]) if len(learnt) else PROMPT_TOKENS)].tolist()
        stop = data.tokenizer.chat.end_of_turn()
        return _sample_answer(
            model, data.tokenizer, asked, data.tokenizer.end_of_text if stop is None else stop, seed=seed
        )
    return generate_text(
        model,
        data.tokenizer,
        data.tokenizer.decode(samples.beginning(PROMPT_TOKENS)),
        max_new_tokens=SAMPLE_TOKENS,
        temperature=SAMPLE_TEMPERATURE,
        top_k=SAMPLE_TOP_K,
        seed=seed,
    )


def _sample_answer(model: nn.Module, tokenizer: TextTokenizer, asked: list[int], stop: int, *, seed: int) -> str:
    """The text before an answer, and the model's answer, up to the token `stop`."""
    answer = continue_ids(
        model,
        asked,
        stop=stop,
        max_new_tokens=SAMPLE_TOKENS,
        temperature=SAMPLE_TEMPERATURE,
        top_k=SAMPLE_TOP_K,
        seed=seed,
    )
    return tokenizer.decode(asked) + tokenizer.decode(answer)
