"""A trained model's folder: `model.safetensors` and `config.json`, read back by `load_model`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_model as load_weights
from safetensors.torch import save_model as save_weights
from torch import nn

from tightfit.config.schema import PretrainedModel
from tightfit.errors import ModelError, OutputError
from tightfit.models.decoder import Decoder, DecoderConfig
from tightfit.models.loading import build_model

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
MODEL_TYPE = "tightfit_decoder"


def save_model(model: nn.Module, folder: str | Path) -> None:
    """Writes the weights (tied ones once) and the config of a `Decoder` or a `transformers` model into `folder`.

    Raises `OutputError` where the folder cannot be written, `ModelError` for a model without a config to read back.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(model, Decoder):
            _save_decoder(model, folder)
        elif hasattr(model, "save_pretrained"):
            model.save_pretrained(folder)  # pyright: ignore[reportCallIssue]
        else:
            raise ModelError(f"{type(model).__name__} has no config to save: give a Decoder or a transformers model")
    except OSError as error:
        raise OutputError(f"{folder}: the model cannot be written: {error.strerror or error}") from error


def load_model(folder: str | Path) -> nn.Module:
    """The model that `save_model` wrote into `folder`, in evaluation mode on the CPU. Raises `ModelError`."""
    folder = Path(folder)
    raw = _read_config(folder / CONFIG_FILE)
    if raw.get("model_type") != MODEL_TYPE:
        return build_model(PretrainedModel(path=str(folder))).eval()
    model = Decoder(_decoder_config(raw, folder))
    try:
        load_weights(model, str(folder / WEIGHTS_FILE))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ModelError(f"{folder / WEIGHTS_FILE}: does not hold this model's weights: {error}") from error
    return model.eval()


def _save_decoder(model: Decoder, folder: Path) -> None:
    save_weights(model, str(folder / WEIGHTS_FILE), metadata={"format": "pt"})
    config = {"model_type": MODEL_TYPE, **asdict(model.config)}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}: give the folder of a finished run") from error
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: holds no mapping: give the folder of a finished run")
    return raw


def _decoder_config(raw: dict[str, Any], folder: Path) -> DecoderConfig:
    keys = {key: value for key, value in raw.items() if key != "model_type"}
    try:
        return TypeAdapter(DecoderConfig).validate_python(keys)
    except ValidationError as error:
        first = error.errors()[0]
        raise ModelError(f"{folder / CONFIG_FILE}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
