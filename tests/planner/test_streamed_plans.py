"""Plans that stream frozen weights: chosen within the budget, as predicted, bit-equal, and only where named."""

from contextlib import contextmanager

import pytest
import torch

import tightfit
from adapted_blocks import built, of_batch
from exactness import assert_bit_equal, run
from tightfit.devices.described import with_host
from tightfit.devices.present import lookup
from tightfit.errors import CannotFit, LeverError
from tightfit.memory.allocator import measured_peak
from tightfit.memory.disk import DiskStore
from tightfit.planner.levers import Stream
from tightfit.planner.levers.stream import spread
from tightfit.training.loop import resident_tensors

BLOCKS = 6


def asked(**how):
    model, x = built()
    return model, {"x": x.detach()}, {"loss": of_batch, "device": "cpu", **how}


def peak_of(model, batch, applied):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def step():
        applied.backward(batch, of_batch)
        optimizer.step()
        optimizer.zero_grad()

    step(), step()
    return measured_peak(step, resident_tensors(model, optimizer, batch))


@pytest.mark.sampled(1)
@pytest.mark.keeps("streamed-peak")
@pytest.mark.parametrize("share", [0.9, 0.7, 0.6])
def test_a_plan_streams_as_many_blocks_as_the_budget_requires(share):
    model, batch, how = asked(levers=["exact", "stream"])
    least = tightfit.plan(model, batch, "1GiB", **{**how, "levers": "exact"}).plain_peak_bytes
    plan = tightfit.plan(model, batch, int(share * least), **how)
    lever = plan.lever(Stream)
    assert plan.peak_bytes <= plan.budget_bytes
    if share == 0.6:
        assert lever is not None
    assert lever is None or set(lever.paths) <= {choice.path for choice in plan.choices}
    again = tightfit.Plan.from_dict(plan.to_dict())
    assert again == plan
    with again.apply(model) as applied:
        assert peak_of(model, batch, applied) == plan.peak_bytes


def test_the_class_exact_alone_streams_nothing():
    model, batch, how = asked()
    plan = tightfit.plan(model, batch, "1GiB", **how)
    with pytest.raises(CannotFit) as failure:
        tightfit.plan(model, batch, int(0.6 * plan.plain_peak_bytes), levers="exact", **how)
    assert "stream" not in str(failure.value)


def test_a_planned_step_is_bit_equal():
    model, batch, how = asked(levers=["exact", "stream"])
    plain_peak = tightfit.plan(model, batch, "1GiB", **how).plain_peak_bytes
    plan = tightfit.plan(model, batch, int(0.6 * plain_peak), **how)

    def loss(model, x):
        return of_batch(model, {"x": x})

    assert plan.lever(Stream) is not None
    assert_bit_equal(run(*built(), loss, times=3), run(*built(), loss, times=3, levers=plan.apply))
    assert tightfit.verify(model, batch, plan, loss=of_batch).ok


def test_a_model_without_frozen_blocks_says_why_it_streams_nothing():
    model, batch, how = asked(levers=["exact", "stream"], optimizer="sgd")
    how["device"] = "rtx4090"  # on a CPU trained weights stream too
    model.requires_grad_(True)
    batch = {"x": batch["x"].repeat(512, 1, 1)}
    plain_peak = tightfit.plan(model, batch, "1GiB", **how).plain_peak_bytes
    plan = tightfit.plan(model, batch, plain_peak - 4096, **how)
    why = "no block has frozen weights of its own: train adapters, or update on the host (offloaded_adamw_fused)"
    assert ("stream", why) in [(each.levers, each.reason) for each in plan.rejected]


def on_a_card(host_budget=None, **how):
    """The plan of a step on a card that streams its blocks, with so much of the host's memory beside the process."""
    model, batch, _ = asked()
    plain = tightfit.estimate(model, batch, loss=of_batch, device="rtx4090").peak_bytes
    given = {"loss": of_batch, "device": "rtx4090", "levers": ["stream"], **how}
    return tightfit.plan(model, batch, int(0.98 * plain), host_budget=host_budget, **given)


@pytest.mark.slow  # two plans
@pytest.mark.keeps("streamed-file-on-card")
def test_weights_for_which_the_host_has_no_room_stream_from_a_file(tmp_path, monkeypatch):
    """The model's own weights are in memory here, and count while they are loaded; a map of a file takes none."""
    monkeypatch.setattr("tightfit.planner.host.loaded_bytes", lambda request, stream=None: 0)
    monkeypatch.setattr("tightfit.planner.host.process_bytes", lambda held, tidied: 1 << 30)
    monkeypatch.setattr("tightfit.levers.stream.tiers.STAGE_BYTES", 1)
    monkeypatch.setattr("tightfit.tracing.streams.STAGE_BYTES", 1)
    pinned = on_a_card(offload_folder=str(tmp_path))
    assert pinned.lever(Stream).folder is None
    assert pinned.host_peak_bytes > 1 << 30
    plan = on_a_card(host_budget=pinned.host_peak_bytes - 1, offload_folder=str(tmp_path))
    assert plan.lever(Stream).folder == str(tmp_path)
    assert plan.host_peak_bytes < pinned.host_peak_bytes
    assert plan.peak_bytes == pinned.peak_bytes
    assert any("the drive with the streamed weights is read at 3.0 GB/s (assumed" in line for line in plan.assumptions)
    assert tightfit.Plan.from_dict(plan.to_dict()) == plan
    with pytest.raises(CannotFit, match="of host memory cannot fit"):
        on_a_card(host_budget=1 << 30)
    monkeypatch.setattr("tightfit.planner.request.is_in_memory", lambda folder: True)
    with pytest.raises(LeverError, match=r"is in memory itself, .*: name a folder on a disk \(offload_folder\)"):
        on_a_card(host_budget=pinned.host_peak_bytes - 1, offload_folder=str(tmp_path))


@pytest.mark.slow  # a plan for each drive
def test_a_drive_is_as_fast_as_the_host_says(monkeypatch):
    monkeypatch.setattr("tightfit.planner.host.loaded_bytes", lambda request, stream=None: 0)
    monkeypatch.setattr("tightfit.planner.host.process_bytes", lambda held, tidied: 1 << 30)
    monkeypatch.setattr("tightfit.tracing.streams.STAGE_BYTES", 1)
    budget = on_a_card().host_peak_bytes - 1
    slow, fast = (
        on_a_card(host_budget=budget, device=with_host(lookup("rtx4090"), f"drive={rate}GB/s")) for rate in (0.01, 10)
    )
    assert slow.step_seconds > fast.step_seconds
    assert "10.0 GB/s (as --host says)" in " ".join(fast.assumptions)


def test_a_cpu_streams_from_the_folder_of_its_files(tmp_path):
    model, batch, how = asked(levers=["stream"], offload_folder=str(tmp_path))
    plain_peak = tightfit.plan(model, batch, "1GiB", **how).plain_peak_bytes
    plan = tightfit.plan(model, batch, int(0.8 * plain_peak), **how)
    assert plan.lever(Stream).folder == str(tmp_path)
    opened = set()
    with monkeypatched_folders(opened), plan.apply(model) as applied:
        applied.backward(batch, of_batch)
    assert opened == {tmp_path}


@contextmanager
def monkeypatched_folders(opened):
    """Notes the folders in which files for streamed weights are made."""
    made = DiskStore.__init__

    def noted(self, folder=None, budget_bytes=None, *, user="offload"):
        made(self, folder, budget_bytes, user=user)
        if user == "stream":
            opened.add(self.folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskStore, "__init__", noted)
        yield


def test_streamed_blocks_are_spread_evenly():
    paths = [f"layers.{number}" for number in range(6)]
    assert spread(paths, 2) == ["layers.0", "layers.3"]
    assert spread(paths, 6) == paths
    assert all(len(set(spread(paths, count))) == count for count in range(1, 7))
