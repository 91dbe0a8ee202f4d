import itertools
import random

import pytest
import torch

from tightfit.devices.cost import CostModel
from tightfit.devices.families import Family
from tightfit.devices.known import known_devices
from tightfit.devices.present import lookup
from tightfit.devices.roofline import RooflineLaw, stream_of
from tightfit.devices.spec import DeviceSpec, Kernels, Roofline
from tightfit.devices.work import AttentionShape, ProductShape, Work, work_of
from tightfit.tracing.shapes import TensorShape

TERA, GIGA = 1e12, 1e9
LAWS = {key: RooflineLaw(device.spec.roofline) for key, device in known_devices().items() if device.spec.roofline}
ATTENTION = (Family.ATTENTION, Family.ATTENTION_BACKWARD)
STREAMS = next(iter(LAWS.values())).kernels.shares
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
        sm_count=100,
        kernels=Kernels(
            shares={**dict.fromkeys(STREAMS, 0.5), "attention/backward": 0.25, "elementwise/uneven/half": 0.25},
            kernel_seconds=0.0,
            launch_seconds=1e-5,
            product_calls=2.0,
            tile_depth=0.0,
            ramp_depth=0.0,
            attention_ramp=0.0,
            exponential_width=0.0,
            pick_seconds=1e-8,
            scatter_seconds=1e-4,
            block_row_seconds=1e-6,
            long_row_bytes=2**16,
        ),
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


def test_the_host_calls_longer_for_a_product_and_for_operators_that_call_others():
    seconds, x, sliced = CostModel(ROUND).operator_seconds, shape(8, 8), shape(4, 8)
    assert seconds("aten.mm.default", [x, x], [x]) == pytest.approx(2e-5)
    assert seconds("aten.slice_backward.default", [sliced], [x]) == pytest.approx(3e-5)
    assert seconds("aten.masked_fill.Scalar", [x, x], [x]) == pytest.approx(2e-5)
    assert seconds("aten.masked_fill_.Scalar", [x, x], [x]) == pytest.approx(1e-5)


def test_a_softmax_gives_long_rows_to_blocks_of_threads():
    def seconds(rows, length):
        x = shape(rows, length, dtype=torch.float32)
        return CostModel(ROUND).operator_seconds("aten._softmax.default", [x], [x])

    moving = 2 * 4 * 2**24 / (500 * GIGA)
    assert seconds(2**14, 2**10) == pytest.approx(moving)
    assert seconds(2**13, 2**11) == pytest.approx(moving + 2**13 * 1e-6 / 100)


def test_a_table_of_few_rows_takes_fewer_sums_of_gradients():
    """4 x 4096 gradients for 2 rows: two results, and a partial sum of each ten gradients written and read."""
    gradients, indices, table = shape(4, 4096, 512, dtype=torch.float32), shape(4, 4096, dtype=torch.int64), 2
    few, many = (shape(rows, 512, dtype=torch.float32) for rows in (table, 2**20))
    work = [work_of("aten.embedding_dense_backward.default", [gradients, indices], [found]) for found in (few, many)]
    assert work[0].sorted_elements == pytest.approx(512 * (2 + 2 * (2 + 4 * 4096 / 10)), rel=1e-6)
    assert work[1].sorted_elements == pytest.approx(512 * (3 + 0.2) * 4 * 4096, rel=0.01)
    assert work_of("aten.index_add.default", [many, indices, gradients], [many]).sorted_elements == 0


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


def test_rows_that_no_vector_load_fits_are_slower():
    assert product(8192, 8191, 8192) > 1.9 * product(8192, 8192, 8192)


def test_tensors_that_lie_in_memory_unlike_take_longer_to_walk_over():
    x, turned = shape(8192, 8192), TensorShape((8192, 8192), (1, 8192), torch.bfloat16)
    add = CostModel(ROUND).operator_seconds
    assert add("aten.add.Tensor", [x, turned], [x]) == pytest.approx(2 * add("aten.add.Tensor", [x, x], [x]))


def test_a_loss_picks_its_numbers_one_after_the_other():
    rows, loss = 2**20, TensorShape((), (), torch.bfloat16)
    logits, target = shape(rows, 64), shape(rows, dtype=torch.int64)
    seconds = CostModel(ROUND).operator_seconds("aten.nll_loss_forward.default", [logits, target], [loss, loss])
    assert seconds == pytest.approx(rows * 1e-8 + 8 * rows / (500 * GIGA), rel=1e-3)


def test_every_family_has_a_share_for_every_dtype():
    for family, dtype, even in itertools.product(Family, ("float32", "bfloat16", "float16", "mixed"), (False, True)):
        work = Work(family, dtype, 2**20, 2**18, even=even)
        if family is not Family.FREE:
            assert family is Family.SCATTER or stream_of(work, 2**16) in STREAMS
            assert all(law.seconds(work) > 0 for law in LAWS.values())


def sizes(draw, count):
    return [8 * draw.randint(1, 2 ** draw.randint(1, 10)) for _ in range(count)]


@pytest.mark.keeps("known-card-more-same")
@pytest.mark.parametrize("card", LAWS)
def test_more_of_the_same_never_takes_less_time(card):
    draw, law = random.Random(card), LAWS[card]
    dtypes = ("float32", "bfloat16", "float16", "mixed")
    for _ in range(40):
        dtype = draw.choice(dtypes)
        size = sizes(draw, 4)
        for grown in range(4):
            more = [s * 2 if place == grown else s for place, s in enumerate(size)]
            causal, attention = draw.random() < 0.5, draw.choice(ATTENTION)
            products = [Work(Family.PRODUCT, dtype, sum(s), 8, products=(ProductShape(*s),)) for s in (size, more)]
            seen = [Work(attention, dtype, sum(s), 8, attention=AttentionShape(*s, causal)) for s in (size, more)]
            assert all(law.seconds(less) <= law.seconds(greater) for less, greater in (products, seen))
        family = draw.choice([f for f in Family if f not in (Family.PRODUCT, *ATTENTION)])
        rows = draw.choice((2**10, 2**20))
        little, much = (Work(family, dtype, s, s, row_bytes=rows * n) for n, s in ((1, size[0]), (2, 2 * size[0])))
        assert law.seconds(little) <= law.seconds(much)


@pytest.mark.parametrize("card", LAWS)
def test_a_larger_table_more_tokens_and_longer_rows_never_take_less_time(card):
    def summed(rows, tokens):
        values, indices = shape(tokens, 64, dtype=torch.float32), shape(tokens, dtype=torch.int64)
        return work_of("aten.embedding_dense_backward.default", [values, indices], [shape(rows, 64)])

    def softmax(rows, length):
        return work_of("aten._softmax.default", [shape(rows, length)], [shape(rows, length)])

    draw, law = random.Random(card), LAWS[card]
    for _ in range(20):
        first, second = sizes(draw, 2)
        for make in (summed, softmax):
            least = law.seconds(make(first, second))
            assert least <= law.seconds(make(2 * first, second))
            assert least <= law.seconds(make(first, 2 * second))
