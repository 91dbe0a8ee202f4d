"""A trained model's folder: `model.safetensors` and `config.json`, or the adapters alone; read back by `load_model`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_model as load_weights
from safetensors.torch import save_model as save_weights
from torch import Tensor, nn

from tightfit.config import load_config
from tightfit.config.schema import PretrainedModel
from tightfit.errors import ModelError, OutputError
from tightfit.levers.low_bit_weights import freeze_in_low_bits
from tightfit.models.adapters import ADAPTER_CONFIG, adapter_state, is_adapted, load_adapter, save_adapter
from tightfit.models.decoder import Decoder, DecoderConfig
from tightfit.models.loading import build_model

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
RUN_CONFIG = "config.yaml"  # what a training writes beside the model
MODEL_TYPE = "tightfit_decoder"


def save_model(model: nn.Module, folder: str | Path) -> None:
    """Writes the weights (tied ones once) and the config of a `Decoder` or a `transformers` model into `folder`; of a
    model under adapters, the adapters alone, as `peft` does.

    Raises `OutputError` where the folder cannot be written, `ModelError` for a model without a config to read back.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(model, Decoder):
            _save_decoder(model, folder)
        elif is_adapted(model):
            save_adapter(model, folder)
        elif hasattr(model, "save_pretrained"):
            model.save_pretrained(folder)  # pyright: ignore[reportCallIssue]
        else:
            raise ModelError(f"{type(model).__name__} has no config to save: give a Decoder or a transformers model")
    except OSError as error:
        raise OutputError(f"{folder}: the model cannot be written: {error.strerror or error}") from error
    except SafetensorError as error:  # what its writer makes of an error of the system
        raise OutputError(f"{folder}: the model cannot be written: {error}") from error


def saved_bytes(model: nn.Module) -> int:
    """What `save_model` writes of weights: each storage's tensor once, and the names, dtypes and shapes before them."""
    state = adapter_state(model) if is_adapted(model) else model.state_dict()
    tensors = {(t.data_ptr(), t.nbytes): t for t in state.values() if isinstance(t, Tensor)}
    total = sum(tensor.nbytes for tensor in tensors.values())
    header = {
        name: {"dtype": str(t.dtype), "shape": list(t.shape), "data_offsets": [total, total]}
        for name, t in state.items()
        if isinstance(t, Tensor)
    }
    return total + len(json.dumps(header))


def load_model(folder: str | Path) -> nn.Module:
    """The model that `save_model` wrote into `folder`, in evaluation mode on the CPU. Raises `ModelError`."""
    folder = Path(folder)
    if (folder / ADAPTER_CONFIG).is_file():
        return load_adapter(_base_of(folder), folder).eval()
    raw = _read_config(folder / CONFIG_FILE)
    if raw.get("model_type") != MODEL_TYPE:
        return build_model(PretrainedModel(path=str(folder))).eval()
    model = Decoder(_decoder_config(raw, folder))
    try:
        load_weights(model, str(folder / WEIGHTS_FILE))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ModelError(f"{folder / WEIGHTS_FILE}: does not hold this model's weights: {error}") from error
    return model.eval()


def _base_of(folder: Path) -> nn.Module:
    """The model that the adapters in a folder are for: as the run's own configuration builds it, else by the name that
    peft wrote.
    """
    written = folder / RUN_CONFIG
    section = load_config(written).model if written.is_file() else None
    if isinstance(section, PretrainedModel) and section.adapter is not None:
        base = build_model(section.model_copy(update={"adapter": None}))
        if section.adapter.base != "fp32":
            freeze_in_low_bits(base, section.adapter.base)
        return base
    name = _read_config(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(name, str):
        raise ModelError(f"{folder / ADAPTER_CONFIG}: base_model_name_or_path does not name the model they are for")
    return build_model(PretrainedModel(path=name))


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
