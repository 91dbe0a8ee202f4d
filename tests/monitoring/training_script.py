"""A training script as people write them, small: the tests run it, unchanged, under the monitor."""

import argparse
import os
import signal
import sys

import torch
import training_script_data  # stands beside this file
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--debug", action="store_true")
parser.add_argument("--end", choices=("raise", "exit", "memory", "interrupt", "untrained"))
options = parser.parse_args()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary=100, width=32, layers=3):
        super().__init__()
        self.wte, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.h = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, ids, targets):
        x = self.wte(ids)
        for block in self.h:
            x = block(x)
        logits = self.head(x)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate():
    model.eval()
    _, loss = model(*training_script_data.batch())
    model.train()
    return loss.item()


def received(signum, frame):
    print("signal", signum)
    sys.exit(128 + signum)


if options.end == "interrupt":
    signal.signal(signal.SIGTERM, received)
torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
print("evaluated", evaluate())
for step in range(0 if options.end == "untrained" else options.steps):
    for _ in range(2):
        logits, loss = model(*training_script_data.batch())
        (loss / 2).backward()
    if step == 2 and options.end == "raise":
        raise ValueError("bad luck")
    if step == 2 and options.end == "exit":
        sys.exit(3)
    if step == 2 and options.end == "memory":
        torch.empty(10**15)
    if step == 2 and options.end == "interrupt":
        os.kill(os.getpid(), signal.SIGTERM)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print("loss", loss.item())
print(__name__, sys.argv[1:], options.debug)
