"""The memory of the host that CUDA's libraries take, measured (`libraries.toml`)."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import torch


def library_bytes() -> int:
    """Bytes that a training on a card adds to this process: none where it has CUDA started.

    Where PyTorch's build has no CUDA, the training will run with one that has.
    """
    if torch.cuda.is_initialized():
        return 0
    figures = _figures()
    return figures["steps_bytes"] + (figures["build_bytes"] if torch.version.cuda is None else 0)


@cache
def _figures() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "libraries.toml").read_text("utf-8"))
