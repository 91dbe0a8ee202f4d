"""Models whose blocks hold checkpoints of PyTorch's: reentrant ones, and those with a policy of their own."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tightfit import estimate, plan
from tightfit.errors import CannotFit
from tiny import allocator_peak, token_batch

BATCH = token_batch(8, 128)
CLASSES = 32


def keep_products(_context, operator, *_arguments, **_named):
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS = {
    "selective": partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, keep_products),
    ),
    "reentrant": partial(checkpoint, use_reentrant=True),
}


class Block(nn.Module):
    """Its feed-forward is checkpointed by the model's own code, with dropout inside; what comes before is not."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.checkpoint = CHECKPOINTS[way]
        self.mix, self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.norm, self.dropout = nn.LayerNorm(64), nn.Dropout(0.1)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.mix(x))
        return x + self.checkpoint(self.feed_forward, x)


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(600, 64)
        self.blocks = nn.ModuleList(Block(way) for _ in range(6))
        self.head = nn.Linear(64, CLASSES)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten() % CLASSES)


def numbers(model: nn.Module) -> list[torch.Tensor]:
    """Loss and gradients of a step on a fixed seed."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(**BATCH)
    loss.backward()
    found = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


def least(way: str) -> int:
    with pytest.raises(CannotFit) as caught:
        plan(Model(way), BATCH, 1000, levers=("recompute",))
    return caught.value.least_bytes


@pytest.mark.parametrize("way", CHECKPOINTS)
def test_an_estimate_is_what_the_allocator_records(way):
    assert estimate(Model(way), BATCH).peak_bytes == allocator_peak(Model(way), BATCH)


@pytest.mark.keeps("blocks-own-reentrant-selective")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", CHECKPOINTS)
@pytest.mark.parametrize("budget", ["0.9x", "least"])
def test_a_plan_takes_what_it_says_and_changes_no_bit(way, budget):
    model = Model(way)
    planned = plan(model, BATCH, least(way) if budget == "least" else budget, levers=("recompute",))
    assert any(choice.action != "keep" for choice in planned.choices)
    with planned.apply(model):
        found = numbers(model)
        real = allocator_peak(model, BATCH)
    assert real == planned.peak_bytes <= planned.budget_bytes
    assert all(map(torch.equal, found, numbers(Model(way))))
    assert len(found) == 1 + sum(1 for _ in model.parameters())


def test_a_budget_below_what_they_keep_is_refused_with_the_least():
    with pytest.raises(CannotFit, match="the least is"):
        plan(Model("selective"), BATCH, "0.6x", levers=("recompute",))
