"""bf16 weights that lose no small update."""

import math

import pytest
import torch
from small_training import assert_same_weights, batches, loss_of, net, resumed_equals_uninterrupted, train

from tightfit.errors import InputError
from tightfit.optim import BF16AdamW
from tightfit.optim.bf16 import REMAINDER, joined, rounded_stochastically, split_into


@pytest.mark.keeps("bf16-weight-remainder-exact")
def test_weight_and_remainder_are_an_exact_fp32_master():
    model = net(torch.bfloat16)
    master = net().to(torch.bfloat16).float()
    optimizer, reference = BF16AdamW(model.parameters(), lr=1e-3), torch.optim.AdamW(master.parameters(), lr=1e-3)
    for ids in batches(50):
        loss_of(model, ids).backward()
        for own, theirs in zip(model.parameters(), master.parameters(), strict=True):
            theirs.grad = None if own.grad is None else own.grad.float()
        optimizer.step(), reference.step(), optimizer.zero_grad()
    for own, theirs in zip(model.parameters(), master.parameters(), strict=True):
        assert torch.equal(joined(own.detach(), optimizer.state[own][REMAINDER]), theirs)


@pytest.mark.keeps("bf16-weight-remainder-exact")
def test_any_fp32_number_is_kept_exactly_and_the_weight_is_the_nearest_bf16():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    edges = torch.tensor([0.0, -0.0, 1.0, math.inf, -math.inf, 3.4e38, -3.4e38, 1e-45, math.nan])
    numbers = torch.cat([bits.view(torch.float32), edges])
    weight, remainder = torch.empty_like(numbers, dtype=torch.bfloat16), torch.empty(numbers.shape, dtype=torch.int16)
    split_into(numbers, weight, remainder)
    is_number, again = ~numbers.isnan(), joined(weight, remainder)
    assert torch.equal(again.view(torch.int32)[is_number], numbers.view(torch.int32)[is_number])
    assert torch.equal(again.isnan(), ~is_number)
    finite = numbers.isfinite() & weight.isfinite()
    nearest = numbers.to(torch.bfloat16)
    own, theirs = (numbers - weight.float()).abs()[finite], (numbers - nearest.float()).abs()[finite]
    assert torch.equal(own, theirs)


def test_a_cards_nan_stays_one():
    numbers = torch.tensor([0x7FFFFFFF, 0x7F800000], dtype=torch.int32).view(torch.float32)  # all bits set; infinity
    weight, remainder = torch.empty(2, dtype=torch.bfloat16), torch.empty(2, dtype=torch.int16)
    split_into(numbers, weight, remainder)
    assert weight.isnan().tolist() == [True, False]
    assert weight.isinf().tolist() == [False, True]


def test_stochastic_rounding_is_right_in_the_mean_and_only_between_neighbours():
    number = torch.full((100_000,), 1.0 + 0.3 * 2**-7)  # 0.3 of the way from 1 to the next bf16
    rounded = rounded_stochastically(number, torch.Generator().manual_seed(0))
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert (rounded > 1).float().mean().item() == pytest.approx(0.3, abs=0.01)
    odd = torch.tensor([math.inf, -math.inf, math.nan, -2.5])
    assert rounded_stochastically(odd, torch.Generator()).float().nan_to_num(7).tolist() == pytest.approx(
        odd.nan_to_num(7).tolist(), rel=1.0
    )


@pytest.mark.parametrize("keeping", ["remainder", "stochastic"])
def test_updates_that_plain_bf16_would_lose_are_not_lost(keeping):
    def moved(make):
        weight = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = make([weight])
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return 1 - weight.float().mean().item()

    assert moved(lambda ps: torch.optim.AdamW(ps, lr=1e-4, weight_decay=0.0)) == 0
    assert moved(lambda ps: BF16AdamW(ps, lr=1e-4, weight_decay=0.0, keeping=keeping)) == pytest.approx(0.01, abs=2**-9)


@pytest.mark.parametrize("keeping", ["remainder", "stochastic"])
def test_a_resumed_training_is_bit_equal(keeping):
    resumed_equals_uninterrupted(
        lambda model: BF16AdamW(model.parameters(), keeping=keeping), lambda: net(torch.bfloat16)
    )


def test_rounding_by_chance_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    model = net(torch.bfloat16)
    start = torch.get_rng_state()
    train(model, BF16AdamW(model.parameters(), keeping="stochastic"), steps=2)
    assert torch.equal(torch.get_rng_state(), start)
    torch.set_rng_state(before)


def test_fp32_parameters_are_updated_as_usual():
    plain, own = net(), net()
    train(plain, torch.optim.AdamW(plain.parameters()))
    train(own, BF16AdamW(own.parameters()))
    assert_same_weights(plain, own)


def test_what_it_cannot_do_is_refused():
    with pytest.raises(InputError, match="a parameter is fp16"):
        BF16AdamW(net(torch.float16).parameters())
    with pytest.raises(InputError, match="keeping is 'all': choose one of remainder, stochastic"):
        BF16AdamW(net().parameters(), keeping="all")
