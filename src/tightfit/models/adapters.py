"""Low-rank adapters (LoRA, Hu et al. 2021) through `peft`: put on a model, and written and read in its own format."""

import difflib
import importlib
import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from tightfit.errors import ModelError, why_unreadable
from tightfit.models.decoder import Decoder
from tightfit.models.diffusion import KINDS, is_denoiser, kind_of
from tightfit.models.expert_adapters import adapting_codes
from tightfit.names import FEW_BITS
from tightfit.ops.weights.experts import fused_experts
from tightfit.ops.weights.low_bit import freeze_in_low_bits, is_in_low_bits, linear_layers
from tightfit.training.config.schema import AdapterConfig, ModelConfig, PretrainedModel

ALL_LINEAR = "all-linear"
INSTALL_HINT = "pip install 'tightfit[hf]'"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def add_adapter(model: nn.Module, config: AdapterConfig) -> nn.Module:
    """The model under a `peft.PeftModel` whose adapters alone are trained; the weights below are frozen, and in few
    bits where the configuration says so.

    What a low-rank adapter adds is zero at first. Without `target_modules` the layers are those of `usual_layers`.
    Raises `ModelError` where the model has none of the layers that are named, a file holds no adapters of `peft`, or a
    package is missing.
    """
    peft = _peft()
    adapter = _from_file(config.config, model) if config.config is not None else _lora(model, config)
    if config.base in FEW_BITS:
        if adapter.target_modules == ALL_LINEAR and fused_experts(model):  # which peft cannot adapt in few bits
            adapter.target_modules = set(linear_names(model))
        freeze_in_low_bits(model, config.base)
    try:
        with _no_idle_warnings(), adapting_codes(model):
            return peft.get_peft_model(model, adapter)
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # a model without a model_type is looked up
        raise ModelError(f"model.adapter: {_reason(str(error), model)}") from error


def _lora(model: nn.Module, config: AdapterConfig) -> Any:
    """The `LoraConfig` that the section stands for."""
    targets = usual_layers(model) if config.target_modules is None else config.target_modules
    return _peft().LoraConfig(
        task_type=_task(model),
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=list(targets) if isinstance(targets, tuple) else targets,
    )


def _task(model: nn.Module) -> str | None:
    """The task by which peft chooses its wrapper of a model; None for the one that passes everything on as it is.

    The wrappers of tasks pass on tokens and embeddings by name, None too. Models of sounds and images (Whisper) have no
    such arguments, and would hand them to a decoder that gets its own.
    """
    if not signature(model.forward).parameters.keys() >= {"input_ids", "inputs_embeds"}:
        return None
    task = "SEQ_2_SEQ_LM" if getattr(getattr(model, "config", None), "is_encoder_decoder", False) else "CAUSAL_LM"
    return task if hasattr(model, "prepare_inputs_for_generation") else None


def _from_file(path: str, model: nn.Module) -> Any:
    """The `PeftConfig` in a JSON file. Without `peft_type` it is a LoRA's; it is there to be trained. Raises
    `ModelError`.
    """
    given = _keys(path)
    try:
        given = {"peft_type": "LORA", "task_type": _task(model), **given, "inference_mode": False}
        known = _peft().mapping.PEFT_TYPE_TO_CONFIG_MAPPING.get(given["peft_type"])
        if known is None:
            raise ValueError(f"peft has no adapters of peft_type {given['peft_type']}")
        unknown = sorted(given.keys() - {field.name for field in fields(known)})
        if unknown:
            near = difflib.get_close_matches(unknown[0], [field.name for field in fields(known)], n=1)
            raise ValueError(f"{known.__name__} has no {unknown[0]}{f', did you mean {near[0]}?' if near else ''}")
        made = known(**given)
        if made.is_prompt_learning and made.task_type is None:  # peft looks its wrapper up, and says `None`
            raise ValueError(
                f"{given['peft_type']} goes before tokens, which {type(model).__name__} does not begin with"
            )
    except (ValueError, TypeError) as error:
        raise ModelError(f"model.adapter.config {path}: {why_unreadable(error)}") from error
    if hasattr(made, "target_modules") and made.target_modules is None and given["peft_type"] == "LORA":
        targets = usual_layers(model)
        made.target_modules = set(targets) if isinstance(targets, tuple) else targets
    return made


def _keys(path: str) -> dict[str, Any]:
    """The mapping in a JSON file. Raises `ModelError`."""
    try:
        found = json.loads(Path(path).read_text("utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no mapping of keys")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.adapter.config {path}: {why_unreadable(error)}: give the JSON of a PeftConfig, as save_pretrained "
            "writes adapter_config.json"
        ) from error
    return found


def demand_adapters(section: ModelConfig) -> None:
    """Raises `ModelError` where a section names a file of adapters that cannot be read."""
    if isinstance(section, PretrainedModel) and section.adapter is not None and section.adapter.config is not None:
        _keys(section.adapter.config)


def usual_layers(model: nn.Module) -> str | tuple[str, ...] | None:
    """The layers of adapters if the user names none: those that peft chooses for the architecture; for any other model
    of transformers, and the reference decoder, all linear layers but the head, and beside fused experts those of
    `linear_names`. None where peft is not installed, or for a module of another kind.
    """
    if find_spec("peft") is None:
        return None
    if is_denoiser(model):
        return KINDS[kind_of(model)].adapted
    if isinstance(model, Decoder):
        return tuple(sorted({path.rpartition(".")[2] for path in linear_layers(model)} - {"head"}))
    known = _peft().utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind in known:
        layers = known[kind]
        return layers if isinstance(layers, str) else tuple(layers)
    has_head = callable(getattr(model, "get_output_embeddings", None))
    return (ALL_LINEAR if not fused_experts(model) else linear_names(model)) if has_head and kind is not None else None


def linear_names(model: nn.Module) -> tuple[str, ...]:
    """The names of a model's linear layers, but those that peft takes for weights of fused experts. It would adapt
    these as parameters, each of which exists a second time at full width during a step.
    """
    names = {path.rpartition(".")[2] for path in linear_layers(model)}
    return tuple(sorted(names - _OF_EXPERTS))


# Of experts before they were fused (`_MOE_TARGET_MODULE_MAPPING` in peft/utils/transformers_weight_conversion.py).
_OF_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


def is_adapted(model: nn.Module) -> bool:
    """True if a model is one that `peft` made."""
    return any(kind.__module__.startswith("peft.") for kind in type(model).__mro__)


def adapter_state(model: Any) -> dict[str, Tensor]:
    """The weights of the adapters alone, by the names that `peft` gives them."""
    return _peft().get_peft_model_state_dict(model, save_embedding_layers=False)


def save_adapter(model: Any, folder: Path) -> None:
    """Write the adapters alone, as `peft` does, for `PeftModel.from_pretrained(base, folder)`. Its page about the model
    is left out: it would be a form to fill in.
    """
    state = adapter_state(model)
    save_file({name: tensor.detach().contiguous() for name, tensor in state.items()}, folder / ADAPTER_WEIGHTS)
    config = model.peft_config[model.active_adapter]
    trains = config.inference_mode
    config.inference_mode = True
    try:
        config.save_pretrained(folder)
    finally:
        config.inference_mode = trains


def load_adapter(base: nn.Module, folder: Path) -> nn.Module:
    """A base model with the adapters in `folder`, which can be trained on. Raises `ModelError`."""
    peft = _peft()
    try:
        with _no_idle_warnings(), adapting_codes(base):
            return peft.PeftModel.from_pretrained(base, str(folder), is_trainable=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{folder}: does not hold adapters of this model: {why_unreadable(error)}") from error


def merged(model: Any) -> nn.Module:
    """The model with what its adapters add in its own weights, and no adapters. Raises `ModelError` for weights in few
    bits: what the adapters were trained beside cannot be written in them.
    """
    narrow = next((path for path, m in model.named_modules() if is_in_low_bits(m)), None)
    if narrow is not None:
        raise ModelError(
            f"the adapters are for weights in few bits ({narrow}), into which they cannot be merged: use the run's "
            "folder with peft, or train them on model.adapter.base bf16 or fp32"
        )
    with _no_idle_warnings():
        return model.merge_and_unload()


def _reason(text: str, model: nn.Module) -> str:
    """Why peft refuses, in a line that says what to do."""
    names = sorted({path.rpartition(".")[2] for path, m in model.named_modules() if isinstance(m, nn.Linear)})
    if "Please specify" in text or "model_type" in text:
        return (
            f"peft has no layers in mind for {type(model).__name__}: name some in target_modules ({', '.join(names)})"
        )
    found = re.match(r"Target modules (.+?) not found", text)
    if found:
        return f"target_modules {found[1]} are none of the model's linear layers: they are {', '.join(names)}"
    found = re.match(r"Target module (\w+)\(.* is not supported", text, re.DOTALL)  # which prints the whole module
    if found:
        return f"target_modules name a {found[1]}, which is no linear layer: these are {', '.join(names)}"
    return " ".join(text.split())


@contextmanager
def _no_idle_warnings() -> Iterator[None]:
    """Without warnings about what nobody here asked for: merging adapters into int8 weights, and the name by which peft
    asks a model of transformers whether it recomputes, ranks of layers that `target_modules` does not name, and GPT-2's
    transposed layers.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TorchaoLoraLinear was instantiated without")
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False but the target module is `Conv1D`")
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
        yield


def _peft() -> Any:
    """The package, imported only where it is needed: that takes seconds."""
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ModelError(f"model.adapter needs the package peft: {INSTALL_HINT}") from error
