"""A tiny model of transformers, saved, and what adapters make of it."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from tightfit.models.loading import build_model
from tightfit.training.config import AdapterConfig, PretrainedModel
from tightfit.training.data.tokenizer import train_tokenizer

SHAPE = {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 600, "max_position_embeddings": 128,
}  # fmt: skip


def saved_llama(folder: Path, **shape: Any) -> Path:
    """The folder of a Llama of some 170k parameters, with a tokenizer."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHAPE, **shape})).save_pretrained(folder)
    train_tokenizer(["the quick brown fox jumps over the lazy dog"], 300).save(folder)
    return folder


def adapted(folder: Path, **adapter: Any) -> nn.Module:
    """The model in a folder under new adapters that already add something."""
    model = build_model(PretrainedModel(path=str(folder), adapter=AdapterConfig(**adapter)), seed=1)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model
