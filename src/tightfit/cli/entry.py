"""The entry point of `tightfit`. Ctrl-C ends it with one exit code and without a traceback, whenever it comes."""

import gc
import os
import signal
import sys
from types import FrameType

from tightfit.cli.ending import INTERRUPTED, cancel_compilations


def command() -> None:
    """The command that a shell runs: `main`, and the end of the process."""
    if not sys.stderr.isatty():  # bars of transformers and of the hub would be lines of a log
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        main()
    except SystemExit as ended:
        if ended.code == 0:
            gc.freeze()  # else Python collects what ends with the process anyway, which takes a second after torch
        else:
            cancel_compilations()
        raise


def main() -> None:
    """Run the command that `sys.argv` names."""
    pressed: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else whoever starts us wants it ignored
        signal.signal(signal.SIGINT, interrupt)
    try:
        from tightfit.cli.app import app

        app(prog_name="tightfit")
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except Exception:
        if not pressed:
            raise
        # Some packages swallow a KeyboardInterrupt while they are imported, and fail in another way then.
        raise SystemExit(INTERRUPTED) from None
