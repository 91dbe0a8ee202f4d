"""A model on a graphics card is run dry on the host. No card is needed here: the CPU stands for it."""

import pytest
import torch
from torch import nn

from tightfit.runtime.operators import traits_of
from tightfit.tracing.dry_run import DryRun
from tightfit.tracing.host import on_host
from tightfit.tracing.ledger import Ledger
from tightfit.tracing.modules import ModuleTracker
from tightfit.tracing.shapes import KNOWN_LIMIT
from tightfit.tracing.unbacked import is_unbacked


@pytest.mark.keeps("model-card-traced-without")
def test_large_weights_come_as_shapes_and_what_is_small_or_integer_with_its_content():
    weight = nn.Parameter(torch.randn(300, 300).t())
    small, index = torch.randn(8), torch.arange(KNOWN_LIMIT + 1)
    own = [t.data_ptr() for t in (weight, small, index)]
    with on_host([weight, small, index, weight], kind="cpu"):
        assert is_unbacked(weight)
        assert weight.stride() == (1, 300)
        assert not is_unbacked(small)
        assert index[-1] == KNOWN_LIMIT
        assert not {t.data_ptr() for t in (weight, small, index)} & set(own)
        small.fill_(7)
    assert [t.data_ptr() for t in (weight, small, index)] == own
    assert not is_unbacked(weight)
    assert not (small == 7).any()


@pytest.mark.keeps("model-card-traced-without")
def test_everything_is_back_after_an_error():
    weight = nn.Parameter(torch.randn(300, 300))
    before = weight.data_ptr()
    with pytest.raises(RuntimeError), on_host([weight], kind="cpu"):
        raise RuntimeError
    assert weight.data_ptr() == before


def test_what_lies_on_the_host_already_is_left_alone():
    weight = nn.Parameter(torch.randn(300, 300))
    before = weight.data_ptr()
    with on_host([weight]):
        assert weight.data_ptr() == before


def test_tied_weights_stay_one():
    model = nn.ModuleDict({"embedding": nn.Embedding(500, 200), "head": nn.Linear(200, 500, bias=False)})
    model["head"].weight = model["embedding"].weight
    with on_host([p for m in model.values() for p in m.parameters()], kind="cpu"):
        assert model["head"].weight.data_ptr() == model["embedding"].weight.data_ptr()


def test_the_arithmetic_of_a_dry_run_wakes_no_other_thread():
    model = torch.nn.Linear(1, 1)
    dry = DryRun(Ledger(), ModuleTracker(model))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        computed = dry.compute(traits_of(torch.ops.aten.ones.default), lambda *_: torch.get_num_threads(), (), {})
        assert (computed, torch.get_num_threads()) == (1, 3)
    finally:
        torch.set_num_threads(before)
