"""What a command that only asks may leave out."""

import atexit
import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from tightfit.cli.question import Question
from tightfit.errors import CannotFit, TightfitError
from tightfit.names import QUANTISED_FILE

NEED_A_TRACER = ("compile", "capture")  # levers that need PyTorch's compiler, or its tracers
COMPILED = ("adamw8bit", "adamw4bit")  # optimizers whose packages compile code of theirs when they are imported
ALL_LOADED = "TIGHTFIT_ALL_LOADED"  # set in the environment of a command that was started again
# The collector of cycles begins at 700 new objects. An import makes hundreds of thousands, and next to no garbage.
SELDOM = (100_000, 20, 100)
_alone: list[bool] = []  # not empty where this process was started to run one command
_answered: list[bool] = []  # not empty where that command was a question, and dry runs have answered it


def this_process_is_ours() -> None:
    """Called by the entry point: nothing runs here after the command."""
    _alone.append(True)


@contextmanager
def answering(question: Question) -> Iterator[None]:
    """For a question that is answered by dry runs: packages that those do not need are left out (`deferred`). Where one
    was needed after all, the command starts again with all of them. The answer is shown outside, so it is shown once.
    """
    if not may_defer(question):
        yield
        return
    often = gc.get_threshold()
    gc.set_threshold(*SELDOM)
    try:
        yield from _answering_lightly()
    finally:
        gc.set_threshold(*often)
    _answered.append(True)


def _answering_lightly() -> Iterator[None]:
    from tightfit.cli.transformers_index import read_once
    from tightfit.runtime.deferred import GaveWay, deferred

    with deferred() as deferral, read_once():
        try:
            yield
        except (Exception, GaveWay) as error:
            if deferral.gave_way or (deferral.is_used and not is_ours(error)):
                start_again()
            if deferral.is_used and isinstance(error, CannotFit):
                start_again()  # ways out need what is left out: adapters, other optimizers
            raise
        if deferral.gave_way:  # and somebody kept that to himself
            start_again()


def end_at_once() -> None:
    """End the process after an answer as Python would, except that nothing is taken apart that ends with the process
    anyway: that takes half a second. Returns where somebody may still be at work.
    """
    if not _answered or sys.flags.interactive or sys.flags.inspect or sys.gettrace() or sys.getprofile():
        return
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        return
    atexit._run_exitfuncs()
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None where the shell has closed it
            stream.flush()
    except OSError:
        return  # nobody reads any more, or the disk is full: Python says so at its own end
    os._exit(0)


def may_defer(question: Question) -> bool:
    """Not where the user's own code is imported, nor where a plan may compile or capture, nor where a model is a pipe
    that can be read once, nor with an optimizer or adapters that need what is left out; nor in a process that others go
    on with.
    """
    if not _alone or ALL_LOADED in os.environ or question.config is not None or question.model is None:
        return False
    if question.world_size is not None:
        return False  # FSDP2 and its distributed tensors are what is left out
    if question.optimizer in COMPILED or question.adapter is not None:
        return False
    if any(lever in (question.levers or "") for lever in NEED_A_TRACER):
        return False
    if (Path(question.model) / QUANTISED_FILE).is_file():
        return False  # its weights are torchao's
    return ":" not in question.model and not Path(question.model).is_fifo()


def is_ours(error: BaseException | None) -> bool:
    """Whether an error says what we know, and nothing unforeseen led to it."""
    while error is not None:
        if not isinstance(error, TightfitError | OSError):
            return False
        error = error.__cause__ or error.__context__
    return True


def start_again() -> NoReturn:
    """This command from its beginning, in the place of this process, with nothing deferred."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.environ[ALL_LOADED] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
