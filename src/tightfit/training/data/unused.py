"""The fields of a source that nothing reads: counted while it is read, and reported once, by name and number of
records.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

MOST_NAMES = 12  # in one line


class Unused:
    """Counts of records, by the names that they hold and that are not read.

    `columns` are fields of records and of parts of their turns. `given` are names handed to the chat template, which
    reads those that it mentions. `left_out` are records labelled as bad answers. `nulls` have tool arguments that are
    null.
    """

    def __init__(self) -> None:
        self.columns: Counter[str] = Counter()
        self.given: Counter[str] = Counter()
        self.left_out = self.nulls = 0

    def lines(self, template: str | None) -> list[str]:
        """One line for each kind of thing that was not used. `template` is the text of the chat template, if any."""
        unread = {name: count for name, count in self.given.items() if not _mentions(template or "", name)}
        said = [
            (self.columns, "not used of the records: {}"),
            (unread, "not used, since the chat template does not mention it: {}"),
        ]
        lines = [text.format(_named(counts)) for counts, text in said if counts]
        if self.left_out:
            lines.append(f"left out as bad answers: {_records(self.left_out)} whose label is false")
        if self.nulls:
            lines.append(
                f"null as the argument of a tool is learnt as it stands, in {_records(self.nulls)}: remove the nulls "
                "that a conversion to columns added"
            )
        return lines


def unused_files(names: Sequence[str]) -> str:
    """The line about files of a folder that are not read."""
    return f"not used of the folder: {_listed(names)}"


def alternatives(*names: str) -> str:
    """Names of which a template needs to mention one, as one name of `Unused.given`."""
    return "|".join(names)


def _mentions(template: str, names: str) -> bool:
    return any(re.search(rf"\b{re.escape(name)}\b", template) for name in names.split("|"))


def _named(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return _listed([f'"{name.split("|")[0]}" (in {_records(count)})' for name, count in ordered])


def _listed(every: Sequence[str]) -> str:
    more = f" and {len(every) - MOST_NAMES} more" if len(every) > MOST_NAMES else ""
    return ", ".join(every[:MOST_NAMES]) + more


def _records(count: int) -> str:
    return "1 record" if count == 1 else f"{count} records"
