"""The reference decoder in a folder: its config and weights, as a training leaves them."""

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_model as load_weights
from safetensors.torch import save_model as save_weights

from tightfit.errors import ModelError, why_unreadable
from tightfit.models.decoder import Decoder, DecoderConfig

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
MODEL_TYPE = "tightfit_decoder"
QUANTISED_KEY = "quantization_config"  # in a config.json, where the weights are quantised; the name of transformers


def is_own(folder: Path) -> bool:
    """True if the model in a folder is a reference decoder."""
    path = folder / CONFIG_FILE
    return path.is_file() and read_config(path).get("model_type") == MODEL_TYPE


def decoder_config(folder: Path, dtype: str = "auto") -> DecoderConfig:
    """The shape of the decoder in a folder, its weights' dtype the one that is named if not `auto`. Raises
    `ModelError`.
    """
    written = read_config(folder / CONFIG_FILE)
    keys = {key: value for key, value in written.items() if key not in ("model_type", QUANTISED_KEY)}
    if dtype not in ("auto", stated_dtype(keys)):
        keys["dtype"] = dtype
    try:
        return TypeAdapter(DecoderConfig).validate_python(keys)
    except ValidationError as error:
        first = error.errors()[0]
        raise ModelError(f"{folder / CONFIG_FILE}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def stated_dtype(keys: Mapping[str, Any]) -> str:
    """`fp32` or `bf16`: the dtype of the weights of a decoder's configuration."""
    return "bf16" if keys.get("dtype") == "bf16" else "fp32"


def load_decoder(folder: Path, dtype: str = "auto") -> Decoder:
    """The decoder in a folder with its weights, in their own dtype or the one that is named, on the CPU. Raises
    `ModelError`.
    """
    model = Decoder(decoder_config(folder, dtype))
    try:
        load_weights(model, str(folder / WEIGHTS_FILE))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ModelError(
            f"{folder / WEIGHTS_FILE}: does not hold this model's weights: {why_unreadable(error)}"
        ) from error
    return model


def save_decoder(model: Decoder, folder: Path) -> None:
    """Write config and weights, tied ones once."""
    save_weights(model, str(folder / WEIGHTS_FILE), metadata={"format": "pt"})
    _sort_metadata(folder / WEIGHTS_FILE)
    write_decoder_config(model, folder)


def write_decoder_config(model: Decoder, folder: Path) -> None:
    config = {"model_type": MODEL_TYPE, **asdict(model.config)}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _sort_metadata(path: Path) -> None:
    """Give a safetensors file the same bytes for the same weights: its writer puts the metadata (the format, and the
    names of tied weights) in an order that differs from process to process.
    """
    with path.open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length, "the same keys and values in another order"
        file.seek(8)
        file.write(text.ljust(length))


def read_config(path: Path) -> dict[str, Any]:
    """The mapping in a config.json. Raises `ModelError`."""
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path}: cannot be read: {why_unreadable(error)}: give the folder of a finished run"
        ) from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: holds no mapping: give the folder of a finished run")
    return raw
