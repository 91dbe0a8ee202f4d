"""Runs commands in this process, as a user would in a shell."""

import json
from typing import Any, NamedTuple

from typer.testing import CliRunner

from tightfit.cli.app import app


class Outcome(NamedTuple):
    """What a command leaves: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def answer(self) -> dict[str, Any]:
        """Its JSON without the host's memory: the process grows a little from one command to the next."""
        of_host = ("host", "host_peak_bytes", "host_by_category")
        return {name: value for name, value in json.loads(self.out).items() if name not in of_host}

    @property
    def error(self) -> str:
        """The one line about the user's mistake."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        return lines[0].removeprefix("error: ")


def tightfit(*args: object) -> Outcome:
    """`tightfit ARGS`. An exception that is not the user's mistake comes through."""
    result = CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=False, prog_name="tightfit")
    return Outcome(result.exit_code, result.stdout, result.stderr)


def mistake(*args: object, code: int = 2) -> str:
    """The line about a mistake that `tightfit ARGS` ends with, having answered nothing."""
    outcome = tightfit(*args)
    assert outcome.code == code, outcome
    assert outcome.out == ""
    return outcome.error
