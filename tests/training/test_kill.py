"""A training that is killed and resumed ends as the one that never was: real processes, real SIGKILL."""

import json
import random
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from forked_trainings import Nursery, final_state
from ranks_beside_one import assert_one_line, assert_same, at
from real_trainings import STEPS as ENDLESS
from real_trainings import first_step, written
from tiny_training import settings

from command_line import tightfit
from tightfit.models.saving import load_model
from tightfit.training.checkpoint.store import Checkpoints
from tightfit.training.config import Config
from tightfit.training.lock import LOCK

SEED, MOMENTS, RESUMES = 14, 200, 50
STEPS = 10


def training(folder: Path, **sections: dict[str, Any]) -> Config:
    """One that draws random numbers, accumulates gradients and comes to its second epoch."""
    shape = {"hidden_size": 16, "num_layers": 1, "dropout": 0.1, "max_position_embeddings": 16}
    data = {"sequence_length": 16, "max_documents": 20}
    steps = {"max_steps": STEPS, "batch_size": 4, "gradient_accumulation_steps": 2, "log_every": 2}
    return settings(
        folder,
        model={**shape, **sections.get("model", {})},
        data={**data, **sections.get("data", {})},
        training={**steps, **sections.get("training", {})},
        memory=sections.get("memory", {}),
        checkpoint={"every_steps": 3, **sections.get("checkpoint", {})},
    )


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as forked:
        yield forked


class Killed:
    """The same training again and again, each time killed elsewhere."""

    def __init__(self, nursery: Nursery, config: Config):
        self.nursery, self.config = nursery, config
        self.run = Path(config.output.folder)
        whole = nursery.train(config)
        assert whole.code == 0
        self.calls, self.seconds = whole.calls, whole.seconds
        self.expected = final_state(self.run)
        shutil.rmtree(self.run)

    def ends_the_same(self, **moment: Any) -> None:
        """Kill once, resume to the end, and compare."""
        self.nursery.train(self.config, **moment)
        assert self.nursery.train(self.config, resume=True).code == 0
        self.is_the_same(moment)

    def is_the_same(self, moment: Any) -> None:
        found = final_state(self.run)
        different = [name for name in self.expected if found[name] != self.expected[name]]
        assert not different, f"killed {moment}: {different}"
        shutil.rmtree(self.run)


def moments(killed: Killed, count: int) -> Iterator[dict[str, Any]]:
    """Half of them somewhere in the training, half of them before a system call that writes."""
    chance = random.Random(SEED)
    for number in range(count):
        if number % 2:
            yield {"at_call": chance.randrange(killed.calls)}
        else:
            yield {"after": chance.random() * killed.seconds}


def resumed_again_and_again(killed: Killed, count: int) -> None:
    """One training, killed and resumed so many times before it is left alone."""
    chance = random.Random(SEED)
    for number in range(count):
        config = killed.config
        ended = killed.nursery.train(config, resume=number > 0, at_call=chance.randrange(killed.calls // 4))
        if ended.code == 0:
            break
    assert killed.nursery.train(killed.config, resume=True).code == 0
    killed.is_the_same(f"{count} times in a row")


def finished(run: Path) -> dict:
    """What a training that was ended early left: a whole run."""
    load_model(run)
    assert not (run / LOCK).exists()
    result = json.loads((run / "result.json").read_text())
    assert result["interrupted"]
    checkpoint = Checkpoints(run / "checkpoints").newest_intact().checkpoint
    assert checkpoint is not None
    assert checkpoint.step == result["steps"]
    return result


@pytest.mark.keeps("ctrl-c-sigterm-sighup", "folder-holds-training-time")
def test_sigterm_keeps_what_is_done_and_no_other_training_writes_there_before(nursery: Nursery, tmp_path: Path):
    config, run = training(tmp_path, training={"max_steps": ENDLESS, "log_every": 1}), tmp_path / "run"
    nursery.begin(config)

    def alive() -> None:
        assert nursery.is_there()
        time.sleep(0.02)

    first_step(run, alive)

    second = tightfit("train", written(tmp_path), "output.overwrite=true")
    assert (second.code, second.out) == (2, "")
    process = psutil.Process(
        int(re.search(rf"{run}: another training is writing here \(process (\d+) on ", second.error)[1])
    )
    assert process.parent().parent() == psutil.Process()

    process.send_signal(signal.SIGTERM)

    assert nursery.ended().code == 128 + signal.SIGTERM
    said = (tmp_path / "said.txt").read_text()
    assert "peak memory" in said
    assert "Traceback" not in said
    finished(run)


@pytest.mark.keeps("training-killed-sigkill-random")
def test_a_training_killed_at_some_moments_ends_as_if_it_had_not_been(nursery: Nursery, tmp_path: Path):
    killed = Killed(nursery, training(tmp_path))
    for moment in moments(killed, 2):
        killed.ends_the_same(**moment)
    resumed_again_and_again(killed, 2)


@pytest.mark.keeps("ranks-see-tokens-process")
def test_two_ranks_of_which_one_is_killed_train_as_one_process_does(nursery: Nursery, tmp_path: Path):
    """With rows of unlike length, and one more than the ranks can share evenly."""
    steps = {"batch_size": 5, "gradient_accumulation_steps": 1, "max_steps": 6, "log_every": 1}
    config = training(tmp_path, model={"dropout": 0.0}, data={"buckets": True}, training=steps)
    assert nursery.train(config).code == 0
    together = at(config, "together")
    ended = nursery.train_ranks(together, 2, kill=1, after=0.8)
    assert_one_line(ended, 1)
    ended = nursery.train_ranks(together, 2, resume=True)
    assert (ended.codes, ended.said) == ([0, 0], "")
    assert_same(config, together)
    checkpoint = Checkpoints(Path(together.output.folder) / "checkpoints").newest_intact().checkpoint
    assert checkpoint is not None
    assert not torch.equal(checkpoint.read("random.rank1.cpu"), checkpoint.read("random.cpu"))


def with_everything(folder: Path, *, in_background: bool = False) -> Config:
    """Packing and a plan too."""
    data = {"packing": "best_fit"}
    budget = "1.5x" if in_background else "0.9x"  # the copy is as large as half of such a small training
    return training(folder, data=data, memory={"budget": budget, "levers": "exact", "max_slowdown": None},
                    checkpoint={"in_background": in_background})  # fmt: skip


def with_buckets(folder: Path) -> Config:
    """Batches of alike length, sized by their predicted bytes."""
    return training(folder, data={"buckets": True})


CASES = {
    "packed and planned": with_everything,
    "in the background": lambda folder: with_everything(folder, in_background=True),
    "in buckets": with_buckets,
}


@pytest.mark.keeps("training-killed-sigkill-random")
@pytest.mark.slow  # two trainings a moment
@pytest.mark.parametrize("case", CASES)
def test_a_training_killed_at_any_moment_ends_as_if_it_had_not_been(nursery: Nursery, tmp_path: Path, case: str):
    killed = Killed(nursery, CASES[case](tmp_path))
    for moment in moments(killed, MOMENTS // len(CASES) + 1):
        killed.ends_the_same(**moment)


@pytest.mark.keeps("training-killed-sigkill-random")
@pytest.mark.slow  # a training in fifty pieces
def test_a_training_killed_and_resumed_fifty_times_ends_as_if_it_had_not_been(nursery: Nursery, tmp_path: Path):
    killed = Killed(nursery, with_everything(tmp_path))
    resumed_again_and_again(killed, RESUMES)
