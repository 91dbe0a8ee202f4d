"""Outcomes of a step that reads numbers which a dry run does not have.

They may be drawn at random, such as those of layer drop: `torch.rand(()).item() < p`. A dry run with an outcome begins
with states of the generators from which all next numbers are near one end of their range. So it does not matter how
code draws: by PyTorch, Python or numpy, through a name that it imported long ago, or from a module's own generator.

Or they are computed: `while (halted < 0.9).any()`. Then another outcome has other answers (`tracing.questions`).
"""

import enum
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from tightfit.tracing.restore import Contents, comparable, set_state, state_of

MOST_DRAWN = 1024  # numbers of one draw that are known in a dry run: more are noise, which decides nothing
_WORDS = 624  # of 32 bits, in the state of a Mersenne Twister
_DRAWN = 600  # of them at an end. After these, numbers are random again: code may draw until one is in between.
# From an end of a word's range. Not 0: code may divide by a number, or take its logarithm. PyTorch makes a number of
# the last 24 bits of a word, others of the first ones, and whole numbers of a few last or first bits.
_NEAR = 13 << 7
_SPREAD = 0x9E3779B9  # 2 ** 32 by the golden ratio: multiples of it fill a word's range evenly, and its last bits too
_LATER = [(place + 1) * 1812433253 & 0xFFFFFFFF for place in range(_WORDS - _DRAWN)]


class OpenNumbers(enum.Enum):
    """Which numbers a step reads in a dry run.

    The generators give numbers near one end of their range, near the two in turns, below the middle, which is the last
    of two, four or eight choices to Python, or spread over the range, so that choices among many differ. With
    `OTHER_ANSWERS` they are high, and what the step computes is not as is usually assumed.
    """

    HIGH = "high"
    LOW = "low"
    HIGH_THEN_LOW = "high, low"
    LOW_THEN_HIGH = "low, high"
    BELOW_MIDDLE = "below the middle"
    SPREAD = "spread"
    OTHER_ANSWERS = "other answers"

    @property
    def is_drawn(self) -> bool:
        return self is not OpenNumbers.OTHER_ANSWERS


class _Assumed(threading.local):
    draws: OpenNumbers = OpenNumbers.HIGH  # most models skip a layer for a low number


_assumed = _Assumed()


@contextmanager
def assumed(draws: OpenNumbers) -> Iterator[None]:
    """A context whose dry runs draw such numbers."""
    outside, _assumed.draws = _assumed.draws, draws
    try:
        yield
    finally:
        _assumed.draws = outside


def are_answers_others() -> bool:
    """True in a dry run whose step reads other numbers than those usually assumed."""
    return _assumed.draws is OpenNumbers.OTHER_ANSWERS


class Generators:
    """The random generators that a step may draw from: PyTorch's, Python's, numpy's, and those that modules hold."""

    def __init__(self, attributes: Contents):
        self._own = [generator for generator, _ in attributes.generators]

    def begin(self) -> None:
        """Give all generators the states that the dry run assumes."""
        draws = _assumed.draws
        random.setstate(_of_python(random.getstate(), draws))
        numpy.random.set_state(_of_numpy(numpy.random.get_state(), draws))
        torch.default_generator.set_state(_of_torch(torch.default_generator.get_state(), draws))
        cards = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        for generator in (*cards, *self._own):
            change = _CHANGES.get(type(generator))
            if getattr(generator, "device", torch.device("cpu")).type != "cpu":
                generator.manual_seed(list(OpenNumbers).index(draws))  # no state gives a card's an end: other ones
            elif change is not None:
                set_state(generator, change(state_of(generator), draws))

    def states(self) -> Any:
        """The states of those generators whose draws no operator shows."""
        own = [state_of(generator) for generator in self._own if not isinstance(generator, torch.Generator)]
        return comparable((random.getstate(), numpy.random.get_state(), own))


def _words(draws: OpenNumbers, each: int) -> list[int]:
    """The words of a state from which the next numbers, of `each` words, are as assumed."""
    if draws is OpenNumbers.SPREAD:
        spread = [_untempered((place + 1) * _SPREAD & 0xFFFFFFFF) for place in range(_DRAWN)]
        return [*_LATER, *spread]
    low, high, middle = map(_untempered, (_NEAR, 0xFFFFFFFF - _NEAR, 0x7FFFFFFF - _NEAR))
    turns = {
        OpenNumbers.HIGH: (high,),
        OpenNumbers.OTHER_ANSWERS: (high,),
        OpenNumbers.LOW: (low,),
        OpenNumbers.HIGH_THEN_LOW: (high, low),
        OpenNumbers.LOW_THEN_HIGH: (low, high),
        OpenNumbers.BELOW_MIDDLE: (middle,),
    }[draws]
    # The first words are read only once these are used up. They are the same for every dry run.
    return [*_LATER, *(turns[place // each % len(turns)] for place in range(_DRAWN))]


def _untempered(output: int) -> int:
    """The word of a Mersenne Twister's state that gives this output (Matsumoto and Nishimura 1998)."""
    output ^= output >> 18
    output ^= output << 15 & 0xEFC60000
    word = output
    for _ in range(4):
        word = output ^ word << 7 & 0x9D2C5680
    first = word ^ word >> 11
    return (word ^ first >> 11) & 0xFFFFFFFF


def _of_python(state: Any, draws: OpenNumbers) -> Any:
    version, _, gauss = state
    return version, (*_words(draws, 2), _WORDS - _DRAWN), gauss


def _of_numpy(state: Any, draws: OpenNumbers) -> Any:
    kind, words, *_ = state
    if kind != "MT19937":
        return state
    return kind, numpy.array(_words(draws, 2), dtype=words.dtype), _WORDS - _DRAWN, 0, 0.0


def _of_twister(state: Any, draws: OpenNumbers) -> Any:
    # In the place of the generator's own bits: no state of PCG64, the usual ones, gives many numbers near an end.
    bits = numpy.random.MT19937()
    content: dict[str, Any] = dict(bits.state)
    words = numpy.array(_words(draws, 2), dtype=content["state"]["key"].dtype)
    return bits, content | {"state": {"key": words, "pos": _WORDS - _DRAWN}}


def _of_torch(state: torch.Tensor, draws: OpenNumbers) -> torch.Tensor:
    # `CPUGeneratorImplStateLegacy` in ATen: the seed, the number of words left and a flag (32 bits each), the next
    # word, the words (64 bits each), and a normal number kept from the last pair.
    fields = state.clone().numpy()
    halves = fields[8:16].view(numpy.int32)
    halves[0] = _DRAWN + 1
    fields[16:24].view(numpy.uint64)[0] = _WORDS - _DRAWN
    fields[24 : 24 + 8 * _WORDS].view(numpy.uint64)[:] = _words(draws, 1)
    return torch.from_numpy(fields)


_CHANGES: dict[type, Callable[[Any, OpenNumbers], Any]] = {
    random.Random: _of_python,
    numpy.random.RandomState: _of_numpy,
    torch.Generator: _of_torch,
    numpy.random.Generator: _of_twister,
}
