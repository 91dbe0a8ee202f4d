"""Quantised models in a folder: their config, their weights as plain tensors in safetensors, and how they were made."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from tightfit.errors import ModelError, why_unreadable
from tightfit.models.decoder import Decoder
from tightfit.models.dtypes import WEIGHT_DTYPES
from tightfit.models.own import CONFIG_FILE, QUANTISED_KEY, decoder_config, read_config, write_decoder_config
from tightfit.models.pretrained import build_pretrained
from tightfit.models.quantised_record import QUANTISED_FILE, QUANTISED_WEIGHTS, QuantisedRecord, read_record
from tightfit.names import METHODS
from tightfit.ops.weights.torchao_weights import WeightParts, demand_products, parts_of, torchao_version, weight_of
from tightfit.training.config.schema import PretrainedModel


def write_quantised(model: Any, folder: Path, record: QuantisedRecord) -> QuantisedRecord:
    """Write a quantised `Decoder` or model of `transformers` into a folder. Returns the record with its layers and the
    hash of the weights. The caller gives a folder that becomes visible when it is complete (`new_folder`).
    """
    tensors, layers = {}, {}
    seen: set[int] = set()
    for name, tensor in {**dict(model.named_parameters()), **_saved_buffers(model)}.items():
        parts = parts_of(tensor)
        if parts is None:
            if id(tensor) not in seen:
                tensors[name] = tensor.detach().contiguous()
            seen.add(id(tensor))
            continue
        layers[name] = {**parts.described, "parts": sorted(parts.tensors)}
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.tensors.items()}
    save_file(tensors, folder / QUANTISED_WEIGHTS, metadata={"format": "pt"})
    record = replace(record, layers=layers, sha256=hash_of(folder / QUANTISED_WEIGHTS))
    if isinstance(model, Decoder):
        write_decoder_config(model, folder)
    else:
        _write_pretrained_config(model, folder)
    _say_quantised(folder / CONFIG_FILE, record)
    (folder / QUANTISED_FILE).write_text(record.to_json(), "utf-8")
    return record


def load_quantised(folder: Path) -> nn.Module:
    """The model that `write_quantised` wrote, in evaluation mode on the CPU. Its weights exist once while it is read.

    Raises `ModelError` where a file is missing or damaged, `InputError` where torchao is, and `DeviceError` where this
    machine has no products of such weights.
    """
    record = read_record(folder)
    if record.method not in METHODS:
        raise ModelError(
            f"{folder / QUANTISED_FILE}: {record.method!r} is no method of this tightfit: quantise it again"
        )
    torchao_version()
    method: Any = record.method
    demand_products(method)
    with parameters_without_memory():
        model = _empty(folder, record)
    path = folder / QUANTISED_WEIGHTS
    try:
        if hash_of(path) != record.sha256:
            raise ModelError(f"{path}: is not the file that was written (its hash differs): quantise the model again")
        with safe_open(path, framework="pt") as file:
            _fill(model, record, file, method)
    except (OSError, SafetensorError, KeyError, AttributeError, RuntimeError, ValueError) as error:
        reason = why_unreadable(error)
        raise ModelError(f"{path}: does not hold this model's weights: {reason}: quantise the model again") from error
    return model.requires_grad_(False).eval()


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """A context in which new modules have parameters on the meta device. Buffers (tables of angles) are real."""

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:  # tied: the same object again
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook: Any = on_meta  # declared to return nothing, and documented to return what is registered instead
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def hash_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _empty(folder: Path, record: QuantisedRecord) -> nn.Module:
    """The model of a folder without its weights."""
    if record.kind == "decoder":
        return Decoder(decoder_config(folder, record.dtype))
    section = PretrainedModel(path=str(folder), random_init=True)
    return build_pretrained(section, WEIGHT_DTYPES[record.dtype])


def _fill(model: nn.Module, record: QuantisedRecord, file: Any, method: Any) -> None:
    """Put every weight and buffer of a file in its place. Raises `KeyError` and `ValueError` where one does not fit."""
    left = set(file.keys())
    for name, places in _places(model).items():
        if name in record.layers:
            described = record.layers[name]
            found = {part: file.get_tensor(f"{name}.{part}") for part in described["parts"]}
            left -= {f"{name}.{part}" for part in found}
            weight = weight_of(WeightParts(found, described), method)
        else:
            weight = nn.Parameter(file.get_tensor(name), requires_grad=False)
            left.discard(name)
        for module, attribute in places:
            expected = module._parameters[attribute]
            if expected is None or weight.shape != expected.shape or weight.dtype != expected.dtype:
                raise ValueError(f"{name} is {tuple(weight.shape)} of {weight.dtype}")
            module._parameters[attribute] = weight
    for name, buffer in _saved_buffers(model).items():
        buffer.copy_(file.get_tensor(name))
        left.discard(name)
    if left:
        raise ValueError(f"the model has no place for {sorted(left)[0]}")


def _places(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """The modules and attributes that hold each parameter, by its first name: tied ones have several."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places: dict[str, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                places[names[id(parameter)]].append((module, attribute))
    return places


def _saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a state_dict has."""
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _write_pretrained_config(model: Any, folder: Path) -> None:
    before, model.config.use_cache = getattr(model.config, "use_cache", True), True
    try:
        model.config.save_pretrained(folder)
        if model.can_generate() and getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
    finally:
        model.config.use_cache = before


def _say_quantised(path: Path, record: QuantisedRecord) -> None:
    """Add to a config.json what other readers look for first."""
    config = read_config(path)
    config[QUANTISED_KEY] = {"quant_method": "tightfit", "method": record.method}
    path.write_text(json.dumps(config, indent=2) + "\n", "utf-8")
