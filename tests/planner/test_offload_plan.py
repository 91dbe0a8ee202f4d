"""A plan may offload where that is named; what it says of bytes is what the allocator records."""

import copy
import os
from dataclasses import replace

import pytest
import torch

import tightfit
from exactness import assert_bit_equal, run
from tightfit.devices.present import lookup
from tightfit.errors import CannotFit, InputError, LeverError, OutputError
from tightfit.levers.offload import offload
from tightfit.memory import disk
from tightfit.planner.levers import Offload
from tiny import allocator_peak, decoder, token_batch

SIZE, LENGTH = 4, 128


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch):
    """Whether it pays to offload must not hang on what else the disk is doing."""
    monkeypatch.setattr("tightfit.planner.request.disk_rates", lambda folder: disk.DiskRates(1e11, 1e11))


@pytest.fixture
def model():
    return decoder(hidden_size=128, num_layers=4)


@pytest.fixture
def batch():
    return token_batch(SIZE, LENGTH)


def least(model, batch, levers):
    with pytest.raises(CannotFit) as caught:
        tightfit.plan(model, batch, "0.01x", levers=levers)
    return caught.value.least_bytes


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", [{}, {"recompute": True}])
def test_the_peak_of_what_is_offloaded_by_hand_is_predicted(model, batch, how):
    with offload(model, "layers.*", **how) as applied:
        predicted = tightfit.estimate(model, batch).peak_bytes
        assert applied.statistics.misses == 0, "a dry run copies nothing"
        assert predicted == allocator_peak(model, batch)


@pytest.mark.keeps("peak-plan-offload-equals")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("levers", [["offload"], ["recompute", "offload"]])
def test_the_measured_peak_is_the_planned_one(model, batch, levers):
    plan = tightfit.plan(model, batch, "0.6x", levers=levers)
    assert plan.lever(Offload) is not None
    with plan.apply(model):
        measured = allocator_peak(model, batch)
    assert plan.peak_bytes == measured <= plan.budget_bytes


@pytest.mark.keeps("peak-plan-offload-equals")
def test_a_plan_with_offload_changes_no_bit(model, batch):
    def loss(model, batch):
        return model(**batch).loss

    plan = tightfit.plan(model, batch, "0.6x", levers=["recompute", "offload"])
    assert plan.lever(Offload) is not None
    plain = run(copy.deepcopy(model), batch, loss)
    assert_bit_equal(plain, run(model, batch, loss, levers=plan.apply))


@pytest.mark.slow  # two plans and their measured peaks
def test_offload_reaches_lower_than_recompute_alone(model, batch):
    assert least(model, batch, ["recompute", "offload"]) < least(model, batch, ["recompute"])


def test_bytes_on_disk_are_those_of_the_plan(model, batch, tmp_path):
    plan = tightfit.plan(model, batch, "0.6x", levers=["offload"], offload_folder=str(tmp_path))
    with plan.apply(model):
        value = model(**batch).loss
        on_disk = [os.stat(fd).st_size for fd in open_files(tmp_path)]
        value.backward()
    assert plan.lever(Offload) is not None
    assert on_disk == [plan.lever(Offload).bytes]


def open_files(folder):
    links = {
        int(fd): os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if fd.isdigit()
        if os.path.lexists(f"/proc/self/fd/{fd}")
    }
    return [fd for fd, path in links.items() if path.startswith(str(folder)) and os.fstat(fd).st_size]


def test_offload_is_used_only_where_it_is_named(model, batch):
    plan = tightfit.plan(model, batch, "0.7x")
    assert plan.lever(Offload) is None
    assert not any(choice.action == "offload" for choice in plan.choices)


def test_a_slow_disk_is_left_alone_where_recompute_does(model, batch, monkeypatch):
    monkeypatch.setattr("tightfit.planner.request.disk_rates", lambda folder: disk.DiskRates(1e6, 1e6))
    plan = tightfit.plan(model, batch, "0.7x", levers=["recompute", "offload"])
    assert plan.lever(Offload) is None


def test_the_plan_says_what_goes_where_and_comes_back_from_json(model, batch, tmp_path):
    plan = tightfit.plan(model, batch, "0.6x", levers=["offload"], offload_folder=str(tmp_path))
    text = " ".join(str(plan).split())
    assert f"blocks offload {tightfit.units.format_bytes(plan.lever(Offload).bytes)} to a file in {tmp_path}." in text
    assert "offloaded: its input" in text
    plan.to_json(tmp_path / "plan.json")
    assert tightfit.Plan.from_json(tmp_path / "plan.json") == plan


def test_bad_input_gets_one_line(model, batch, tmp_path):
    unmeasured = replace(lookup("rtx4090"), roofline=None)
    with pytest.raises(LeverError, match=r"^offload is not available on RTX 4090: the rate of its link .* calibrate"):
        tightfit.plan(model, batch, "20GiB", device=unmeasured, levers=["offload"])
    with pytest.raises(OutputError, match=r"^offload: .*/none cannot be used"):
        tightfit.plan(model, batch, "0.6x", levers=["offload"], offload_folder=str(tmp_path / "none"))
    with pytest.raises(InputError, match="'much' is not an amount of memory"):
        tightfit.plan(model, batch, "0.6x", levers=["offload"], offload_budget="much")


def test_a_plan_is_not_applied_where_there_is_less_room_than_it_needs(model, batch, tmp_path, monkeypatch):
    plan = tightfit.plan(model, batch, "0.6x", levers=["offload"], offload_folder=str(tmp_path))
    monkeypatch.setattr(disk.DiskStore, "_free_bytes", lambda self: 2**20)
    with pytest.raises(LeverError, match=r"^offload: the plan needs .* MiB in .*, and may take 512\.00 KiB: free"):
        plan.apply(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_what_the_budget_has_no_room_for_stays_in_memory_in_the_plan_too(model, batch):
    room = 4 * 2**20
    with offload(model, "layers.*", budget=room):
        predicted = tightfit.estimate(model, batch).peak_bytes
        with pytest.warns(RuntimeWarning, match="^offload: there is no room"):
            measured = allocator_peak(model, batch)
    assert predicted == measured


def test_a_dry_run_gives_small_and_integer_values_back_as_they_were(batch):
    class Routes(torch.nn.Module):
        """Branches in backward on a number that was offloaded in forward."""

        def forward(self, x):
            return Branch.apply(x, torch.arange(5) * 2)

    class Branch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, codes):
            ctx.save_for_backward(codes.float())
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            assert ctx.saved_tensors[0][3].item() == 6.0
            return gradient, None

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Routes())
    with offload(model, "1", smallest=1):
        tightfit.estimate(model, (torch.randn(4, 8),), loss=lambda model, batch: model(*batch).sum())


def test_a_budget_of_offload_that_is_too_small_is_named(model, batch):
    with pytest.raises(CannotFit, match=r"; offload may take 1\.00 KiB \(offload_budget\)$"):
        tightfit.plan(model, batch, "0.4x", levers=["offload"], offload_budget="1KiB")


class Messages(torch.nn.Module):
    """A layer of a graph network: every tensor is smaller than what is worth a copy to a file."""

    def __init__(self, width=16):
        super().__init__()
        self.message, self.update = torch.nn.Linear(2 * width, width), torch.nn.Linear(2 * width, width)

    def forward(self, nodes, edges):
        sent = self.message(torch.cat([nodes[edges[0]], nodes[edges[1]]], -1)).relu()
        received = torch.zeros_like(nodes).index_add(0, edges[1], sent)
        return nodes + self.update(torch.cat([nodes, received], -1)).relu()


class Graph(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Messages() for _ in range(4))

    def forward(self, nodes, edges):
        for layer in self.layers:
            nodes = layer(nodes, edges)
        return nodes


def of_nodes(model, batch):
    return model(**batch).square().mean()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("budget", ["0.8x", "0.75x"])
def test_a_plan_whose_offloaded_values_are_all_small_can_be_applied(budget):
    model, batch = Graph(), {"nodes": torch.randn(20, 16), "edges": torch.randint(20, (2, 60))}
    plan = tightfit.plan(model, batch, budget, loss=of_nodes, levers=["recompute", "offload"])
    assert any(choice.action == "offload" for choice in plan.choices)
    assert plan.lever(Offload).bytes == 0
    assert "would offload" in str(plan)
    assert tightfit.verify(model, batch, plan, loss=of_nodes).ok
    with plan.apply(planned := copy.deepcopy(model)):
        assert allocator_peak(planned, batch, loss=of_nodes) == plan.peak_bytes
    without = replace(plan, levers=tuple(each for each in plan.levers if not isinstance(each, Offload)))
    assert tightfit.verify(model, batch, without, loss=of_nodes).ok  # as plans were saved once


def test_the_lever_is_said_in_words():
    assert str(Offload(None, None, 1, bytes=10)) == "offload"
