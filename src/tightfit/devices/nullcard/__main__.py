"""`python -m tightfit.devices.nullcard rtx4090 [--memory 8GiB] [--count 2] [--late side|main] [--no-copies] -- ...`."""

import argparse
import contextlib
import os
import shutil
import sys
from dataclasses import replace
from typing import NoReturn

from tightfit.devices.nullcard.card import card_of, environment
from tightfit.errors import TightfitError
from tightfit.units import parse_bytes

SMALL_COPY = 4096  # bytes: numbers that the host reads are copied even where large copies are not made


def main(arguments: list[str]) -> NoReturn:
    """Replace this process by a command that finds the card. Exits where that is not possible."""
    own, command = _split(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m tightfit.devices.nullcard", description="Run a command on a null card."
    )
    parser.add_argument("device", help="a card's name, or its figures")
    parser.add_argument("--memory", metavar="BYTES", help="all of its memory, for example 8GiB")
    parser.add_argument("--count", type=int, default=1, help="the number of cards")
    parser.add_argument("--late", choices=("none", "side", "main"), default="none", help="the streams whose work waits")
    parser.add_argument(
        "--no-copies", action="store_true", help="large copies are not made: only the host's time is left"
    )
    given = parser.parse_args(own)
    if not command:
        parser.error("no command: write -- and what is to be run")
    try:
        memory = None if given.memory is None else parse_bytes(given.memory)
        card = replace(
            card_of(given.device, memory),
            count=given.count,
            late=given.late,
            most_copied=SMALL_COPY if given.no_copies else None,
        )
        variables = environment(card)
    except TightfitError as error:
        parser.exit(error.exit_code, f"error: {error}\n")
    program = shutil.which(command[0])
    if program is None:
        parser.exit(2, f"error: {command[0]}: there is no such program\n")
    # A kernel that does not run leaves old bytes, so a count that a program reads may be anything: where the host's
    # memory ends, this process ends first.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    os.execve(program, command, variables)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
    main(sys.argv[1:])
