"""Offload by hand: what it saves, what it leaves behind, and what it refuses."""

import copy
import os
import pickle
import signal
import subprocess
import sys

import pytest
import torch
from blocks_with_dropout import BLOCKS, STREAM_BYTES, forward_bytes, step_peak
from torch import nn

from exactness import allocator_record, assert_bit_equal, run
from tightfit.errors import BudgetError, LeverError, OutputError
from tightfit.levers.offload import HostStore, OffloadSettings, offload
from tightfit.levers.offload.store import OffloadFallback
from tightfit.levers.recompute import OFFLOAD_ALL, recompute
from tightfit.levers.recompute.lever import apply_policies
from tightfit.levers.recompute.region import RecordedForward, forwards_on


def loss(model, ids):
    return model(ids)


# What it saves


@pytest.mark.keeps("activations-offloaded-hand-out")
def test_nothing_of_the_blocks_is_left_in_memory_when_forward_ends(model, ids):
    plain = forward_bytes(model, ids)
    with offload(model, "layers.*", smallest=1) as applied:
        left = forward_bytes(model, ids)
        moved = applied.statistics.high_water_bytes
    assert left < 3 * STREAM_BYTES, "the embedding's output and what the loss holds"
    assert moved >= plain - left


def test_what_blocks_are_given_leaves_memory_where_the_rest_is_recomputed(model, ids):
    with recompute(model, "layers.*"):
        recomputed = forward_bytes(model, ids)
    with offload(model, "layers.*", recompute=True, smallest=1) as applied:
        assert recomputed - forward_bytes(model, ids) == BLOCKS * STREAM_BYTES
        assert applied.statistics.high_water_bytes == BLOCKS * STREAM_BYTES


def test_the_peak_of_a_step_falls(model, ids):
    plain = step_peak(model, ids)
    with offload(model, "layers.*", smallest=1):
        assert step_peak(model, ids) < plain / 4


def test_small_values_stay_in_memory(model, ids):
    with offload(model, "layers.*", smallest=STREAM_BYTES + 1) as applied:
        model(ids).backward()
        assert applied.statistics.high_water_bytes > 0
        assert all(size > STREAM_BYTES for size in applied.offload_store.open("cpu")._free)


# What it leaves behind


@pytest.mark.keeps("activations-offloaded-hand-out")
def test_the_pool_is_flat_over_500_steps(ids):
    torch.manual_seed(0)
    tiny = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), nn.Linear(8, 1))
    inputs = torch.randn(16, 8)
    with offload(tiny, "1", smallest=1) as applied:

        def step():
            tiny(inputs).sum().backward()

        step()
        first = applied.statistics
        for _ in range(500):
            step()
        last = applied.statistics
        assert allocator_record(step)[1] == 0
    assert (last.buffers, last.held_bytes, last.high_water_bytes) == (first.buffers, first.held_bytes, first.held_bytes)
    assert (last.misses, last.leased_bytes) == (first.misses, 0)
    assert last.hits == first.hits + 500 * first.misses


def test_a_graph_that_is_dropped_without_backward_gives_its_buffers_back(model, ids):
    with offload(model, "layers.*", smallest=1) as applied:
        value = model(ids)
        assert applied.statistics.leased_bytes > 0
        del value
        assert applied.statistics.leased_bytes == 0


RUN_FOREVER = """
import sys, torch
from tightfit import offload
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)])
with offload(model, "*", folder=sys.argv[1], smallest=1) as applied:
    value = model(torch.randn(256, 64)).sum()
    print(applied.statistics.leased_bytes, flush=True)
    sys.stdin.read()
"""


@pytest.mark.keeps("activations-offloaded-hand-out")
@pytest.mark.slow  # an interpreter of its own
def test_no_file_is_left_after_kill_9(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", RUN_FOREVER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        leased = int(process.stdout.readline())
        held = [
            os.stat(f"/proc/{process.pid}/fd/{fd}").st_size
            for fd in os.listdir(f"/proc/{process.pid}/fd")
            if os.readlink(f"/proc/{process.pid}/fd/{fd}").startswith(str(tmp_path))
        ]
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert held == [leased], "the bytes were in a file in this folder"
    assert not list(tmp_path.iterdir())


# Exactness beyond the traps


class Awkward(nn.Module):
    """Saves views of one storage, a tensor twice, a transposed tensor, and parameters."""

    scale: torch.Tensor

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x):
        y = x @ self.weight
        left, right = y.chunk(2, -1)
        return torch.cat([left * right, right * right], -1).transpose(0, 1).contiguous().mul(self.scale[0]).T.exp() * y


def test_views_shared_storages_and_tensors_saved_twice_are_copied_once():
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(8, 8), Awkward()), torch.randn(8, 8)
    plain = run(copy.deepcopy(model), inputs)
    offload_store = HostStore(OffloadSettings(smallest_bytes=1))
    frugal = run(
        model, inputs, levers=lambda model: apply_policies(model, {"1": OFFLOAD_ALL}, offload_store=offload_store)
    )
    assert_bit_equal(plain, frugal)
    stored = offload_store.statistics()
    assert stored.misses == 3, "the input, the product (two views of it, and whole), the exponential (saved twice)"
    assert stored.high_water_bytes == 3 * 8 * 8 * 4


class SubByte(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, packed):
        ctx.save_for_backward(packed)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        (packed,) = ctx.saved_tensors
        return gradient * packed.view(torch.uint8).float().sum(), None


class Packs(nn.Module):
    """Saves a tensor whose elements are smaller than a byte."""

    def forward(self, x):
        codes = (x.detach().abs() * 8).clamp(0, 15).to(torch.uint8)
        low = (codes * 1).bitwise_or(codes * 16).bool().to(torch.uint8)
        return SubByte.apply(x, low.view(torch.float4_e2m1fn_x2))


class Complex(nn.Module):
    """Saves conjugated views and bytes that are no whole number of elements of their dtype."""

    def forward(self, x):
        z = torch.view_as_complex(x.exp().unflatten(-1, (-1, 2)).contiguous()).conj()
        odd = (x * 2).to(torch.bfloat16).flatten()[1::3].sin()
        return (z * z.conj() * z).real.sum() + odd.float().sum()


@pytest.mark.parametrize("block", [Packs, Complex])
def test_elements_smaller_than_a_byte_and_complex_ones_come_back(block):
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(8, 8), block()), torch.randn(6, 8)
    plain = run(copy.deepcopy(model), inputs)
    assert_bit_equal(plain, run(model, inputs, levers=lambda model: offload(model, "1", smallest=1)))


def test_backward_twice_over_one_graph_is_bit_equal(model, ids):
    def twice(value):
        value.backward(retain_graph=True)
        value.backward()

    plain = run(copy.deepcopy(model), ids, loss, backward=twice)
    frugal = run(model, ids, loss, backward=twice, levers=lambda model: offload(model, "layers.*", smallest=1))
    assert_bit_equal(plain, frugal)


def test_where_there_is_no_room_values_stay_in_memory_and_it_is_said_once(model, ids):
    plain = run(copy.deepcopy(model), ids, loss)
    with offload(model, "layers.*", budget=3 * STREAM_BYTES, smallest=1) as applied:
        with pytest.warns(OffloadFallback, match=r"^offload: there is no room for a value of .*: it stays in mem"):
            frugal = run(model, ids, loss)
        model(ids)  # a warning would be an error
        assert applied.statistics.high_water_bytes <= 3 * STREAM_BYTES
        assert applied.statistics.refusals > 0
        assert applied.offload_store.kept_bytes > 0
        assert_bit_equal(plain, frugal)
        assert allocator_record(lambda: model(ids).backward())[1] == 0, "what stayed in memory goes with the graph"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_has_an_offload_store_of_its_own(model, ids, copied):
    plain = run(copy.deepcopy(model), ids, loss)
    with offload(model, "layers.*", smallest=1) as applied:
        twin = copied(model)
        assert_bit_equal(plain, run(twin, ids, loss))
        assert applied.statistics.misses == 0


def test_undo_restores_the_model_exactly(model):
    before = {path: dict(module.__dict__) for path, module in model.named_modules()}
    offload(model, "layers.*").undo()
    assert {path: dict(module.__dict__) for path, module in model.named_modules()} == before


# What it refuses


@pytest.mark.parametrize(
    ("how", "error", "line"),
    [
        ({"folder": "/nowhere"}, OutputError, "offload: /nowhere cannot be used: No such file or directory"),
        ({"folder": "/proc"}, OutputError, "offload: no file can be made in /proc"),
        ({"budget": "900000GiB"}, LeverError, "more than the .* that are free"),
        ({"budget": "much"}, BudgetError, "'much' is not an amount of memory"),
        ({"budget": 0}, BudgetError, "offload: 0 is not above zero"),
        ({"pattern": "blocks.*"}, LeverError, "no module matches"),
    ],
)
def test_bad_input_gets_one_line(model, how, error, line):
    with pytest.raises(error, match=line) as caught:
        offload(model, **{"pattern": "layers.*", **how})
    assert "\n" not in str(caught.value)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_block_that_is_recomputed_already_is_refused(model):
    with recompute(model, "layers.*"), pytest.raises(LeverError, match=r"layers\.0 is already recomputed"):
        offload(model, "layers.*")


# From the second run on: saved-tensor hooks alone


class Steps(nn.Module):
    """A block whose operators a test chooses."""

    def __init__(self, steps):
        super().__init__()
        self.linear, self.steps = nn.Linear(8, 8), steps

    def forward(self, x):
        return self.steps(self, x)


def recorded(monkeypatch):
    """The paths of the blocks that are recorded from here on."""
    from tightfit.levers.recompute import region

    paths = []
    original = region.Recorder
    monkeypatch.setattr(
        region, "Recorder", lambda path, *given, **named: paths.append(path) or original(path, *given, **named)
    )
    return paths


def test_the_second_run_saves_as_the_first_and_is_not_recorded(model, ids, monkeypatch):
    with offload(model, "layers.*", smallest=1) as applied:
        paths = recorded(monkeypatch)
        peaks = [step_peak(model, ids) for _ in range(3)]
        assert len(paths) == BLOCKS
        assert len(set(peaks)) == 1, "what it holds and frees is the same"
        assert applied.statistics.leased_bytes == 0


def test_without_the_recorder_a_value_is_freed_with_its_last_reader(monkeypatch):
    def steps(block, x):
        x = block.linear(x)
        for _ in range(12):
            x = x.sin()
        return x

    block, x = Steps(steps), torch.randn(4096, 8)
    paths = recorded(monkeypatch)
    with offload(nn.Sequential(block), "0", smallest=1):
        peaks = []
        for _ in range(2):
            block.zero_grad(set_to_none=True)
            peaks.append(allocator_record(lambda: block(x).sum().backward())[0])
    assert peaks[0] == peaks[1]
    assert len(paths) == 1


def test_a_block_that_saves_something_else_is_recorded_again_and_stays_exact(monkeypatch):
    more = [False]

    def steps(block, x):
        y = block.linear(x).sin()
        return y.exp() if more[0] else y

    plain, x = Steps(steps), torch.randn(4, 8)
    block = copy.deepcopy(plain)
    paths = recorded(monkeypatch)
    with offload(nn.Sequential(block), "0", smallest=1):
        for more[0] in (False, False, True, True, True):
            for each in (plain, block):
                each.zero_grad()
                each(x).sum().backward()
            assert torch.equal(block.linear.weight.grad, plain.linear.weight.grad)
    assert len(paths) == 2, "the first run, and the one after the first that was not like it"


def test_a_block_that_writes_over_what_it_saved_is_recorded_each_time(monkeypatch):
    def steps(block, x):
        y = block.linear(x)
        z = y.sin()
        y.detach().zero_()
        return z

    block, x = Steps(steps), torch.randn(4, 8)
    paths = recorded(monkeypatch)
    with offload(nn.Sequential(block), "0", smallest=1):
        for _ in range(3):
            block(x).sum().backward()
    assert len(paths) == 3


class ByTurns(nn.Module):
    """Saves other tensors in every other run, on inputs of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.runs = nn.Linear(64, 64), 0

    def forward(self, x: torch.Tensor, held: dict[str, torch.Tensor]) -> torch.Tensor:
        self.runs += 1
        x = self.linear(x).tanh() * held["scale"]
        return x.exp().sin().cos() if self.runs % 2 else x.sigmoid()


def test_a_block_that_saves_by_turns_is_recorded_each_time():
    # A note of what one run saved does not fit the next one, and would hold what it has no place for.
    torch.manual_seed(0)
    model, x = nn.ModuleList([ByTurns()]), torch.randn(64, 64)

    def step() -> None:
        y = x
        for _ in range(4):
            y = model[0](y, {"scale": x})
        y.sum().backward()
        model.zero_grad()

    with offload(model, "*"):
        step()
        (forward,) = forwards_on(model)
        assert isinstance(forward, RecordedForward)
        assert forward.changing
        assert not forward.saves
