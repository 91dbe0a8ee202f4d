"""What a document's loss and gradients depend on: its tokens, and not what else its row holds."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from packed_rows import LENGTH, MODELS, decoder, document, of_transformers, packed, padded
from torch import Tensor, nn

from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.memory.allocator import measured_peak
from tightfit.planner.api import plan
from tightfit.step import StepSettings, forward_backward
from tightfit.training.loop import resident_tensors
from tightfit.training.objective import CausalLMLoss, counted, next_tokens
from tightfit.training.stepper import Stepper

BY_NAME = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
DOCUMENT = document(9, seed=1)


def losses(model: nn.Module, batch: dict[str, Tensor], row: int, begin: int) -> Tensor:
    """The loss of each token of `DOCUMENT` but its first, where it begins at this place of a row."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    of_all = F.cross_entropy(logits.flatten(0, 1), next_tokens(batch["labels"]), reduction="none", ignore_index=-100)
    return of_all.view(-1, LENGTH)[row, begin : begin + len(DOCUMENT) - 1].detach()


def beside(*lengths: int, seed: int) -> list:
    return [document(length, seed + number) for number, length in enumerate(lengths)]


@pytest.mark.keeps("packed-document-loss-move")
@BY_NAME
def test_a_documents_loss_does_not_move_by_a_bit_with_the_tokens_and_lengths_of_its_neighbours(
    make: Callable[[], nn.Module],
):
    model, found = make(), []
    for before, after, other in (
        ((7,), (10,), (20, 5)),
        ((3, 4), (2, 3, 4), (32,)),
        ((6, 1), (), (1, 1, 1)),
        ((1, 6), (16,), (31,)),
    ):
        row = [*beside(*before, seed=10 * len(found)), DOCUMENT, *beside(*after, seed=77 + len(found))]
        found.append(losses(model, packed([row, beside(*other, seed=5)]), row=0, begin=7))

    assert (found[0] > 0).all()
    for others in found[1:]:
        assert torch.equal(found[0], others)


@pytest.mark.keeps("packed-document-loss-move")
@BY_NAME
def test_in_another_place_its_loss_is_the_same_within_rounding(make: Callable[[], nn.Module]):
    model, other = make(), beside(8, 9, seed=3)
    alone = losses(model, packed([[DOCUMENT], other]), row=0, begin=0)

    for row, begin in (([*beside(7, seed=2), DOCUMENT], 7), ([*beside(11, 5, seed=4), DOCUMENT], 16)):
        assert torch.allclose(losses(model, packed([other, row]), row=1, begin=begin), alone, rtol=1e-5, atol=1e-5)


def gradients(model: nn.Module, batch: dict[str, Tensor], micro_batches: int = 1) -> list[Tensor]:
    model.zero_grad()
    loss = CausalLMLoss()
    parts = as_parts(split_batch(counted(batch), micro_batches), loss)
    forward_backward(model, parts, loss)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.keeps("packed-rows-gradients-padded")
@BY_NAME
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_packed_rows_have_the_gradients_of_padded_ones_within_rounding(
    make: Callable[[], nn.Module], micro_batches: int
):
    model = make()
    documents = beside(9, 23, 14, 18, seed=1)
    rows, alone = packed([documents[:2], documents[2:]]), padded(documents)

    found, expected = gradients(model, rows, micro_batches), gradients(model, alone)
    model.double()
    truth, again = gradients(model, alone), gradients(model, rows, micro_batches)

    for one, other in zip(truth, again, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-7)  # norms of transformers compute in fp32
    assert error(found, truth) <= 1.5 * error(expected, truth)


def error(found: list[Tensor], truth: list[Tensor]) -> float:
    """Of all gradients together, relative to them."""
    wrong = sum(float((one.double() - other).square().sum()) for one, other in zip(found, truth, strict=True))
    return (wrong / sum(float(one.square().sum()) for one in truth)) ** 0.5


@pytest.mark.keeps("batches-hold-attention-mask")
def test_a_mask_of_ones_silently_takes_the_boundaries_away():
    """transformers#46634: that is why batches hold no mask, and why a model that makes one is refused."""
    model = of_transformers("Llama")
    rows = [packed([[*beside(7, seed=seed), DOCUMENT]]) for seed in (1, 2)]
    ones = torch.ones(1, LENGTH, dtype=torch.int64)

    masked = [model(input_ids=r["input_ids"], position_ids=r["position_ids"], attention_mask=ones).logits for r in rows]
    unmasked = [model(input_ids=r["input_ids"], position_ids=r["position_ids"]).logits for r in rows]

    assert torch.equal(unmasked[0][0, 7:16], unmasked[1][0, 7:16])
    assert not torch.allclose(masked[0][0, 7:16], masked[1][0, 7:16], atol=1e-3)
    assert all("attention_mask" not in row for row in rows)


@pytest.mark.slow  # two plans
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("make", "levers"),
    [
        (lambda: decoder(), ["recompute"]),
        (lambda: decoder(), ["micro_batch", "chunked_loss"]),
        (lambda: decoder(attention="chunked", attention_chunk_size=8), ["recompute"]),
        (lambda: of_transformers("Llama"), ["micro_batch", "recompute"]),
        (lambda: of_transformers("Qwen3", attn_implementation="eager"), ["recompute"]),
    ],
)
def test_a_plan_for_packed_rows_predicts_what_is_measured(make: Callable[[], nn.Module], levers: list[str]):
    model = make()
    rows = [[*beside(5, 11 + n, 4, seed=n)] for n in range(4)]
    batch, recipe = counted(packed(rows)), lambda parameters: torch.optim.AdamW(parameters)
    made = plan(model, batch, "0.9x", loss=CausalLMLoss(), optimizer=recipe, levers=levers, device="cpu")

    with made.apply(model):
        stepper = Stepper(model, recipe(model.parameters()), CausalLMLoss(), StepSettings(), made.micro_batches)
        stepper.step(batch)
        peak = measured_peak(lambda: stepper.step(batch), resident_tensors(model, stepper.optimizer, batch))

    assert peak == pytest.approx(made.peak_bytes, rel=1e-3)
    assert peak <= made.budget_bytes
