"""Every causal language model class of `transformers`, made tiny from its configuration, with random weights.

The sizes shrink by the names of the configuration's fields; what one class needs besides stands in `OWN`.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import nn

from tightfit.step import TokenBatch

LAYERS, HIDDEN, HEADS, HEAD, VOCABULARY = 4, 64, 4, 16, 256
BATCH = TokenBatch(size=2, length=64, vocab_size=VOCABULARY)

# A field's size by its name, in every configuration and in those inside it.
_SIZES: tuple[tuple[int, str], ...] = (
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers depth num_blocks conf_num_hidden_layers max_window_layers"),
    (HIDDEN, "hidden_size d_model n_embd embed_dim emb_dim dim embedding_size input_embedding_size "
    "output_embedding_size "
    "embedding_dim word_embed_proj_dim hidden_size_global lru_width out_hidden_size vision_output_dim "
    "attention_hidden_size backbone_hidden_size mamba_d_ssm router_hidden_size pronunciation_embed_dim "
    "shape_embed_dim adapter_out_dim adapter_in_dim projector_input_dim projector_output_dim d_rel"),
    (HEADS, "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads "
    "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads "
    "linear_num_heads linear_num_key_heads linear_num_value_heads num_query_groups conf_num_attention_heads "
    "num_attention_groups index_n_heads"),
    (2, "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads num_experts_per_tok "
    "num_experts_per_token moe_topk moe_k moe_top_k num_local_layers cross_attn_k mamba_n_groups n_groups o_groups "
    "n_mamba_heads hc_mult hc_count index_topk_blocks num_kv_shared_layers"),
    (HEAD, "head_dim v_head_dim dim_head attention_head_size d_head d_kv kv_channels linear_head_dim "
    "linear_key_head_dim "
    "linear_value_head_dim swa_head_dim global_head_dim mamba_d_head mamba_head_dim mamba_headdim "
    "state_size mamba_d_state ssm_state_size time_step_rank mamba_dt_rank kv_lora_rank q_lora_rank o_lora_rank "
    "laurel_rank gated_norm_rank hc_lowrank adapter_rank index_head_dim index_topk hidden_size_per_layer_input "
    "zero_expert_num n_group_size chunk_size mamba_chunk_size prompt_length rotary_dim"),
    (8, "qk_rope_head_dim qk_nope_head_dim mamba_n_heads mamba_num_heads"),
    (128, "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff dff dim_ff d_inner ffn_hidden_size "
    "feed_forward_size mlp_dim intermediate_size_mlp dense_intermediate_size"),
    (32, "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size "
    "shared_intermediate_size expert_ffn_hidden_size shared_experts_intermediate_size sliding_window "
    "sliding_window_size attention_window_size local_attention window_size attention_chunk_size index_block_size "
    "local_attention_window_len num_buckets"),
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    (1, "n_group topk_group num_expert_group first_k_dense_replace num_dense_layers moe_layer_start_index "
    "num_nextn_predict_layers"),
    (VOCABULARY, "vocab_size vocab_size_per_layer_input audio_vocab_size decoder_vocab_size unpadded_vocab_size"),
    (256, "max_position_embeddings n_positions max_seq_len n_ctx model_max_length context_length "
    "original_max_position_embeddings max_target_positions pronunciation_vocab_size shape_vocab_size"),
)  # fmt: skip
SIZES = {name: size for size, names in _SIZES for name in names.split()}

_WIDE_ATTENTION = {"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HEAD, "num_key_value_heads": HEADS}

# What a class needs beyond the sizes, to be built or to run at all; fields under "" are needed to make the default.
OWN: dict[str, dict[str, Any]] = {
    "BltForCausalLM": {"encoder_hash_byte_group_vocab": 500},
    "CohereCompassForCausalLM": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
    },
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
    "Dots1ForCausalLM": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "Dots3NoteForCausalLM": {
        "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": HEADS, "swa_q_lora_rank": HEAD,
        "swa_kv_lora_rank": HEAD, "swa_head_dim": HEAD, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": HEAD,
    },
    "GitForCausalLM": {"vision_config": {"image_size": 32}},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "Mamba2ForCausalLM": {"head_dim": 2 * HEAD},
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "Qwen4ExpForCausalLM": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": HEAD, "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "ReformerModelWithLMHead": {
        "is_decoder": True, "axial_pos_shape": (8, 8), "axial_pos_embds_dim": (16, 48), "num_buckets": 4,
        "local_attn_chunk_length": 16, "lsh_attn_chunk_length": 16, "attn_layers": ("local", "lsh", "local", "lsh"),
    },
    "XmodForCausalLM": {"default_language": "en_XX"},
    "Zamba2ForCausalLM": {"mamba_headdim": HIDDEN, **_WIDE_ATTENTION},
    "ZambaForCausalLM": _WIDE_ATTENTION,
}  # fmt: skip

# Inputs besides ids and labels, or in other shapes.
INPUTS: dict[str, dict[str, tuple[int, ...]]] = {
    "GitForCausalLM": {"pixel_values": (BATCH.size, 3, 32, 32)},
    "MusicgenForCausalLM": {"input_ids": (BATCH.size * 4, BATCH.length), "labels": (BATCH.size, BATCH.length, 4)},
    "MusicgenMelodyForCausalLM": {"input_ids": (BATCH.size * 4, BATCH.length), "labels": (BATCH.size, BATCH.length, 4)},
}


@cache
def classes() -> dict[str, tuple[type, type]]:
    """Configuration and model class of each causal language model, by the model's name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    found: dict[str, tuple[type, type]] = {}
    for config, models in MODEL_FOR_CAUSAL_LM_MAPPING.items():
        for model in models if isinstance(models, tuple) else (models,):
            found.setdefault(model.__name__, (getattr(model, "config_class", None) or config, model))
    return dict(sorted(found.items()))


def tiny_model(name: str) -> nn.Module:
    """A class with some 100k random weights, on a fixed seed, in training mode."""
    config_class, model_class = classes()[name]
    torch.manual_seed(0)
    return model_class(tiny_config(config_class, OWN.get(name, {}))).train()


def tiny_batch(name: str) -> dict[str, torch.Tensor]:
    """Ids and labels, and what else the class wants."""
    return BATCH.tensors() | {key: numbers(key, shape) for key, shape in INPUTS.get(name, {}).items()}


def numbers(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Ids below the vocabulary size, or pixels from -1 to 1."""
    count = math.prod(shape)
    if key in ("input_ids", "labels"):
        return (torch.arange(count) * 7919 % VOCABULARY).view(shape)
    return torch.linspace(-1, 1, count).view(shape)


def tiny_config(config_class: type, own: dict[str, Any]) -> Any:
    """The configuration with its sizes shrunk, `own` laid over it."""
    return config_class(**laid_over(shrunk(config_class, config_class(**own.get("", {}))), own))


def laid_over(fields: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    nested = {k: laid_over(fields.get(k) or {}, v) for k, v in own.items() if isinstance(v, dict) and k}
    return {**fields, **{k: v for k, v in own.items() if k and not isinstance(v, dict)}, **nested}


def shrunk(config_class: type, default: Any) -> dict[str, Any]:
    """The fields that differ from the default configuration."""
    changes: dict[str, Any] = {"use_cache": False} if hasattr(default, "use_cache") else {}
    layers = next(
        (getattr(default, n) for n in ("num_hidden_layers", "num_layers", "n_layer") if hasattr(default, n)), 0
    )
    for name, value in vars(default).items():
        if hasattr(value, "to_diff_dict"):
            changes[name] = shrunk(type(value), value)
        elif isinstance(value, list) and len(value) == layers and layers:
            changes[name] = fewer(value)
        elif name.endswith("_token_id") and isinstance(value, int | list):
            changes[name] = 1 if name == "pad_token_id" else 2
        elif isinstance(value, int) and not isinstance(value, bool) and name in SIZES:
            changes[name] = min(SIZES[name], value) if value >= 0 else value
        elif name == "head_dim" and value is None:
            changes[name] = HEAD
    if "qk_rope_head_dim" in changes:  # latent attention: all heads have keys of their own, the rotated part its width
        changes |= {"num_key_value_heads": HEADS, "head_dim": changes["qk_rope_head_dim"]}
    return changes


def fewer(kinds: list[Any]) -> list[Any]:
    """One entry a layer: each kind that occurs, the last one repeated."""
    small = [SIZES["intermediate_size"] if isinstance(kind, int) and kind > 999 else kind for kind in kinds]
    different = [kind for i, kind in enumerate(small) if kind not in small[:i]][:LAYERS]
    return different + [different[-1]] * (LAYERS - len(different))
