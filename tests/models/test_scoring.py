"""A text read piece by piece is the text read whole; what it takes does not grow with it."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tightfit import score
from tightfit.errors import InputError, ModelError
from tightfit.memory.allocator import measured_peak
from tightfit.models.generation import generate
from tightfit.models.kv_cache import KVCache
from tiny import VOCABULARY, decoder


def text(rows=2, length=75):
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))


DECODERS = {
    "plain": {},
    "chunked attention": {"attention": "chunked", "attention_chunk_size": 16},
    "window": {"attention_window": 20},
    "window of one": {"attention_window": 1},
    "window, chunked attention": {"attention_window": 20, "attention": "chunked", "attention_chunk_size": 8},
    "normed heads": {"qk_norm": True},
    "dropout": {"dropout": 0.3},
}


def single_pass(model, ids):
    """The log-likelihoods by the definition, in evaluation mode."""
    with torch.no_grad():
        scores = F.log_softmax(model.eval()(input_ids=ids).logits, dim=-1)
    return scores[:, :-1].gather(2, ids[:, 1:, None])[..., 0]


@pytest.mark.keeps("text-read-pieces-scores")
@pytest.mark.sampled(12)
@pytest.mark.parametrize("settings", DECODERS.values(), ids=DECODERS)
@pytest.mark.parametrize("chunk_size", [1, 16, 30, 74, 1000, None])
def test_in_fp64_a_decoder_scores_a_text_in_pieces_as_in_one_pass(settings, chunk_size):
    model = decoder(**settings).double()
    scored = score(model, text(), chunk_size=chunk_size).log_likelihoods
    # the scores themselves are kept in fp32
    torch.testing.assert_close(scored.double(), single_pass(model, text()), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("window", [None, 20])
def test_in_fp64_the_logits_of_pieces_of_any_size_are_those_of_the_whole(window):
    model, ids = decoder(attention_window=window).double().eval(), text()
    with torch.no_grad():
        whole = model(ids).logits
        cache = KVCache(model.config, capacity=75)
        made = [model(piece, cache=cache).logits for piece in ids.split([1, 30, 2, 41, 1], dim=1)]
    torch.testing.assert_close(torch.cat(made, dim=1), whole, rtol=1e-10, atol=1e-12)


def test_in_fp32_pieces_are_no_further_from_fp64_than_the_single_pass():
    model, ids = decoder(), text(4, 500)
    whole, pieces = (score(model, ids, chunk_size=size).log_likelihoods for size in (None, 64))
    truth = single_pass(model.double(), ids)
    assert (pieces - truth).norm() <= 1.1 * (whole - truth).norm()


def test_the_sums_are_those_of_the_tokens_after_the_first():
    model, ids = decoder(), text(1)
    scored = score(model, ids[0], chunk_size=10)
    assert scored.tokens == 74
    assert scored.log_likelihood == pytest.approx(single_pass(model, ids).double().sum().item(), rel=1e-6)
    assert scored.perplexity == pytest.approx(math.exp(-scored.log_likelihood / 74))


def peak(length, chunk_size, **settings):
    model = decoder(max_position_embeddings=1024, **settings)
    ids = text(1, length)
    resident = [*model.parameters(), *model.buffers(), ids]
    return measured_peak(lambda: score(model, ids, chunk_size=chunk_size), resident) - sum(t.nbytes for t in resident)


@pytest.mark.keeps("text-read-pieces-scores")
@pytest.mark.slow  # a long text, so that one piece is small beside it
def test_in_pieces_logits_and_activations_of_one_piece_exist_at_a_time():
    in_pieces = peak(1024, 32)
    assert in_pieces < 0.25 * peak(1024, None)
    # beside the piece there are keys and values, 2 x 2 heads x 16 wide in 3 layers, and the score itself
    assert in_pieces - peak(512, 32) <= 512 * (4 * 2 * 2 * 16 * 3 + 2 * 8 + 3 * 4)


@pytest.mark.slow  # ten seconds of long texts; the test before it holds the same for a cache of all
def test_within_a_window_what_is_held_of_the_text_does_not_grow_with_it():
    grown = peak(1024, 32, attention_window=64) - peak(512, 32, attention_window=64)
    assert grown <= 512 * (2 * 8 + 3 * 4)  # ids, targets and scores


def test_each_module_is_left_in_the_mode_it_was_in():
    model = decoder().train()
    model.layers[0].eval()
    score(model, text(), chunk_size=16)
    assert model.training
    assert not model.layers[0].training


class Cacheless(nn.Module):
    """Gives even odds to each token, and keeps no cache."""

    def __init__(self):
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(()))

    def forward(self, input_ids):
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 8))


def test_a_model_without_a_cache_is_scored_in_one_pass_only():
    ids = torch.zeros(1, 5, dtype=torch.long)
    assert score(Cacheless(), ids, chunk_size=None).perplexity == pytest.approx(8)
    with pytest.raises(ModelError, match=r"Cacheless keeps no cache.*chunk_size=None"):
        score(Cacheless(), ids)


@pytest.mark.parametrize(
    ("ids", "how", "message"),
    [
        (torch.zeros(1, 1, dtype=torch.long), {}, r"shape \(1, 1\).*at least two tokens"),
        (torch.zeros(1, 2, 3, dtype=torch.long), {}, r"shape \(1, 2, 3\)"),
        (torch.zeros(1, 9, dtype=torch.long), {"chunk_size": 0}, "chunk_size is 0"),
        (torch.zeros(1, 600, dtype=torch.long), {}, "the text has 600 tokens, the model's positions reach 512"),
    ],
)
def test_what_cannot_be_scored_is_refused_in_one_line(ids, how, message):
    with pytest.raises(InputError, match=message) as caught:
        score(decoder(), ids, **how)
    assert "\n" not in str(caught.value)


def test_a_cache_in_training_is_refused():
    model = decoder()
    with pytest.raises(ModelError, match="for reading, not for training"):
        model(text(), cache=KVCache(model.config, capacity=75))


# Generation


def by_whole_passes(model, ids, count, limit):
    """Greedy tokens, each from one pass over what the model can hold."""
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat((ids, model(input_ids=ids[:, -limit:]).logits[:, -1:].argmax(-1)), dim=1)
    return ids


@pytest.mark.keeps("text-read-pieces-scores")
@pytest.mark.sampled(8)
@pytest.mark.parametrize("settings", DECODERS.values(), ids=DECODERS)
@pytest.mark.parametrize("chunk_size", [1, 7, 512])
def test_text_generated_from_a_cache_is_that_of_whole_passes(settings, chunk_size):
    model = decoder(**settings).double().eval()
    made = generate(model, text(2, 20), max_new_tokens=12, temperature=0, chunk_size=chunk_size)
    assert torch.equal(made, by_whole_passes(model, text(2, 20), 12, 512))


def test_beyond_the_positions_of_the_model_the_text_slides_as_with_whole_passes():
    model = decoder(max_position_embeddings=24).double().eval()
    made = generate(model, text(2, 20), max_new_tokens=12, temperature=0, chunk_size=7)
    assert torch.equal(made, by_whole_passes(model, text(2, 20), 12, 24))


def test_the_prompt_is_read_in_pieces_and_each_token_by_itself():
    model, lengths = decoder(), []
    model.embedding.register_forward_hook(lambda module, inputs, output: lengths.append(inputs[0].shape[1]))
    generate(model, text(1, 20), max_new_tokens=4, temperature=0, chunk_size=8)
    assert lengths == [8, 8, 4, 1, 1, 1]


def test_a_chunk_size_of_nothing_is_refused():
    with pytest.raises(InputError, match="chunk_size is 0"):
        generate(decoder(), text(), max_new_tokens=1, chunk_size=0)
