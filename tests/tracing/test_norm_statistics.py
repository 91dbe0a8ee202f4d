"""The statistics that norms save have the dtype of the CPU's kernels, and on a simulated card that of CUDA's."""

import itertools

import pytest
import torch
from torch import nn

from tightfit import TokenBatch, estimate
from tightfit.runtime.operators import traits_of
from tightfit.runtime.simulation import simulation
from tightfit.tracing.shapes import inputs_and_key, result_shapes
from tiny import allocator_peak

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def calls(dtype, parameters):
    """A layer norm and a group norm of an input of a dtype with parameters of another, or without any."""
    x = torch.randn(2, 4, 6).to(dtype)
    weights = [None if parameters is None else torch.ones(n, dtype=parameters) for n in (6, 4)]
    yield aten.native_layer_norm.default, (x, [6], weights[0], weights[0], 1e-5)
    yield aten.native_group_norm.default, (x, weights[1], weights[1], 2, 4, 6, 2, 1e-5)


def predicted(operator, arguments):
    traits_of(operator)
    _, key = inputs_and_key(operator, arguments, {})
    return [shape.dtype for shape in result_shapes(operator, arguments, {}, key, lambda tensor: False)]


@pytest.mark.keeps("statistics-norm-saves-predicted")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_statistics_of_a_norm_have_the_dtype_of_the_cpus_kernel(dtype):
    tried = 0
    for parameters, place in itertools.product((None, *DTYPES), range(2)):
        operator, arguments = list(calls(dtype, parameters))[place]
        try:
            results = operator(*arguments)
        except RuntimeError:
            continue  # a mixture that the CPU's kernel refuses
        tried += 1
        assert predicted(operator, arguments) == [result.dtype for result in results]
    assert tried >= 4


def test_on_a_simulated_card_a_layer_norm_keeps_its_statistics_in_fp32(monkeypatch):
    operator, arguments = next(calls(torch.bfloat16, torch.bfloat16))
    on_the_cpu = predicted(operator, arguments)
    monkeypatch.setattr(simulation, "card", object())
    assert predicted(operator, arguments) == [torch.bfloat16, torch.float32, torch.float32]
    assert on_the_cpu == [torch.bfloat16] * 3


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.norms = nn.Sequential(*(nn.LayerNorm(8) for _ in range(6)))

    def forward(self, input_ids, labels):
        return self.norms(self.embedding(input_ids)).float().square().mean()


@pytest.mark.keeps("statistics-norm-saves-predicted")
def test_a_bf16_model_with_layer_norms_is_predicted_to_the_byte():
    model, batch = Normed().to(torch.bfloat16), TokenBatch(4, 64, 32)
    found = estimate(model, batch, optimizer="sgd")
    assert found.peak_bytes == allocator_peak(model, batch.tensors(), optimizer="sgd")
