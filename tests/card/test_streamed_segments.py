"""The segments of CUDA's allocator that a step with streamed blocks takes are the predicted ones."""

import json
import os
import subprocess
import sys

import torch
from torch import nn

import tightfit


class Wide(nn.Module):
    """Frozen blocks of weights of several sizes, and a trained head whose gradient needs a segment of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(1024, 3072), nn.GELU(), nn.Linear(3072, 1024)) for _ in range(8)
        )
        self.layers.requires_grad_(False)
        self.first, self.head = nn.Linear(1024, 1024), nn.Linear(1024, 24576)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def reserved():
    """Predicted and measured bytes, in a process that has reserved none before."""
    model, batch = Wide(), (torch.randn(1024, 1024, device="cuda"),)
    tightfit.stream(model, "layers.*", device="cuda")
    found = tightfit.estimate(model, batch, loss=lambda model, batch: model(*batch), optimizer="sgd", device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found.reserved_bytes, torch.cuda.max_memory_reserved()


def test_a_step_reserves_what_was_predicted():
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    predicted, measured = json.loads(done.stdout.splitlines()[-1])
    assert measured == predicted


if __name__ == "__main__":
    print(json.dumps(reserved()), flush=True)
    # On a busy machine autograd's thread of the card may not have let go of the last backward's context yet, a Python
    # object: PyTorch then ends the process by SIGABRT while Python finalizes.
    os._exit(0)
