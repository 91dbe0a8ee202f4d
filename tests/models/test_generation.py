from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tightfit.errors import InputError
from tightfit.models.decoder import Decoder, DecoderConfig
from tightfit.models.generation import generate, generate_text
from tightfit.training.data.tokenizer import train_tokenizer


class Counting(nn.Module):
    """Prefers the token after the last one, and then the one after that; knows 8 tokens; remembers what it read."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.anchor = nn.Parameter(torch.zeros(()))
        self.read = []

    def forward(self, input_ids):
        self.read.append(input_ids)
        assert not self.dropout.training
        logits = torch.zeros(*input_ids.shape, 8)
        logits.scatter_(-1, ((input_ids + 1) % 8)[..., None], 3.0)
        logits.scatter_(-1, ((input_ids + 2) % 8)[..., None], 2.0)
        return SimpleNamespace(logits=logits)


def start(*tokens):
    return torch.tensor([tokens])


def test_temperature_zero_takes_the_likeliest_token_each_time():
    assert generate(Counting(), start(3), max_new_tokens=6, temperature=0).tolist() == [[3, 4, 5, 6, 7, 0, 1]]


def test_the_same_seed_draws_the_same_tokens_and_leaves_torchs_own_numbers_alone():
    state = torch.get_rng_state()
    first, again, other = (generate(Counting(), start(0), max_new_tokens=40, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_top_k_draws_from_the_k_likeliest_only():
    drawn = generate(Counting(), start(0), max_new_tokens=60, top_k=2, seed=0)[0]
    assert set(((drawn[1:] - drawn[:-1]) % 8).tolist()) == {1, 2}
    assert generate(Counting(), start(3), max_new_tokens=3, top_k=1, seed=0).tolist() == [[3, 4, 5, 6]]


def test_a_low_temperature_draws_the_likeliest_more_often():
    def share(temperature):
        drawn = generate(Counting(), start(0), max_new_tokens=100, temperature=temperature, seed=0)[0]
        return ((drawn[1:] - drawn[:-1]) % 8 == 1).float().mean()

    assert share(0.3) > share(1.0) > share(10.0)


def test_generation_stops_when_every_row_has_ended_and_ended_rows_stay_ended():
    ids = torch.tensor([[3], [5]])
    out = generate(Counting(), ids, max_new_tokens=9, temperature=0, end_of_text=7)
    assert out.tolist() == [[3, 4, 5, 6, 7], [5, 6, 7, 7, 7]]


def test_only_the_last_tokens_that_the_model_can_hold_are_read():
    model = Counting()
    generate(model, start(1, 2, 3), max_new_tokens=3, temperature=0, context_length=2)
    assert [ids.shape[1] for ids in model.read] == [2, 2, 2]
    decoder = Decoder(DecoderConfig(hidden_size=8, num_layers=1, num_heads=2, vocab_size=8, max_position_embeddings=4))
    assert generate(decoder, start(1, 2, 3), max_new_tokens=6, temperature=0).shape == (1, 9)


def test_each_module_is_left_in_the_mode_it_was_in():
    model = Counting().train()
    model.dropout.eval()
    generate(model, start(0), max_new_tokens=1)
    assert model.training
    assert not model.dropout.training


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_k": 0}, "top_k is 0"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "input_ids have the shape"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(arguments, expected):
    with pytest.raises(InputError, match=expected):
        generate(Counting(), **{"input_ids": start(0), "max_new_tokens": 1, **arguments})


def test_text_continues_its_prompt_and_an_empty_prompt_starts_a_document():
    tokenizer = train_tokenizer(["the cat sat on the mat"], 270)
    model = Decoder(DecoderConfig(hidden_size=8, num_layers=1, num_heads=2, vocab_size=270, max_position_embeddings=16))
    text = generate_text(model, tokenizer, "the cat", max_new_tokens=4, seed=0)
    assert text.startswith("the cat")
    assert "<|endoftext|>" not in generate_text(model, tokenizer, "", max_new_tokens=4, seed=0)
