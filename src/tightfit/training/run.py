"""The whole road: configuration, data, model, plan, steps, evaluation, sample, files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from tightfit.checkpoint.stored import Checkpoint
from tightfit.config import Config, load_config, parse_config
from tightfit.data.packing import BatchStream, StreamPosition
from tightfit.data.prepare import PreparedData, check_fits, prepare_data
from tightfit.data.samples import Samples
from tightfit.data.tokenizer import TextTokenizer
from tightfit.devices.present import lookup_present
from tightfit.devices.spec import DeviceSpec
from tightfit.errors import CannotFit, CheckpointError, ConfigError, OutputError, VerificationFailed
from tightfit.levers.micro_batch import IGNORE_INDEX
from tightfit.memory.settings import private_pool, set_allocator
from tightfit.models.generation import continue_ids, generate_text
from tightfit.models.loading import build_model, position_limit, vocabulary_size
from tightfit.models.masks import put_masks, source_masks
from tightfit.models.saving import saved_bytes
from tightfit.names.run_files import REFERENCE
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
from tightfit.training.loop import Record, Stepper, run_steps
from tightfit.training.objective import Objective, counted
from tightfit.training.objectives import plannable
from tightfit.training.optimizer import OptimizerRecipe, rounding_note
from tightfit.training.outcome import result_of
from tightfit.training.preferences import ReferencedSamples, from_file, reference_log_probs, to_file
from tightfit.training.purpose import Purpose, refuse_teacher
from tightfit.training.random_states import seed_generators
from tightfit.training.recovery import RecoveringStepper, StepPlanner
from tightfit.training.reporter import Reporter, SilentReporter, Start
from tightfit.training.result import TrainResult
from tightfit.training.resume import Earlier, look_back
from tightfit.training.saving import Saver
from tightfit.training.several import (
    config_of_a_rank,
    device_of_a_rank,
    folder_of,
    plan_digest,
    ranks_of,
    shared_fit,
    split_in_words,
)
from tightfit.training.state import edges_digest
from tightfit.training.storage import METRICS, RunFolder
from tightfit.training.tracking import TrackingReporter

PROMPT_TOKENS, SAMPLE_TOKENS = 12, 80  # of the sample: what begins it, and what the model adds
SAMPLE_TEMPERATURE, SAMPLE_TOP_K = 0.8, 50


def train(
    config: str | Path | Config,
    overrides: Sequence[str] = (),
    *,
    reporter: Reporter | None = None,
    resume: bool = False,
) -> TrainResult:
    """Train as a configuration says: a YAML file's path or a `Config`, with `key=value` overrides laid over it.

    The folder `output.folder` then holds config.yaml, plan.json (with a budget), metrics.jsonl, result.json,
    memory.png, report.html, the weights and the tokenizer. `reporter` is told how it goes; nothing is printed.

    `resume` goes on from the newest intact checkpoint of the folder, bit for bit as if the training had never ended;
    without one it begins. The result of a finished run is returned as it stands, unless `training.max_steps` is larger
    now. Only that, logging, `checkpoint.*`, `memory.*`, device and threads may differ from the run's configuration.

    Ctrl-C ends it: the step that runs is undone, a checkpoint and the weights are written, then `KeyboardInterrupt` is
    raised. So do SIGTERM, SIGHUP and SIGUSR1; afterwards they go to whom they would have gone, which is the end of the
    process unless it handles them. A second one ends at once. Where the folder has no room left at the end, the run is
    written elsewhere, and `OutputError` says where.

    Raises `InputError` for what is wrong in the configuration, the data or the folder (one that another training is
    writing into too, or one without an intact checkpoint where some stand), `CannotFit` where no plan meets the budget,
    `VerificationFailed` where `memory.verify` finds a difference.

    Example:
        >>> import tempfile, tightfit
        >>> from pathlib import Path
        >>> from tightfit.config import parse_config
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "corpus.txt").write_text("To be, or not to be, that is the question.\\n" * 200)
        >>> shape = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 300}
        >>> data = {"source": str(folder / "corpus.txt"), "sequence_length": 32, "vocab_size": 300}
        >>> training = {"max_steps": 10, "batch_size": 4, "device": "cpu"}
        >>> output = {"folder": str(folder / "run")}
        >>> config = parse_config({"model": shape, "data": data, "training": training, "output": output})
        >>> result = tightfit.train(config, ["training.max_steps=2"])
        >>> (folder / "run" / "result.json").exists()
        True
    """
    settings = resolved(config, overrides)
    refuse_teacher(settings, "train")
    return run_training(settings, Purpose(), reporter=reporter, resume=resume)


def run_training(
    settings: Config, purpose: Purpose, *, reporter: Reporter | None = None, resume: bool = False
) -> TrainResult:
    """`train` for a purpose. Arguments, files, signals and errors are those of `train`."""
    interrupt = Interrupt()
    with ranks_of(settings) as ranks:
        if ranks.is_several and type(purpose) is not Purpose:
            raise ConfigError(f"a distillation runs in one process, and torchrun started {ranks.size}: start one")
        folder, reporter = folder_of(settings, ranks), (reporter if ranks.is_first else None) or SilentReporter()
        claimed = folder.claimed(overwrite=settings.output.overwrite, resume=resume)
        tracked = TrackingReporter(reporter, settings, folder) if ranks.is_first else nullcontext(reporter)
        with claimed as is_locked, threads(settings.training.num_threads), tracked as reporter:
            if not is_locked:
                where = f"{folder.path}: its file system has no locks"
                reporter.on_note(f"{where}: see that no other training writes there")
            with ranks.first_goes_ahead():
                earlier = look_back(settings, folder, reporter) if resume else Earlier()
            run = _Run(settings, folder, reporter, interrupt, earlier.checkpoint, purpose, ranks)
            result = earlier.finished or run.run()
    interrupt.deliver()
    assert result is not None, "a training without a result was ended by a signal, which is delivered"
    return result


def resolved(config: str | Path | Config, overrides: Sequence[str]) -> Config:
    if not isinstance(config, Config):
        return load_config(config, overrides)
    return parse_config(config.model_dump(mode="json"), overrides) if overrides else config


@dataclass
class _Run:
    """One training in its folder, from a checkpoint on or from the start."""

    config: Config
    folder: RunFolder
    reporter: Reporter
    interrupt: Interrupt
    checkpoint: Checkpoint | None
    purpose: Purpose
    ranks: Ranks

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
        self.purpose.begin(model, data, config)
        self.folder.demand_room(saved_bytes(model))  # before a plan is made, which may take long
        self.reporter.on_note(_what_is_trained(model, data))
        if (rounding := rounding_note(model, training.optimizer)) is not None:
            self.reporter.on_note(rounding)
        if config.data.packing != "none":
            demand_boundaries(model, vocabulary=data.tokenizer.vocab_size, longest=config.data.sequence_length)
        if isinstance(ranks, SeveralRanks):
            self.reporter.on_note(split_in_words(config, ranks, data.training.rows))
        own = self.own(data)
        longest, *shorter = [counted(batch) for batch in data.for_dry_runs(own.training.batch_size)]
        stored = context.fitted(checkpoint, model) if ranks.is_first else None
        fitted = stored or (fit(model, longest, self.loss(data), own, device, shorter) if ranks.is_first else None)
        if ranks.is_several:
            fitted, is_stored = shared_fit(ranks, fitted, config, is_stored=stored is not None)
            stored = fitted if is_stored else None
            self._demand_same(model, data, fitted)
        assert fitted is not None, "rank 0 plans for all"
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
                if data.objective == "dpo":
                    referenced = self._with_reference(model, levers, data)
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
            sample = self._sample(model, data) if ranks.is_first else ""
            is_cut = agree_on_signal(ranks, self.interrupt)
            saver.end(record, is_cut=is_cut)
            self.purpose.end(model)
            result = result_of(
                config,
                model,
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
                files.write_end(result, record.lines(), self.folder, self.reporter)
        return result

    def own(self, data: PreparedData) -> Config:
        """The configuration of this rank's step."""
        return config_of_a_rank(self.config, self.ranks, data.training.rows)

    def _demand_same(self, model: nn.Module, data: PreparedData, fitted: Fit) -> None:
        """Before the first collective: ranks that differ here would train different things."""
        checkpoint = self.checkpoint
        self.ranks.demand_same(
            {
                "configuration": self.config.model_dump_json(),
                "checkpoint in output.folder": "none" if checkpoint is None else str(checkpoint.step),
                "data": data.fingerprint,
                "model": edges_digest(model) + edges_digest(model, trained=True),
                "plan": plan_digest(fitted),
            }
        )

    def loss(self, data: PreparedData) -> Objective:
        """What is minimised."""
        return self.purpose.loss(data, self.config)

    def _with_reference(self, model: nn.Module, levers: LeversInForce, data: PreparedData) -> PreparedData | None:
        """The pairs with the log-probabilities that the model gives them before its first step: those that the folder
        keeps, or computed now. None where a signal has come meanwhile.
        """
        path, kept = self.folder.path / REFERENCE, None
        if self.ranks.is_first:
            kept = from_file(path, data.fingerprint) if self.checkpoint is not None else None
            kept = kept or self._computed_reference(model, levers, data)
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

    def _computed_reference(
        self, model: nn.Module, levers: LeversInForce, data: PreparedData
    ) -> tuple[np.ndarray, np.ndarray] | None:
        self.reporter.on_note("computing the reference's log-probabilities of all answers")
        training, validation = (self._log_probs(model, levers, s, data) for s in (data.training, data.validation))
        if training is None or validation is None:
            if self.checkpoint is None:
                self.folder.clear()
            return None
        self.folder.write(REFERENCE, to_file(training, validation, data.fingerprint))
        return training, validation

    def _log_probs(
        self, model: nn.Module, levers: LeversInForce, samples: Samples, data: PreparedData
    ) -> np.ndarray | None:
        training, interrupt = self.own(data).training, self.interrupt
        try:
            return interrupt.cuttable(
                lambda: reference_log_probs(
                    model,
                    samples,
                    micro_batch_size=training.batch_size // levers.fitted.micro_batches,
                    precision=training.precision,
                    stop=lambda: interrupt.received is not None,
                )
            )
        except Cut:
            return None

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
            if record.steps:  # the step that failed was undone: those before it are not lost
                saver.save(record, now=True)
                self.reporter.on_note(f"step {record.steps} is in a checkpoint: go on with --resume and other memory.*")
            raise

    def _validation(self, model: nn.Module, levers: LeversInForce, data: PreparedData) -> float | None:
        """The held-out loss; None where a signal has come."""
        training, interrupt = self.own(data).training, self.interrupt
        found, device = None, next(model.parameters()).device
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


def sample_text(model: nn.Module, data: PreparedData, *, seed: int) -> str:
    """The beginning of a sample that was held out, if one was, and what the model makes of it."""
    samples = data.validation if len(data.validation) else data.training
    if data.objective != "causal":
        return _sample_answer(model, data.tokenizer, samples.batch([0]), seed=seed)
    return generate_text(
        model,
        data.tokenizer,
        data.tokenizer.decode(samples.beginning(PROMPT_TOKENS)),
        max_new_tokens=SAMPLE_TOKENS,
        temperature=SAMPLE_TEMPERATURE,
        top_k=SAMPLE_TOP_K,
        seed=seed,
    )


def _sample_answer(model: nn.Module, tokenizer: TextTokenizer, batch: dict[str, torch.Tensor], *, seed: int) -> str:
    """What was said before the first answer of a sample, and the model's answer."""
    learnt = (batch["labels"][0] != IGNORE_INDEX).nonzero()
    asked = batch["input_ids"][0, : max(1, int(learnt[0]) if len(learnt) else PROMPT_TOKENS)].tolist()
    stop = tokenizer.chat.end_of_turn()
    answer = continue_ids(
        model,
        asked,
        stop=tokenizer.end_of_text if stop is None else stop,
        max_new_tokens=SAMPLE_TOKENS,
        temperature=SAMPLE_TEMPERATURE,
        top_k=SAMPLE_TOP_K,
        seed=seed,
    )
    return tokenizer.decode(asked) + tokenizer.decode(answer)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """The CPU's operators on `count` threads inside, and on as many as before afterwards."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
