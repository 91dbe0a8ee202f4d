"""The reference decoder's shape in the configurations of `transformers`, and back.

Five architectures compute what the decoder computes: Llama, Mistral (with a window), Qwen3 (with QK-norm, with or
without a window), Mixtral (experts) and Qwen3-MoE (experts and QK-norm). A shape that none of them expresses is refused
by the name of its key.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tightfit.errors import ModelError
from tightfit.models.decoder_config import DecoderConfig

ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh"}
DTYPES = {"auto": "float32", "fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Architecture:
    """An architecture of `transformers`: its `model_type` and class, and what the weights of its experts are called."""

    model_type: str
    architecture: str
    router: str = ""
    experts: str = ""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


LLAMA = Architecture("llama", "LlamaForCausalLM")
MISTRAL = Architecture("mistral", "MistralForCausalLM")
QWEN3 = Architecture("qwen3", "Qwen3ForCausalLM")
MIXTRAL = Architecture(
    "mixtral", "MixtralForCausalLM", "block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"
)
QWEN3_MOE = Architecture("qwen3_moe", "Qwen3MoeForCausalLM", "mlp.gate", "mlp.experts")
LAYOUTS = {layout.model_type: layout for layout in (LLAMA, MISTRAL, QWEN3, MIXTRAL, QWEN3_MOE)}


def layout_of(config: DecoderConfig) -> Architecture:
    """The architecture that computes what a decoder of this shape does. Raises `ModelError`."""
    if config.conv_kernel is not None:
        raise _inexpressible("conv_kernel", config.conv_kernel, "a block without attention")
    if config.num_experts is None:
        if config.qk_norm:
            return QWEN3
        return LLAMA if config.attention_window is None else MISTRAL
    if config.num_shared_experts:
        raise _inexpressible("num_shared_experts", config.num_shared_experts, "experts that every token visits")
    if config.qk_norm:
        return QWEN3_MOE
    if config.first_dense_layers:
        raise _inexpressible("first_dense_layers", config.first_dense_layers, "without qk_norm: Mixtral has experts")
    if not config.norm_topk:
        raise _inexpressible("norm_topk", "false", "without qk_norm: Mixtral's weights sum to 1")
    return MIXTRAL


def _inexpressible(key: str, value: object, what: str) -> ModelError:
    return ModelError(
        f"model.{key} {value}: no layout that export writes has {what}: they are {', '.join(LAYOUTS)}; keep the run's "
        "own folder"
    )


def to_transformers(config: DecoderConfig) -> dict[str, Any]:
    """The config.json that makes `transformers` compute what the decoder does. Raises `ModelError`."""
    layout, window = layout_of(config), config.attention_window
    common: dict[str, Any] = {
        "architectures": [layout.architecture],
        "model_type": layout.model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": ACTIVATIONS[config.activation],
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,  # as older releases and other engines read it
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "attention_dropout": config.attention_dropout,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": DTYPES[config.dtype],
        "torch_dtype": DTYPES[config.dtype],
    }
    if layout is LLAMA:
        return {**common, "mlp_bias": False}
    if layout is MISTRAL:
        return {**common, "sliding_window": window}
    if layout is QWEN3:
        kind = "full_attention" if window is None else "sliding_attention"
        windowed = {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": 0}
        return {**common, **windowed, "layer_types": [kind] * config.num_layers}
    routed = {
        "num_experts_per_tok": config.experts_per_token,
        "router_aux_loss_coef": config.auxiliary_loss_coefficient,
        "output_router_logits": False,
        "sliding_window": window,
    }
    if layout is MIXTRAL:
        return {**common, **routed, "intermediate_size": config.expert_width, "num_local_experts": config.num_experts}
    return {
        **common,
        **routed,
        "num_experts": config.num_experts,
        "moe_intermediate_size": config.expert_width,
        "norm_topk_prob": config.norm_topk,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(config.first_dense_layers)),
        "use_sliding_window": window is not None,
    }


def from_transformers(raw: Mapping[str, Any], place: str) -> DecoderConfig:
    """The shape of the decoder that computes what a model of `transformers` with this configuration does. Every default
    is written out in it.

    `place` is what errors call it. Raises `ModelError` by the name of the key that the decoder does not express.
    """
    layout = LAYOUTS.get(raw["model_type"])
    if layout is None:
        raise ModelError(f"{place}: model_type {raw['model_type']!r} is none of {', '.join(LAYOUTS)}")
    _demand(raw, place, attention_bias=False, mlp_bias=False, decoder_sparse_step=1)
    rope = raw["rope_parameters"]
    if rope.get("rope_type", "default") != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{place}: rope_parameters {rope}: the decoder turns whole heads by unscaled frequencies")
    activation = {theirs: ours for ours, theirs in ACTIVATIONS.items()}.get(raw["hidden_act"])
    if activation is None:
        raise ModelError(f"{place}: hidden_act {raw['hidden_act']!r} is none of {', '.join(ACTIVATIONS.values())}")
    keys: dict[str, Any] = {
        "hidden_size": raw["hidden_size"],
        "num_layers": raw["num_hidden_layers"],
        "num_heads": raw["num_attention_heads"],
        "num_kv_heads": raw["num_key_value_heads"],
        "head_dim": raw.get("head_dim"),
        "intermediate_size": raw["intermediate_size"],
        "vocab_size": raw["vocab_size"],
        "max_position_embeddings": raw["max_position_embeddings"],
        "rope_theta": float(rope["rope_theta"]),
        "norm_eps": raw["rms_norm_eps"],
        "qk_norm": layout in (QWEN3, QWEN3_MOE),
        "tie_embeddings": raw["tie_word_embeddings"],
        "activation": activation,
        "attention_window": _window(raw, layout, place),
    }
    return DecoderConfig(**keys, **_experts(raw, layout, place))


def _window(raw: Mapping[str, Any], layout: Architecture, place: str) -> int | None:
    if layout is LLAMA:
        return None
    if layout is not QWEN3:
        return raw.get("sliding_window")
    kinds = set(raw["layer_types"])
    if len(kinds) > 1:
        raise ModelError(f"{place}: layer_types {sorted(kinds)}: the decoder's blocks all have the same window")
    return raw["sliding_window"] if kinds == {"sliding_attention"} else None


def _experts(raw: Mapping[str, Any], layout: Architecture, place: str) -> dict[str, Any]:
    if not layout.experts:
        return {}
    keys = {
        "num_experts": raw["num_local_experts"],
        "experts_per_token": raw["num_experts_per_tok"],
        "auxiliary_loss_coefficient": float(raw["router_aux_loss_coef"]),
    }
    if layout is MIXTRAL:
        return keys
    dense = sorted(raw["mlp_only_layers"])
    if dense != list(range(len(dense))):
        raise ModelError(f"{place}: mlp_only_layers {dense}: the decoder's blocks without experts come first")
    return {
        **keys,
        "expert_intermediate_size": raw["moe_intermediate_size"],
        "norm_topk": raw["norm_topk_prob"],
        "first_dense_layers": len(dense),
    }


def _demand(raw: Mapping[str, Any], place: str, **only: Any) -> None:
    """Raise `ModelError` where a key has another value than the one that the decoder expresses."""
    for key, value in only.items():
        if raw.get(key, value) != value:
            raise ModelError(f"{place}: {key} {raw[key]}: the decoder has {value} only")
