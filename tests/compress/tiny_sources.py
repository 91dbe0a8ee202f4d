"""Tiny models of `transformers` in folders, with a tokenizer and texts to read."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tightfit.training.data.tokenizer import train_tokenizer

SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 300, "max_position_embeddings": 64, "eos_token_id": 0, "bos_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 6},
    "mixtral": {"num_local_experts": 3, **EXPERTS},
    "qwen3_moe": {
        "num_experts": 3, "moe_intermediate_size": 32, "mlp_only_layers": [0, 3], "head_dim": 8, **EXPERTS,
    },
}  # fmt: skip
TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer. " * 40
IDS = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))


def tiny_model(kind: str, **changed: Any) -> Any:
    """With weights that are far from their beginning, biases and norms too."""
    config = transformers.AutoConfig.for_model(kind.split()[0], **{**SHAPE, **KINDS.get(kind, {}), **changed})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.1 + (1 if parameter.dim() == 1 and parameter.mean() > 0.5 else 0))
    return model


def tiny_folder(folder: Path, model: Any) -> Path:
    """The model and a tokenizer in a folder, and a text beside it."""
    model.save_pretrained(folder)
    train_tokenizer([TEXT], 300).save(folder)
    (folder / "text.txt").write_text(TEXT)
    return folder


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits
