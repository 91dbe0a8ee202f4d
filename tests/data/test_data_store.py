"""Items in flat arrays."""

import numpy as np
import pytest

from tightfit.training.data.store import TokenStore


def test_items_come_back_with_their_lengths_and_flags():
    store = TokenStore.from_lists([[1, 2, 3], [4], []], [[True, False, True], [False], []], kind="conversations")
    assert len(store) == 3
    assert store.lengths.tolist() == [3, 1, 0]
    assert store.lengths.dtype == np.int64
    assert [store.tokens(item).tolist() for item in range(3)] == [[1, 2, 3], [4], []]
    assert [store.learnt(item).tolist() for item in range(3)] == [[True, False, True], [False], []]
    assert store.learnt(0).dtype == np.bool_


def test_without_flags_there_are_none_and_ids_take_the_smallest_dtype():
    assert TokenStore.from_lists([[1], [2]]).learnt(1) is None
    assert TokenStore.from_lists([[65535]]).dtype == np.uint16
    assert TokenStore.from_lists([[65536]]).dtype == np.uint32
    assert len(TokenStore.from_lists([])) == 0


def test_an_item_that_is_not_there_is_no_item():
    store = TokenStore.from_lists([[1], [2]])
    for item in (-1, 2):
        with pytest.raises(IndexError):
            store.tokens(item)


def test_fingerprints_differ_where_anything_in_the_store_does():
    stores = [
        TokenStore.from_lists([[1, 2], [3]]),
        TokenStore.from_lists([[1], [2, 3]]),
        TokenStore.from_lists([[1, 2], [4]]),
        TokenStore.from_lists([[1, 2], [3]], [[True, True], [True]]),
        TokenStore.from_lists([[1, 2], [3]], [[True, True], [False]]),
        TokenStore.from_lists([[1, 2], [3]], kind="preferences"),
    ]
    assert len({store.fingerprint for store in stores}) == len(stores)
    assert TokenStore.from_lists([[1, 2], [3]]).fingerprint == stores[0].fingerprint
