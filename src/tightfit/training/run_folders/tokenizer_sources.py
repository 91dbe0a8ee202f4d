"""The folders that a run's tokenizer came from."""

from pathlib import Path

from tightfit.names import CONFIG
from tightfit.training.config import PretrainedModel, load_config


def tokenizer_sources(run: Path) -> list[Path]:
    """Where the run's tokenizer came from, with the files that a run does not copy; empty for what is no run."""
    if not (run / CONFIG).is_file():
        return []
    config = load_config(run / CONFIG)
    own = config.model.path if isinstance(config.model, PretrainedModel) else None
    named = [config.data.tokenizer, own] if config.data.tokenizer != "model" else [own]
    return [Path(name) for name in named if name is not None]
