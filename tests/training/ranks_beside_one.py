"""A training on several ranks beside the same one in one process."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from forked_ranks import RanksEnded
from safetensors.torch import load_file

from tightfit.training.checkpoint.store import Checkpoints
from tightfit.training.checkpoint.stored import Checkpoint
from tightfit.training.config import Config


def lines(config: Config) -> list[dict[str, Any]]:
    path = Path(config.output.folder) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def at(config: Config, name: str) -> Config:
    """The same training in another folder."""
    folder = Path(config.output.folder).with_name(name)
    return config.model_copy(update={"output": config.output.model_copy(update={"folder": str(folder)})})


def assert_same(alone: Config, together: Config) -> None:
    """The same tokens, losses and norms at every step, and the same weights, within rounding."""
    expected, found = lines(alone), lines(together)
    assert [line["tokens"] for line in found] == [line["tokens"] for line in expected]
    for name in ("loss", "grad_norm"):
        torch.testing.assert_close(
            torch.tensor([line[name] for line in found]), torch.tensor([line[name] for line in expected]),
            rtol=1e-4, atol=1e-5,
        )  # fmt: skip
    weights = [load_file(Path(config.output.folder) / "model.safetensors") for config in (alone, together)]
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-4)


def newest(config: Config) -> Checkpoint:
    checkpoint = Checkpoints(Path(config.output.folder) / "checkpoints").newest_intact().checkpoint
    assert checkpoint is not None
    return checkpoint


def corrections(config: Config, rank: int = 0) -> dict[str, Any]:
    return newest(config).record["corrections"][rank]


def assert_equal(found: Config, expected: Config) -> None:
    """To the last bit: losses and norms, weights, and the last checkpoint with the optimizer's and random states."""
    same = ("step", "loss", "learning_rate", "grad_norm", "tokens")
    steps = [[[line[name] for name in same] for line in lines(each)] for each in (found, expected)]
    assert steps[0] == steps[1]
    weights = [load_file(Path(each.output.folder) / "model.safetensors") for each in (found, expected)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
    last = [newest(each) for each in (found, expected)]
    assert last[0].digests == last[1].digests
    assert last[0].record["random"] == last[1].record["random"]


def assert_one_line(ended: RanksEnded, killed: int) -> None:
    """The other rank ends with exit code 2 and one line; one that had all its work done may end as if nothing were."""
    other = ended.codes[1 - killed]
    assert other in (0, 2), (ended.codes, ended.said)
    if other == 2:
        assert re.fullmatch(rf"error: rank {1 - killed} has lost another rank.*\n", ended.said), ended.said
