import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tightfit.devices.families import _FAMILIES, Family, family_of
from tightfit.devices.work import work_of
from tightfit.models.decoder import Decoder, DecoderConfig
from tightfit.step import Part, StepSettings, TokenBatch, forward_backward, model_loss, update
from tightfit.tracing.shapes import TensorShape

aten = torch.ops.aten


class Recorder(TorchDispatchMode):
    """Keeps what a cost model is told of every operator."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        constants = tuple(a for a in args if not isinstance(a, torch.Tensor))
        self.calls.append((str(func), shapes((args, kwargs)), shapes(result), constants))
        return result


def shapes(tree):
    return [TensorShape.of(t) for t in tree_iter(tree) if isinstance(t, torch.Tensor)]


def work_in(function):
    """The work of the last operator that the function runs."""
    with Recorder() as recorder:
        function()
    return work_of(*recorder.calls[-1])


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_operator_of_a_training_step_has_a_family(precision, foreach):
    model = Decoder(
        DecoderConfig(hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, vocab_size=64, dropout=0.1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    batch = TokenBatch(2, 16, 64).tensors()
    with Recorder() as recorder:
        forward_backward(model, [Part(batch, 1.0)], model_loss, precision)
        update(model, optimizer, StepSettings(precision, grad_clip=1.0))
    names = {call[0] for call in recorder.calls}
    assert {"aten.mm.default", "aten._log_softmax.default"} <= names
    assert {name for name in names if family_of(name) is None} == set()


def test_attention_within_a_window_is_counted_by_its_window():
    q, k, gradient = (TensorShape.of(torch.empty(2, heads, 4096, 64, device="meta")) for heads in (8, 2, 8))

    def keys(causal, window, *, backward=False):
        name = f"tightfit.window_attention{'_backward' if backward else ''}.default"
        inputs = [gradient, q, k, k] if backward else [q, k, k]
        attention = work_of(name, inputs, [q], (None, causal, window, 0.125)).attention
        assert attention[:2] == (16, 4096)
        return attention.key_length, attention.causal

    assert keys(True, 256) == keys(True, 256, backward=True) == (256, False)
    assert keys(False, 256) == (511, False)
    assert keys(True, None) == (4096, True)
    assert keys(False, 4000) == (4096, False)


def test_every_name_in_the_table_is_an_operator_of_pytorch():
    def exists(name):
        return any(hasattr(aten, form) for form in (name, f"{name}_", f"_foreach_{name}"))

    # Not in every release: newer and older spellings.
    varying = {"_scaled_grouped_mm", "_batch_norm_with_update", "_fused_rms_norm", "_fused_rms_norm_backward"}
    assert {name for name in _FAMILIES if not exists(name)} <= varying


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("aten.mul_.Tensor", Family.ARITHMETIC),
        ("aten._foreach_addcdiv_.ScalarList", Family.ARITHMETIC),
        ("aten.view.default", Family.FREE),
        ("aten.silu_backward.default", Family.TRANSCENDENTAL),
        ("aten._scaled_dot_product_efficient_attention_backward.default", Family.ATTENTION_BACKWARD),
        ("mylib.mul.default", None),
        ("aten.no_such_operator.default", None),
    ],
)
def test_a_family_is_found_whatever_the_form_of_the_operator(name, family):
    assert family_of(name) is family


def test_products_have_their_sizes_and_see_which_side_is_transposed():
    a, b, weight = torch.ones(6, 4), torch.ones(4, 5), torch.ones(5, 4)
    (plain,) = work_in(lambda: a @ b).products
    assert plain == (1, 6, 5, 4, "nn")
    assert work_in(lambda: torch.mm(a, weight.t())).products[0].layout == "nt"
    assert work_in(lambda: torch.mm(b.t(), b)).products[0] == (1, 5, 5, 4, "tn")
    assert work_in(lambda: torch.addmm(torch.ones(5), a, b)).products[0] == (1, 6, 5, 4, "nn")
    assert work_in(lambda: torch.bmm(torch.ones(3, 6, 4), torch.ones(3, 4, 5))).products[0] == (3, 6, 5, 4, "nn")


def test_grouped_products_share_the_rows_among_the_groups():
    a, b, offsets = (torch.ones(shape) for shape in ((12, 8), (3, 8, 16), (3,)))
    arguments = (TensorShape.of(a), TensorShape.of(b), TensorShape.of(offsets.int()))
    (product,) = work_of("aten._grouped_mm.default", arguments, [TensorShape.of(torch.ones(12, 16))]).products
    assert math.prod(product[:4]) == 12 * 8 * 16


def test_a_convolution_is_the_product_of_its_patches_and_a_depthwise_one_is_not():
    x = torch.ones(2, 3, 10)
    work = work_in(lambda: torch.nn.functional.conv1d(x, torch.ones(7, 3, 4)))
    assert math.prod(work.products[0][:4]) == 2 * 7 * 7 * 3 * 4
    depthwise = work_in(lambda: torch.nn.functional.conv1d(x, torch.ones(3, 1, 4), groups=3))
    assert depthwise.family is Family.ARITHMETIC


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_read_forward_and_backward(causal):
    q, k = torch.ones(2, 4, 6, 8, requires_grad=True), torch.ones(2, 2, 6, 8)
    with Recorder() as recorder:
        torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=causal, enable_gqa=True).sum().backward()
    seen = [work_of(*call) for call in recorder.calls]
    found = [work for work in seen if work.attention is not None]
    assert [work.family for work in found] == [Family.ATTENTION, Family.ATTENTION_BACKWARD]
    assert {work.attention for work in found} == {(8, 6, 6, 8, causal)}


def test_attention_of_cuda_says_causal_after_the_dropout_probability():
    q = TensorShape((2, 4, 6, 8), (192, 48, 8, 1), torch.bfloat16)
    lse = TensorShape((2, 4, 6), (24, 6, 1), torch.float32)
    name = "aten._scaled_dot_product_efficient_attention"
    forward = work_of(f"{name}.default", [q, q, q], [q, lse], (None, True, 0.0, False))
    backward = work_of(f"{name}_backward.default", [q] * 5 + [lse], [q] * 3, (None, 0.0, [True] * 4, True))
    assert forward.attention == (8, 6, 6, 8, False)
    assert backward.attention == (8, 6, 6, 8, True)


def test_bytes_count_what_is_read_and_written():
    x, row = torch.ones(1000, 10), torch.ones(10)
    assert work_in(lambda: x + x).bytes == 3 * 40_000
    assert work_in(lambda: x * row.expand(1000, 10)).bytes == 2 * 40_000 + 40
    assert work_in(lambda: x.clone().mul_(2.0)).bytes == 2 * 40_000
    assert work_in(lambda: x.new_empty(1000, 10).copy_(x)).bytes == 2 * 40_000
    assert work_in(lambda: x.bfloat16()).bytes == 40_000 + 20_000
    assert work_in(lambda: torch.zeros(1000, 10)).bytes == 40_000
    assert work_in(lambda: x.t()).bytes == 0


def test_a_gather_reads_the_rows_it_takes_and_not_the_table():
    table, rows = torch.ones(1000, 16), torch.zeros(4, dtype=torch.int64)
    assert work_in(lambda: torch.nn.functional.embedding(rows, table)).bytes == 2 * 4 * 64 + 4 * 8


def test_in_place_lists_write_their_first_list():
    a, b = [torch.ones(10), torch.ones(20)], [torch.ones(10), torch.ones(20)]
    assert work_in(lambda: aten._foreach_add_(a, b)).bytes == 3 * 120


def test_only_new_outputs_are_fresh():
    x = torch.ones(10)
    assert work_in(lambda: x + x).fresh_bytes == (40,)
    assert work_in(lambda: x.clone().add_(1)).fresh_bytes == ()
    assert work_in(lambda: torch.mul(x, x, out=torch.empty(10))).fresh_bytes == ()


def test_a_copy_that_turns_rows_into_columns_is_a_transpose():
    x = torch.ones(8, 8)
    assert work_in(lambda: x.clone()).family is Family.COPY
    assert work_in(lambda: x.t().contiguous()).family is Family.TRANSPOSE
    assert work_in(lambda: x.t().bfloat16()).family is Family.COPY  # keeps its strides


def test_squares_are_arithmetic_and_other_powers_are_not():
    x = torch.ones(8)
    assert work_in(lambda: x**2).family is Family.ARITHMETIC
    assert work_in(lambda: x**1.7).family is Family.ERROR_FUNCTION


def test_halves_among_floats_are_mixed():
    x = torch.ones(8)
    assert work_in(lambda: x + x.double()).dtype == "float32"
    assert work_in(lambda: x.bfloat16() * x.bfloat16()).dtype == "bfloat16"
    assert work_in(lambda: x.half() * x.half()).dtype == "float16"
    assert work_in(lambda: x.bfloat16() * x).dtype == "mixed"


def test_an_unknown_operator_is_priced_by_its_bytes():
    x = TensorShape((10,), (1,), torch.float32)
    work = work_of("mylib.something.default", [x], [x])
    assert (work.family, work.bytes) == (Family.ARITHMETIC, 80)
