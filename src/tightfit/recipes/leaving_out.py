"""Recipes that cannot be tried: each is named with its reason, and the others are answered all the same."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from traceback import extract_tb
from typing import NamedTuple, Protocol

from tightfit.errors import BudgetError, TightfitError, in_one_line


class Named(Protocol):
    """A recipe, or what has become of one."""

    @property
    def name(self) -> str: ...


class LeftOut(NamedTuple):
    """A recipe, or its sizes, that could not be tried, and why."""

    name: str
    reason: str


@contextmanager
def leaving_out(
    recipes: Iterable[Named] | Callable[[], Iterable[Named]], left: list[LeftOut], what: str = ""
) -> Iterator[None]:
    """A context in which an error leaves out these recipes, or `what` of them. A model may raise anything in one.

    An error about the budget concerns all recipes and is raised.
    """
    try:
        yield
    except BudgetError:
        raise
    except Exception as error:
        names = [each.name for each in (recipes() if callable(recipes) else recipes)]
        left += [LeftOut(f"{what}{name}", _reason(error)) for name in names]


def in_words(left: Iterable[LeftOut]) -> tuple[str, ...]:
    """A sentence for each reason, with all that it has left out."""
    names: dict[str, list[str]] = {}
    for each in dict.fromkeys(left):
        names.setdefault(each.reason, []).append(each.name)
    return tuple(f"Left out: {'; '.join(those)}. {reason}" for reason, those in names.items())


def _reason(error: Exception) -> str:
    """The error in one line; of one that nobody has raised on purpose, where it comes from."""
    if isinstance(error, TightfitError):
        return " ".join(str(error).split())
    line = in_one_line(error)
    last = extract_tb(error.__traceback__)[-1]
    folder, _, file = last.filename.rpartition("/")
    where = f"{folder.rpartition('/')[2]}/{file}:{last.lineno}"
    return f"{type(error).__name__} in {where}{f': {line}' if line else ''}"
