from dataclasses import replace

import pytest
import torch

from tightfit.devices.cost import CostModel, interpolate
from tightfit.devices.described import with_host
from tightfit.devices.present import lookup
from tightfit.devices.spec import AttentionPoint
from tightfit.runtime.simulation import host_memory, simulation
from tightfit.tracing.shapes import TensorShape


def shape(*sizes, dtype=torch.float32):
    return TensorShape(sizes, torch.empty(sizes, device="meta").stride(), dtype)


def product_seconds(spec, m, n, k, dtype=torch.float32):
    inputs = [shape(m, k, dtype=dtype), shape(k, n, dtype=dtype)]
    return CostModel(spec).operator_seconds("aten.mm.default", inputs, [shape(m, n, dtype=dtype)])


def attention_seconds(spec, length, *, width=64, causal=False, backward=False):
    q = shape(1, 4, length, width)
    name = f"aten._scaled_dot_product_flash_attention_for_cpu{'_backward' if backward else ''}.default"
    inputs = [q] * 6 if backward else [q] * 3
    return CostModel(spec).operator_seconds(name, inputs, [q], (0.0, causal))


def sum_seconds(spec, elements):
    x = shape(elements)
    return CostModel(spec).operator_seconds("aten.add.Tensor", [x, x], [x])


def test_a_product_costs_its_multiply_adds_and_a_call(spec):
    assert product_seconds(spec, 100, 200, 300) == pytest.approx(100 * 200 * 300 * 1e-9 + 1e-6)


def test_a_product_in_bf16_uses_the_rate_of_bf16(spec):
    assert product_seconds(spec, 1000, 1000, 1000, torch.bfloat16) == pytest.approx(0.25 + 1e-6)


def test_a_dtype_without_figures_borrows_those_of_its_nearest(spec):
    assert product_seconds(spec, 64, 64, 64, torch.float16) == product_seconds(spec, 64, 64, 64, torch.bfloat16)


def test_views_are_free(spec):
    x = shape(1000, 1000)
    assert CostModel(spec).operator_seconds("aten.transpose.int", [x], [x], (0, 1)) == 0.0


def test_an_operator_on_nothing_is_free(spec):
    assert sum_seconds(spec, 0) == 0.0


def test_the_framework_adds_to_every_operator_that_computes(spec):
    slower = replace(spec, framework_seconds=1.0)
    assert sum_seconds(slower, 100) == pytest.approx(sum_seconds(spec, 100) + 1.0)
    assert CostModel(slower).operator_seconds("aten.view.default", [shape(4)], [shape(4)]) == 0.0


def test_the_least_call_takes_the_time_of_a_call(spec):
    assert sum_seconds(spec, 1) == 1e-6


def test_time_never_falls_as_tensors_grow(spec):
    sizes = [1, 10, 1000, 10**5, 10**6, 8 * 2**20, 10**7, 10**9]
    for seconds in (lambda n: sum_seconds(spec, n), lambda n: product_seconds(spec, n, 8, 8)):
        times = [seconds(n) for n in sizes]
        assert times == sorted(times)


def test_attention_grows_with_the_square_of_the_length(spec):
    assert attention_seconds(spec, 4096) == pytest.approx(4 * attention_seconds(spec, 2048))
    assert attention_seconds(spec, 512) > attention_seconds(spec, 256)


def test_attention_costs_what_its_direction_mask_and_width_cost(spec):
    full = attention_seconds(spec, 512)
    assert full == pytest.approx(4 * 512 * 512 * 2e-9)
    assert attention_seconds(spec, 512, causal=True) == pytest.approx(full / 2)
    assert attention_seconds(spec, 512, backward=True) == pytest.approx(3 * full)
    assert attention_seconds(spec, 512, width=128) == pytest.approx(2 * full)


def test_a_fresh_output_from_the_threshold_on_pays_for_its_first_touch(spec):
    elements = 8 * 2**20  # 32 MiB
    kept = sum_seconds(replace(spec, fresh_threshold_bytes=None), elements)
    assert sum_seconds(spec, elements) == pytest.approx(kept + 32 * 2**20 * 1e-9)
    below = elements - 1
    assert sum_seconds(spec, below) == sum_seconds(replace(spec, fresh_threshold_bytes=None), below)


def test_in_place_writes_touch_nothing_new(spec):
    x = shape(16 * 2**20)
    in_place = CostModel(spec).operator_seconds("aten.add_.Tensor", [x, x], [x])
    assert in_place == pytest.approx(sum_seconds(replace(spec, fresh_threshold_bytes=None), 16 * 2**20))


def test_nothing_is_faster_than_its_bytes(spec):
    eager = {key: ((1.0, 1e-9),) for key in spec.streams if key.startswith("transcendental")}
    x = shape(10**6)
    seconds = CostModel(replace(spec, streams={**spec.streams, **eager})).operator_seconds(
        "aten.silu.default", [x], [x]
    )
    assert seconds == pytest.approx(8e6 * 1e-9)


def test_interpolation_is_flat_before_straight_between_and_proportional_after():
    curve = ((10.0, 1.0), (20.0, 3.0))
    assert [interpolate(curve, size) for size in (1, 10, 15, 20, 40)] == [1.0, 1.0, 2.0, 3.0, 6.0]


def with_curves(spec, **streams):
    return replace(spec, streams={**spec.streams, **{key.replace("_", "/"): curve for key, curve in streams.items()}})


def cast_seconds(spec, source, target, name="aten._to_copy.default"):
    inputs, outputs = [shape(1000, dtype=source)], [shape(1000, dtype=target)]
    if name == "aten.copy_.default":
        inputs = [*outputs, *inputs]
    return CostModel(spec).operator_seconds(name, inputs, outputs)


@pytest.mark.parametrize("name", ["aten._to_copy.default", "aten.copy_.default"])
def test_a_cast_to_a_wider_dtype_has_a_rate_of_its_own_where_one_was_measured(spec, name):
    measured = with_curves(spec, widening_mixed=((6e3, 0.5), (6e6, 500.0)))
    wider, narrower = (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)
    assert cast_seconds(measured, *wider, name) == pytest.approx(0.5)
    assert cast_seconds(measured, *narrower, name) == cast_seconds(spec, *narrower, name)
    assert cast_seconds(spec, *wider, name) == cast_seconds(spec, *narrower, name)


def test_element_by_element_over_unlike_tensors_has_a_rate_of_its_own_where_one_was_measured(spec):
    measured = with_curves(spec, uneven_float32=((1e3, 0.5), (1e6, 500.0)))

    def seconds(figures, *tensors, name="aten.mul.Tensor"):
        return CostModel(figures).operator_seconds(name, tensors, [shape(10, 20, 5)])

    heads = TensorShape((10, 20, 5), (5, 50, 1), torch.float32)
    for unlike in ((heads, shape(20, 5)), (heads, shape(10, 20, 5)), (shape(10, 20, 5), shape(5))):
        assert seconds(measured, *unlike) == pytest.approx(0.5)
        assert seconds(spec, *unlike) < 1e-2
    alike = (shape(10, 20, 5), shape(10, 20, 5))
    assert seconds(measured, *alike) == seconds(spec, *alike)
    assert seconds(measured, heads, name="aten.clone.default") == pytest.approx(0.5)


def test_products_whose_rows_begin_anywhere_have_a_rate_of_their_own_where_one_was_measured(spec):
    measured = replace(spec, products={**spec.products, "unaligned-nn/bfloat16": (1.0, 0.0, 0.0, 0.0, 0.0)})
    for odd in ((8, 17, 8), (8, 8, 17), (8, 20, 8)):
        m, n, k = odd
        assert product_seconds(measured, *odd, torch.bfloat16) == pytest.approx(m * n * k)
        assert product_seconds(measured, *odd) == product_seconds(spec, *odd), "no vector loads in fp32 products"
    for even in ((17, 16, 8), (8, 16, 24)):  # the rows of the left side are as long as the inner side
        assert product_seconds(measured, *even, torch.bfloat16) == product_seconds(spec, *even, torch.bfloat16)


def test_attention_of_a_measured_width_takes_what_was_measured(spec):
    key = "forward/full/float32"
    points = tuple(AttentionPoint(1024, width, seconds) for width, seconds in ((32, 1e-9), (64, 5e-9), (128, 6e-9)))
    measured = replace(spec, attention={**spec.attention, key: points})
    for point in points:
        found = attention_seconds(measured, 1024, width=point.width)
        assert found == pytest.approx(4 * 1024**2 * point.seconds_per_score)
    assert attention_seconds(measured, 1024, width=96) == pytest.approx(4 * 1024**2 * 5.5e-9)
    assert attention_seconds(measured, 1024, width=256) == pytest.approx(4 * 1024**2 * 8e-9)


def test_a_fused_update_on_the_host_takes_its_own_measured_rate(monkeypatch):
    """Other work there takes that of a sum; and so does the update, where somebody names another host."""
    monkeypatch.setattr(simulation, "card", object())
    weights = TensorShape((1000,), (1,), torch.float32)
    measured = replace(lookup("rtx4090"), host_bytes_per_second=1e6, host_update_bytes_per_second=2e6)
    named = with_host(measured, "bandwidth=0.004GB/s")
    with host_memory():
        for spec, update, rest in ((measured, 0.014, 0.012), (named, 0.007, 0.003)):
            cost = CostModel(spec).operator_seconds
            assert cost("aten._fused_adamw_.default", [weights] * 4, []) == pytest.approx(update)
            assert cost("aten.add.Tensor", [weights] * 2, [weights]) == pytest.approx(rest)
