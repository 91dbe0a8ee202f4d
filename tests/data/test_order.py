import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.training.data.order import POOL, Buckets, Epochs, bucket_lengths
from tightfit.training.data.packing import BatchStream, StreamPosition
from tightfit.training.data.samples import PaddedSamples, Pieces
from tightfit.training.data.store import TokenStore


def documents(lengths):
    """Padded samples of these lengths; sample i holds the token i, again and again."""
    store = TokenStore.from_lists([np.full(length, number) for number, length in enumerate(lengths)])
    return PaddedSamples(store, Pieces.cut(np.arange(len(lengths)), store.lengths, 1000), pad_id=999)


def samples_of(batch):
    return batch["input_ids"][:, 0].tolist()


def stream(samples, size, **how):
    return BatchStream(samples, size, **{"seed": 3, "buckets": True, **how})


@settings(max_examples=80, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=30), size=st.integers(1, 9), shuffle=st.booleans())
def test_batches_of_buckets_are_full_and_give_each_sample_once_an_epoch(lengths, size, shuffle):
    batches = stream(documents(lengths), size, shuffle=shuffle)
    epochs = 3
    given_out = np.concatenate([samples_of(next(batches)) for _ in range(-(-epochs * len(lengths) // size))])
    assert len(given_out) % size == 0
    counts = np.bincount(given_out, minlength=len(lengths))
    assert counts.min() >= epochs  # what the last batch holds beside them is of the next epoch
    assert counts.sum() - epochs * len(lengths) < size


@settings(max_examples=80, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=30), size=st.integers(1, 9),
       stops=st.lists(st.integers(0, 6), min_size=2, max_size=5))  # fmt: skip
def test_a_stream_of_buckets_continues_from_its_position_again_and_again(lengths, size, stops):
    samples = documents(lengths)
    whole, position = stream(samples, size), StreamPosition()
    for stop in stops:
        part = stream(samples, size, position=position)
        for _ in range(stop):
            assert samples_of(next(part)) == samples_of(next(whole))
        position = part.position


@pytest.mark.keeps("batches-position-reached-without")
def test_a_stream_from_any_position_is_the_uninterrupted_stream():
    samples, size = documents(np.random.RandomState(0).randint(1, 50, 107)), 8
    for buckets in (False, True):
        whole = stream(samples, size, buckets=buckets)
        passed = [(whole.position, samples_of(next(whole))) for _ in range(60)]
        for position, expected in passed:
            assert samples_of(next(stream(samples, size, buckets=buckets, position=position))) == expected


def test_the_batches_of_a_bucket_are_of_alike_length_and_the_longest_of_an_epoch_goes_first():
    lengths, size = np.random.RandomState(0).randint(1, 500, 800), 8
    epochs = Epochs(len(lengths), seed=0, shuffle=True)
    buckets = Buckets(epochs, size, lambda: lengths)
    for epoch in (0, 1):
        batches = [lengths[buckets.batch(number)] for number in range(epoch * 100, (epoch + 1) * 100)]
        assert batches[0].max() == lengths.max()
        spread = np.mean([batch.max() - batch.min() for batch in batches])
        assert spread < 500 / POOL * 2
        longest = [batch.max() for batch in batches[1:]]
        assert sorted(longest) != longest  # the order of the batches is drawn


def test_epochs_and_seeds_give_buckets_in_other_orders():
    samples = documents(np.random.RandomState(0).randint(1, 50, 64))
    first = stream(samples, 8)
    orders = [tuple(tuple(samples_of(next(first))) for _ in range(8)) for _ in range(2)]
    other = stream(samples, 8, seed=4)
    orders.append(tuple(tuple(samples_of(next(other))) for _ in range(8)))
    assert len(set(orders)) == 3


@pytest.mark.keeps("batches-position-reached-without")
@pytest.mark.parametrize("buckets", [False, True])
def test_the_last_position_of_many_samples_is_reached_without_the_batches_before_it(buckets, monkeypatch):
    samples = documents(np.full(50, 3))
    drawn = []
    monkeypatch.setattr(PaddedSamples, "batch", lambda self, chosen: drawn.append(len(chosen)) or {"input_ids": chosen})
    next(stream(samples, 5, buckets=buckets, position=StreamPosition(epoch=10**6, sample=45)))
    assert drawn == [5]


def test_lengths_are_rounded_up_to_eighths_of_the_longest_and_unused_ones_are_left_out():
    assert bucket_lengths(np.array([1, 10, 11, 80]), 80) == [10, 20, 80]
    assert bucket_lengths(np.array([3, 5]), 5) == [3, 5]
    assert bucket_lengths(np.array([2, 3]), 100) == [13, 100]
    assert bucket_lengths(np.array([1]), 1) == [1]
