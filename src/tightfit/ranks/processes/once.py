"""A result of one rank for all ranks of somebody else's loop, over the store through which they have met.

The loop owns its process group, and may use any backend. So nothing here is a collective: ranks read and write the
group's key-value store, which has no time-out while a rank plans and disturbs no message of the loop.
"""

import hashlib
import json
import logging
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import tightfit.errors as errors
from tightfit.errors import CannotFit, PeerFailed, RankError, TightfitError
from tightfit.ranks.processes.board import POLL_SECONDS, store_under
from tightfit.runtime.internals import default_group, store_of_default_group

MEETING_SECONDS = 600.0  # for the others to come to the same call: they may still load the model
_MEETINGS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of each process group, counted

logger = logging.getLogger(__name__)


def is_one_of_several() -> bool:
    """True if this process is a rank of a process group of several."""
    group = default_group()
    return group is not None and group.size() > 1


def is_first() -> bool:
    """True if this process speaks: rank 0 of a process group, or a process without one."""
    group = default_group()
    return group is None or group.rank() == 0


def found_once(what: str, facts: Mapping[str, str], work: Callable[[], str]) -> str:
    """The text that `work` returns on rank 0, on every rank of the default process group. All ranks call it alike.

    `facts` are what has to be equal on all ranks, each under its name. Raises `RankError` where one differs, or where a
    rank does not come; on every rank what `work` raises on rank 0. Only rank 0 shows an error that nobody catches.
    """
    group = default_group()
    number = _MEETINGS[group] = _MEETINGS.get(group, 0) + 1
    store, rank, size = store_under(f"tightfit/{what}/{number}", store_of_default_group()), group.rank(), group.size()
    try:
        _demand_same(store, what, facts, rank, size)
        return _first(store, work) if rank == 0 else _other(store, what)
    except TightfitError as error:
        if rank:
            show_nothing_of(error)
        raise


def _demand_same(store: Any, what: str, facts: Mapping[str, str], rank: int, size: int) -> None:
    """Raise `RankError` unless all ranks come, with the same facts."""
    store.set(f"facts/{rank}", json.dumps(dict(facts)))
    until = time.monotonic() + MEETING_SECONDS
    for other in range(size):
        if not _comes(store, f"facts/{other}", until):
            raise RankError(
                f"rank {other} has not asked for {what} within {MEETING_SECONDS:.0f} seconds: every rank makes the "
                "same call"
            )
    given = [json.loads(store.get(f"facts/{other}")) for other in range(size)]
    for name in facts:
        for other, its in enumerate(given):
            if its.get(name) != given[0].get(name):
                raise RankError(
                    f"rank {other} asks for {what} with another {name} than rank 0 ({its.get(name)}, not "
                    f"{given[0].get(name)}): give every rank the same"
                )


def _first(store: Any, work: Callable[[], str]) -> str:
    try:
        found = work()
    except BaseException as error:
        with suppress(RuntimeError):  # the store is gone: the others have ended
            store.set("found", json.dumps(_as_json(error)))
        raise
    store.set("found", json.dumps({"found": found, "digest": _digest(found)}))
    return found


def _other(store: Any, what: str) -> str:
    """Rank 0 may take hours. Where it is lost, its store is gone, or the launcher ends this process."""
    try:
        while not store.check(["found"]):
            time.sleep(POLL_SECONDS)
        said = json.loads(store.get("found"))
    except RuntimeError as error:
        raise RankError(f"rank 0 was lost while it made {what}: start all ranks again") from error
    if "found" not in said:
        raise _from_json(said)
    if _digest(said["found"]) != said["digest"]:
        raise RankError(f"what rank 0 sent as {what} arrived changed: start all ranks again")
    return said["found"]


def _comes(store: Any, key: str, until: float) -> bool:
    while not store.check([key]):
        if time.monotonic() > until:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _as_json(error: BaseException) -> dict[str, Any]:
    line = " ".join(str(error).split()) or type(error).__name__
    said: dict[str, Any] = {"error": type(error).__name__, "line": line}
    if isinstance(error, TightfitError):
        said["exit_code"] = error.exit_code
    if isinstance(error, CannotFit):
        said |= {"least_bytes": error.least_bytes, "taken_bytes": error.taken_bytes}
    return said


def _from_json(said: Mapping[str, Any]) -> TightfitError:
    """The error of rank 0, of the same class, so that a loop that catches it goes on alike on every rank."""
    kind = getattr(errors, said["error"], None)
    if kind is CannotFit:
        return CannotFit(said["line"], said["least_bytes"], said["taken_bytes"])
    if isinstance(kind, type) and issubclass(kind, TightfitError) and not issubclass(kind, RankError):
        return kind(said["line"])
    return PeerFailed(f"rank 0 ended: {said['error']}: {said['line']}", said.get("exit_code", 1))


def said_once(error: TightfitError) -> TightfitError:
    """An error that every rank raises. Where nobody catches it, only rank 0 shows it."""
    if not is_first():
        show_nothing_of(error)
    return error


def show_nothing_of(error: BaseException) -> None:
    """Where nobody catches this error, this process ends with it and writes nothing: rank 0 writes it."""
    shown = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        if value is not error:
            shown(kind, value, trace)

    sys.excepthook = show
