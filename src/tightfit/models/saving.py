"""A trained model's folder: `model.safetensors` and `config.json`, or the adapters alone; read back by `load_model`."""

import json
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor, nn

from tightfit.errors import ModelError, OutputError
from tightfit.models.adapters import ADAPTER_CONFIG, adapter_state, is_adapted, load_adapter, save_adapter
from tightfit.models.decoder import Decoder
from tightfit.models.loading import build_model, weights_dtype
from tightfit.models.own import CONFIG_FILE, MODEL_TYPE, WEIGHTS_FILE, read_config, save_decoder
from tightfit.models.quantised import load_quantised
from tightfit.models.quantised_record import is_quantised
from tightfit.names import CONFIG as RUN_CONFIG
from tightfit.names import FEW_BITS
from tightfit.ops.weights.low_bit import freeze_in_low_bits
from tightfit.training.config import load_config
from tightfit.training.config.schema import PretrainedModel

__all__ = ["CONFIG_FILE", "MODEL_TYPE", "RUN_CONFIG", "WEIGHTS_FILE", "load_model", "save_model", "saved_bytes"]


def save_model(model: nn.Module, folder: str | Path) -> None:
    """Writes the weights (tied ones once) and the config of a `Decoder` or a `transformers` model into `folder`; of a
    model under adapters, the adapters alone, as `peft` does.

    Raises `OutputError` where the folder cannot be written, `ModelError` for a model without a config to read back.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(model, Decoder):
            save_decoder(model, folder)
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
    """The bytes that `save_model` writes for weights: each storage's tensor once, and the names, dtypes and shapes
    before them.
    """
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
    """The model that `save_model` or `tightfit quantise` wrote into `folder`, in evaluation mode on the CPU. Raises
    `ModelError`.
    """
    folder = Path(folder)
    if is_quantised(folder):
        return load_quantised(folder)
    if (folder / ADAPTER_CONFIG).is_file():
        return load_adapter(_base_of(folder), folder).eval()
    read_config(folder / CONFIG_FILE)  # a folder without one holds no model
    return build_model(PretrainedModel(path=str(folder))).eval()


def _base_of(folder: Path) -> nn.Module:
    """The model that the adapters in a folder are for: as the run's own configuration builds it, else by the name that
    peft wrote.
    """
    written = folder / RUN_CONFIG
    section = load_config(written).model if written.is_file() else None
    if isinstance(section, PretrainedModel) and section.adapter is not None:
        base = build_model(section.model_copy(update={"adapter": None, "dtype": weights_dtype(section)}))
        if section.adapter.base in FEW_BITS:
            freeze_in_low_bits(base, section.adapter.base)
        return base
    name = read_config(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(name, str):
        raise ModelError(f"{folder / ADAPTER_CONFIG}: base_model_name_or_path does not name the model they are for")
    return build_model(PretrainedModel(path=name))
