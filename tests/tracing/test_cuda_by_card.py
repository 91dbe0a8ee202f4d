"""Scratch memory that hangs on the card, by hand from the sources that the formulas name."""

import pytest
import torch

from tightfit.tracing.cuda import CudaRole
from tightfit.tracing.cuda.allocator import RESULT, round_size
from tightfit.tracing.shapes import TensorShape

H100 = CudaRole((9, 0), 132, (2, 14))
A100 = CudaRole((8, 0), 108, (2, 14))
RTX4090 = CudaRole((8, 9), 128, (2, 14))
T4 = CudaRole((7, 5), 40, (2, 14))


def shape(*sizes: int, dtype: torch.dtype = torch.float32) -> TensorShape:
    return TensorShape.of(torch.empty(sizes, dtype=dtype, device="meta"))


def total(sizes: list[int]) -> int:
    return sum(map(round_size, sizes))


def summed(role: CudaRole, source: TensorShape, dims: list[int], dtype: torch.dtype | None = None) -> int:
    meta = torch.empty_strided(source.shape, source.stride, dtype=source.dtype, device="meta")
    result = TensorShape.of(torch.sum(meta, dims, dtype=dtype))
    return role.workspace("aten.sum.dim_IntList", [source], [result], (dims, False))


# The gradient of a bias: columns of 8192 rows. Blocks of 32 threads for 4 columns each and 4 rows at a time (512
# threads over a vector of 4): a thread would sum 2048 numbers, over 256. 4096 / 4 / 32 = 32 blocks lie side by side; a
# card holds 132 * (2048 / 128) = 2112 of them (108 * 16 = 1728, 128 * (1536 / 128) = 1536), so 66 (54, 48) share a
# column. The buffer has a number in fp32 for each column and sharer, 32 * 4 times over (`global_memory_size`).
@pytest.mark.keeps("cublas-workspaces-card-pytorch")
@pytest.mark.parametrize(("role", "sharers"), [(H100, 66), (A100, 54), (RTX4090, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_of_columns_is_split_over_blocks_that_meet_in_a_buffer(role, sharers, dtype):
    expected = total([4 * 4096 * sharers * 32 * 4, 4 * 32])
    assert summed(role, shape(8192, 4096, dtype=dtype), [0]) == expected
    assert summed(role, shape(2, 4096, 4096, dtype=dtype), [0, 1]) == expected


def test_no_more_blocks_share_a_column_than_leave_each_thread_sixteen_numbers():
    # 1024 rows over 4 at a time: 256 numbers a thread, over 16: 16 sharers, though 1056 would fill the card
    assert summed(H100, shape(1024, 256), [0]) == total([4 * 256 * 16 * 32 * 4, 4 * 2])


def test_sums_that_fill_the_card_need_no_buffer():
    assert summed(H100, shape(512, 4096), [0]) == 0  # 128 numbers a thread
    assert summed(H100, shape(8192, 4096), [1]) == 0  # a row a block
    assert summed(H100, shape(8192, 4096 * 80), [0]) == 0  # 2560 blocks side by side


def test_a_sum_of_everything_has_a_number_for_each_block():
    # 8192 * 4096 numbers, 4 at a time, 512 threads in a row: 65536 a thread; 132 * 4 = 528 blocks, all for one sum
    assert summed(H100, shape(8192, 4096), [0, 1]) == total([4 * 528, 4])


def test_odd_columns_are_not_read_four_at_a_time():
    # 50257 columns, one at a time: 32 by 16 threads, 8192 / 16 = 512 numbers each; 1571 blocks, more than 132 * 4
    assert summed(H100, shape(8192, 50257), [0]) == 0
    assert summed(H100, shape(8192, 1001), [0]) == total([4 * 1001 * 17 * 32, 4 * 32])  # 32 blocks, 528 / 32


def test_counts_of_a_mask_take_it_in_64_bits():
    assert summed(H100, shape(64, 64, dtype=torch.bool), [1]) == 8 * 64 * 64
    assert summed(H100, shape(64, 64, dtype=torch.bfloat16), [1], torch.float32) == 0


def test_many_short_rows_of_a_norm_are_summed_in_blocks():
    # 24 blocks of 32 columns, so 32768 / 24 = 1365 blocks of rows; their sums are added by a reduction: 341 numbers a
    # thread, and min(2112 / 6, 341 / 16) = 22 sharers for each of 6 blocks of 128 columns
    rows, gradient = shape(128 * 1024, 768), shape(768)
    outputs = [rows, gradient, gradient]
    sharers = [4 * 768 * 22 * 32 * 4, 512]
    both = [4 * 768, 4 * 768, 4 * 1365 * 768, 4 * 1365 * 768]
    name = "aten.native_layer_norm_backward.default"
    inputs = [rows, rows, shape(128 * 1024, 1), shape(128 * 1024, 1), gradient, gradient]
    scratch = H100.workspace(name, inputs, outputs, ([768],))
    again = [-size for size in reversed(sharers)]  # between the sums of the weight and those of the bias
    assert scratch.blocks == (RESULT, *both, RESULT, *sharers, *again, -4 * 768, RESULT, *sharers)
    assert scratch == sum(both) + sum(sharers)
    few = shape(64 * 1024, 768)
    inputs = [few, few, shape(64 * 1024, 1), shape(64 * 1024, 1), gradient, gradient]
    assert H100.workspace(name, inputs, [few, gradient, gradient], ([768],)) == 0


@pytest.mark.parametrize(
    ("role", "dtype", "width", "rows", "columns", "has_sums"),
    [
        (H100, torch.float32, 64, 64, 64, False),
        (H100, torch.float32, 128, 128, 64, False),
        (H100, torch.bfloat16, 96, 128, 64, False),
        (H100, torch.bfloat16, 128, 128, 128, False),
        (H100, torch.bfloat16, 256, 128, 64, True),
        (RTX4090, torch.float32, 128, 64, 64, False),
        (RTX4090, torch.float32, 256, 64, 64, False),
        (RTX4090, torch.bfloat16, 96, 128, 64, False),
        (RTX4090, torch.bfloat16, 128, 64, 64, True),
        (T4, torch.float16, 128, 128, 64, False),
        (T4, torch.float32, 128, 64, 64, False),
    ],
)
def test_efficient_attentions_backward_uses_the_first_kernel_that_fits_the_cards_shared_memory(
    role, dtype, width, rows, columns, has_sums
):
    heads, length = 2, 1024
    query = TensorShape.of(torch.empty(1, length, heads, width, dtype=dtype, device="meta").transpose(1, 2))
    name = "aten._scaled_dot_product_efficient_attention_backward.default"
    scratch = role.workspace(name, [query, query, query, query, query], [query] * 3, ())
    tiles = -(-length // rows) * -(-width // columns)
    numbers = tiles * (rows * columns + 4) + (2 * length * width if has_sums else 0)
    delta, product = 4 * heads * length, 4 * heads * length * width
    before = [delta] if dtype.itemsize == 2 else [product, delta, delta, -delta, -product]
    expected = (*[RESULT] * 3, *before, round_size(4 * heads * numbers))
    assert scratch.blocks == expected
    # as from `nn.MultiheadAttention`, whose rows are (length, batch, heads, width)
    other = TensorShape.of(
        torch.empty(length, heads, 2, width, dtype=dtype, device="meta")[:, :, :1].permute(2, 1, 0, 3)
    )
    copied = role.workspace(name, [other, query, query, query, query], [query] * 3, ())
    assert copied.blocks == (other.bytes, *expected)


# 2048 rows of 512 numbers: the columns are combined by 16 blocks of threads that share 64 numbers of each. Measured by
# tests/card/test_operators.py.
@pytest.mark.parametrize(
    ("name", "dtype", "bytes_of_one"),
    [
        ("amax.default", torch.float32, 4),
        ("amax.default", torch.bfloat16, 2),
        ("sum.dim_IntList", torch.bfloat16, 4),
        ("any.dim", torch.bool, 1),
        ("var.correction", torch.float32, 16),
        ("var.correction", torch.bfloat16, 16),
    ],
)
def test_what_blocks_of_a_reduction_share_depends_on_the_operator(name, dtype, bytes_of_one):
    dims = 0 if name == "any.dim" else [0]
    scratch = RTX4090.workspace(f"aten.{name}", [shape(2048, 512, dtype=dtype)], [shape(512, dtype=dtype)], (dims,))
    assert scratch.blocks == (2048 * 1024 * bytes_of_one, 512)


def test_the_largest_of_all_numbers_and_its_place_are_shared_as_pairs():
    numbers = shape(1, 2_000_000)
    largest, place = ("aten.max.default", ()), ("aten.argmax.default", (1,))
    sizes = [RTX4090.workspace(name, [numbers], [shape()], given).blocks for name, given in (largest, place)]
    assert sizes == [(1024, 512), (4096, 512)]


def attention(role: CudaRole, heads: int, length: int, dropout: float = 0.0, width: int = 80) -> int:
    query = shape(1, length, heads, width, dtype=torch.bfloat16)
    turned = TensorShape.of(torch.empty(1, length, heads, width, dtype=torch.bfloat16, device="meta").transpose(1, 2))
    name = "aten._scaled_dot_product_flash_attention.default"
    assert query.bytes == turned.bytes
    return role.workspace(name, [turned] * 3, [turned], (dropout, True))


def test_flash_attention_splits_keys_where_heads_are_too_few_for_the_card():
    # 4 heads of 1024 / 64 blocks: 64 of 264 slots; 8 blocks of 128 keys; 4 parts fill 256 slots, and 2, 3 less
    rows = 4 * 4 * 4 * 1024
    assert attention(H100, 4, 1024) == total([rows, rows * 96])
    assert attention(H100, 4, 1024, dropout=0.1) == 512  # the state of the generator
    assert attention(H100, 16, 1024) == 0  # 256 of 264 slots
