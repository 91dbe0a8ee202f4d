"""Commands in several processes, which torchrun starts: `train` shares its work, and one process speaks for all."""

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from tightfit.errors import InputError, RankError
from tightfit.ranks.processes.launch import launched

ALLOWED = ("train", "profile", "doctor", "minimind")  # the last three run scripts of the user's, in each process


def ranks_started() -> int:
    """How many processes were started together with this one, which is counted; 1 where its environment is wrong."""
    try:
        found = launched()
    except RankError:
        return 1
    return 1 if found is None else found.size


def is_silent() -> bool:
    """True if another process speaks for this one."""
    found = launched()
    return found is not None and found.rank > 0


def refuse_several(command: str) -> None:
    """Raise `InputError` where torchrun has started several processes of a command that is one."""
    if command and command not in ALLOWED and (count := ranks_started()) > 1:
        raise InputError(f"torchrun started {count} processes, and tightfit {command} runs in one: start it by itself")


def report_and_end(error: BaseException, report: Callable[[], None], exit_code: int) -> None:
    """Report an error that ends the command. Of several processes one does, and all end here with the exit code."""
    found = launched() if ranks_started() > 1 else None
    if found is None:
        report()
        return
    from tightfit.ranks.processes.ending import report_once

    # torchrun sends it to those that are slower to end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    report_once(found, error, report)
    _end_at_once(exit_code)


def _end_at_once(exit_code: int) -> NoReturn:
    """Without what Python takes apart, where a collective that was left behind would be waited for."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            continue  # nobody reads any more
    os._exit(exit_code)
