"""How long the rank that reports an error waits for the others."""

import pytest

from tightfit.errors import CannotFit, RankError
from tightfit.ranks.processes import board, ending
from tightfit.ranks.processes.launch import Launch
from tightfit.ranks.processes.ranks import SeveralRanks


class Board:
    """A board of a run in which nobody has spoken."""

    def __init__(self, *launched):
        self.waited = []

    def is_first_to_speak(self):
        return True

    def meet_at_the_end(self, seconds, report_seconds, *, reports):
        self.waited.append(seconds)


def in_a_message():
    """The error of a rank that fails where the others wait for what it sends."""
    with pytest.raises(CannotFit) as raised, SeveralRanks.talking(object.__new__(SeveralRanks)):
        raise CannotFit("step 3: rank 1 is out of memory", 1)
    return raised.value


@pytest.mark.keeps("out-memory-recovered-memory")
@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (CannotFit("a plan cannot be made", 1), ending.MEETING_SECONDS),
        (RankError("rank 1 was lost"), ending.SHORTLY),
        (in_a_message(), ending.SHORTLY),
    ],
    ids=["any other", "lost", "in a message"],
)
def test_nobody_is_waited_for_long_who_cannot_come(monkeypatch, error, seconds):
    made, said = Board(), []
    monkeypatch.setattr(board, "Board", lambda *launched: made)
    launch = Launch(rank=1, size=2, local_rank=1, local_size=2, address="127.0.0.1", port=1, run="x", has_agent=True)
    ending.report_once(launch, error, lambda: said.append(str(error)))
    assert (said, made.waited) == ([str(error)], [seconds])
