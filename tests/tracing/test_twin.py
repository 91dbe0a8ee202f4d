"""Models and batches without memory, on meta or fake: estimated and planned as if they had some."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from round_device import round_device
from tightfit import estimate, maximise, plan, verify
from tightfit.errors import InputError, ModelError
from tightfit.step import TokenBatch
from tightfit.tracing.twin import with_memory
from tiny import VOCABULARY, allocator_peak, decoder, token_batch


def on_meta():
    with torch.device("meta"):
        return decoder()


def meta_batch(batch):
    return {name: tensor.to("meta") for name, tensor in batch.items()}


@pytest.mark.keeps("model-meta-fake-same")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("device", [None, "rtx4090"])
def test_a_model_on_meta_is_estimated_as_the_same_model_with_memory(optimizer, device):
    device = device or round_device()
    expected = estimate(decoder(), token_batch(), optimizer=optimizer, device=device).peak_bytes
    for batch in (token_batch(), meta_batch(token_batch()), TokenBatch(4, 96, VOCABULARY)):
        assert estimate(on_meta(), batch, optimizer=optimizer, device=device).peak_bytes == expected


@pytest.mark.parametrize("device", [None, "rtx4090"])
def test_states_in_eight_bits_are_counted_on_meta_too(device):
    def found(model):
        return estimate(model, token_batch(), optimizer="adamw8bit", device=device or round_device()).peak_bytes

    found(decoder())  # bitsandbytes makes tables when it is first used
    assert found(on_meta()) == found(decoder())


def test_a_batch_on_meta_does_for_a_model_with_memory():
    expected = estimate(decoder(), token_batch(), device=round_device()).peak_bytes
    assert estimate(decoder(), meta_batch(token_batch()), device=round_device()).peak_bytes == expected


@pytest.mark.keeps("model-meta-fake-same")
@pytest.mark.slow  # a plan
def test_a_plan_made_on_meta_is_for_the_model_with_weights(tmp_path):
    model = on_meta()
    made = plan(model, meta_batch(token_batch()), "0.7x", device=round_device())
    assert all(parameter.is_meta for parameter in model.parameters())
    real = decoder()
    with made.apply(real):
        assert allocator_peak(real, token_batch()) <= made.budget_bytes
    assert verify(real, token_batch(), made).ok


def test_a_model_that_gets_its_memory_after_a_plan_was_applied_runs_under_it():
    model, real = on_meta(), decoder()
    made = plan(model, token_batch(), "0.7x", device=round_device())
    made.apply(model)
    model.to_empty(device="cpu")
    model.head.weight = model.embedding.weight  # `to_empty` gives every name a tensor of its own
    model.load_state_dict(real.state_dict())
    for buffer, content in zip(model.buffers(), real.buffers(), strict=True):
        buffer.copy_(content)
    for each in (model, real):
        each(**token_batch()).loss.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), real.parameters(), strict=True))


def test_tied_weights_and_buffers_stay_tied_on_meta():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("scale", torch.ones(32))
            self.also = self.scale

        def forward(self, ids):
            return self.head(self.embedding(ids) * self.scale * self.also).logsumexp(-1).mean()

    ids = {"ids": torch.zeros(2, 8, dtype=torch.long)}
    with torch.device("meta"):
        model = Tied()
    assert (
        estimate(model, ids, device=round_device()).peak_bytes
        == estimate(Tied(), ids, device=round_device()).peak_bytes
    )


@pytest.mark.slow  # a plan in every mode
def test_within_fake_tensor_mode_and_after_it():
    expected = estimate(decoder(), token_batch(), device=round_device()).peak_bytes
    with FakeTensorMode():
        model, batch = decoder(), token_batch()
        assert estimate(model, batch, device=round_device()).peak_bytes == expected
        within = plan(model, batch, "0.7x", device=round_device())
    assert estimate(model, batch, device=round_device()).peak_bytes == expected
    assert within.choices == plan(decoder(), token_batch(), "0.7x", device=round_device()).choices


@pytest.mark.slow  # a search for the longest sequence
def test_the_longest_sequence_of_a_model_on_meta():
    def found(build):
        at_most = {"at_most": 200, "device": round_device()}
        return maximise(lambda n: (build(), TokenBatch(2, n, VOCABULARY)), "4MiB", what="length", **at_most).value

    assert found(on_meta) == found(decoder) > 32


def test_what_needs_numbers_says_so_in_a_line():
    made = plan(decoder(), token_batch(), "0.7x", device=round_device())
    with pytest.raises(ModelError, match=r"verify compares numbers, and .* has none \(meta, or fake\)"):
        verify(on_meta(), token_batch(), made)
    model = on_meta()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(InputError, match="this AdamW holds parameters without memory"):
        estimate(model, token_batch(), optimizer=optimizer)


def test_a_model_on_meta_that_cannot_be_copied_is_refused_by_name():
    model = on_meta()
    model.generator = (number for number in range(3))
    with pytest.raises(ModelError, match=r"Decoder has no memory .* and cannot be copied"):
        estimate(model, token_batch(), device=round_device())


def test_masks_without_memory_are_taken_as_true_and_ids_stay_below_each_embedding():
    model = decoder()
    batch = {
        name: torch.zeros(2, 16, dtype=torch.int64, device="meta") for name in ("input_ids", "labels", "attention_mask")
    }
    filled = with_memory(batch, model)
    assert torch.equal(filled["attention_mask"], torch.ones(2, 16, dtype=torch.int64))
    assert 1 < int(filled["input_ids"].max()) < VOCABULARY
