"""Small real models and steps that many tests use."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tightfit
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.memory.allocator import measured_peak
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.optim.by_name import build_optimizer
from tightfit.step import Loss, StepSettings, TokenBatch, forward_backward, model_loss, update
from tightfit.training.loop import resident_tensors

VOCABULARY = 600


class Stack(nn.Module):
    """Blocks, one after another."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def decoder(**settings: Any) -> Decoder:
    """A decoder of some 100k parameters whose activations outweigh them, on a fixed seed."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "vocab_size": VOCABULARY}
    return Decoder(DecoderConfig(**{**sizes, "max_position_embeddings": 512, **settings}))


def token_batch(size: int = 4, length: int = 96) -> dict[str, torch.Tensor]:
    return TokenBatch(size, length, VOCABULARY).tensors()


def allocator_peak(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss = model_loss,
    optimizer: Any = "adamw",
    settings: StepSettings | None = None,
    micro_batches: int = 1,
    applied: Callable[[], Any] | None = None,
) -> int:
    """Peak of the second real step, as the CPU allocator itself recorded it."""
    settings = settings or StepSettings()
    parts = as_parts(split_batch(batch, micro_batches), loss)
    real = build_optimizer(optimizer, model.parameters())

    def step() -> None:
        forward_backward(model, parts, loss, settings.precision)
        update(model, real, settings)

    step()
    return measured_peak(step, resident_tensors(model, real, [part.batch for part in parts], loss))


def demand_exact_plan(model: nn.Module, batch: Any, budget: str) -> None:
    """A plan with exact levers is within its budget, takes what it says, and changes no bit."""
    made = tightfit.plan(model, batch, budget, levers="exact")
    assert tightfit.verify(model, batch, made).ok
    with made.apply(model):
        assert allocator_peak(model, batch) == pytest.approx(made.peak_bytes, rel=1e-3)
    assert made.peak_bytes <= made.budget_bytes
