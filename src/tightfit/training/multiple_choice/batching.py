"""How many rows a batch of an evaluation holds: as many as dry runs say that the budget allows.

A peak grows with the rows of a batch, their length and the number of logits that are needed. Of all batches only those
are therefore run dry that no other one exceeds in all three; the highest of them is the evaluation's peak.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tightfit.errors import CannotFit
from tightfit.training.multiple_choice.likelihood import ScoredRow
from tightfit.units import format_bytes

Batch = tuple[ScoredRow, ...]
Predict = Callable[[Sequence[ScoredRow]], int]  # the peak of one batch in bytes, by a dry run

BATCH_SIZE = 8  # rows, where neither a budget nor a size is given
MOST_ROWS = 256  # of a batch: more of them only wait for each other


@dataclass(frozen=True)
class Batching:
    """All rows in batches, longest first. `heaviest` is the batch with the highest predicted peak."""

    batches: tuple[Batch, ...]
    heaviest: int
    predicted_peak_bytes: int


def batched(
    rows: Sequence[ScoredRow], predict: Predict, *, budget_bytes: int | None = None, batch_size: int | None = None
) -> Batching:
    """The rows, longest first, in batches of `batch_size`, or as large as the budget allows.

    Raises `CannotFit` where a batch exceeds the budget: one of the given size, or one row alone.
    """
    prices = _PredictedPeaks(predict)
    if batch_size is not None or budget_bytes is None:
        found = prices.of(equal(rows, batch_size or BATCH_SIZE))
        if budget_bytes is not None and found.predicted_peak_bytes > budget_bytes:
            _refuse(found.predicted_peak_bytes, budget_bytes, batch_size)
        return found
    tokens = _tokens_within(rows, prices, budget_bytes)
    while True:
        found = prices.of(by_tokens(rows, tokens))
        if found.predicted_peak_bytes <= budget_bytes:
            return found
        if all(len(batch) == 1 for batch in found.batches):
            _refuse(found.predicted_peak_bytes, budget_bytes, None)
        tokens -= max(len(rows[0].ids), tokens // 8)


def equal(rows: Sequence[ScoredRow], size: int) -> list[Batch]:
    return [tuple(rows[first : first + size]) for first in range(0, len(rows), size)]


def by_tokens(rows: Sequence[ScoredRow], tokens: int) -> list[Batch]:
    """Batches of at most so many tokens, padding included; a row that is longer has a batch of its own."""
    batches: list[Batch] = []
    first = 0
    while first < len(rows):
        size = min(max(tokens // len(rows[first].ids), 1), MOST_ROWS)  # the first row of a batch is its longest
        batches.append(tuple(rows[first : first + size]))
        first += size
    return batches


def maximal(batches: Sequence[Batch]) -> list[int]:
    """The batches that no other one exceeds in rows, length and needed logits at once; of equal ones the first."""
    shapes = [_shape(batch) for batch in batches]
    first_of = {shape: index for index, shape in reversed(list(enumerate(shapes)))}

    def is_exceeded(shape: tuple[int, int, int]) -> bool:
        return any(other != shape and all(a >= b for a, b in zip(other, shape, strict=True)) for other in first_of)

    return sorted(index for shape, index in first_of.items() if not is_exceeded(shape))


def _shape(batch: Batch) -> tuple[int, int, int]:
    return len(batch), max(len(row.ids) for row in batch), sum(row.counted for row in batch)


def _tokens_within(rows: Sequence[ScoredRow], prices: "_PredictedPeaks", budget_bytes: int) -> int:
    """The tokens of the largest batch that fits, among those that begin with the longest row.

    The peak is nearly a line over the rows. Each dry run gives a point on it, and the next guess lies on the line.
    """
    length = len(rows[0].ids)
    fits, exceeds = 0, min(len(rows), MOST_ROWS) + 1
    known = {size: prices.peak(tuple(rows[:size])) for size in {1, min(2, len(rows))}}
    while True:
        for size, peak in known.items():
            fits, exceeds = (max(fits, size), exceeds) if peak <= budget_bytes else (fits, min(exceeds, size))
        if exceeds - fits <= 1 or fits == 0:
            return max(fits, 1) * length
        guess = _on_the_line(known, budget_bytes)
        size = min(max(guess, fits + 1), exceeds - 1)
        if fits > 2 and size - fits <= fits // 16:
            return fits * length  # nearer to the budget there is little to win
        known[size] = prices.peak(tuple(rows[:size]))


def _on_the_line(known: dict[int, int], budget_bytes: int) -> int:
    """The rows at which the line through the two largest known batches meets the budget."""
    (low, low_peak), (high, high_peak) = sorted(known.items())[-2:]
    slope = (high_peak - low_peak) / (high - low)
    return MOST_ROWS if slope <= 0 else int(low + (budget_bytes - low_peak) / slope)


def _refuse(peak_bytes: int, budget_bytes: int, batch_size: int | None) -> None:
    if batch_size is None:
        raise CannotFit(
            f"the evaluation cannot fit: the least is {format_bytes(peak_bytes)}, one row at a time, and the budget is "
            f"{format_bytes(budget_bytes)}: raise the budget, or shorten the longest question",
            peak_bytes,
        )
    raise CannotFit(
        f"the evaluation cannot fit: batches of {batch_size} rows take {format_bytes(peak_bytes)}, and the budget is "
        f"{format_bytes(budget_bytes)}: leave the batch size to the budget",
        peak_bytes,
    )


class _PredictedPeaks:
    """Peaks that were predicted, each once."""

    def __init__(self, predict: Predict):
        self.predict = predict
        self.known: dict[Batch, int] = {}

    def peak(self, batch: Batch) -> int:
        if batch not in self.known:
            self.known[batch] = self.predict(batch)
        return self.known[batch]

    def of(self, batches: Sequence[Batch]) -> Batching:
        peaks = {index: self.peak(batches[index]) for index in maximal(batches)}
        heaviest = max(peaks, key=lambda index: peaks[index])
        return Batching(tuple(batches), heaviest, peaks[heaviest])
