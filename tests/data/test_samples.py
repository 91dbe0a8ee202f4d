"""Rows of whole documents, padded or packed: which tokens are where, and which are learnt."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.errors import ConfigError, DataError
from tightfit.training.config import DataConfig
from tightfit.training.data.packing import BatchStream
from tightfit.training.data.prepare import arrange
from tightfit.training.data.samples import BestFitSamples, PaddedSamples, Pieces
from tightfit.training.data.store import TokenStore

PAD = 999
DOCUMENTS = st.lists(st.integers(1, 25), min_size=1, max_size=40)


def store_of(lengths, **how):
    """Documents whose tokens are all different."""
    tokens = np.arange(sum(lengths)) + 1000
    return TokenStore.from_lists(np.split(tokens, np.cumsum(lengths)[:-1]), **how)


def arranged(store, length=10, **data):
    config = DataConfig(**{"sequence_length": length, "validation_fraction": 0.0, **data})
    return arrange(store, config, pad_id=PAD)[0]


def tokens_of(batch):
    """All tokens that are no padding, in order of their ids."""
    ids = batch["input_ids"].flatten()
    return sorted(ids[ids != PAD].tolist())


@pytest.mark.keeps("packing-padding-lose-token")
@settings(max_examples=80, deadline=None)
@given(lengths=DOCUMENTS, packing=st.sampled_from(["best_fit", "none"]), shuffle=st.booleans())
def test_no_token_is_lost_or_there_twice_and_all_but_the_first_of_a_piece_are_learnt(lengths, packing, shuffle):
    store = store_of(lengths)
    samples = arranged(store, packing=packing, buckets=packing == "none", shuffle=shuffle)
    batch = samples.batch(range(len(samples)))
    assert tokens_of(batch) == list(range(1000, 1000 + sum(lengths)))
    learnt = batch["labels"] != -100
    assert torch.equal(batch["labels"][learnt], batch["input_ids"][learnt])
    pieces = sum(-(-length // 10) for length in lengths)
    assert learnt.sum() == sum(lengths) - pieces


@pytest.mark.keeps("packing-padding-lose-token")
@settings(max_examples=50, deadline=None)
@given(lengths=DOCUMENTS)
def test_positions_restart_at_each_piece_and_no_label_crosses_a_boundary(lengths):
    samples = arranged(store_of(lengths), packing="best_fit")
    batch = samples.batch(range(len(samples)))
    ids, positions, labels = batch["input_ids"], batch["position_ids"], batch["labels"]
    begins = positions == 0
    assert begins[:, 0].all()
    assert torch.equal(positions[:, 1:][~begins[:, 1:]], positions[:, :-1][~begins[:, 1:]] + 1)
    goes_on = (ids[:, 1:] == ids[:, :-1] + 1) | ((ids[:, 1:] == PAD) & (ids[:, :-1] == PAD))
    assert goes_on[~begins[:, 1:]].all()
    assert (labels[begins] == -100).all()
    assert (labels[ids == PAD] == -100).all()


def test_a_document_has_a_row_padded_to_the_longest_of_its_batch_without_a_mask():
    samples = arranged(store_of([3, 1, 5]), buckets=True, shuffle=False)
    batch = samples.batch([0, 1])
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].tolist() == [[1000, 1001, 1002], [1003, PAD, PAD]]
    assert batch["labels"].tolist() == [[-100, 1001, 1002], [-100, -100, -100]]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_only_what_a_conversation_marks_is_learnt(packing):
    store = TokenStore.from_lists([[5, 6, 7, 8]], [[True, False, True, True]], kind="conversations")
    batch = arranged(store, packing=packing).batch([0])
    assert batch["labels"][0, :4].tolist() == [-100, -100, 7, 8]


def test_a_long_document_goes_on_in_another_row():
    samples = arranged(store_of([7]), length=3, buckets=True, shuffle=False)
    assert samples.batch([0, 1, 2])["input_ids"].tolist() == [[1000, 1001, 1002], [1003, 1004, 1005], [1006, PAD, PAD]]


@pytest.mark.keeps("packing-padding-lose-token")
def test_the_two_answers_of_a_pair_stay_together_in_this_order():
    store = store_of([3, 4, 12, 2, 5, 6], kind="preferences")
    samples = arranged(store)
    assert len(samples) == 3
    for batch in (next(BatchStream(samples, 4, seed=seed, buckets=buckets)) for seed in (1, 2) for buckets in (0, 1)):
        first = batch["input_ids"][:, 0]
        pairs = {1000: 1003, 1007: 1019, 1021: 1026}
        assert [pairs[chosen] for chosen in first[::2].tolist()] == first[1::2].tolist()
    assert samples.lengths.tolist().count(10) == 1  # cut, not continued
    assert "2 tokens beyond data.sequence_length cut off" in str(samples)


def test_an_odd_batch_of_pairs_is_refused():
    with pytest.raises(ConfigError, match=r"training\.batch_size 3 counts sequences, and a preference pair is 2"):
        BatchStream(arranged(store_of([3, 4], kind="preferences")), 3)


def test_pairs_are_not_packed():
    with pytest.raises(ConfigError, match=r"data\.packing best_fit: the two answers of a preference pair"):
        arranged(store_of([3, 4], kind="preferences"), packing="best_fit")


def test_buckets_and_packing_exclude_each_other():
    with pytest.raises(ValueError, match="buckets and packing best_fit are both set"):
        DataConfig(buckets=True, packing="best_fit")


def test_whole_documents_are_held_out():
    store = store_of([4] * 20)
    config = DataConfig(sequence_length=8, packing="best_fit", validation_fraction=0.25)
    training, validation = arrange(store, config, pad_id=PAD)
    kept, held = (tokens_of(part.batch(range(len(part)))) for part in (training, validation))
    assert len(held) == 20
    assert sorted(kept + held) == list(range(1000, 1080))


def test_empty_documents_alone_are_refused():
    with pytest.raises(DataError, match="holds no token to train on"):
        arranged(TokenStore.from_lists([[]]), packing="best_fit")


def test_text_without_buckets_and_packing_is_a_stream_cut_evenly_across_documents():
    samples = arranged(store_of([7, 6]), shuffle=False)
    assert samples.batch(range(len(samples)))["input_ids"].tolist() == [list(range(1000, 1010))]


def test_the_fullest_batch_has_one_ignored_label_and_where_rows_are_packed_a_boundary_in_each():
    store = store_of([3, 5])
    pieces = Pieces.cut(np.arange(2), store.lengths, 10)
    padded, packed = PaddedSamples(store, pieces, PAD), BestFitSamples.of(store, pieces, 10, PAD)
    for samples in (padded, packed):
        batch = samples.fullest(3, 8)
        assert batch["input_ids"].shape == (3, 8)
        assert (batch["labels"] == -100).sum() == 1
    assert ((packed.fullest(3, 8)["position_ids"] == 0).sum(dim=1) == 2).all()


def test_the_share_of_padding_is_said():
    samples = arranged(store_of([6, 5, 4]), packing="best_fit")
    assert str(samples) == "2 rows of 10 tokens, packed by best fit, 75.0% full,"
