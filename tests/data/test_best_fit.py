import bisect

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.training.data.best_fit import best_fit

LENGTHS = st.integers(1, 40).flatmap(
    lambda capacity: st.tuples(st.just(capacity), st.lists(st.integers(1, capacity), max_size=80))
)


def rooms_one_by_one(lengths, capacity):
    """What each row has left when the longest piece goes first, each into the fullest row with room for it."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        place = bisect.bisect_left(rooms, length)
        room = rooms.pop(place) if place < len(rooms) else capacity
        bisect.insort(rooms, room - length)
    return rooms


@pytest.mark.keeps("rows-full-best-fit")
@settings(max_examples=300, deadline=None)
@given(LENGTHS)
def test_rows_are_as_full_as_those_of_the_search_for_each_piece_by_itself(drawn):
    capacity, lengths = drawn
    rows = best_fit(np.array(lengths, np.int64), capacity)
    rooms = [capacity - sum(lengths[piece] for piece in rows[row]) for row in range(len(rows))]
    assert sorted(rooms) == rooms_one_by_one(lengths, capacity)


@settings(max_examples=100, deadline=None)
@given(LENGTHS)
def test_each_piece_is_in_one_row_and_keeps_its_order_there(drawn):
    capacity, lengths = drawn
    rows = best_fit(np.array(lengths, np.int64), capacity)
    held = [rows[row].tolist() for row in range(len(rows))]
    assert sorted(piece for row in held for piece in row) == list(range(len(lengths)))
    assert all(row == sorted(row) for row in held)
    assert [row[0] for row in held] == sorted(row[0] for row in held)


def test_the_same_lengths_give_the_same_rows():
    lengths = np.random.RandomState(0).randint(1, 65, 500)
    first, again = best_fit(lengths, 64), best_fit(lengths.copy(), 64)
    assert np.array_equal(first.pieces, again.pieces)
    assert np.array_equal(first.bounds, again.bounds)


def test_a_hundred_thousand_documents_of_usual_lengths_leave_less_than_a_thousandth_of_their_rows_empty():
    lengths = np.clip(np.exp(np.random.RandomState(0).normal(5.5, 1.2, 100_000)).astype(np.int64), 1, 2048)
    rows = best_fit(lengths, 2048)
    assert lengths.sum() / (len(rows) * 2048) > 0.999
