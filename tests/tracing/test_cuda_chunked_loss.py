"""A chunked loss that is planned for a CUDA device takes the products of CUDA, though it is traced on the CPU."""

from collections import Counter

from tightfit.levers.chunked_loss import apply_chunked_loss
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.runtime.activity import now
from tightfit.step import StepSettings, model_loss
from tightfit.tracing.cuda import CudaRole
from tightfit.tracing.step import trace_step
from tiny import decoder, token_batch

HOPPER = CudaRole((9, 0), 132)


def operators(role):
    model = decoder()
    parts = as_parts(split_batch(token_batch(), 1), model_loss)
    with apply_chunked_loss(model, "head"):
        trace = trace_step(model, parts, model_loss, settings=StepSettings("bf16"), role=role)
    return Counter(operator.name for operator in trace.operators)


def test_16_bit_products_are_summed_in_fp32_by_the_product_itself():
    assert operators(HOPPER)["aten.mm.dtype"] >= 2
    assert operators(None)["aten.mm.dtype"] == 0
    assert not now.playing_cuda
