"""A stack of frozen blocks with trained low-rank parts, in each base that frozen weights have."""

import torch
from torch import nn

from tightfit.ops.weights.low_bit import freeze_in_low_bits

WIDTH, BLOCKS = 64, 6
KINDS = ["fp32", "bf16", "int8", "nf4"]


class Adapted(nn.Module):
    """A frozen feed-forward with a trained low-rank part and dropout."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.one, self.two = nn.Parameter(torch.randn(WIDTH, 4)), nn.Parameter(torch.randn(4, WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(x)))) + x @ self.one @ self.two


def built(kind="fp32"):
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList([Adapted() for _ in range(BLOCKS)]), "head": nn.Linear(WIDTH, 8)})
    trained = [p for layer in model["layers"] for p in (layer.one, layer.two)] + list(model["head"].parameters())
    if kind in ("int8", "nf4"):
        freeze_in_low_bits(model, kind, head=model["head"])
    model.requires_grad_(False)
    if kind == "bf16":
        model.to(torch.bfloat16)
    for parameter in trained:
        parameter.requires_grad_(True)
    return model, torch.randn(4, 8, WIDTH, dtype=trained[0].dtype).requires_grad_()


def through(model, x):
    for layer in model["layers"]:
        x = layer(x)
    return model["head"](x)


def loss(model, x):
    return through(model, x).float().square().sum()


def of_batch(model, batch):
    """The loss of a batch, as plans take it."""
    return loss(model, batch["x"])
