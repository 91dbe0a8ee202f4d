"""A decoder whose attention sees a window only."""

import pytest
import torch

from tightfit import estimate, plan, verify
from tightfit.errors import ModelError
from tightfit.models.decoder import next_token_loss
from tightfit.models.decoder_config import DecoderConfig
from tiny import allocator_peak, decoder, token_batch


def reach(window, **settings):
    """For position 20 of one layer, which positions' embeddings its logits depend on."""
    model = decoder(num_layers=1, attention_window=window, **settings)
    seen = []
    model.embedding.register_forward_hook(lambda module, inputs, output: seen.append(output.requires_grad_()) or output)
    logits = model(torch.arange(40)[None]).logits
    (gradient,) = torch.autograd.grad(logits[0, 20].square().sum(), seen)
    return gradient[0].abs().sum(dim=-1).nonzero().flatten().tolist()


@pytest.mark.parametrize("settings", [{}, {"attention": "chunked", "attention_chunk_size": 8}], ids=str)
@pytest.mark.parametrize("window", [1, 7, 16])
def test_a_position_sees_itself_and_those_before_it_within_the_window(window, settings):
    assert reach(window, **settings) == list(range(20 - window + 1, 21))


def test_a_window_as_wide_as_the_text_changes_nothing():
    batch = token_batch(2, 40)
    assert torch.equal(decoder(attention_window=40)(**batch).logits, decoder()(**batch).logits)


@pytest.mark.slow  # plans of long sequences
@pytest.mark.parametrize("settings", [{}, {"attention": "chunked", "attention_chunk_size": 32}], ids=str)
def test_its_peak_is_predicted_and_a_plan_keeps_to_its_budget_and_changes_no_bit(settings):
    model, batch = decoder(attention_window=24, **settings), token_batch()
    predicted = estimate(model, batch).peak_bytes
    assert predicted == pytest.approx(allocator_peak(model, batch), rel=1e-3)
    made = plan(model, batch, int(0.8 * predicted), levers="exact")
    assert verify(model, batch, made).ok
    with made.apply(model):
        assert allocator_peak(model, batch) <= 0.8 * predicted


def test_it_learns_what_lies_within_the_window():
    torch.manual_seed(0)
    model = decoder(num_layers=1, attention_window=4)
    ids = torch.randint(0, 600, (8, 1), generator=torch.Generator().manual_seed(0)) + torch.arange(32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        loss = next_token_loss(model(ids % 600).logits, ids % 600)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


def test_dropout_of_attention_weights_is_refused():
    with pytest.raises(ModelError, match=r"attention_window and model\.attention_dropout exclude each other") as caught:
        DecoderConfig(attention_window=8, attention_dropout=0.1)
    assert "\n" not in str(caught.value)
