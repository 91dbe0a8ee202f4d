"""Trained models in the layout of `transformers`, and models of that layout as reference decoders.

The weights are the same numbers under other names, so that a model that goes there and back is the same bit for bit.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tightfit.errors import ModelError, OutputError, why_unreadable
from tightfit.models.adapters import is_adapted, merged
from tightfit.models.decoder import Block, Decoder
from tightfit.models.feed_forward import GatedMLP, MixtureOfExperts
from tightfit.models.layouts import Architecture, from_transformers, layout_of, to_transformers
from tightfit.models.own import CONFIG_FILE, WEIGHTS_FILE, save_decoder
from tightfit.models.pretrained import transformers_config
from tightfit.names import MASKS
from tightfit.ops.weights.low_bit import is_in_low_bits

HEAD = "lm_head.weight"
GENERATION_CONFIG = "generation_config.json"
_IDLE = ("rotary_emb.inv_freq",)  # tables that old checkpoints hold beside the weights


def export_model(
    model: nn.Module, folder: str | Path, *, end_of_text: int | None = None, beside: Mapping[str, bytes] | None = None
) -> str:
    """Write a `Decoder`, or a model of `transformers`, with or without adapters, to a new folder that `transformers`
    loads with equal logits. Returns the name of the architecture.

    Adapters are merged into weights at full width. `end_of_text` is the id that ends a generation, `beside` further
    files (a tokenizer's) by name. The folder is complete or not there. Raises `OutputError` where it holds files or
    cannot be written, `ModelError` for a shape that no architecture expresses, or adapters on weights in few bits.

    Example:
        >>> import pathlib, tempfile
        >>> from tightfit.models.decoder import Decoder, DecoderConfig
        >>> from tightfit.models.export import export_model
        >>> model = Decoder(DecoderConfig(hidden_size=32, num_layers=2, num_heads=2, vocab_size=64))
        >>> export_model(model, pathlib.Path(tempfile.mkdtemp()) / "exported")
        'LlamaForCausalLM'
    """
    if is_adapted(model):
        model = merged(model)
    if any(is_in_low_bits(module) for module in model.modules()):
        raise ModelError(
            f"{type(model).__name__} has quantised weights, which transformers cannot read: export the model that "
            "it was made from"
        )
    if not isinstance(model, Decoder) and not hasattr(model, "save_pretrained"):
        raise ModelError(f"{type(model).__name__} has no config to export: give a Decoder or a transformers model")
    architecture = layout_of(model.config).architecture if isinstance(model, Decoder) else type(model).__name__
    with new_folder(Path(folder)) as part:
        if isinstance(model, Decoder):
            _write_decoder(model, part, end_of_text)
        else:
            _write_pretrained(model, part)
        _write_beside(part, beside)
    return architecture


def import_decoder(folder: str | Path) -> Decoder:
    """The reference decoder that computes what the model in a folder of `transformers` does, with its weights in their
    dtype (fp16 as fp32), on the CPU. Raises `ModelError` by the key or the weight that a decoder does not express.
    """
    folder = Path(folder)
    config = transformers_config(str(folder)).to_dict()
    shape = from_transformers(config, str(folder / CONFIG_FILE))
    tensors = _read_weights(folder)
    kinds = {tensor.dtype for tensor in tensors.values()}
    model = Decoder(replace(shape, dtype="bf16" if kinds == {torch.bfloat16} else "auto"))
    if shape.tie_embeddings:
        tensors.pop(HEAD, None)
    _fill(model, tensors, folder)
    return model.eval()


def import_to(source: str | Path, folder: str | Path, *, beside: Mapping[str, bytes] | None = None) -> Decoder:
    """Write the model in a folder of `transformers` to a new folder as a reference decoder, for `model.path`.

    Raises `ModelError` and `OutputError`.
    """
    model = import_decoder(source)
    with new_folder(Path(folder)) as part:
        save_decoder(model, part)
        _write_beside(part, beside)
    return model


def weight_views(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Each weight under its name in `transformers`, as a view of the decoder's; a tied head is not among them."""
    layout = layout_of(model.config)
    yield "model.embed_tokens.weight", model.embedding.weight
    for i, block in enumerate(model.layers):
        assert isinstance(block, Block), "a decoder's layers are blocks"
        for name, weight in _block_views(block, layout):
            yield f"model.layers.{i}.{name}.weight", weight
    yield "model.norm.weight", model.norm.weight
    if not model.config.tie_embeddings:
        yield HEAD, model.head.weight


def _block_views(block: Block, layout: Architecture) -> Iterator[tuple[str, Tensor]]:
    yield "input_layernorm", block.attention_norm.weight
    yield "post_attention_layernorm", block.mlp_norm.weight
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
        weight = getattr(getattr(block.attention, name), "weight", None)
        if weight is not None:  # without QK-norm there is nothing in its place
            yield f"self_attn.{name}", weight
    if isinstance(block.mlp, GatedMLP):
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield f"mlp.{name}", getattr(block.mlp, name).weight
    else:
        yield from _expert_views(block.mlp, layout)


def _expert_views(mlp: MixtureOfExperts, layout: Architecture) -> Iterator[tuple[str, Tensor]]:
    yield layout.router, mlp.router.weight
    for expert, (gate_up, down) in enumerate(zip(mlp.gate_up_proj, mlp.down_proj, strict=True)):
        gate, up = gate_up.chunk(2)
        for name, weight in ((layout.gate, gate), (layout.up, up), (layout.down, down)):
            yield f"{layout.experts}.{expert}.{name}", weight


@torch.no_grad()
def _write_decoder(model: Decoder, folder: Path, end_of_text: int | None) -> None:
    # A view of an expert shares its memory with the others, which the format does not know: copied.
    weights = {name: view.detach().cpu().clone() for name, view in weight_views(model)}
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    del weights
    ends = {} if end_of_text is None else {"eos_token_id": end_of_text}
    _write_json(folder / CONFIG_FILE, {**to_transformers(model.config), **ends})
    _write_json(folder / GENERATION_CONFIG, {"_from_model_config": True, **ends})


def _write_pretrained(model: Any, folder: Path) -> None:
    """A model of `transformers` as it saves itself, with the cache that its training was without."""
    before, model.config.use_cache = model.config.use_cache, True
    try:
        model.save_pretrained(folder)
    finally:
        model.config.use_cache = before


def _write_beside(folder: Path, files: Mapping[str, bytes] | None) -> None:
    for name, content in (files or {}).items():
        (folder / name).write_bytes(content)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """All weights in a folder by name. Raises `ModelError`."""
    found: dict[str, Tensor] = {}
    paths = sorted(path for path in folder.glob("*.safetensors") if path.name != MASKS)
    if not paths:
        raise ModelError(f"{folder}: holds no .safetensors file: give a folder of transformers with its weights")
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - not a mapping
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}: cannot be read: {why_unreadable(error)}") from error
    return {name: tensor for name, tensor in found.items() if not name.endswith(_IDLE)}


@torch.no_grad()
def _fill(model: Decoder, tensors: dict[str, Tensor], folder: Path) -> None:
    """Every weight of the decoder from the one of its name in `transformers`; none is left over."""
    for name, view in weight_views(model):
        tensor = tensors.pop(name, None)
        if tensor is None:
            raise ModelError(f"{folder}: the weight {name} is not there")
        if tensor.shape != view.shape:
            raise ModelError(f"{folder}: {name} has the shape {tuple(tensor.shape)}, wanted {tuple(view.shape)}")
        view.copy_(tensor)
    if tensors:
        raise ModelError(f"{folder}: a decoder has no place for the weight {sorted(tensors)[0]}")


def demand_new(folder: Path) -> None:
    """Raise `OutputError` where a folder holds files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder}: is not an empty folder: give one that is not there yet")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `folder` when all of it is on disk; after an error nothing is left. Raises
    `OutputError` where `folder` holds files, or cannot be written.
    """
    try:
        demand_new(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.part-"))
        try:
            yield part
            # A temporary folder is its owner's alone, and so is what safetensors writes.
            for path, mode in (*((file, 0o666) for file in sorted(part.iterdir())), (part, 0o777)):
                path.chmod(mode & ~_umask())
                _sync(path)
            part.replace(folder)
            _sync(folder.parent)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise OutputError(
            f"{folder}: cannot be written: {why_unreadable(error)}: make room, or give another folder"
        ) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
