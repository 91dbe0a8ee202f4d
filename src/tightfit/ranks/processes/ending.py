"""How a command ends that runs in several processes: one of them reports the error, and all end with one exit code."""

from collections.abc import Callable

from tightfit.errors import PeerFailed, RankError
from tightfit.ranks.processes.launch import Launch

MEETING_SECONDS = 30.0  # for the others to come to the same end: they may still be importing torch
SHORTLY = 1.0  # where they do not come: one is lost, or all wait for a message of this process
REPORT_SECONDS = 600.0  # for the one that reports: ways out are run dry

_OTHERS_WAIT = "others_wait"


def leave_others(error: BaseException) -> None:
    """Note on an error that the other ranks wait for a message of this one, in code that sees nothing else: only the
    end of this process ends their wait.
    """
    setattr(error, _OTHERS_WAIT, True)


def report_once(launch: Launch, error: BaseException, report: Callable[[], None]) -> None:
    """Let one rank report an error that ends the command. Returns when all ranks are at their end, or take too long: a
    launcher ends the others when the first one is gone.
    """
    from tightfit.ranks.processes.board import Board  # with torch: a command that fails early has not imported it

    nobody_comes = type(error) is RankError or getattr(error, _OTHERS_WAIT, False)
    try:
        board = Board(launch, MEETING_SECONDS)
        reports = not isinstance(error, PeerFailed) and board.is_first_to_speak()
    except (RankError, RuntimeError):  # the store is gone with its rank
        if launch.rank == 0 or type(error) is RankError:
            report()
        return
    if reports:
        report()
    try:
        board.meet_at_the_end(SHORTLY if nobody_comes else MEETING_SECONDS, REPORT_SECONDS, reports=reports)
    except RuntimeError:
        return  # the store is gone: the others have ended
