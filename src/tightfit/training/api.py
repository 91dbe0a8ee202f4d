"""`tightfit.train`: claims the folder, looks at what it holds, and runs the training."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from tightfit.errors import CannotFit, ConfigError
from tightfit.training.config import Config, load_config, parse_config
from tightfit.training.config.schema import PretrainedModel
from tightfit.training.grpo import GroupPolicy
from tightfit.training.interrupt import Interrupt
from tightfit.training.purpose import Purpose, refuse_teacher
from tightfit.training.reporter import Reporter, SilentReporter
from tightfit.training.result import TrainResult
from tightfit.training.resume import Earlier, look_back
from tightfit.training.run import TrainingRun
from tightfit.training.several import folder_of, ranks_of
from tightfit.training.tracked import TrackingReporter


def train(
    config: str | Path | Config,
    overrides: Sequence[str] = (),
    *,
    reporter: Reporter | None = None,
    resume: bool = False,
) -> TrainResult:
    """Train as a configuration says.

    The folder `output.folder` then holds config.yaml, plan.json (with a budget), metrics.jsonl, result.json,
    memory.png, report.html, the weights and the tokenizer. Nothing is printed.

    Ctrl-C ends the training: the step that runs is undone, a checkpoint and the weights are written, then
    `KeyboardInterrupt` is raised. SIGTERM, SIGHUP and SIGUSR1 do the same, and afterwards have their usual effect,
    which is the end of the process unless it handles them. A second signal ends the process at once.

    Args:
        config: The path of a YAML file, or a `Config`.
        overrides: Texts `key=value`, laid over the configuration.
        reporter: The object that is told how the training goes. Of several ranks, only rank 0's is told all; another's
            is told by `on_note` what befalls its rank.
        resume: Go on from the newest intact checkpoint of the folder, bit for bit as if the training had never ended;
            without a checkpoint, begin. The result of a finished run is returned as it stands, unless
            `training.max_steps` is larger now. Only that, logging, `checkpoint.*`, `memory.*`, device and threads may
            differ from the run's configuration.

    Returns:
        The result, with losses, predicted and measured peaks in bytes, and times in seconds.

    Raises:
        InputError: The configuration, the data or the folder is wrong (one that another training is writing into too,
            or one whose checkpoints are all damaged).
        CannotFit: No plan meets the budget.
        VerificationFailed: `memory.verify` finds a difference.
        OutputError: The folder has no room left at the end; the text says where the run was written instead.

    Example:
        >>> import tempfile, tightfit
        >>> from pathlib import Path
        >>> from tightfit.training.config import parse_config
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
    return run_training(settings, purpose_of(settings), reporter=reporter, resume=resume)


def purpose_of(settings: Config) -> Purpose:
    """The purpose of a training by its configuration alone."""
    return GroupPolicy() if settings.training.objective == "grpo" else Purpose()


def run_training(
    settings: Config, purpose: Purpose, *, reporter: Reporter | None = None, resume: bool = False
) -> TrainResult:
    """`train` for a purpose. Arguments, files, signals and errors are those of `train`."""
    interrupt = Interrupt()
    with ranks_of(settings) as ranks:
        if ranks.is_several and type(purpose) is not Purpose:
            raise ConfigError(f"{purpose.name} runs in one process, and torchrun started {ranks.size}: start one")
        folder, own = folder_of(settings, ranks), reporter or SilentReporter()
        reporter = own if ranks.is_first else SilentReporter()
        claimed = folder.claimed(overwrite=settings.output.overwrite, resume=resume)
        tracked = TrackingReporter(reporter, settings, folder) if ranks.is_first else nullcontext(reporter)
        with claimed as is_locked, threads(settings.training.num_threads), tracked as reporter:
            if not is_locked:
                where = f"{folder.path}: its file system has no locks"
                reporter.on_note(f"{where}: see that no other training writes there")
            with ranks.first_goes_ahead():
                earlier = look_back(settings, folder, reporter) if resume else Earlier()
            note = reporter.on_note if ranks.is_first else lambda line: own.on_note(f"rank {ranks.rank}: {line}")
            run = TrainingRun(settings, folder, reporter, interrupt, earlier.checkpoint, purpose, ranks, note)
            try:
                result = earlier.finished or run.run()
            except CannotFit as error:
                _tell_in_keys(error, settings)
                raise
    interrupt.deliver()
    assert result is not None, "a training without a result was ended by a signal, which is delivered"
    return result


def _tell_in_keys(error: CannotFit, settings: Config) -> None:
    """Let the error's ways out be those that the configuration can take."""
    if error.refusal is not None:
        model = settings.model
        pretrained = model if isinstance(model, PretrainedModel) else None
        error.refusal = replace(
            error.refusal,
            taken_by="overrides",
            may_convert=pretrained is not None,
            may_adapt=pretrained is not None and not pretrained.random_init,
        )


def resolved(config: str | Path | Config, overrides: Sequence[str]) -> Config:
    if not isinstance(config, Config):
        return load_config(config, overrides)
    return parse_config(config.model_dump(mode="json"), overrides) if overrides else config


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
