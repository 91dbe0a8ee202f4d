"""The least peak of a step, where no lever can be applied."""

import pytest

import tightfit
from round_device import round_device
from tightfit import TokenBatch
from tightfit.errors import LeverError
from tightfit.planner.search import least
from tiny import VOCABULARY, decoder


def test_where_every_way_is_refused_the_first_refusal_comes(monkeypatch):
    def refused(search, plain, way):
        raise LeverError(f"not here: {len(way.policies)}")

    monkeypatch.setattr(least, "peak_of", refused)
    model = decoder()
    with pytest.raises(LeverError, match="not here"):
        tightfit.maximise(lambda n: (model, TokenBatch(n, 32, VOCABULARY)), "1GiB", device=round_device())
