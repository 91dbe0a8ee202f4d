from dataclasses import replace

import pytest
import torch

from tightfit.devices.cost import CostModel, interpolate
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
