"""The gated activations equal their plain versions bit by bit and hold only their inputs."""

import functools

import pytest
import torch

from tightfit.errors import InputError
from tightfit.memory.allocator import measured_peak
from tightfit.ops import geglu, swiglu
from tightfit.ops.gated import plain_geglu, plain_swiglu

PAIRS = {
    "swiglu": (swiglu, plain_swiglu),
    "geglu": (geglu, plain_geglu),
    "geglu_tanh": (functools.partial(geglu, approximate="tanh"), functools.partial(plain_geglu, approximate="tanh")),
}
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float64, torch.float64),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]
pairs = pytest.mark.parametrize(("ours", "plain"), PAIRS.values(), ids=PAIRS)


def inputs(gate_dtype=torch.float32, up_dtype=torch.float32, shape=(3, 37, 129)):
    torch.manual_seed(0)
    gate, up = torch.randn(shape) * 3, torch.randn(shape)
    return gate.to(gate_dtype).requires_grad_(), up.to(up_dtype).requires_grad_()


@pytest.mark.keeps("error-operators-against-fp64")
@pairs
@pytest.mark.parametrize(("gate_dtype", "up_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("create_graph", [False, True])
def test_output_and_gradients_are_bit_equal_to_the_plain_version(ours, plain, gate_dtype, up_dtype, create_graph):
    both = inputs(gate_dtype, up_dtype)
    made, wanted = ours(*both), plain(*both)
    gradient = torch.randn_like(wanted)
    assert made.dtype == wanted.dtype
    assert torch.equal(made, wanted)
    for mine, theirs in zip(
        torch.autograd.grad(made, both, gradient, create_graph=create_graph),
        torch.autograd.grad(wanted, both, gradient, create_graph=create_graph),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


@pairs
def test_second_derivatives_are_right(ours, plain):
    assert torch.autograd.gradgradcheck(ours, inputs(torch.float64, torch.float64, (2, 5)))


@pairs
def test_only_the_inputs_are_saved(ours, plain):
    gate, up = inputs()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        ours(gate, up)
    assert sorted(saved) == sorted([gate.data_ptr(), up.data_ptr()])


@pairs
def test_backward_needs_no_memory_but_for_its_two_gradients(ours, plain):
    gate, up = inputs()
    output = ours(gate, up)
    gradient = torch.ones_like(output)
    resident = [gate, up, gradient]
    before = sum(t.nbytes for t in resident)
    peak = measured_peak(lambda: torch.autograd.grad(output, (gate, up), gradient), resident)
    assert peak <= before + gate.nbytes + up.nbytes + 1024


@pairs
def test_a_frozen_input_gets_no_gradient(ours, plain):
    gate, up = inputs()
    ours(gate.detach(), up).sum().backward()
    assert gate.grad is None
    assert up.grad is not None


def test_inputs_that_do_not_fit_are_refused_by_name():
    gate, up = inputs()
    with pytest.raises(InputError, match=r"gate \(3, 37, 129\) and up \(3, 37, 1\) differ"):
        swiglu(gate, up[..., :1])
    with pytest.raises(InputError, match=r"up is torch\.int64"):
        geglu(gate, up.long())
    with pytest.raises(InputError, match="approximate='quick' is unknown"):
        geglu(gate, up, approximate="quick")
