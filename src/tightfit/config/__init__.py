"""The configuration of a training: YAML, strict, with `key=value` overrides and the flat keys people know."""

from tightfit.config.load import dump_config, load_config, parse_config
from tightfit.config.schema import (
    AdapterConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    OutputConfig,
    PretrainedModel,
    RecomputeConfig,
    TrainingConfig,
)
from tightfit.models.decoder_config import DecoderConfig

__all__ = [
    "AdapterConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DecoderConfig",
    "MemoryConfig",
    "ModelConfig",
    "OutputConfig",
    "PretrainedModel",
    "RecomputeConfig",
    "TrainingConfig",
    "dump_config",
    "load_config",
    "parse_config",
]
