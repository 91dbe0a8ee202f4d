"""What keeps least memory in a block, whatever operators cost."""

import pytest
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from made_up_devices import CALIBRATIONS
from tightfit import plan
from tightfit.errors import CannotFit
from tightfit.levers.recompute import KEEP_ALL, Policy
from tightfit.planner.blocks.frontier import frontier, keep_set
from tightfit.planner.blocks.frugal import foreseen, frugal_sets
from tightfit.planner.blocks.graph import block_graph
from tightfit.planner.blocks.windows import footprint, windows
from tightfit.planner.levers import Combination
from tightfit.planner.request import Request, Tracer
from tiny import VOCABULARY, decoder, token_batch


class Repeated(nn.Module):
    """A decoder whose first block stands for the second as well: it runs twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = decoder()
        self.inner.layers[1] = self.inner.layers[0]

    def forward(self, **batch):
        return self.inner(**batch)


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    )


MODELS = {"decoder": decoder, "gpt2": gpt2, "repeated": Repeated}


def least(model, device, levers):
    with pytest.raises(CannotFit) as caught:
        plan(model, token_batch(2, 160), 1000, levers=levers, device=device)
    return caught.value.least_bytes


@pytest.mark.keeps("planner-finds-same-least")
@pytest.mark.slow  # the least is searched at each price
@pytest.mark.parametrize("levers", [("recompute",), ("recompute", "chunked_loss"), ("recompute", "offload")])
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_the_least_is_the_same_at_every_price(build, levers):
    model = build()
    assert len({least(model, device(), levers) for device in CALIBRATIONS.values()}) == 1


@pytest.mark.slow  # many traces
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_the_backward_foreseen_under_a_keep_set_is_the_one_traced(build):
    model = build()
    tracer = Tracer(Request.of(model, token_batch(2, 64), device=CALIBRATIONS["even"](), levers=["recompute"]))
    path = "inner.layers.0" if build is Repeated else next(p for p, m in model.named_modules() if p.endswith(".0"))
    plain = tracer.whole(Combination(), {path: KEEP_ALL})
    (window,) = windows(plain, [path])
    graph = block_graph(plain, model, path)
    assert graph is not None
    backward = foreseen(plain, graph, window)
    least = [keep_set(graph.operations, kept) for kept in frugal_sets(plain, graph, window)]
    beneath = set()
    for one in [*frontier(graph.operations), *least]:
        applied = tracer.whole(Combination(), {path: Policy(graph.kept_keys(one.kept))})
        (there,) = windows(applied, [path])
        beneath.add(backward.cost(one.kept)[1] - footprint(applied, there).backward_bytes)
    assert len(beneath) == 1  # the level on which the block stands
