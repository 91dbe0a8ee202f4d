"""Trained models as GGUF, the format that llama.cpp reads: one file with the shape, the weights and the tokenizer.

What is written is what llama.cpp's convert_hf_to_gguf.py writes for these architectures: its names, its order of the
rows of queries and keys, one dtype for matrices and fp32 for vectors.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tightfit.errors import DataError, InputError, ModelError
from tightfit.models.compress.source import open_source
from tightfit.models.export import demand_new, new_folder
from tightfit.training.data.tokenizer import TextTokenizer

Weights = Literal["f16", "bf16", "q8_0"]
FILE = "model.gguf"
LARGEST_F16 = 65504.0
GROUP = 32  # weights of a row that share a scale in q8_0; rows that it does not divide are f16
INSTEAD = "use tightfit export without --to, which writes a folder for transformers"


@dataclass(frozen=True)
class GGUFFamily:
    """How GGUF names a model's type, and whether its rotations turn neighbouring numbers, not the halves of a head."""

    architecture: str
    turns_neighbours: bool


FAMILIES = {
    "llama": GGUFFamily("llama", turns_neighbours=True),
    "mistral": GGUFFamily("llama", turns_neighbours=True),
    "qwen2": GGUFFamily("qwen2", turns_neighbours=False),
    "qwen3": GGUFFamily("qwen3", turns_neighbours=False),
}
# Which cut of text a tokenizer's `pre_tokenizer` makes, by the names that llama.cpp has for it.
_LLAMA3 = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
CUTS: Mapping[str, Callable[[Any], bool]] = {
    "gpt-2": lambda part: _is_bytes(part, regex=True),
    "smollm": lambda part: (
        [one["type"] for one in _sequence(part)] == ["Digits", "ByteLevel"]
        and _sequence(part)[0]["individual_digits"]
        and _is_bytes(_sequence(part)[1], regex=True)
    ),
    "llama-bpe": lambda part: _is_split(part, _LLAMA3),
    "qwen2": lambda part: _is_split(part, _LLAMA3.replace("{1,3}", "")),
}


def _sequence(part: Any) -> list[Any]:
    return part["pretokenizers"] if part["type"] == "Sequence" else []


def _is_bytes(part: Any, *, regex: bool) -> bool:
    return part["type"] == "ByteLevel" and not part["add_prefix_space"] and part.get("use_regex", True) == regex


def _is_split(part: Any, pattern: str) -> bool:
    kinds = [one["type"] for one in _sequence(part)]
    if kinds != ["Split", "ByteLevel"] or not _is_bytes(_sequence(part)[1], regex=False):
        return False
    return _sequence(part)[0]["pattern"].get("Regex") == pattern


def export_gguf(source: str | Path, folder: str | Path, *, weights: Weights) -> str:
    """Write the model in a folder (a run's, or one of `transformers`) and its tokenizer as one GGUF file, model.gguf in
    a new folder. Returns the architecture's name in GGUF.

    `weights` is f16, bf16 or q8_0: the dtype of all matrices. Vectors are fp32. A row that 32 does not divide is f16 in
    q8_0. The folder is complete or not there. Raises `ModelError` for a shape that the file cannot say, `DataError` for
    a tokenizer, `InputError` without the package gguf, `OutputError`.
    """
    try:
        import gguf
    except ImportError as error:
        raise InputError("GGUF is written by the package gguf, which is missing: pip install gguf") from error

    opened = open_source(source)
    opened.refuse_quantised("export")
    demand_new(Path(folder))
    tokenizer = opened.tokenizer if opened.tokenizer_files() else None
    model: Any = opened.transformers_model()
    shape: Any = model.config
    family = _family(shape)
    said = None if tokenizer is None else _tokens(tokenizer, shape.vocab_size)
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture), shape.num_hidden_layers
    )
    with new_folder(Path(folder)) as part:
        writer = gguf.GGUFWriter(part / FILE, family.architecture)
        _write_shape(writer, shape, gguf.LlamaFileType[f"MOSTLY_{weights.upper()}"])
        if said is not None:
            said.write(writer, shape)
        for name, weight in model.state_dict().items():
            if name == "lm_head.weight" and shape.tie_word_embeddings:
                continue
            path, _, kind = name.rpartition(".")
            target = names.get_name(path)
            if target is None:
                raise ModelError(f"the weight {name} has no name in GGUF's {family.architecture}: {INSTEAD}")
            array, dtype = _as_written(_turned(weight, path, family, shape), name, weights)
            writer.add_tensor(f"{target}.{kind}", array, raw_dtype=dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return family.architecture


def _family(shape: Any) -> GGUFFamily:
    """Raises `ModelError` for a model that GGUF would say wrongly."""
    family = FAMILIES.get(shape.model_type)
    if family is None:
        raise ModelError(f"GGUF is written for {', '.join(FAMILIES)}, and this is a {shape.model_type}: {INSTEAD}")
    rope = getattr(shape, "rope_parameters", None) or {}
    wrong = {
        "rope_parameters": rope.get("rope_type", "default") != "default",
        "sliding_window": getattr(shape, "sliding_window", None) is not None
        and "sliding_attention" in (getattr(shape, "layer_types", None) or ("sliding_attention",)),
        "hidden_act": shape.hidden_act != "silu",
        "attention_bias": bool(getattr(shape, "attention_bias", False)),
        "mlp_bias": bool(getattr(shape, "mlp_bias", False)),
    }
    for key, is_wrong in wrong.items():
        if is_wrong:
            raise ModelError(f"{key} {getattr(shape, key)} cannot be said in GGUF's {family.architecture}: {INSTEAD}")
    return family


def _write_shape(writer: Any, shape: Any, file_type: Any) -> None:
    heads = shape.num_attention_heads
    width = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    writer.add_type("model")
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(shape.num_key_value_heads or heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(shape.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_file_type(file_type)
    writer.add_quantization_version(2)


def _turned(weight: Tensor, path: str, family: GGUFFamily, shape: Any) -> Tensor:
    """The rows of a query's or a key's projection in the order in which GGUF's rotation pairs them."""
    heads = {
        "q_proj": shape.num_attention_heads,
        "k_proj": shape.num_key_value_heads or shape.num_attention_heads,
    }.get(path.rpartition(".")[2])
    if heads is None or not family.turns_neighbours:
        return weight
    halves = weight.view(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def _as_written(weight: Tensor, name: str, weights: str) -> tuple[np.ndarray, Any]:
    """A weight's numbers in the file, and their type there. Raises `ModelError` for numbers beyond fp16."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    wide = weight.detach().to("cpu", torch.float32).contiguous()
    if wide.dim() < 2:
        return wide.numpy(), kinds.F32
    kind = {"f16": kinds.F16, "bf16": kinds.BF16, "q8_0": kinds.Q8_0}[weights]
    if kind is kinds.Q8_0 and wide.shape[-1] % GROUP:
        kind = kinds.F16
    if kind is kinds.F16 and not bool(wide.abs().max() <= LARGEST_F16):
        raise ModelError(f"the weight {name} has numbers beyond {LARGEST_F16:,.0f}, which f16 has none of: take bf16")
    return gguf.quants.quantize(wide.numpy(), kind), kind


@dataclass(frozen=True)
class _Tokens:
    """A byte-level BPE in GGUF's fields."""

    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    cut: str
    end: int
    template: str | None

    def write(self, writer: Any, shape: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.cut)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.kinds)
        writer.add_token_merges(self.merges)
        if isinstance(shape.bos_token_id, int):
            writer.add_bos_token_id(shape.bos_token_id)
        writer.add_eos_token_id(self.end)
        writer.add_add_bos_token(False)
        if self.template is not None:
            writer.add_chat_template(self.template)


def _tokens(tokenizer: TextTokenizer, rows: int) -> _Tokens:
    """Raises `DataError` for a tokenizer that is no byte-level BPE, or cuts text in a way that has no name."""
    import gguf

    raw = json.loads(tokenizer.to_text())
    cut = next((name for name, is_it in CUTS.items() if raw["pre_tokenizer"] and is_it(raw["pre_tokenizer"])), None)
    normalizes = raw["normalizer"] is not None and raw["normalizer"]["type"] != "NFC"  # which llama.cpp leaves out
    if raw["model"]["type"] != "BPE" or cut is None or normalizes:
        raise DataError(
            f"the tokenizer is none of the byte-level BPEs written as GGUF ({', '.join(CUTS)}): {INSTEAD}, and "
            "convert that with llama.cpp's convert_hf_to_gguf.py"
        )
    kinds = gguf.TokenType
    added = {token["id"]: kinds.CONTROL if token["special"] else kinds.USER_DEFINED for token in raw["added_tokens"]}
    by_id = {i: token for token, i in tokenizer.tokens.items()}
    # Rows of the embedding that no token has, as llama.cpp's converter fills them.
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(rows)]
    found = [int(added.get(i, kinds.NORMAL)) if i in by_id else int(kinds.UNUSED) for i in range(rows)]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in raw["model"]["merges"]]
    return _Tokens(tokens, found, merges, cut, tokenizer.end_of_text, tokenizer.chat_template)
