import pytest
import torch
from torch import nn

from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.models.decoder import Decoder, DecoderConfig
from tightfit.step import forward_backward
from tightfit.training.objective import VALID_TOKENS, CausalLMLoss, counted

VOCABULARY, LENGTH = 97, 24
LOSS = CausalLMLoss()


def decoder() -> Decoder:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY}
    return Decoder(DecoderConfig(**shape, max_position_embeddings=LENGTH))


def ragged_batch() -> dict[str, torch.Tensor]:
    """Samples with 24 to 0 valid labels."""
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (6, LENGTH))
    labels = ids.clone()
    for row, valid in enumerate((24, 3, 17, 1, 9, 0)):
        labels[row, valid:] = -100
    return {"input_ids": ids, "labels": labels}


def gradient(model: nn.Module, micro_batches: int) -> torch.Tensor:
    """All gradients of the ragged batch in fp64, one behind the other."""
    forward_backward(model, as_parts(split_batch(counted(ragged_batch()), micro_batches), LOSS), LOSS)
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def test_the_loss_is_the_models_own_mean_over_valid_tokens():
    model, batch = decoder(), ragged_batch()

    own = model(**batch).loss

    torch.testing.assert_close(LOSS(model, counted(batch)), own)


def test_valid_tokens_are_counted_after_the_shift():
    assert counted(ragged_batch())[VALID_TOKENS] == 23 + 2 + 16 + 0 + 8 + 0


@pytest.mark.keeps("micro-batches-ragged-length")
@pytest.mark.parametrize("micro_batches", [2, 3, 6])
def test_ragged_micro_batches_add_up_to_the_gradient_of_the_whole_batch(micro_batches: int):
    truth = gradient(decoder().double(), 1)
    whole_error = (gradient(decoder(), 1) - truth).norm()

    error = (gradient(decoder(), micro_batches) - truth).norm()

    assert error <= 1.1 * whole_error  # sums in another order: 1.001 with SSE4.1
    assert error <= 1e-6 * truth.norm()


def test_a_mean_of_means_would_not_add_up():
    """What the token count is for: the batch is ragged enough to tell the two apart."""
    truth = gradient(decoder().double(), 1)
    model = decoder().double()

    for part in split_batch(ragged_batch(), 3):
        (LOSS(model, part) / 3).backward()
    means = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    assert (means - truth).norm() > 0.1 * truth.norm()


@pytest.mark.keeps("micro-batches-ragged-length")
def test_a_micro_batch_without_a_valid_label_adds_exactly_zero():
    model, batch = decoder(), counted(ragged_batch())
    empty = split_batch(batch, 6)[-1]

    loss = LOSS(model, empty)
    loss.backward()

    assert loss.item() == 0.0
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_a_batch_without_any_valid_label_has_a_loss_of_zero():
    batch = ragged_batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)

    assert LOSS(decoder(), counted(batch)).item() == 0.0


def test_the_model_is_called_without_labels_and_with_everything_else():
    seen = []

    class Spy(nn.Module):
        def forward(self, **inputs: torch.Tensor) -> object:
            seen.append(set(inputs))
            return decoder()(inputs["input_ids"])

    LOSS(Spy(), counted({**ragged_batch(), "position_ids": torch.arange(LENGTH)}))

    assert seen == [{"input_ids", "position_ids"}]
