"""Models that tests name on the command line as `models_by_name:FUNCTION`."""

import torch
from torch import nn

from tightfit.models.decoder import Decoder, DecoderConfig

VOCABULARY = 64


def decoder():
    """Two blocks, wide enough for recomputing to pay at a few dozen tokens."""
    return Decoder(
        DecoderConfig(hidden_size=32, num_layers=2, num_heads=2, vocab_size=VOCABULARY, max_position_embeddings=128)
    )


class Flat(nn.Module):
    """No repeated block."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids, labels):
        # Each token is asked for the next one: valid tokens are counted so where a batch is split.
        scores = self.head(self.embedding(input_ids[:, :-1]))
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten())


class Picky(Flat):
    """Refuses batches of more than two sequences."""

    def forward(self, input_ids, labels):
        if len(input_ids) > 2:
            raise ValueError("at most two at a time,\nplease")
        return super().forward(input_ids, labels)


class Wordy(Flat):
    """Gives an argument twice, which Python complains about with the text of the whole module: pages of layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({str(n): nn.Linear(2, 2)}) for n in range(60))

    def forward(self, input_ids, labels):
        given = {"input_ids": input_ids}
        return self(input_ids=input_ids, **given)


def image_model():
    """Takes no token ids: brings its own batch."""
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1), nn.Flatten(0), MeanSquare())
    return model, (torch.zeros(6, 8),)


class MeanSquare(nn.Module):
    def forward(self, x):
        return x.square().mean()


def without_embedding():
    return nn.Linear(3, 3)


def not_a_module():
    return {"layers": 3}


def broken():
    raise RuntimeError("the weights are lost")


a_number = 3
