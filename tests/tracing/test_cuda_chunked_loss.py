"""A chunked loss that is planned for a CUDA device takes the products of CUDA, though it is traced on the CPU."""

from collections import Counter

import pytest
import transformers

from tightfit.levers.chunked_loss import apply_chunked_loss
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.runtime.simulation import simulation
from tightfit.step import StepSettings, model_loss
from tightfit.tracing.cuda import CudaRole
from tightfit.tracing.step import trace_step
from tiny import VOCABULARY, decoder, token_batch

HOPPER = CudaRole((9, 0), 132)


def operators(role):
    model = decoder()
    parts = as_parts(split_batch(token_batch(), 1), model_loss)
    with apply_chunked_loss(model, "head"):
        trace = trace_step(model, parts, model_loss, settings=StepSettings("bf16"), role=role)
    return Counter(operator.name for operator in trace.operators)


def test_16_bit_products_are_summed_in_fp32_by_the_product_itself():
    on_a_card, on_a_cpu = operators(HOPPER), operators(None)
    for product in ("aten.mm.dtype", "aten.mm.dtype_out"):  # gradients of the hidden states; logits and the weight's
        assert on_a_card[product] >= 1
        assert on_a_cpu[product] == 0
    assert not simulation.of_cuda


@pytest.mark.keeps("dry-run-card-defers")
def test_a_model_that_asks_for_the_device_of_its_logits_gets_it_without_them():
    # As the losses of `transformers` do: `labels.to(logits.device)`.
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 96}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).train()
    parts = as_parts(split_batch(token_batch(), 1), model_loss)
    with apply_chunked_loss(model, "lm_head"):
        trace = trace_step(model, parts, model_loss, settings=StepSettings("bf16"), role=HOPPER)
    names = [operator.name for operator in trace.operators]
    assert "aten.addmm.dtype_out" in names or "aten.mm.dtype_out" in names
    assert "aten._log_softmax.default" not in names, "the logits of all tokens"
    assert "aten.nll_loss_forward.default" not in names
