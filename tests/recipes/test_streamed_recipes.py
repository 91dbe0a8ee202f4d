"""`tightfit.fit` streams frozen weights where the lever is named, and says how many blocks."""

import pytest

import tightfit
from tightfit import TokenBatch
from tightfit.training.config import AdapterConfig
from tiny_adapters import saved_llama


@pytest.mark.slow  # a plan with streamed blocks takes many traces
def test_adapters_on_a_base_above_the_budget_fit_with_streamed_blocks(tmp_path):
    folder = saved_llama(tmp_path, hidden_size=128, intermediate_size=512, num_hidden_layers=4)
    how = {"device": "cpu", "adapter": AdapterConfig(r=4, base="fp32")}

    def row(budget, levers):
        return tightfit.fit(str(folder), TokenBatch(1, 16, 600), budget=budget, levers=levers, **how)[0]

    plain = row("1GiB", "rounding")
    budget = int(0.75 * plain.peak_bytes)
    assert not row(budget, ["exact"]).fits
    streamed = row(budget, ["exact", "stream"])
    assert streamed.fits
    assert streamed.peak_bytes <= budget
    assert 0 < streamed.streamed_blocks <= 4
    assert f"{streamed.streamed_blocks} of 4 blocks streamed" in streamed.name
    assert streamed.to_dict()["streamed_blocks"] == streamed.streamed_blocks
    assert streamed.changes == plain.changes
