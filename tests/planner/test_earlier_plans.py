"""Plans that version 0.1.0 wrote: the files lie beside this one, written by it, their timelines cut short."""

import json
from pathlib import Path

import pytest

from tightfit import Plan
from tightfit.planner.levers import ChunkedLoss, MicroBatches, Offload, Recompute
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tiny import allocator_peak, decoder, token_batch

FILES = Path(__file__).parent / "earlier_plans"
LEVERS = {"format_4": (Recompute, MicroBatches), "format_5": (ChunkedLoss, Offload)}


def written(name):
    return json.loads((FILES / f"{name}.json").read_text("utf-8"))


@pytest.mark.keeps("plans-written-version-0")
@pytest.mark.parametrize("name", LEVERS)
def test_an_earlier_plan_is_read_and_applied(name):
    raw, plan = written(name), Plan.from_json(FILES / f"{name}.json")
    assert tuple(map(type, plan.levers)) == LEVERS[name]
    assert (plan.micro_batches, plan.peak_bytes) == (raw["micro_batches"], raw["peak_bytes"])
    model = decoder()
    with plan.apply(model) as applied:
        measured = allocator_peak(model, token_batch(), micro_batches=applied.plan.micro_batches)
    assert measured == pytest.approx(plan.peak_bytes, abs=UNSEEN_BYTES)
    assert Plan.from_dict(plan.to_dict()) == plan


def test_the_settings_of_its_levers_are_kept():
    plan, raw = Plan.from_dict(written("format_5")), written("format_5")
    loss, offload = plan.lever(ChunkedLoss), plan.lever(Offload)
    assert (loss.head, loss.chunk_size) == (raw["chunked_loss"]["head"], raw["chunked_loss"]["chunk_size"])
    assert (offload.folder, offload.bytes, offload.host) == ("/tmp", raw["offload"]["bytes"], False)


def test_tiles_and_compiled_blocks_are_read_too():
    raw = written("format_5")
    raw |= {"tiled": {"paths": ["layers.0.mlp"], "tokens": 32}, "offload": None}
    raw["choices"] = [{**choice, "action": "compile", "share": 0.5} for choice in raw["choices"]]
    levers = {lever.name: lever for lever in Plan.from_dict(raw).levers}
    assert levers["tile"].paths == ("layers.0.mlp",)
    assert levers["compile"].shares == tuple((choice["path"], 0.5) for choice in raw["choices"])


def test_a_checkpoint_of_lightning_holds_one():
    from tightfit.integrations.lightning import MemoryBudget

    callback = MemoryBudget("0.6x")
    callback.load_state_dict({"plan": written("format_5")})
    assert callback.plan == Plan.from_dict(written("format_5"))
