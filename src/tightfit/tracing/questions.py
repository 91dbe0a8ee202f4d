"""Answers reads of numbers that a dry run does not have, and records them as assumptions.

A number read from an unknown float tensor is 1.0 (a loss or a norm: finite and ordinary). From an integer tensor it is
0. From a boolean tensor it is False (no overflow, no NaN). Two unknown tensors are not equal.

A yes-or-no question may be a check: its one answer raises (`assert torch.isfinite(y).all()`). A step that raises after
such a question is run dry again, with the other answer (`retried`). So is one that asks at one place without an end
(`while not done.all()`, `while error.item() > 1e-6`), with each other answer until its loop ends.

Whatever else depends on an answer is seen in a second outcome (`OpenNumbers.OTHER_ANSWERS`): every question has its
other answer there, and a loop that the other answer does not end, or that only an answer of its own ends, runs once.
"""

import functools
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch

from tightfit.errors import TightfitError, TraceError
from tightfit.tracing.modules import ModuleTracker
from tightfit.tracing.outcomes import are_answers_others
from tightfit.tracing.record import ARE_EQUAL, NUMBER_READ, READ_BY_OPTIMIZER, Assumption, Phase

aten = torch.ops.aten
NUMBERS = {bool: (False, True), int: (0, 1, 2**31 - 1), float: (1.0, 0.0, float("inf"))}  # the usual one, the others
LONGEST = 1 << 17  # times at one place: no answer ends this loop
MOST_ENDED = 32  # answers that are tried together, in all loops of a step
# Times at one place, before a loop is thought to have no end: in one call of a module, and in a step. What asks in each
# layer, in each expert or for each weight has an end.
MOST_ASKED, MOST_IN_ALL = 500, 10_000
ASKING = frozenset({aten._local_scalar_dense.default, aten.equal.default})  # return a number, not a tensor
_OWN = ("tightfit.tracing", "tightfit.levers", "tightfit.step", "tightfit.runtime", "tightfit.optim.in_backward")
_OURS = ("torch.", *_OWN)
_RUNNER = "tightfit.tracing.repeated"  # runs a step; what calls it is not in the step
Traced = TypeVar("Traced")


@dataclass(frozen=True)
class Answer:
    value: Any


Place = tuple[Any, ...]  # of a question or of an exception: the frames down to it, each with its place in the code


class Endless(BaseException):
    """A step asks at one place without an end. A loop that catches every `Exception` must not catch it."""


class Answers:
    """Mutable: at which places of a model's step another answer than the usual one is right.

    With `usual`, those of the outcome where all other answers are given: `changed` are the places where the usual one
    is right.
    """

    MOST_RUNS, MOST_OTHERS = 24, 6  # of one step, if answers are to be found; if other answers are

    def __init__(self, usual: "Answers | None" = None) -> None:
        self._usual = usual
        self._once: set[Place] = set()  # loops that other answers do not end
        self._in_round: set[Place] = set()  # such loops in this run, between their first and their last answer
        self.is_of_a_round = False  # whether the last answer was for a loop that runs once
        self.changed: set[Place] = set()
        self.asked: dict[Place, None] = {}  # in this run, the last one last
        self._fixed: set[Place] = set()  # places whose change led to another exception
        self._tried: set[Place] = set()  # places whose change led to the same one
        self._last: Place | None = None  # the place that was changed before this run
        self._raised: Place | None = None
        self._runs = 0
        self.is_watched = False  # whether a step that asks without an end is run again
        self._times: Counter[Place] = Counter()  # in this run
        self._in_call: Counter[tuple[Place, int]] = Counter()  # in one call of a module
        self._in_loops: dict[Place, int] = {}  # places that are asked without an end, and how many answers there are
        self._ending: dict[Place, int] = {}  # which answers there, by number, were given to end the loop
        self._ended: set[frozenset[tuple[Place, int]]] = set()  # those that were tried
        self._long: set[Place] = set()  # places where no answer ends it: the loop is long

    def answer(self, kind: type, call: int | None) -> Any:
        """The answer to a question that the running code asks, of a kind of `NUMBERS`.

        `call` is the call of a module that runs, -1 in the code around the model's, None in autograd's and the
        optimizer's.
        """
        place, values = _asking_place(), NUMBERS[kind]
        self._times[place] += 1
        if self._times[place] > LONGEST:
            raise TraceError(
                f"{calling_line()}: a loop that ends by a number cannot be run dry, since a dry run computes none: "
                "give it a largest count of rounds"
            )
        endless = self._times[place] / MOST_IN_ALL
        if call is not None:
            self._in_call[place, call] += 1
            endless = max(endless, self._in_call[place, call] / MOST_ASKED)
        if endless > 0.5:  # what asks beside the place that ends the run may end the loop
            self._in_loops[place] = len(values)
        if self.is_watched and endless > 1 and place not in self._long:
            raise Endless
        if self._usual is not None:
            return self._other(place, values, self._usual)
        found = self._ending.get(place, 0)
        if kind is bool:
            self._note(place)
            return values[found] != (place in self.changed)
        return values[found]

    @cached_property
    def others(self) -> "Answers":
        """The answers of the other outcome."""
        return Answers(usual=self)

    def _other(self, place: Place, values: tuple[Any, ...], usual: "Answers") -> Any:
        """The answer that is not the usual one, where the step may go on with it."""
        self.is_of_a_round = place in usual._ending or place in self._once
        if place in usual.changed:  # the usual one raises, and so this is the only one
            return values[1]
        if self.is_of_a_round:
            self._in_round ^= {place}
        begins = place in self._in_round
        if place in usual._ending:
            return values[0 if begins else usual._ending[place]]
        self._note(place)
        is_usual = place in self.changed or (place in self._once and not begins)
        return values[0 if is_usual else 1]

    def _note(self, place: Place) -> None:
        """Note that a question is the last one."""
        self.asked.pop(place, None)
        self.asked[place] = None

    def begin(self) -> None:
        self.asked.clear()
        self._times.clear()
        self._in_call.clear()
        self._in_round.clear()

    def end_loop(self) -> None:
        """Give other answers in the loops of the last run."""
        if self._usual is not None:
            self._long.update(self._once.intersection(self._in_loops))
            self._once.update(self._in_loops)
            return
        self._ended.add(frozenset(self._ending.items()))
        choices = itertools.product(*map(range, self._in_loops.values()))
        for numbers in itertools.islice(choices, MOST_ENDED):
            ending = {place: number for place, number in zip(self._in_loops, numbers, strict=True) if number}
            if frozenset(ending.items()) not in self._ended:
                self._ending = ending
                return
        self._ending = {}
        self._long.update(self._in_loops)

    def change(self, error: Exception) -> bool:
        """Change the answer to the last question before an exception of the step. False if none is left to change."""
        raised = _place_of(error)
        if self._last is not None:
            if raised == self._raised:
                self._tried.add(self._last)
                self.changed.discard(self._last)
            else:
                self._fixed.add(self._last)
                self._tried.clear()
        self._raised, self._runs = raised, self._runs + 1
        left = [place for place in self.asked if place not in self._tried and place not in self._fixed]
        if not left or self._runs == (self.MOST_RUNS if self._usual is None else self.MOST_OTHERS):
            self.settle(self.changed & self._fixed)
            return False
        self._last = left[-1]
        self.changed.add(self._last)
        return True

    def settle(self, changed: set[Place]) -> None:
        """End a search for answers."""
        self.changed = changed
        self._fixed, self._tried, self._last, self._raised, self._runs = set(changed), set(), None, None, 0


_answers: "weakref.WeakKeyDictionary[Any, Answers]" = weakref.WeakKeyDictionary()


def answers_of(model: Any) -> Answers:
    """The answers that are right for a model's step in the outcome that is assumed.

    They stay, so that a plan looks for them once.
    """
    found = _answers.setdefault(model, Answers())
    return found.others if are_answers_others() else found


def retried(trace: Callable[..., Traced]) -> Callable[..., Traced]:
    """A function that runs a model's step dry, made to run it again with another answer where a check raises.

    The step of one rank of several is not run again, since the rank has changed its model.
    """

    @functools.wraps(trace)
    def traced(model: Any, *args: Any, **kwargs: Any) -> Traced:
        if kwargs.get("rank") is not None:
            return trace(model, *args, **kwargs)
        return run_again(answers_of(model), lambda: trace(model, *args, **kwargs))

    return traced


def run_again(answers: Answers, run: Callable[[], Traced]) -> Traced:
    """`run()`, which restores what it changed, until no check in it raises. Otherwise its first exception."""
    first: Exception | None = None
    while True:
        answers.begin()
        outside, answers.is_watched = answers.is_watched, True
        try:
            found = run()
        except TightfitError:
            raise
        except Endless:
            answers.end_loop()
            continue
        except Exception as error:
            if first is None:
                first = error
            again = answers.change(error)
        else:
            answers.settle(answers.changed)
            return found
        finally:
            answers.is_watched = outside
        if not again:
            try:
                raise first
            finally:
                del first  # this frame is in its traceback: each would keep the other, and the caller's model


def _asking_place() -> Place:
    """The frames from the question to the innermost line of the user's: PyTorch's own checks ask for many."""
    frame: FrameType | None = sys._getframe(1)
    place: list[Any] = []
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(_OWN):
            place += (frame.f_code, _position(frame.f_code, frame.f_lasti))
            if not name.startswith(_OURS):
                break
        frame = frame.f_back
    return tuple(place)


@functools.cache
def _position(code: CodeType, instruction: int) -> Any:
    """Where an instruction's expression is in its file: the condition of a `while` is compiled twice."""
    found = next(itertools.islice(code.co_positions(), instruction // 2, None), ())
    return instruction if None in found else found  # `python -X no_debug_ranges`


def _place_of(error: Exception) -> Place:
    """The frames of an exception."""
    place: list[Any] = [type(error)]
    traceback = error.__traceback__
    while traceback is not None:
        place += (traceback.tb_frame.f_code, traceback.tb_lasti)
        traceback = traceback.tb_next
    return tuple(place)


class Questions:
    """Answers questions, and records each one with its module and its line."""

    def __init__(self, modules: ModuleTracker, answers: Answers | None = None):
        self.modules = modules
        self.answers = answers or Answers()
        self.asked: dict[tuple[str, str, str], Assumption] = {}

    def number(self, kind: type, phase: Phase) -> Any:
        """The answer to a question of a kind of `NUMBERS` that is asked in a phase."""
        calls = self.modules.open_calls
        return self.answers.answer(kind, calls[-1] if calls else -1 if phase is Phase.FORWARD else None)

    def ask(
        self, func: Any, args: tuple, everywhere: Callable[[torch.Tensor], bool | None], phase: Phase
    ) -> Answer | None:
        """The documented answer if this operator reads a number from a tensor, else None.

        `everywhere` says what all elements of a tensor are, if that is known of unknown numbers. What an optimizer
        reads scales its update (Adafactor), and decides nothing.
        """
        if func is aten._local_scalar_dense.default:
            dtype = args[0].dtype
            if (known := everywhere(args[0])) is not None:
                self.note("whether numbers are finite", "True")
                return Answer(torch.tensor(known, dtype=dtype).item())
            value = self.number(float if dtype.is_floating_point else bool if dtype == torch.bool else int, phase)
            self.note(READ_BY_OPTIMIZER if phase is Phase.OPTIMIZER else NUMBER_READ, repr(value))
            if self.answers.is_of_a_round:
                self.note("a loop that ends by a number", "to run once: each further round may take more memory")
            return Answer(value)
        if func is aten.equal.default:
            value = self.number(bool, phase)
            self.note(ARE_EQUAL, repr(value))
            return Answer(value)
        return None

    def note(self, question: str, answer: str, *, moves_peak: bool = False) -> None:
        where = calling_line()
        assumption = Assumption(question, self.modules.current, where, answer, moves_peak)
        self.asked.setdefault((question, where, answer), assumption)


def calling_line() -> str:
    """File and line of the innermost frame outside of PyTorch and this package: the user's code.

    If the step has no such frame where it asks, as in an optimizer of PyTorch's, the innermost frame of `torch.optim`.
    """
    frame, pytorchs = sys._getframe(1), "unknown"
    while frame is not None and (name := frame.f_globals.get("__name__", "")) != _RUNNER:
        if not name.startswith(_OURS):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if pytorchs == "unknown" and name.startswith("torch.optim."):
            pytorchs = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return pytorchs
