"""What is measured: models, precisions, optimizers, levers and shapes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig


@dataclass(frozen=True)
class Case:
    """One configuration. With `levers` and a `budget` the step is planned, else it is run as it stands."""

    model: str
    size: int
    length: int
    precision: Any = "bf16"
    optimizer: str = "adamw"
    grad_clip: float | None = None
    levers: str | None = None
    budget: str | None = None

    @property
    def name(self) -> str:
        how = "plain" if self.levers is None else f"{self.levers} at {self.budget}"
        clip = "" if self.grad_clip is None else ", clipped"
        return f"{self.model}, {self.size} x {self.length}, {self.precision}, {self.optimizer}{clip}, {how}"


@dataclass(frozen=True)
class Model:
    build: Callable[[], nn.Module]
    vocabulary: int


def _decoder(vocabulary: int, **sizes: Any) -> Model:
    config = DecoderConfig(vocab_size=vocabulary, max_position_embeddings=8192, **sizes)
    return Model(partial(Decoder, config), vocabulary)


def _from_transformers(kind: str, vocabulary: int, attention: str = "sdpa", **sizes: Any) -> Model:
    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(vocab_size=vocabulary, **sizes)
        config._attn_implementation = attention
        classes = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}
        return getattr(transformers, classes.get(kind, f"{kind}ForCausalLM"))(config).train()

    return Model(build, vocabulary)


_HF: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
}
_GPT2: dict[str, Any] = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}

MODELS = {
    "MM26": _decoder(6400, hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=2),
    "MM26 dropout": _decoder(6400, hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=2, dropout=0.1),
    "MM104": _decoder(6400, hidden_size=768, num_layers=16, num_heads=12, num_kv_heads=4),
    "1B": _decoder(128256, hidden_size=2048, num_layers=16, num_heads=32, num_kv_heads=8),
    "8B-width": _decoder(128256, hidden_size=4096, num_layers=8, num_heads=32, num_kv_heads=8),
    "Llama": _from_transformers("Llama", 32000, num_key_value_heads=4, **_HF),
    "Llama eager": _from_transformers("Llama", 32000, "eager", num_key_value_heads=4, **_HF),
    "Qwen3": _from_transformers("Qwen3", 32000, num_key_value_heads=4, head_dim=64, **_HF),
    "GPT-2": _from_transformers("GPT2", 50257, **_GPT2),
    "GPT-2 eager": _from_transformers("GPT2", 50257, "eager", **_GPT2),
    "Gemma-2": _from_transformers("Gemma2", 32000, "eager", num_key_value_heads=4, head_dim=128, **_HF),
    "Gemma-3": _from_transformers("Gemma3Text", 32000, num_key_value_heads=4, head_dim=256, **_HF),
    "tiny": _decoder(500, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2),
    "tiny GPT-2": _from_transformers("GPT2", 500, n_embd=64, n_layer=2, n_head=4, n_positions=128),
}

OPTIMIZERS: dict[str, Any] = {
    "adamw": "adamw",
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "sgd": "sgd",
    "adafactor": "adafactor",
}


def all_cases() -> Iterator[Case]:
    """The configurations for a GPU, the quick and telling ones first."""
    yield from _minimind()
    yield from _large()
    yield from _of_transformers()


def small_cases() -> Iterator[Case]:
    """A few for a CPU, to see that the suite runs."""
    plain = Case("tiny", 4, 96, "fp32")
    yield plain
    yield replace(plain, levers="exact", budget="0.8x", precision="bf16")
    yield replace(plain, levers="rounding", budget="0.5x", grad_clip=1.0)
    yield replace(plain, model="tiny GPT-2", optimizer="sgd")


def _minimind() -> Iterator[Case]:
    for model in ("MM26", "MM104"):
        plain = Case(model, 32, 512)
        yield plain
        yield replace(plain, levers="rounding", budget="0.25x")  # beside the plain one: less memory, what time?
        yield replace(plain, levers="exact", budget="0.6x")
        yield replace(plain, precision="fp32")
        yield replace(plain, precision="fp32", levers="exact", budget="0.6x")
        yield replace(plain, precision="fp16", grad_clip=1.0)
        yield replace(plain, optimizer="adamw fused")
        yield replace(plain, optimizer="sgd")
    yield Case("MM26 dropout", 32, 512)
    yield Case("MM26 dropout", 32, 512, levers="exact", budget="0.6x")
    yield Case("MM26", 3, 333)
    yield Case("MM26", 128, 512, levers="rounding", budget="4GiB")


def _large() -> Iterator[Case]:
    wide = Case("1B", 4, 4096)
    yield wide
    yield replace(wide, levers="exact", budget="0.7x")
    yield replace(wide, levers="rounding", budget="0.4x")
    yield replace(wide, optimizer="adafactor")
    yield replace(wide, size=1, precision="fp32")
    deep = Case("8B-width", 1, 8192)
    yield deep
    yield replace(deep, levers="exact", budget="0.8x")
    yield replace(deep, optimizer="adamw fused", grad_clip=1.0)


def _of_transformers() -> Iterator[Case]:
    for model in ("Llama", "Qwen3", "GPT-2", "Gemma-2", "Gemma-3"):
        plain = Case(model, 8, 1024)
        yield plain
        yield replace(plain, precision="fp32", size=4)
        yield replace(plain, levers="exact", budget="0.7x")
    yield Case("Llama eager", 8, 1024)
    yield Case("GPT-2 eager", 8, 1024)
    yield Case("Llama", 8, 1000)
    yield Case("GPT-2", 8, 1024, levers="rounding", budget="0.4x")
