"""A tiny teacher with random weights, and distillations from it."""

from pathlib import Path
from typing import Any

import torch

from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.models.saving import save_model
from tightfit.training.config import Config, parse_config
from tightfit.training.data.tokenizer import train_tokenizer

VOCABULARY, LENGTH = 300, 32
LINES = [f"{name} number {i} has {i * 7 % 31} doors.\n" for i in range(40) for name in ("House", "Mill", "Tower")]
SHAPE = {"num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}


def decoder(width: int, seed: int = 0, **settings: Any) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(DecoderConfig(**{**SHAPE, "hidden_size": width, **settings}))


def write_teacher(folder: Path, *, seed: int = 0, lines: list[str] = LINES, **settings: Any) -> Path:
    """A folder as a finished run leaves it: weights, config, tokenizer. Its logits are far from even."""
    model = decoder(48, seed, **settings)
    with torch.no_grad():
        model.head.weight.mul_(20)
    save_model(model, folder)
    train_tokenizer(lines, VOCABULARY).save(folder)
    return folder


def settings(folder: Path, teacher: Path, **sections: dict[str, Any]) -> Config:
    """A distillation of a decoder of width 32 in `folder`/run."""
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(LINES))
    defaults: dict[str, dict[str, Any]] = {
        "model": {**SHAPE, "hidden_size": 32},
        "data": {"source": str(corpus), "sequence_length": LENGTH, "tokenizer": str(teacher)},
        "training": {"max_steps": 2, "batch_size": 8, "learning_rate": 1e-2, "device": "cpu", "num_threads": 1},
        "memory": {},
        "checkpoint": {},
        "output": {"folder": str(folder / "run"), "overwrite": True},
        "distil": {"teacher": str(teacher), "teacher_dtype": "fp32"},
    }
    return parse_config({name: {**values, **sections.get(name, {})} for name, values in defaults.items()})
