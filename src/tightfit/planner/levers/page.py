"""The page `docs/levers.md`, made from the registered levers.

`python -m tightfit.planner.levers.page > docs/levers.md` writes it. No torch here.
"""

import sys
from collections.abc import Iterator

from tightfit.names import OF_NO_LEVER, Exclusion
from tightfit.planner.levers import Exactness, Lever, lever_types

_INTRODUCTION = """\
# Levers

Written by `python -m tightfit.planner.levers.page` from the registered levers. `exact` allows levers that change no
bit. `rounding` also allows levers that change the order of sums. A plan uses a lever marked "where named" only if you
name it: `levers=["rounding", "offload"]`, `--levers rounding,offload`. `verify` judges exact levers by bit-equality,
and the others by the error of the gradients against fp64.

| lever | what it does | result | `verify` allows | used |
|---|---|---|---|---|
"""

_EXCLUDING = """
## Levers and settings that exclude each other

tightfit refuses each pair with these words, before it runs a step. `tests/training/test_combinations.py` trains forty
random combinations of levers. Each is refused by this table, or has the losses of the plain training (to the last bit
where its levers are exact), or reports that its budget cannot be met.

| one | other | why | what to do |
|---|---|---|---|
"""


def exclusions() -> tuple[Exclusion, ...]:
    """All exclusions, each once: those that concern no lever, then those that levers state."""
    return tuple(dict.fromkeys((*OF_NO_LEVER, *(each for kind in lever_types() for each in kind.excludes))))


def levers_page() -> str:
    """The page, as Markdown."""
    return _INTRODUCTION + "".join(map(_row, lever_types())) + _EXCLUDING + "".join(_excluding_rows())


def _row(kind: type[Lever]) -> str:
    used = "where named" if kind.on_request else f"with `{kind.exactness}`"
    if kind.repaid_beside is not None:
        used += f", or beside `{kind.repaid_beside}` where the steps repay it (on a card: a twentieth of each)"
    return f"| `{kind.name}` | {kind.summary} | {kind.exactness} | {_allowed(kind)} | {used} |\n"


def _allowed(kind: type[Lever]) -> str:
    if kind.exactness is Exactness.EXACT:
        return "no difference"
    if kind.exactness is Exactness.ROUNDING:
        return f"{kind.spread - 1:.0%} above the plain run's error"
    return f"an error of {kind.bound:g} more than the plain run's"


def _excluding_rows() -> Iterator[str]:
    for each in exclusions():
        yield f"| `{each.one}` | `{each.other}` | {each.reason} | {each.remedy} |\n"


if __name__ == "__main__":
    sys.stdout.write(levers_page())
