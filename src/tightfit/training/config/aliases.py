"""Keys that people know from other trainers, and what each one means here.

An alias is accepted at the top level of the file, or within any section. It is only another way to write its key: the
two may stand together where they agree, and are an error where they do not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tightfit.names import FOREIGN


class AliasValueError(ValueError):
    """The value of an alias cannot be translated; the text says what is wanted."""


def _same(value: Any) -> Any:
    return value


def _recompute(value: Any) -> Any:
    if isinstance(value, bool):
        return {} if value else None
    if value is None or isinstance(value, dict):
        return value
    raise AliasValueError("true, false or a mapping of recompute's own keys")


def _lookup(table: dict[Any, str]) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        # A list or a mapping cannot be looked up at all, so ask by comparison.
        for known, meaning in table.items():
            if value == known and isinstance(value, bool) == isinstance(known, bool):
                return meaning
        raise AliasValueError(" or ".join(str(known).lower() for known in table))

    return convert


_precision = _lookup({True: "bf16", False: "fp32", "no": "fp32", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16"})
_attention = _lookup({"memory_efficient": "chunked", "chunked": "chunked", "standard": "sdpa", "sdpa": "sdpa"})
_activation = _lookup({"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"})


def _optimizer(value: Any) -> Any:
    return FOREIGN.get(value, value) if isinstance(value, str) else value


@dataclass(frozen=True)
class Alias:
    """One more name for a key: `name` stands for `key`, its value translated by `convert`."""

    name: str
    key: str
    convert: Callable[[Any], Any] = _same
    note: str = "same value"


_RECOMPUTE = "true: recompute every block; false: null; or a mapping"
_PRECISION = "true: bf16; false or no: fp32; or the name"

ALIASES: dict[str, Alias] = {
    alias.name: alias
    for alias in (
        Alias("use_gradient_checkpointing", "memory.recompute", _recompute, _RECOMPUTE),
        Alias("gradient_checkpointing", "memory.recompute", _recompute, _RECOMPUTE),
        Alias("activation_checkpointing", "memory.recompute", _recompute, _RECOMPUTE),
        Alias("use_checkpoint", "memory.recompute", _recompute, _RECOMPUTE),
        Alias("memory_budget", "memory.budget"),
        Alias("use_mixed_precision", "training.precision", _precision, _PRECISION),
        Alias("mixed_precision", "training.precision", _precision, _PRECISION),
        Alias("attention_type", "model.attention", _attention, "memory_efficient: chunked; standard: sdpa"),
        Alias("gradient_accumulation_steps", "training.gradient_accumulation_steps"),
        Alias("accumulation_steps", "training.gradient_accumulation_steps"),
        Alias("lr", "training.learning_rate"),
        Alias("learning_rate", "training.learning_rate"),
        Alias("batch_size", "training.batch_size"),
        Alias("max_steps", "training.max_steps"),
        Alias("max_iters", "training.max_steps"),
        Alias("warmup_steps", "training.warmup_steps"),
        Alias("warmup_iters", "training.warmup_steps"),
        Alias("lr_scheduler_type", "training.schedule"),
        Alias("optim", "training.optimizer", _optimizer, "adamw_torch, adamw_torch_fused, adamw_bnb_8bit too"),
        Alias("weight_decay", "training.weight_decay"),
        Alias("grad_clip", "training.grad_clip"),
        Alias("max_grad_norm", "training.grad_clip"),
        Alias("logging_steps", "training.log_every"),
        Alias("hidden_size", "model.hidden_size"),
        Alias("n_embd", "model.hidden_size"),
        Alias("d_model", "model.hidden_size"),
        Alias("num_hidden_layers", "model.num_layers"),
        Alias("n_layer", "model.num_layers"),
        Alias("n_layers", "model.num_layers"),
        Alias("num_attention_heads", "model.num_heads"),
        Alias("n_head", "model.num_heads"),
        Alias("n_heads", "model.num_heads"),
        Alias("num_key_value_heads", "model.num_kv_heads"),
        Alias("n_kv_heads", "model.num_kv_heads"),
        Alias("intermediate_size", "model.intermediate_size"),
        Alias("n_inner", "model.intermediate_size"),
        Alias("num_local_experts", "model.num_experts"),
        Alias("n_routed_experts", "model.num_experts"),
        Alias("num_experts_per_tok", "model.experts_per_token"),
        Alias("n_shared_experts", "model.num_shared_experts"),
        Alias("moe_intermediate_size", "model.expert_intermediate_size"),
        Alias("norm_topk_prob", "model.norm_topk"),
        Alias("first_k_dense_replace", "model.first_dense_layers"),
        Alias("router_aux_loss_coef", "model.auxiliary_loss_coefficient"),
        Alias("router_z_loss_coef", "model.z_loss_coefficient"),
        Alias("rms_norm_eps", "model.norm_eps"),
        Alias("tie_word_embeddings", "model.tie_embeddings"),
        Alias(
            "hidden_act", "model.activation", _activation, "silu: swiglu; gelu: geglu; gelu_pytorch_tanh: geglu_tanh"
        ),
        Alias("model_name_or_path", "model.path"),
        Alias("block_size", "data.sequence_length"),
        Alias("max_seq_len", "data.sequence_length"),
        Alias("max_seq_length", "data.sequence_length"),
        Alias("max_length", "data.sequence_length"),
        Alias("data_path", "data.source"),
        Alias("output_dir", "output.folder"),
        Alias("out_dir", "output.folder"),
    )
}
