"""A small training whose every part can be chosen: what optimizers are compared on."""

import copy
import io

import torch
from torch import nn

STEPS = 50


class Net(nn.Module):
    """Matrices, vectors, an embedding and a parameter that only some batches reach."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(31, 13)
        self.first, self.second, self.rare = nn.Linear(13, 17), nn.Linear(17, 5), nn.Linear(17, 5)
        self.norm = nn.LayerNorm(17)

    def forward(self, ids):
        hidden = self.norm(self.first(self.embedding(ids)).tanh())
        return self.rare(hidden) if ids[0, 0] % 3 == 0 else self.second(hidden)


def net(dtype=torch.float32):
    torch.manual_seed(3)
    return Net().to(dtype)


def batches(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 31, (4, 6), generator=generator) for _ in range(count)]


def loss_of(model, ids):
    return (model(ids).float() ** 2).mean() * 10


def clip(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def train(model, optimizer, *, steps=STEPS, micro_batches=1, clipping=None, scheduler=None, scaler=None, seed=0):
    """Steps of an ordinary loop; returns the norms that clipping saw."""
    norms = []
    for ids in batches(steps, seed):
        for part in ids.chunk(micro_batches):
            loss = loss_of(model, part)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clipping is not None:
            norms.append(clipping(model))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    return norms


def grouped(model):
    """Two groups with settings of their own, as trainers make them."""
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


def assert_same_weights(one, other):
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs.to(mine.dtype)), f"{name} differs by {(mine - theirs).abs().max()}"


def resumed_equals_uninterrupted(build, make_model=net, first=5, second=5):
    """Train, save, load into a new optimizer over a copy of the model, go on: the same weights, bit for bit."""
    model = make_model()
    optimizer = build(model)
    train(model, optimizer, steps=first)
    copied = copy.deepcopy(model)
    loaded = build(copied)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file))
    train(model, optimizer, steps=second, seed=1)
    train(copied, loaded, steps=second, seed=1)
    assert_same_weights(model, copied)
