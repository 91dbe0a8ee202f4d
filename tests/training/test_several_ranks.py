"""A training in several real processes is the training of one: tokens, means, files, ends."""

import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_trainings import Nursery
from ranks_beside_one import assert_one_line, assert_same, at, lines
from safetensors.torch import load_file
from tiny_training import settings

from tightfit.training.checkpoint.store import Checkpoints
from tightfit.training.config import Config

SEED, MOMENTS = 18, 20


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as forked:
        yield forked


def training(folder: Path, **sections: dict[str, Any]) -> Config:
    """Rows of unlike length, and one more than ranks can share evenly."""
    model = {"hidden_size": 16, "num_layers": 1, **sections.get("model", {})}
    data = {"sequence_length": 32, "buckets": True, **sections.get("data", {})}
    steps = {"max_steps": 4, "batch_size": 5, "log_every": 1, **sections.get("training", {})}
    return settings(
        folder, model=model, data=data, training=steps, memory=sections.get("memory", {}),
        checkpoint={"every_steps": 2, **sections.get("checkpoint", {})},
    )  # fmt: skip


CASES: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "fifty steps": (4, {"training": {"max_steps": 50, "batch_size": 6}}),
    "fifty steps on two": (2, {"training": {"max_steps": 50, "batch_size": 6}}),
    "a rank without samples": (2, {"training": {"batch_size": 1}}),
    "three ranks without samples": (4, {"training": {"batch_size": 1}}),
    "several micro-batches": (2, {"training": {"batch_size": 8, "gradient_accumulation_steps": 4}}),
    "no clipping": (2, {"training": {"grad_clip": None}}),
    "muon": (2, {"training": {"optimizer": "muon"}}),
    "packed rows": (2, {"data": {"buckets": False, "packing": "best_fit"}}),
}


@pytest.mark.keeps("ranks-see-tokens-process")
@pytest.mark.slow  # two trainings a case
@pytest.mark.parametrize("case", CASES)
def test_ranks_train_as_one_process_does(nursery: Nursery, tmp_path: Path, case: str):
    count, sections = CASES[case]
    config = training(tmp_path, **sections)
    assert nursery.train(config).code == 0
    together = at(config, "together")
    ended = nursery.train_ranks(together, count)
    assert (ended.codes, ended.said) == ([0] * count, "")
    if config.training.grad_clip is None:
        assert all(line["grad_norm"] is None for line in lines(together))
        return
    assert_same(config, together)


@pytest.mark.keeps("training-goes-2-then")
@pytest.mark.slow  # four trainings
def test_a_training_goes_on_with_other_numbers_of_ranks_and_sees_each_token_once(nursery: Nursery, tmp_path: Path):
    config = training(tmp_path, training={"max_steps": 12})
    assert nursery.train(config).code == 0
    together = at(config, "together")
    for steps, count in ((4, 2), (8, 4), (12, 1)):
        ended = nursery.train_ranks(
            together, count, "--resume", f"training.max_steps={steps}", "training.schedule=constant"
        )
        assert ended.codes == [0] * count, ended.said
    found = lines(together)
    assert [line["step"] for line in found] == list(range(1, 13))
    assert [line["tokens"] for line in found] == [line["tokens"] for line in lines(config)]


@pytest.mark.keeps("rank-killed-moment-other")
@pytest.mark.slow  # two trainings a moment
def test_a_rank_killed_at_any_moment_changes_nothing_of_the_resumed_training(nursery: Nursery, tmp_path: Path):
    config = training(tmp_path, model={"dropout": 0.1}, training={"max_steps": 20, "rank_timeout": 30})
    run = Path(config.output.folder)
    whole = nursery.train_ranks(config, 2)
    assert whole.codes == [0, 0], whole.said
    expected = load_file(run / "model.safetensors")
    tokens = [line["tokens"] for line in lines(config)]
    shutil.rmtree(run)
    chance = random.Random(SEED)
    for moment in range(MOMENTS):
        after = chance.random() * whole.seconds
        ended = nursery.train_ranks(config, 2, kill=moment % 2, after=after)
        if any(ended.codes):
            assert_one_line(ended, moment % 2)
        again = nursery.train_ranks(config, 2, resume=True)
        assert again.codes == [0, 0], again.said
        assert [line["tokens"] for line in lines(config)] == tokens
        found = load_file(run / "model.safetensors")
        assert all(torch.equal(found[name], expected[name]) for name in expected), (moment, after)
        shutil.rmtree(run)


@pytest.mark.keeps("signal-rank-ends-ranks")
@pytest.mark.slow  # two trainings for each signal
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_ends_all_with_a_checkpoint(nursery: Nursery, tmp_path: Path, rank: int):
    config = training(tmp_path, training={"max_steps": 100_000}, checkpoint={"every_steps": None})
    ended = nursery.train_ranks(config, 2, kill=rank, by=signal.SIGTERM, after=4.0)
    assert ended.codes == [128 + signal.SIGTERM] * 2, ended.said
    assert ended.said == ""
    made = len(lines(config))
    checkpoint = Checkpoints(Path(config.output.folder) / "checkpoints").newest_intact().checkpoint
    assert checkpoint is not None
    assert checkpoint.step == made
    ended = nursery.train_ranks(config, 2, "--resume", f"training.max_steps={made + 2}")
    assert ended.codes == [0, 0], ended.said
    assert len(lines(config)) == made + 2


@pytest.mark.keeps("mistake-reported-rank-line")
@pytest.mark.slow  # a process for each
@pytest.mark.parametrize(
    ("words", "line", "code"),
    [
        (("training.nonsense=1",), "unknown key training.nonsense", 2),
        (("training.step_in_backward=true", "training.grad_clip=null"), "before the gradients of 2 ranks", 2),
        (("--nonsense",), "no such option", 2),
        (("data.source=/nowhere.txt", "output.folder=/proc/nowhere"), "/proc/nowhere: cannot be written", 2),
    ],
)
def test_a_mistake_is_one_line_of_one_rank(
    nursery: Nursery, tmp_path: Path, words: tuple[str, ...], line: str, code: int
):
    ended = nursery.train_ranks(training(tmp_path), 2, *words)
    assert ended.codes == [code, code]
    assert ended.said.count("\n") == 1, ended.said
    assert line in ended.said
