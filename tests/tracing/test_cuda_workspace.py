"""Scratch memory of CUDA's kernels, by hand from the sources that the formulas name."""

import pytest
import torch

from tightfit.tracing.cuda.allocator import RESULT, Scratch, round_size
from tightfit.tracing.cuda.workspace import CUDNN_ENGINE, cuda_workspace
from tightfit.tracing.shapes import TensorShape


def by_length(batch: int, heads: int, length: int, width: int, dtype: torch.dtype = torch.bfloat16) -> TensorShape:
    """Attention's usual layout: (batch, length, heads, width) in memory, seen as (batch, heads, length, width)."""
    return TensorShape.of(torch.empty(batch, length, heads, width, dtype=dtype, device="meta").transpose(1, 2))


def backward(kind: str, query: TensorShape, key: TensorShape, gradient: TensorShape | None = None) -> Scratch:
    name = f"aten._scaled_dot_product_{kind}_attention_backward.default"
    return cuda_workspace(name, [gradient or query, query, key, key, query], [], ())


def test_flash_backward_accumulates_the_querys_gradient_in_fp32():
    query = by_length(2, 8, 1000, 80)
    rows, width = 1024, 96  # multiples of 128 and 32
    blocks = backward("flash", query, query).blocks
    assert blocks == (RESULT, RESULT, RESULT, 4 * 2 * 8 * rows, 4 * 2 * 8 * rows * width)


def test_flash_backward_expands_shared_keys_and_values():
    query, key = by_length(2, 8, 1024, 64), by_length(2, 2, 1024, 64)
    assert backward("flash", query, key) - backward("flash", query, query) == 2 * query.bytes


def test_flash_backward_copies_a_gradient_that_lies_otherwise():
    query = by_length(2, 8, 1024, 64)
    turned = TensorShape.of(torch.empty(2, 8, 1024, 64, dtype=torch.bfloat16, device="meta"))
    assert backward("flash", query, query, turned).blocks == (query.bytes, *backward("flash", query, query).blocks)


def test_flash_backward_of_one_sample_copies_nothing_whatever_its_first_stride():
    query = by_length(1, 4, 64, 32)
    gradient = TensorShape(query.shape, (1, *query.stride[1:]), query.dtype)
    assert backward("flash", query, query, gradient) == backward("flash", query, query)


def test_ctc_copies_lengths_and_offsets_and_its_backward_has_the_sums_from_the_other_end():
    batch = 100
    sound, targets = (torch.empty(*shape, device="meta") for shape in ((50, batch, 16), (batch, 20)))
    sums = torch.empty(batch, 50, 41, device="meta")
    shapes = [TensorShape.of(tensor) for tensor in (sound, sound, targets, sums[:, 0, 0], sums)]
    numbers = 3 * round_size(8 * batch)
    assert cuda_workspace("aten._ctc_loss.default", shapes[1:3], [], ()) == numbers
    assert cuda_workspace("aten._ctc_loss_backward.default", shapes, [], ()) == round_size(sums.nbytes) + numbers


def test_cudnn_backward_has_one_buffer_for_sums_and_the_querys_gradient():
    query = by_length(2, 8, 1024, 64)
    assert backward("cudnn", query, query) == 4 * 2 * 8 * 1024 * (64 + 1) + CUDNN_ENGINE


def test_efficient_forward_sums_wide_values_in_fp32():
    name = "aten._scaled_dot_product_efficient_attention.default"
    wide, narrow = by_length(2, 8, 1024, 256), by_length(2, 8, 1024, 128)
    assert cuda_workspace(name, [wide] * 3, [], ()) == 2 * wide.bytes
    assert cuda_workspace(name, [narrow] * 3, [], ()) == 0


def embedding_backward(tokens: int, padding: int) -> Scratch:
    weight = TensorShape.of(torch.empty(32000, 256, device="meta"))
    rows = TensorShape.of(torch.empty(tokens, 256, device="meta"))
    index = TensorShape.of(torch.empty(tokens, dtype=torch.int64, device="meta"))
    name = "aten.embedding_dense_backward.default"
    return cuda_workspace(name, [rows, index], [weight], (32000, padding, False))


def test_the_embeddings_backward_sums_runs_of_ten_rows_in_fp32_where_there_are_many_tokens():
    tokens = 8192
    runs = tokens // 10 + tokens
    index, buffers = 8 * tokens, 138_752  # of a sort in two passes of eight bits, as measured
    sort = [index, index, index, buffers, -buffers, -index, RESULT]
    marks = [index, 512, index, -index, index, index, 512]
    assert embedding_backward(tokens, -1).blocks == (*sort, *marks, round_size(8 * runs), round_size(4 * runs * 256))
    assert embedding_backward(tokens, 0) == embedding_backward(tokens, -1)
    assert embedding_backward(3072, -1) == embedding_backward(3072, 0) == 0


def shape(*sizes: int, dtype: torch.dtype = torch.float32) -> TensorShape:
    return TensorShape.of(torch.empty(sizes, dtype=dtype, device="meta"))


def turned(*sizes: int) -> TensorShape:
    """Of these sizes, the last two dimensions in the other order in memory."""
    return TensorShape.of(torch.empty(*sizes[:-2], sizes[-1], sizes[-2], device="meta").transpose(-1, -2))


def test_the_embeddings_backward_copies_a_gradient_that_is_not_contiguous():
    weight, index = shape(32000, 256), shape(1024, dtype=torch.int64)
    name = "aten.embedding_dense_backward.default"
    assert cuda_workspace(name, [shape(1024, 256), index], [weight], (32000, -1, False)) == 0
    assert cuda_workspace(name, [turned(1024, 256), index], [weight], (32000, -1, False)) == 4 * 1024 * 256


def test_index_put_sorts_its_places_where_values_accumulate():
    rows, index, values = shape(1000, 64), shape(512, dtype=torch.int64), shape(512, 64)
    name = "aten.index_put.default"
    assert cuda_workspace(name, [rows, index, values], [rows], ([index], False)) == 0
    places = 8 * 512
    sort = (places, places, -places, places, places, places, 512)
    assert cuda_workspace(name, [rows, index, values], [rows], ([index], True)).blocks == sort
    copied = cuda_workspace(name, [rows, index, turned(512, 64)], [rows], ([index], True))
    assert copied.blocks == (4 * 512 * 64, *sort)


@pytest.mark.parametrize(
    ("count", "rows", "buffers"), [(8192, 32000, 138_752), (262_144, 32, 73_216), (3072, 100, 3584)]
)
def test_places_are_sorted_by_eight_bits_a_pass(count, rows, buffers):
    # As measured on cards of capability 8: with second buffers only if there are several passes.
    inputs = [shape(rows, 8), shape(count, dtype=torch.int64), shape(count, 8)]
    assert cuda_workspace("aten.index_put_.default", inputs, inputs[:1], ([inputs[1]], True)).blocks[-1] == buffers


def test_long_sorts_have_second_buffers_and_short_ones_places():
    def sort(*sizes: int) -> int:
        return cuda_workspace("aten.sort.default", [shape(*sizes)], [], (-1,))

    assert sort(1000, 4096) == 8 * 4096
    assert sort(8192) == 8 * 8192 + round_size(12 * 8192 + 4 * 2048 + 3 * 1024 + 512)
    assert sort(64, 8192) == (8 + 8 + 4 + 12) * 64 * 8192
    assert sort(128, 8192) == (8 + 12) * 128 * 8192


@pytest.mark.keeps("cublas-workspaces-card-pytorch")
def test_operators_made_of_others_take_what_lies_between_those():
    scores, row = shape(8, 128, 512), shape(8, 128)
    assert cuda_workspace("aten._safe_softmax.default", [scores], [scores], (-1,)) == 8 * 128 * 512 + 8 * 128 + 512
    found = cuda_workspace("aten.logsumexp.default", [scores], [row], ([2],))
    assert found.blocks == (row.bytes, row.bytes, 1024, -1024, -row.bytes, scores.bytes, RESULT)
    assert found == scores.bytes + row.bytes


def test_positions_that_a_batch_shares_are_copied_before_they_are_looked_up():
    weight, shared = shape(100, 64), TensorShape((4, 512), (0, 1), torch.int64)
    assert cuda_workspace("aten.embedding.default", [weight, shared], [shape(4, 512, 64)], ()).blocks == (16384, RESULT)
    assert cuda_workspace("aten.embedding.default", [weight, shape(4, 512, dtype=torch.int64)], [], ()) == 0


def test_running_sums_convert_or_copy_their_input_as_a_whole():
    counts = shape(64, 512, dtype=torch.int64)
    name = "aten.cumsum.default"
    assert cuda_workspace(name, [shape(64, 512, dtype=torch.bool)], [counts], (1,)) == counts.bytes
    assert cuda_workspace(name, [shape(64, 512)], [shape(64, 512)], (1,)) == 0
    assert cuda_workspace(name, [turned(64, 512)], [shape(64, 512)], (1,)) == 4 * 64 * 512
    for length, tiles in ((100, 1536), (262_144, 6144)):  # one row is scanned in tiles, as measured
        row = shape(length, dtype=torch.int64)
        assert cuda_workspace(name, [row], [row], (0,)) == tiles


def test_what_a_loss_and_a_search_read_is_made_contiguous_first():
    scores, targets, number = turned(64, 512), shape(64, dtype=torch.int64), shape()
    assert cuda_workspace("aten.nll_loss_forward.default", [scores, targets], [number, number], ()) == scores.bytes
    assert cuda_workspace("aten.nll_loss_forward.default", [shape(64, 512), targets], [number, number], ()) == 0
    every_other = TensorShape((64,), (2,), torch.int64)
    inputs = [number, scores, every_other, number]
    assert cuda_workspace("aten.nll_loss_backward.default", inputs, [scores], ()) == scores.bytes + 512
    assert cuda_workspace("aten.nonzero.default", [scores], [], ()) == scores.bytes


def test_other_operators_need_nothing():
    shape = TensorShape.of(torch.empty(4, 4, device="meta"))
    assert cuda_workspace("aten.mul.Tensor", [shape, shape], [shape], ()) == 0
