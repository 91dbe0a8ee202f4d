"""Forwards that run inside backward: two-pass contrastive losses, models that checkpoint themselves as a whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.utils.checkpoint import checkpoint

import tightfit
from tightfit.errors import CannotFit
from tiny import allocator_peak

PIECES = 2


class Encoder(nn.Module):
    """Vectors (B, 64) of rows (B, T, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.mean(1)


class Checkpointed(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        found: Any = checkpoint(super().forward, x, use_reentrant=False)
        return found


def gradients_of_vectors(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, list[list[Tensor]]]:
    """The first pass: the loss of all pairs, and its gradients for each piece's vectors."""
    with torch.no_grad():
        pieces = [[model(piece) for piece in batch[name].chunk(PIECES)] for name in ("a", "b")]
    with torch.enable_grad():
        vectors = [torch.cat(side).requires_grad_() for side in pieces]
        loss = F.cross_entropy(vectors[0] @ vectors[1].T, torch.arange(len(vectors[0])))
        found = torch.autograd.grad(loss, vectors)
    return loss.detach(), [list(gradient.chunk(PIECES)) for gradient in found]


def grad_cache(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """GradCache (Gao et al. 2021) as sentence-transformers has it: the second pass runs in a hook of the loss."""
    loss, gradients = gradients_of_vectors(model, batch)

    def second_pass(outer: Tensor) -> None:
        with torch.enable_grad():
            for name, of_side in zip(("a", "b"), gradients, strict=True):
                for piece, gradient in zip(batch[name].chunk(PIECES), of_side, strict=True):
                    (torch.dot(model(piece).flatten(), gradient.flatten()) * outer).backward()

    loss.requires_grad_().register_hook(second_pass)
    return loss


def surrogate(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A two-pass loss whose second pass is a forward with the vectors' gradients as weights."""
    loss, gradients = gradients_of_vectors(model, batch)
    parts = [
        (model(piece) * gradient).sum()
        for name, of_side in zip(("a", "b"), gradients, strict=True)
        for piece, gradient in zip(batch[name].chunk(PIECES), of_side, strict=True)
    ]
    total = torch.stack(parts).sum()
    return total - total.detach() + loss


def squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["a"]).square().mean()


def of_samples(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return vmap(lambda row: model(row[None])[0])(batch["a"]).square().mean()


def made(kind: type[Encoder]) -> tuple[Encoder, dict[str, Tensor]]:
    torch.manual_seed(0)
    return kind(), {"a": torch.randn(8, 16, 64), "b": torch.randn(8, 16, 64)}


KINDS = {
    "a hook of the loss": (Encoder, grad_cache),
    "a surrogate": (Encoder, surrogate),
    "a whole model checkpointed": (Checkpointed, squares),
}


@pytest.mark.sampled(3)
@pytest.mark.keeps("forwards-inside-backward")
@pytest.mark.parametrize(("kind", "loss"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("blocks", [None, "layers.*"])
def test_blocks_of_forwards_inside_backward_are_found_and_recomputed(
    kind: type[Encoder], loss: Callable[..., Tensor], blocks: str | None
):
    model, batch = made(kind)
    plain = tightfit.estimate(model, batch, loss=loss)
    assert plain.peak_bytes == allocator_peak(model, batch, loss=loss)
    plan = tightfit.plan(model, batch, "0.95x", loss=loss, levers="exact", blocks=blocks)
    assert [str(lever) for lever in plan.levers] == ["recompute"]
    assert tightfit.verify(model, batch, plan, loss=loss).ok
    with plan.apply(model):
        assert allocator_peak(model, batch, loss=loss) == plan.peak_bytes


@pytest.mark.keeps("forwards-inside-backward")
def test_a_model_under_vmap_is_predicted_and_what_cannot_be_recomputed_there_is_one_line():
    model, batch = made(Encoder)
    plain = tightfit.estimate(model, batch, loss=of_samples)
    assert plain.peak_bytes == allocator_peak(model, batch, loss=of_samples)
    with pytest.raises(CannotFit) as caught:
        tightfit.plan(model, batch, "0.5x", loss=of_samples, levers="exact")
    assert "\n" not in str(caught.value)


@pytest.mark.keeps("forwards-inside-backward")
def test_a_planned_model_under_vmap_has_the_bits_of_the_plain_one():
    model, batch = made(Encoder)
    plan = tightfit.plan(model, batch, "0.95x", loss=squares, levers="exact")
    plain, found = vmap(model)(batch["a"][:, None]), None
    plain.square().sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    with plan.apply(model):
        found = vmap(model)(batch["a"][:, None])
        found.square().sum().backward()
    assert torch.equal(found, plain)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert gradient is not None
        assert torch.equal(parameter.grad, gradient)
