"""Bad lines: refused with file, line and column, or skipped and counted up to a ceiling."""

from typing import Literal

from tightfit.errors import DataError
from tightfit.training.data.unused import Unused

# Where `data.max_bad_lines` is null: so many, or this share of all lines if that is more.
MOST_SKIPPED, MOST_SKIPPED_SHARE = 1000, 0.05


class BadLine(Exception):
    """A line that holds no record: why, and in which of its columns, from 1 on; None where it has none."""

    def __init__(self, reason: str, column: int | None = None):
        super().__init__(reason)
        self.reason, self.column = reason, column


class Tally:
    """Counts the records that are read, and those that are skipped."""

    def __init__(self, policy: Literal["strict", "skip"] = "strict", ceiling: int | None = None):
        self.policy, self.ceiling = policy, ceiling
        self.lines = self.skipped = 0
        self.first = ""
        """The error of the first line that was skipped."""
        self.unused = Unused()
        self.notes: tuple[str, ...] = ()
        """What of the source was not used, a line each: known at its end."""

    def refuse(self, bad: BadLine, place: str) -> None:
        """Count a bad line at `place` (file and line). Raises `DataError` if it is not allowed."""
        line = f"{place}, column {bad.column}: {bad.reason}" if bad.column is not None else f"{place}: {bad.reason}"
        if self.policy == "strict":
            raise DataError(line)
        self.skipped += 1
        self.first = self.first or line
        if self.ceiling is not None and self.skipped > self.ceiling:
            raise DataError(
                f"{line}. It is bad line {self.skipped}, and data.max_bad_lines is {self.ceiling}: mend the lines, or "
                "raise data.max_bad_lines"
            )

    def finish(self) -> None:
        """At the end of the source. Raises `DataError` if more lines were skipped than null allows."""
        most = max(MOST_SKIPPED, int(self.lines * MOST_SKIPPED_SHARE))
        if self.ceiling is None and self.skipped > most:
            raise DataError(
                f"{self.first}. It is the first of {self.skipped} bad lines among {self.lines}, and without "
                f"data.max_bad_lines at most {most} are skipped: mend the lines, or set data.max_bad_lines"
            )
