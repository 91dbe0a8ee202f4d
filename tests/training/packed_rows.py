"""Rows of a few documents whose places are known, and models that read them."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.training.data.best_fit import PackedRows
from tightfit.training.data.samples import BestFitSamples, PaddedSamples, Pieces
from tightfit.training.data.store import TokenStore

VOCABULARY, LENGTH, PAD = 120, 32, 0


def document(length: int, seed: int) -> np.ndarray:
    return np.random.RandomState(seed).randint(1, VOCABULARY, length)


def packed(rows: list[list[np.ndarray]], length: int = LENGTH) -> dict[str, Tensor]:
    """A batch whose rows hold these documents, in this order."""
    documents = [document for row in rows for document in row]
    store = TokenStore.from_lists(documents)
    pieces = Pieces.cut(np.arange(len(store)), store.lengths, length)
    bounds = np.cumsum([0, *map(len, rows)])
    samples = BestFitSamples(store, pieces, PackedRows(np.arange(len(pieces)), bounds), length, PAD)
    return samples.batch(range(len(rows)))


def padded(documents: list[np.ndarray]) -> dict[str, Tensor]:
    """A batch of one document a row."""
    store = TokenStore.from_lists(documents)
    pieces = Pieces.cut(np.arange(len(store)), store.lengths, LENGTH)
    return PaddedSamples(store, pieces, PAD).batch(range(len(documents)))


def decoder(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY}
    return Decoder(DecoderConfig(**{**shape, "max_position_embeddings": 64, **settings}))


def of_transformers(name: str, **settings: Any) -> nn.Module:
    """A tiny causal model of `transformers`, as `model.path` builds it: without a cache."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape = {**sizes, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": VOCABULARY}
    config = getattr(transformers, f"{name}Config")(**{**shape, "max_position_embeddings": 64, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.config.use_cache = False
    return model.train()


MODELS = {
    "decoder": lambda: decoder(),
    "decoder, grouped heads": lambda: decoder(num_kv_heads=1, qk_norm=True),
    "decoder, chunked": lambda: decoder(attention="chunked", attention_chunk_size=8),
    "decoder, window": lambda: decoder(attention_window=6),
    "llama": lambda: of_transformers("Llama"),
    "llama, eager": lambda: of_transformers("Llama", attn_implementation="eager"),
    "qwen3": lambda: of_transformers("Qwen3"),
    "qwen3, eager": lambda: of_transformers("Qwen3", attn_implementation="eager"),
    "mistral, window": lambda: of_transformers("Mistral", sliding_window=6),
}
