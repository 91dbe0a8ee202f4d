"""The model and the tokenizer of a run, of one too that was killed: its newest intact checkpoint has the weights."""

from pathlib import Path
from typing import NamedTuple

from torch import nn

from tightfit.errors import CheckpointError
from tightfit.models.adapters import ADAPTER_CONFIG
from tightfit.models.loading import build_model
from tightfit.models.saving import CONFIG_FILE, load_model
from tightfit.names import CHECKPOINTS, CONFIG, MODEL
from tightfit.training.checkpoint import find
from tightfit.training.config import PretrainedModel, load_config, parse_config
from tightfit.training.data.tokenizer import TextTokenizer, load_tokenizer


class LoadedRun(NamedTuple):
    """`model` is in evaluation mode on the CPU. `source` says which checkpoint its weights are from and which ones were
    passed over; empty where the run has written its weights.
    """

    model: nn.Module
    tokenizer: TextTokenizer
    source: tuple[str, ...] = ()


def load_run(folder: str | Path) -> LoadedRun:
    """The model that a run has trained: its weights, or those of its newest intact checkpoint where it was killed
    before it wrote them.

    Raises `ModelError` where there are neither, `CheckpointError` where no checkpoint is intact, `DataError` where
    there is no tokenizer.
    """
    model, source = load_trained(folder)
    return LoadedRun(model, load_tokenizer(folder), source)


def load_trained(folder: str | Path) -> tuple[nn.Module, tuple[str, ...]]:
    """The model of `load_run` and the source of its weights, without a tokenizer. Raises `ModelError` and
    `CheckpointError`.
    """
    folder = Path(folder)
    has_weights = any((folder / name).is_file() for name in (CONFIG_FILE, ADAPTER_CONFIG))
    if has_weights or not find.checkpoint_paths(folder / CHECKPOINTS):
        return load_model(folder), ()
    found = find.newest_intact(folder / CHECKPOINTS)
    checkpoint = found.checkpoint
    if checkpoint is None:
        raise CheckpointError(
            f"{folder / CHECKPOINTS}: no checkpoint is intact ({len(found.passed_over)} passed over; "
            f"{found.passed_over[0]}): restore one"
        )
    model = build_model(parse_config(checkpoint.record["config"]).model, seed=0)
    held = {f"{MODEL}.{name}": tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    checkpoint.read_into({name: tensor for name, tensor in held.items() if name in checkpoint.specs})
    said = (*(f"passed over: {line}" for line in found.passed_over), f"the weights are those of {checkpoint.path}")
    return model.eval(), said


def tokenizer_sources(run: Path) -> list[Path]:
    """Where the run's tokenizer came from, with the files that a run does not copy; empty for what is no run."""
    if not (run / CONFIG).is_file():
        return []
    config = load_config(run / CONFIG)
    own = config.model.path if isinstance(config.model, PretrainedModel) else None
    named = [config.data.tokenizer, own] if config.data.tokenizer != "model" else [own]
    return [Path(name) for name in named if name is not None]
