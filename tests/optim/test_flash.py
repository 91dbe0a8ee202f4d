"""AdamW with 8-bit moments and 24-bit masters: its arithmetic, its bytes, and how far it is from AdamW's."""

import flash_reference as reference
import pytest
import torch
from small_training import assert_same_weights, batches, loss_of, net, resumed_equals_uninterrupted, train

from tightfit.errors import InputError
from tightfit.optim import BF16AdamW, FlashAdamW, flash, step_in_backward
from tightfit.optim.by_name import state_tensors
from tightfit.optim.companding import (
    joined,
    roots_encoded,
    signed_decoded,
    signed_encoded,
    split,
    squares_decoded,
    threshold_of,
)

BF16, FP32 = torch.bfloat16, torch.float32
both = pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])


def weights(dtype, shapes=((40, 33), (7,))):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@pytest.mark.keeps("flash-adamw-takes-7")
@both
def test_a_step_is_the_references_in_fp64(dtype):
    parameters = weights(dtype)
    optimizer = FlashAdamW(parameters, lr=1e-2)
    for count in range(1, 4):
        give_gradients(parameters, count)
        before = [(reference.master(p, s), *reference.decoded(s)) if (s := optimizer.state[p]) else None
                  for p in parameters]  # fmt: skip
        starts = [p.detach().flatten().tolist() for p in parameters]
        optimizer.step()
        for parameter, known, start in zip(parameters, before, starts, strict=True):
            state, zeros = optimizer.state[parameter], [0.0] * len(start)
            gradient = parameter.grad.flatten().tolist()
            moved, *moments = reference.step(*(known or (start, zeros, zeros))[:1], gradient,
                                             *(known or (start, zeros, zeros))[1:], count, lr=1e-2)  # fmt: skip
            signed, steps = reference.codes(*moments)
            new = torch.tensor(reference.master(parameter, state), dtype=torch.float64)
            # A master has 15 bits after its first; rounding may take either neighbour. fp32 arithmetic adds little.
            tolerance = 2**-15 if dtype == BF16 else 2**-21
            assert torch.allclose(new, torch.tensor(moved, dtype=torch.float64), rtol=tolerance, atol=1e-8)
            own = state["exp_avg"].flatten(), state["exp_avg_sq"].flatten()
            assert (own[0] - torch.tensor(signed)).abs().max() < 0.51
            assert (own[1] + 0.5 - torch.tensor(steps)).abs().max() < 0.51


def trained(dtype, shapes, steps=3, **settings):
    parameters = weights(dtype, shapes)
    optimizer = FlashAdamW(parameters, lr=1e-2, **settings)
    for seed in range(steps):
        give_gradients(parameters, seed)
        optimizer.step()
    return [*parameters, *state_tensors(optimizer)]


@pytest.mark.keeps("flash-adamw-takes-7")
@both
def test_the_size_of_the_chunks_changes_no_bit(dtype, monkeypatch):
    shapes = ((40, 33), (7,), (), (3, 64), (0, 4))
    whole = trained(dtype, shapes)
    monkeypatch.setattr(flash, "CHUNK", 128)
    for one, other in zip(trained(dtype, shapes), whole, strict=True):
        assert torch.equal(one, other)


def test_a_weight_in_another_order_is_updated_in_the_order_of_its_memory():
    turned = torch.nn.Parameter(
        weights(BF16, ((4, 6, 5, 3),))[0].detach().contiguous(memory_format=torch.channels_last)
    )
    plain = torch.nn.Parameter(turned.detach().permute(0, 2, 3, 1).contiguous())
    optimizers = [FlashAdamW([turned], lr=1e-2), FlashAdamW([plain], lr=1e-2)]
    for seed in range(3):
        give_gradients([turned], seed)  # in the usual order, so not in the weight's
        plain.grad = turned.grad.permute(0, 2, 3, 1).contiguous()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(turned.permute(0, 2, 3, 1), plain)
    moments = [optimizers[0].state[turned]["exp_avg"].permute(0, 2, 3, 1), optimizers[1].state[plain]["exp_avg"]]
    assert torch.equal(*moments)


def test_a_master_is_fp32_in_its_upper_24_bits():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    numbers = bits.view(FP32)
    upper, error = split(numbers.clone(), 128)
    weight = upper.to(torch.int16).view(BF16)
    assert error.min() >= -128
    assert error.max() <= 127
    master = joined(weight, error.to(torch.int8))
    finite = numbers.isfinite() & master.isfinite() & weight.isfinite()
    wrong = (numbers - master).abs()[finite]
    assert (wrong <= numbers.abs()[finite] * 2**-16 + 2.0**-142).all()
    assert torch.equal((weight.float() - master).abs()[finite], (master.bfloat16().float() - master).abs()[finite])


def test_what_is_not_a_number_stays_so():
    # What cards and CPUs compute for 0 / 0, and infinities.
    as_computed = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1 << 22, 0x7F800000, -1 << 23], dtype=torch.int32)
    for threshold in (0, 128, 255):
        upper, _ = split(as_computed.view(FP32).clone(), threshold)
        found = upper.to(torch.int16).view(BF16)
        assert found[:3].isnan().all()
        assert found[3:].isinf().all()


def test_the_thresholds_of_256_steps_are_spread_evenly():
    for first in (0, 1, 1000):
        seen = sorted(threshold_of(first + i) for i in range(256))
        assert max(abs(value - i) for i, value in enumerate(seen)) <= 3


@pytest.mark.keeps("update-lost-average-second")
def test_updates_below_the_masters_last_bit_count_on_average():
    weight = torch.nn.Parameter(torch.ones(512, dtype=BF16))
    optimizer = FlashAdamW([weight], lr=1e-6, weight_decay=0.0)  # the last bit of 1 is 2^-16 downwards
    for _ in range(400):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    moved = 1 - joined(weight.detach(), optimizer.state[weight]["error"])
    assert moved.mean().item() == pytest.approx(400e-6, rel=0.05)


def test_codes_keep_zero_and_sign_and_the_largest_number_of_a_group():
    numbers = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 3, 50)[:, None]
    numbers[0], numbers[1, 3] = 0, 0
    codes, scale = signed_encoded(numbers)
    found = signed_decoded(codes.to(torch.int8), scale)
    assert found[0].eq(0).all()
    assert found[1, 3] == 0
    assert ((found == 0) | (found.sign() == numbers.sign())).all()
    largest = numbers.abs().amax(1, keepdim=True)
    assert torch.allclose(found.abs().amax(1, keepdim=True), largest, rtol=1e-6)
    # Half a step of the square root, at most: |x - found| <= sqrt(x) / 127 + 1 / (4 * 127^2), of the largest.
    share = numbers.abs() / largest.clamp_min(1e-45)
    assert ((found - numbers).abs() <= largest * (share.sqrt() / 127 + 2e-5) * 1.001).all()


@pytest.mark.keeps("update-lost-average-second")
def test_no_second_moment_becomes_zero_where_its_group_has_one():
    moments = torch.rand(20, 64, generator=torch.Generator().manual_seed(0)) ** 8 * torch.logspace(-30, 3, 20)[:, None]
    moments[0], moments[1, 1:] = 0, 0
    codes, scale = roots_encoded(moments.sqrt())
    found = squares_decoded(codes.to(torch.uint8), scale)
    assert found[0].eq(0).all()
    assert found[1:].gt(0).all()
    assert torch.allclose(found.amax(1), moments.amax(1), rtol=1e-6)
    share = (moments.sqrt() / scale.clamp_min(1e-45))[1:]
    roots = (found.sqrt() / scale.clamp_min(1e-45))[1:]
    assert ((roots - share).abs() <= (share.sqrt() / 255.5 + 4e-6) * 1.001).all()


@pytest.mark.keeps("flash-adamw-takes-7")
def test_the_bytes_of_a_parameter_are_seven_and_its_scales():
    parameters = weights(BF16, ((64, 96), (70,)))
    optimizer = FlashAdamW(parameters)
    give_gradients(parameters, 0)
    optimizer.step()
    for parameter in parameters:
        count, groups = parameter.numel(), -(-parameter.numel() // 64)
        held = {key: value.nbytes for key, value in optimizer.state[parameter].items()}
        assert held == {"step": 4, "exp_avg": count, "exp_avg_sq": count, "error": count,
                        "exp_avg_scale": 4 * groups, "exp_avg_sq_scale": 4 * groups}  # fmt: skip
        assert parameter.nbytes + parameter.grad.nbytes + sum(held.values()) == 7 * count + 8 * groups + 4


def distance(make, *, steps=30):
    """How far an optimizer's masters are from AdamW's after the same gradients, as a share of AdamW's way."""
    model, plain = net(BF16), net().to(BF16).float()
    start = [p.detach().clone() for p in plain.parameters()]
    optimizer, adamw = make(model), torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for ids in batches(steps):
        loss_of(model, ids).backward()
        for own, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            theirs.grad = None if own.grad is None else own.grad.float()
        optimizer.step(), adamw.step(), optimizer.zero_grad()
    masters = [joined(p.detach(), e) if (e := optimizer.state[p].get("error")) is not None else p.detach().float()
               for p in model.parameters()]  # fmt: skip
    apart = sum(((m - p.detach()) ** 2).sum() for m, p in zip(masters, plain.parameters(), strict=True))
    way = sum(((s - p.detach()) ** 2).sum() for s, p in zip(start, plain.parameters(), strict=True))
    return (apart / way).sqrt().item()


@pytest.mark.keeps("update-lost-average-second")
def test_its_masters_stay_near_adamws():
    own = distance(lambda model: FlashAdamW(model.parameters(), lr=1e-3))
    rounded = distance(lambda model: BF16AdamW(model.parameters(), lr=1e-3, keeping="stochastic"))
    assert own < 0.03
    assert own < rounded / 10


@both
def test_a_resumed_training_is_bit_equal(dtype):
    resumed_equals_uninterrupted(lambda model: FlashAdamW(model.parameters()), lambda: net(dtype))


def test_a_step_in_backward_changes_no_bit():
    plain, stepped = net(BF16), net(BF16)
    train(plain, FlashAdamW(plain.parameters()), steps=5)
    with step_in_backward(FlashAdamW, stepped) as handle:
        train(stepped, handle.optimizer, steps=5)
    assert_same_weights(plain, stepped)


def test_what_it_cannot_do_is_refused():
    with pytest.raises(InputError, match="FlashAdamW: a parameter is float16: use bf16 or fp32"):
        FlashAdamW(net(torch.float16).parameters())
    with pytest.raises(InputError, match="a parameter has gaps in memory: give it a contiguous copy"):
        FlashAdamW([torch.nn.Parameter(torch.ones(4, 4)[:, ::2])])
    parameter = weights(BF16, ((64, 2),))[0]
    optimizer = FlashAdamW([parameter])
    parameter.grad = torch.ones_like(parameter).to_sparse()
    with pytest.raises(InputError, match="a gradient is sparse"):
        optimizer.step()
    give_gradients([parameter], 0)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg_scale"] = torch.zeros(3)
    with pytest.raises(InputError, match=r"exp_avg_scale of parameter 0 has shape \(3,\)"):
        FlashAdamW([parameter]).load_state_dict(saved)
