"""The whole road: configuration, data, model, plan, steps, evaluation, sample, files."""

import itertools
import math
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tightfit.config import Config, load_config, parse_config
from tightfit.data.prepare import PreparedData, check_fits, prepare_data
from tightfit.devices.present import lookup_present
from tightfit.errors import VerificationFailed
from tightfit.memory.settings import private_pool, set_allocator
from tightfit.models.generation import generate_text
from tightfit.models.loading import build_model, position_limit, vocabulary_size
from tightfit.models.saving import saved_bytes
from tightfit.planner.plans import Plan
from tightfit.step import StepSettings
from tightfit.training.boundaries import demand_boundaries
from tightfit.training.evaluation import evaluation_loss
from tightfit.training.files import RunFiles
from tightfit.training.fitting import Fit, fit
from tightfit.training.interrupt import Interrupt
from tightfit.training.loop import Record, Stepper, run_steps
from tightfit.training.objective import CausalLMLoss, counted
from tightfit.training.optimizer import OptimizerRecipe, rounding_note
from tightfit.training.reporter import Reporter, SilentReporter, Start
from tightfit.training.result import TrainResult
from tightfit.training.storage import RunFolder
from tightfit.version import VERSION

PROMPT_TOKENS, SAMPLE_TOKENS = 12, 80  # of the sample: what begins it, and what the model adds
SAMPLE_TEMPERATURE, SAMPLE_TOP_K = 0.8, 50


def train(
    config: str | Path | Config, overrides: Sequence[str] = (), *, reporter: Reporter | None = None
) -> TrainResult:
    """Train as a configuration says: a YAML file's path or a `Config`, with `key=value` overrides laid over it.

    The folder `output.folder` then holds config.yaml, plan.json (with a budget), metrics.jsonl, result.json,
    memory.png, report.html, the weights and the tokenizer. `reporter` is told how it goes; nothing is printed.

    Ctrl-C ends it after the step that runs: what is done so far is written, then `KeyboardInterrupt` is raised. So do
    SIGTERM and SIGHUP; afterwards they go to whom they would have gone, which is the end of the process unless it
    handles them. Where the folder has no room left at the end, the run is written elsewhere, and `OutputError` says
    where.

    Raises `InputError` for what is wrong in the configuration, the data or the folder (one that another training is
    writing into too), `CannotFit` where no plan meets the budget, `VerificationFailed` where `memory.verify` finds a
    difference.

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
    settings = _resolved(config, overrides)
    folder, interrupt = RunFolder(settings.output.folder), Interrupt()
    reporter = reporter or SilentReporter()
    with folder.claimed(overwrite=settings.output.overwrite) as is_locked, _threads(settings.training.num_threads):
        if not is_locked:
            reporter.on_note(f"{folder.path}: its file system has no locks: see that no other training writes there")
        result = _run(settings, folder, reporter, interrupt)
    interrupt.deliver()
    return result


def _resolved(config: str | Path | Config, overrides: Sequence[str]) -> Config:
    if not isinstance(config, Config):
        return load_config(config, overrides)
    return parse_config(config.model_dump(mode="json"), overrides) if overrides else config


def _run(config: Config, folder: RunFolder, reporter: Reporter, interrupt: Interrupt) -> TrainResult:
    training = config.training
    if config.memory.allocator is not None:
        set_allocator(config.memory.allocator)  # before anything starts CUDA
    device = lookup_present(None if training.device == "auto" else training.device, notice=reporter.on_note)
    data = prepare_data(config.data, config.model, objective=training.objective, notice=reporter.on_note)
    model = build_model(config.model, seed=training.seed)
    check_fits(data.tokenizer, vocabulary_size(model), config.data.sequence_length, position_limit(model))
    folder.demand_room(saved_bytes(model))  # before a plan is made, which may take long
    reporter.on_note(_what_is_trained(model, data))
    if (rounding := rounding_note(model, training.optimizer)) is not None:
        reporter.on_note(rounding)
    if config.data.packing != "none":
        demand_boundaries(model, vocabulary=data.tokenizer.vocab_size, longest=config.data.sequence_length)
    batches = data.batches(training.batch_size, seed=config.data.seed, shuffle=config.data.shuffle)
    first = next(batches)
    longest, *shorter = [counted(batch) for batch in data.for_dry_runs(training.batch_size)]
    fitted = fit(model, longest, CausalLMLoss(), config, device, shorter)
    model.to(device.kind)
    if fitted.plan is not None:
        reporter.on_plan(fitted.plan)
        if config.memory.verify:
            _verify(model, counted(first, device.kind), fitted.plan, reporter)
    files = RunFiles(config, data.tokenizer, model, fitted)
    files.demand_room(folder)
    files.write_beginning(folder)
    with interrupt:
        with fitted.apply(model):
            record = _steps(config, model, fitted, itertools.chain([first], batches), folder, reporter, interrupt)
            validation = _validate(config, model, fitted, data, interrupt)
        sample = "" if interrupt.received else sample_text(model, data, seed=training.seed)
        is_cut = interrupt.received is not None
        result = _result(config, folder, model, fitted, record, is_cut, validation, device.name, sample)
        files.write_end(result, record.unwritten, folder, reporter)
    return result


def _what_is_trained(model: nn.Module, data: PreparedData) -> str:
    count = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    which = "" if trained == count else f" ({trained:,} trained)"
    return (
        f"{count / 1e6:.1f}M parameters{which}, vocabulary {data.tokenizer.vocab_size}; {data.training} to train on, "
        f"{len(data.validation)} held out"
    )


def _verify(model: nn.Module, batch: dict[str, Any], plan: Plan, reporter: Reporter) -> None:
    from tightfit.verification import verify

    reporter.on_note("verifying the plan: the plain step against the planned one")
    report = verify(model, batch, plan, loss=CausalLMLoss())
    if not report.ok:
        raise VerificationFailed(f"memory.verify: {report}")
    reporter.on_note(str(report))


def _steps(
    config: Config,
    model: nn.Module,
    fitted: Fit,
    batches: Iterator[dict[str, torch.Tensor]],
    folder: RunFolder,
    reporter: Reporter,
    interrupt: Interrupt,
) -> Record:
    training = config.training
    stepper = Stepper(
        model=model,
        optimizer=OptimizerRecipe(training)(model.parameters()),
        loss=CausalLMLoss(),
        settings=StepSettings(training.precision, training.grad_clip),
        micro_batches=fitted.micro_batches,
        micro_batches_for=fitted.micro_batches_for if fitted.buckets else None,
    )
    reporter.on_start(
        Start(
            max_steps=training.max_steps,
            log_every=training.log_every,
            predicted_peak_bytes=fitted.predicted_peak_bytes,
            predicted_step_seconds=fitted.planned.step_seconds,
            budget_bytes=fitted.budget_bytes,
        )
    )
    torch.manual_seed(training.seed)  # dropout's numbers do not depend on what was planned or verified before
    return run_steps(stepper, batches, training, folder, reporter, interrupt)


def _validate(config: Config, model: nn.Module, fitted: Fit, data: PreparedData, interrupt: Interrupt) -> float | None:
    device = next(model.parameters()).device
    with private_pool(device):  # its sizes are not those of a training step
        return evaluation_loss(
            model,
            data.validation,
            CausalLMLoss(),
            micro_batch_size=config.training.batch_size // fitted.micro_batches,
            precision=config.training.precision,
            stop=lambda: interrupt.received is not None,
        )


def sample_text(model: nn.Module, data: PreparedData, *, seed: int) -> str:
    """The beginning of a sample that was held out, if one was, and what the model makes of it."""
    samples = data.validation if len(data.validation) else data.training
    return generate_text(
        model,
        data.tokenizer,
        data.tokenizer.decode(samples.beginning(PROMPT_TOKENS)),
        max_new_tokens=SAMPLE_TOKENS,
        temperature=SAMPLE_TEMPERATURE,
        top_k=SAMPLE_TOP_K,
        seed=seed,
    )


def _result(
    config: Config,
    folder: RunFolder,
    model: nn.Module,
    fitted: Fit,
    record: Record,
    is_cut: bool,
    validation: float | None,
    device: str,
    sample: str,
) -> TrainResult:
    return TrainResult(
        folder=str(folder.path),
        plain_peak_bytes=fitted.plain.peak_bytes,
        predicted_peak_bytes=fitted.predicted_peak_bytes,
        measured_peak_bytes=record.measured_peak_bytes,
        budget_bytes=fitted.budget_bytes,
        first_loss=record.losses[0],
        last_loss=record.losses[-1],
        validation_loss=validation,
        perplexity=None if validation is None else _exponential(validation),
        tokens_per_second=record.tokens_per_second,
        predicted_step_seconds=fitted.planned.step_seconds,
        measured_step_seconds=record.step_seconds,
        steps=record.steps,
        skipped_steps=record.skipped,
        tokens=record.tokens,
        interrupted=is_cut,
        parameters=sum(p.numel() for p in model.parameters()),
        precision=config.training.precision,
        device=device,
        versions={"tightfit": VERSION, "torch": torch.__version__, "python": platform.python_version()},
        sample=sample,
    )


def _exponential(loss: float) -> float:
    """Infinite where it is beyond a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """The CPU's operators on `count` threads inside, and on as many as before afterwards."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
