"""The configuration of a training: YAML, strict, with `key=value` overrides and the flat keys people know."""

from tightfit.models.decoder_config import DecoderConfig
from tightfit.training.config.load import dump_config, load_config, parse_config
from tightfit.training.config.schema import (
    AdapterConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    GrpoConfig,
    MemoryConfig,
    ModelConfig,
    OutputConfig,
    PretrainedModel,
    RecomputeConfig,
    TrainingConfig,
)

__all__ = [
    "AdapterConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DecoderConfig",
    "GrpoConfig",
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
