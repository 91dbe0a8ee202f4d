"""Memory that CPU operators allocate below the dispatcher is counted: the peaks of steps are those of the allocator."""

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from round_device import round_device
from tightfit.memory.allocator import cpu_rise, measured_peak, storage_bytes
from tightfit.planner.any_code.traced import trace
from tightfit.planner.api import estimate
from tightfit.runtime.operators import traits_of
from tightfit.tracing.cpu_measured import is_measured, measured_scratch
from tightfit.tracing.rules import RESIZED_IN_PLACE
from tightfit.tracing.shapes import TensorShape
from tightfit.tracing.workspace import cpu_workspace
from tiny import allocator_peak

UNSEEN = 64  # bytes: numbers that operators wrap as tensors


class Scaled(nn.Module):
    """A function or a module of a trained tensor."""

    def __init__(self, function):
        super().__init__()
        self.scale, self.function = nn.Parameter(torch.ones(64)), function

    def forward(self, x):
        return self.function(x * self.scale)


def square(model, batch):
    found = model(**batch)
    return found.float().square().mean() if found.dim() else found


def labels(x):
    return (torch.arange(x.shape[0] * x.shape[1]) % 64).view(x.shape[:2])


def drawn(x, generator=None):
    return torch.multinomial(x.softmax(-1), 1, generator=generator)


def learnt_steps(x, count):
    """Fake quantisation whose steps and zero points are trained (LSQ, Esser et al. 2019)."""
    learnt = torch.full((count,), 0.1, requires_grad=True), torch.zeros(count, requires_grad=True)
    if count == 1:
        return torch._fake_quantize_learnable_per_tensor_affine(x, *learnt, -128, 127, 1.0)
    return torch._fake_quantize_learnable_per_channel_affine(x, *learnt, 2, -128, 127, 1.0)


SEQUENCES = (8, 128, 64)
IMAGES = (4, 16, 64, 64)
CASES = {
    "fold": (IMAGES, nn.Sequential(nn.Unfold(3, padding=1), nn.Fold((64, 64), 3, padding=1))),
    "bilinear": (SEQUENCES, lambda x: F.bilinear(x, x, torch.ones(96, 64, 64, requires_grad=True))),
    "kthvalue": (SEQUENCES, lambda x: x.kthvalue(3, -1)[0]),
    "real Fourier transform": (SEQUENCES, lambda x: torch.fft.rfft(x, dim=1).abs()),
    "matrix exponential": (SEQUENCES, lambda x: torch.matrix_exp(x[:, :64] * 0.01)),
    "singular values": (SEQUENCES, torch.linalg.svdvals),
    "inverse": (SEQUENCES, lambda x: torch.linalg.inv(x[:, :64] + 8 * torch.eye(64))),
    "soft margin loss": (SEQUENCES, lambda x: F.soft_margin_loss(x, x.detach().sign())),
    "huber loss": (SEQUENCES, lambda x: F.huber_loss(x, x.detach() + 1)),
    "binary cross entropy": (SEQUENCES, lambda x: F.binary_cross_entropy(x.sigmoid(), x.detach().sigmoid())),
    "loss over transposed classes": (SEQUENCES, lambda x: F.nll_loss(x.log_softmax(-1).transpose(1, 2), labels(x))),
    "multi-margin loss": (SEQUENCES, lambda x: F.multi_margin_loss(x.flatten(0, 1), labels(x).flatten())),
    "fake quantisation": (SEQUENCES, lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)),
    "fake quantisation by tensors": (
        SEQUENCES,
        lambda x: torch.fake_quantize_per_tensor_affine(x, torch.tensor(0.1), torch.tensor(0, dtype=torch.int32), 0, 9),
    ),
    "learnt fake quantisation": (SEQUENCES, lambda x: learnt_steps(x, 1)),
    "learnt fake quantisation of channels": (SEQUENCES, lambda x: learnt_steps(x, 64)),
    "fractional pooling": (IMAGES, lambda x: F.fractional_max_pool3d(x[:, None], 2, output_size=(8, 32, 32))),
    "connectionist temporal classification": (
        SEQUENCES,
        lambda x: F.ctc_loss(
            x.log_softmax(-1).transpose(0, 1), labels(x)[:, :20] + 1, torch.full((8,), 128), torch.full((8,), 20)
        ),
    ),
    "draws": (SEQUENCES, lambda x: x.flatten(0, 1).gather(1, drawn(x.detach().flatten(0, 1)))),
    "take": (SEQUENCES, lambda x: x.take(torch.arange(100))),
    "attention with dropout": (
        SEQUENCES,
        lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.1).sum(),
    ),
}


LEAST_SQUARES = {
    "several": lambda x: torch.linalg.lstsq(x, x.detach()[..., :2]).solution,
    "vectors": lambda x: torch.linalg.lstsq(x, x.detach()[..., 0], driver="gels").solution,
    "residuals": lambda x: torch.linalg.lstsq(x, x.detach()[..., :2], driver="gelsd").residuals,
}


@pytest.mark.parametrize("name", LEAST_SQUARES)
def test_least_squares_have_a_shape_without_data(name):
    """Some hundred bytes of the pseudo-inverse in its backward are not counted."""
    x = torch.randn(SEQUENCES)
    shape = tuple(LEAST_SQUARES[name](x).shape)
    model, batch = Scaled(LEAST_SQUARES[name]), {"x": x}
    seen = []
    model.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    found = estimate(model, batch, loss=square, optimizer="sgd")
    assert set(seen) == {shape}
    assert abs(found.peak_bytes - allocator_peak(model, batch, loss=square, optimizer="sgd")) <= 512


@pytest.mark.sampled(8)
@pytest.mark.keeps("dry-run-cpu-temporaries")
@pytest.mark.parametrize("name", CASES)
def test_a_step_has_the_peak_of_the_allocator(name):
    shape, function = CASES[name]
    model, batch = Scaled(function), {"x": torch.randn(shape)}
    asked = {"loss": square, "optimizer": "sgd"}
    predicted = estimate(model, batch, device=round_device(), **asked).peak_bytes
    assert abs(predicted - allocator_peak(model, batch, **asked)) <= UNSEEN


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 has it first")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_pytorchs_own_chunked_loss_has_the_peak_of_the_allocator(reduction):
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    model = Scaled(nn.Linear(64, 4096, bias=False))
    options = LinearCrossEntropyOptions(batch_chunk_size=128)

    def loss(model, batch):
        hidden, weight = (batch["x"] * model.scale).flatten(0, 1), model.function.weight
        return F.linear_cross_entropy(hidden, weight, batch["y"].flatten(), reduction=reduction, options=options).mean()

    batch = {"x": torch.randn(SEQUENCES), "y": labels(torch.empty(SEQUENCES))}
    asked = {"loss": loss, "optimizer": "sgd"}
    assert estimate(model, batch, device=round_device(), **asked).peak_bytes == allocator_peak(model, batch, **asked)


@pytest.mark.parametrize("draw", [drawn, lambda x, generator: torch.normal(x.abs(), 1.0, generator=generator)])
def test_a_generator_of_the_users_is_not_drawn_from(draw):
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    x = torch.ones(8, 64)
    predicted = trace(draw, x, generator).peak_bytes
    assert torch.equal(generator.get_state(), before)
    assert predicted == measured_peak(lambda: draw(x, generator), [x])


def test_a_large_call_is_extrapolated_from_two_small_batches():
    operator = torch.ops.aten.kthvalue.default
    small, large = ((TensorShape((size, 64, 256), (64 * 256, 256, 1), torch.float32), 3) for size in (4, 512))
    of_small = measured_scratch(operator, small, {}, [])
    assert of_small
    assert measured_scratch(operator, large, {}, []) == 128 * of_small


def test_a_call_that_refuses_zeros_runs_on_ones_or_says_that_it_could_not():
    matrix, pivots = TensorShape((4, 4), (1, 4), torch.float32), TensorShape((4,), (1,), torch.int32)
    assert measured_scratch(torch.ops.aten.linalg_ldl_solve.default, (matrix, pivots, matrix), {}, []) is not None
    probabilities = TensorShape((4, 8), (8, 1), torch.float32)
    assert measured_scratch(torch.ops.aten.multinomial.default, (probabilities, 2), {}, [])
    empty, index = TensorShape((0, 4), (4, 1), torch.float32), TensorShape((2,), (1,), torch.int64)
    assert measured_scratch(torch.ops.aten.index_select.default, (empty, 0, index), {}, []) is None


def test_a_call_with_vast_results_does_not_run():
    one = TensorShape((1, 1, 8, 8), (64, 64, 8, 1), torch.float32)
    vast = TensorShape((1, 1, 2**15, 2**15), (2**30, 2**30, 2**15, 1), torch.float32)
    operator = torch.ops.aten.upsample_bilinear2d.default
    assert measured_scratch(operator, (one, [2**15, 2**15], False), {}, [vast]) is None


def test_scratch_memory_that_no_run_can_show_is_an_assumption():
    embedding = nn.EmbeddingBag(50, 8, sparse=True)
    model, batch = nn.Sequential(embedding), {"input": torch.arange(32).view(4, 8)}
    found = estimate(model, batch, loss=square, optimizer="sgd", device=round_device())
    assert any("scratch memory of aten._embedding_bag" in str(each) for each in found.assumptions)


def test_a_measurement_draws_no_numbers():
    before = torch.get_rng_state()
    measured_scratch(torch.ops.aten.multinomial.default, (torch.ones(8, 16), 4), {}, [])
    assert torch.equal(torch.get_rng_state(), before)


class Compared(TorchDispatchMode):
    """Runs operators under the allocator's record, and notes those whose scratch memory is above the predicted one."""

    def __init__(self):
        super().__init__()
        self.seen, self.others = set(), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        rest = [each for each in tree_leaves((args, kwargs)) if not isinstance(each, torch.Tensor)]
        shapes = [TensorShape.of(each) for each in inputs]
        traits = traits_of(func)
        call = str(func), tuple(shapes), repr(rest)
        if call in self.seen or traits.is_view or traits.is_composed or func in RESIZED_IN_PLACE:
            return func(*args, **kwargs)
        self.seen.add(call)
        results = []
        rise = cpu_rise(lambda: results.append(func(*args, **kwargs)))
        given = {each.untyped_storage().data_ptr() for each in inputs}
        made = [each for each in tree_leaves(results) if isinstance(each, torch.Tensor)]
        taken = rise - storage_bytes([each for each in made if each.untyped_storage().data_ptr() not in given])
        constants = tuple(each for each in args if not isinstance(each, torch.Tensor))
        if is_measured(func, inputs, constants):
            predicted = measured_scratch(func, args, kwargs, [TensorShape.of(each) for each in made]) or 0
        else:
            predicted = int(cpu_workspace(traits.name, shapes, [TensorShape.of(each) for each in made], constants))
        if taken - predicted > UNSEEN:
            self.others.setdefault(traits.name, []).append((taken, predicted, [shape.shape for shape in shapes]))
        return results[0]


# Their temporaries depend on numbers: on what a mask or an index selects, on how often a value occurs, on a norm.
BY_NUMBERS = {"masked_select", "masked_scatter", "_unique2", "_unique", "unique_dim", "unique_consecutive"}
BY_NUMBERS |= {"multinomial", "linalg_matrix_exp", "isin", "lu_unpack"}


def _turned(x):
    return x.movedim(0, -1).contiguous().movedim(-1, 0) if x.dim() > 1 else x


LAYOUTS = [lambda x: x, _turned, lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]] if x.dim() else x]


def _both_ways(mode, function, layout, sample):
    """A sample in another layout, forward and backward: of a sum, whose gradient is expanded, and of ones."""

    def laid(value):
        is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
        return layout(value.detach()).requires_grad_(value.requires_grad) if is_plain else value

    given, args, kwargs = tree_map(laid, (sample.input, sample.args, sample.kwargs))
    with mode:
        found = function(given, *args, **kwargs)
        floating = [t for t in tree_leaves(found) if isinstance(t, torch.Tensor) and t.requires_grad]
        if floating:
            torch.autograd.backward([each.sum() for each in floating], retain_graph=True)
            torch.autograd.backward(floating, [torch.ones_like(each) for each in floating])


@pytest.mark.slow  # minutes each: thousands of calls of 579 operators, in three layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_scratch_memory_of_pytorchs_own_samples_is_never_above_the_prediction(dtype):
    from torch.testing._internal.common_methods_invocations import op_db  # needs expecttest

    left_out = ("sparse", "jiterator", "_refs", "nested", "masked.")
    mode = Compared()
    for info in op_db:
        name = f"{info.name}.{info.variant_test_name}"
        if any(each in name for each in left_out) or dtype not in info.dtypes:
            continue
        samples = info.sample_inputs("cpu", dtype, requires_grad=info.supports_autograd)
        for sample in itertools.islice(samples, 6):
            for layout in LAYOUTS:
                with contextlib.suppress(Exception):
                    _both_ways(mode, info.op, layout, sample)
    assert len(mode.seen) > 10_000
    others = {name: found for name, found in mode.others.items() if name.split(".")[1] not in BY_NUMBERS}
    assert not {name: (found[0], len(found)) for name, found in others.items()}


def _batch_norm(x, weight):
    return F.batch_norm(x, None, None, weight, training=True)


def _masked(x, weight):
    return x.masked_scatter(torch.arange(x.numel()).view(x.shape) % 3 == 0, x * 2)


def _layer_norm(x, weight):
    return F.layer_norm(x, x.shape[-1:], weight[: x.shape[-1]], weight[: x.shape[-1]])


def _softmax_turned(x, weight):
    return x.transpose(0, 1).log_softmax(-1).softmax(-1)


def _bag(x, weight):
    rows = torch.arange(16) % 8
    return F.embedding_bag(rows, weight.expand(8, 16).contiguous(), torch.arange(0, 16, 2), None, mode="sum",
                           per_sample_weights=x.flatten()[:16])  # fmt: skip


@pytest.mark.parametrize("function", [_batch_norm, _layer_norm, _softmax_turned, _masked, _bag])
@pytest.mark.parametrize("shape", [(8, 16), (4, 16, 6), (2, 16, 4, 4)], ids=str)
def test_backward_of_a_contiguous_gradient_takes_what_is_predicted(function, shape):
    # A gradient of a sum, which PyTorch's own samples have, is expanded, and some operators take less for it.
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(16, requires_grad=True)
    mode = Compared()
    found = function(x, weight)
    with mode:
        found.backward(torch.randn(found.shape))
    assert mode.seen
    assert not mode.others


@pytest.mark.parametrize("norm", [F.group_norm, F.batch_norm])
def test_a_norm_of_images_whose_channels_lie_last_takes_what_is_predicted(norm):
    x = torch.randn(4, 64, 12, 12).contiguous(memory_format=torch.channels_last).requires_grad_()
    given = (None, None) if norm is F.batch_norm else (4,)
    trained = {"training": True} if norm is F.batch_norm else {}
    mode = Compared()
    with mode:
        norm(
            x, *given, torch.ones(64, requires_grad=True), torch.ones(64, requires_grad=True), **trained
        ).sum().backward()
    assert mode.seen
    assert not mode.others


@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm", [1e-3, 1.0, 20.0])
@pytest.mark.parametrize("count", [1, 3])
def test_the_exponential_of_a_matrix_of_any_norm_is_within_the_estimate(count, norm):
    # Zeros, on which other operators run for their scratch memory, take 5 matrices of it, and large numbers 13.
    model = nn.ParameterDict({"power": nn.Parameter(torch.full((count, 24, 24) if count > 1 else (24, 24), norm / 24))})

    def loss(model, batch):
        return torch.linalg.matrix_exp(model["power"]).mean() * batch["x"].mean()

    batch = {"x": torch.ones(4)}
    found = estimate(model, batch, loss=loss, optimizer="sgd")
    measured = allocator_peak(model, batch, loss=loss, optimizer="sgd")
    assert any("norm of the matrix" in assumption for assumption in found.assumptions) == (count == 1)
    if count == 1 and norm < 20:
        assert found.peak_bytes > measured
    else:
        assert found.peak_bytes == pytest.approx(measured, abs=UNSEEN)


def test_the_step_of_an_orthogonal_layer_is_within_the_estimate():
    model = nn.utils.parametrizations.orthogonal(nn.Linear(16, 16))
    batch = {"x": torch.randn(4, 16)}

    def loss(model, batch):
        return model(batch["x"]).square().mean()

    assert allocator_peak(model, batch, loss=loss) <= estimate(model, batch, loss=loss).peak_bytes
