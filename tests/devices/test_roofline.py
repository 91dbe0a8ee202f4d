import pytest
import torch

from tightfit.devices.cost import CostModel
from tightfit.devices.present import lookup
from tightfit.devices.spec import DeviceSpec, Roofline
from tightfit.trace.shapes import TensorShape

TERA, GIGA = 1e12, 1e9
ROUND = DeviceSpec(
    name="round",
    kind="cuda",
    memory_bytes=2**34,
    compute_capability=(8, 0),
    sm_count=100,
    roofline=Roofline(
        flops_per_second={"float32": 10 * TERA, "tf32": 20 * TERA, "bfloat16": 100 * TERA, "float16": 100 * TERA},
        memory_bytes_per_second=1000 * GIGA,
        link_bytes_per_second=10 * GIGA,
        l2_bytes=2**20,
        product_share=0.5,
        attention_share=0.5,
        attention_backward_share=0.25,
        stream_share=0.5,
        launch_seconds=1e-5,
    ),
)


def shape(*sizes, dtype=torch.bfloat16):
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    return TensorShape(tuple(sizes), tuple(strides), dtype)


def product(m, n, k, dtype=torch.bfloat16):
    a, b, out = shape(m, k, dtype=dtype), shape(k, n, dtype=dtype), shape(m, n, dtype=dtype)
    return CostModel(ROUND).operator_seconds("aten.mm.default", [a, b], [out])


def test_a_large_product_takes_its_flops_at_the_rate_of_its_dtype():
    flops = 2 * 8192**3
    assert product(8192, 8192, 8192) == pytest.approx(flops / (50 * TERA))
    assert product(8192, 8192, 8192, torch.float32) == pytest.approx(flops / (5 * TERA))


def test_float32_products_use_tf32_where_the_user_allows_it():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert product(8192, 8192, 8192, torch.float32) == pytest.approx(2 * 8192**3 / (10 * TERA))
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_thin_product_takes_its_bytes():
    moved = 2 * (2**24 * 8 + 8 * 8 + 2**24 * 8)
    assert product(2**24, 8, 8) == pytest.approx(moved / (500 * GIGA))


def test_an_elementwise_operator_takes_its_bytes():
    x = shape(2**28)
    assert CostModel(ROUND).operator_seconds("aten.silu.default", [x], [x]) == pytest.approx(2**30 / (500 * GIGA))


def test_nothing_is_faster_than_its_launch_and_views_are_free():
    x = shape(8)
    assert CostModel(ROUND).operator_seconds("aten.mul.Tensor", [x, x], [x]) == 1e-5
    assert CostModel(ROUND).operator_seconds("aten.view.default", [x], [x]) == 0.0


def test_attention_costs_two_products_forward_five_backward_and_half_where_causal():
    q, lse = shape(4, 32, 4096, 128), shape(4, 32, 4096, dtype=torch.float32)
    name = "aten._scaled_dot_product_flash_attention"

    def seconds(causal):
        return CostModel(ROUND).operator_seconds(f"{name}.default", [q, q, q], [q, lse], (0.0, causal))

    full = 2 * 2 * 4 * 32 * 4096**2 * 128
    assert seconds(False) == pytest.approx(full / (50 * TERA))
    assert seconds(True) == pytest.approx(full / 2 / (50 * TERA))
    backward = CostModel(ROUND).operator_seconds(
        f"{name}_backward.default", [q] * 5 + [lse], [q] * 3, (None, None, 4096, 4096, 0.0, True)
    )
    assert backward == pytest.approx(2.5 * full / 2 / (25 * TERA))


def test_a_dtype_without_units_of_its_own_runs_at_the_rate_of_float32():
    t4 = CostModel(lookup("t4"))
    a, b = shape(4096, 4096), shape(4096, 4096, dtype=torch.float32)
    half = t4.operator_seconds("aten.mm.default", [a, a], [a])
    full = t4.operator_seconds("aten.mm.default", [b, b], [b])
    assert half == full
