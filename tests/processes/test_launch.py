"""What a launcher says, and what several processes refuse before they meet."""

from pathlib import Path
from typing import Any

import pytest

from command_line import tightfit
from tightfit.errors import ConfigError, RankError
from tightfit.ranks.processes.launch import NAMES, launched
from tightfit.ranks.processes.ranks import Ranks
from tightfit.training.several import ranks_of

TORCHRUN = dict(zip(NAMES, ("1", "4", "1", "2", "10.0.0.1", "29500"), strict=True))


class OneOf(Ranks):
    """A rank that never meets the others."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size


def test_a_process_of_torchrun_knows_its_place():
    launch = launched({**TORCHRUN, "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert launch is not None
    assert (launch.rank, launch.size, launch.local_rank, launch.local_size) == (1, 4, 1, 2)
    assert (launch.address, launch.port, launch.run, launch.has_agent) == ("10.0.0.1", 29500, "job/2", False)


def test_a_process_without_a_launcher_is_alone():
    assert launched({name: "1" for name in NAMES if name != "LOCAL_RANK"}) is None


@pytest.mark.parametrize("wrong", [{"RANK": "4"}, {"WORLD_SIZE": "many"}, {"LOCAL_WORLD_SIZE": "8"}])
def test_an_environment_that_contradicts_itself_is_refused(wrong: dict[str, str]):
    with pytest.raises(RankError, match="start with torchrun"):
        launched({**TORCHRUN, **wrong})


@pytest.mark.parametrize(("count", "size"), [(5, 2), (1, 4), (8, 3), (0, 2)])
def test_shares_are_even_and_together_the_whole(count: int, size: int):
    shares = [OneOf(rank, size).share(count) for rank in range(size)]
    assert [thing for share in shares for thing in share] == list(range(count))
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1
    assert max(lengths) == OneOf(0, size).largest_share(count)


@pytest.mark.parametrize(
    ("settings", "place", "line"),
    [
        ({"parallel": "ddp"}, {}, "training.parallel is ddp, and this is one process"),
        ({"parallel": "fsdp2"}, {}, "training.parallel is fsdp2, and this is one process: start it with torchrun"),
        ({"step_in_backward": True, "grad_clip": None}, TORCHRUN, "before the gradients of 4 ranks are added up"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], place: dict[str, str], line: str
):
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=line):
        ranks_of(config(training=settings))


def test_one_process_of_torchrun_may_ask_for_ddp(monkeypatch: pytest.MonkeyPatch):
    for name, value in {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert not ranks_of(config(training={"parallel": "ddp"})).is_several


def test_parallel_without_torchrun_is_one_line(tmp_path: Path):
    path = tmp_path / "training.yaml"
    path.write_text("training: {parallel: ddp}\n")
    ended = tightfit("train", str(path))
    assert ended.code == 2
    assert "torchrun --nproc-per-node N -m tightfit train" in ended.err


def config(**sections: Any) -> Any:
    from tightfit.training.config import parse_config

    return parse_config(sections)
