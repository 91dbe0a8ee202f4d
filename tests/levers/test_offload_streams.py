"""Offload from a CUDA device waits for what it must: the order of copies and computation, on streams that are recorded.

No card is needed: the copies are real, on CPU tensors; what is checked is that on a card every access would be ordered.
"""

import gc
import warnings

import pytest
import torch
from recording_streams import BACK, COMPUTE, OUT, Computation, RecordingStreams, SimulatedStore

from exactness import bits
from tightfit.errors import LeverError
from tightfit.levers.offload import OffloadSettings
from tightfit.levers.offload.lever import INPUTS_ONLY
from tightfit.levers.offload.store import HOST, OffloadFallback
from tightfit.levers.recompute.lever import apply_policies
from tightfit.levers.recompute.policy import OFFLOAD_ALL
from tightfit.memory.pinned import PinnedStore
from tightfit.step import model_loss
from tiny import decoder, token_batch

BLOCKS = ["layers.0", "layers.1", "layers.2"]
POLICIES = {"all": OFFLOAD_ALL, "inputs": INPUTS_ONLY}


def content(tensor):
    return bits(tensor).numpy().tobytes()


def trained(policy=None, *, streams=None, steps=3, budget=1 << 30):
    """Losses and gradients of some steps, the last one's; with the offload_store."""
    model, batch = decoder(), token_batch(2, 16)
    offload_store = None
    if policy is not None:
        offload_store = SimulatedStore(OffloadSettings(budget_bytes=budget, smallest_bytes=1)).play(streams)
        apply_policies(model, dict.fromkeys(BLOCKS, policy), offload_store=offload_store)
    losses = []
    for _ in range(steps):
        model.zero_grad()
        loss = model_loss(model, batch)
        loss.backward()
        losses.append(loss.detach())
        del loss
    return [content(t) for t in (*losses, *(p.grad for p in model.parameters()))], offload_store


def watched(policy, streams, **settings):
    with Computation(streams):
        return trained(policy, streams=streams, **settings)


@pytest.mark.keeps("offload-cuda-access-memory")
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_every_access_is_ordered_and_no_bit_changes(policy):
    streams = RecordingStreams()
    found, offload_store = watched(policy, streams)
    assert found == trained()[0]
    del offload_store
    gc.collect()
    assert streams.violations == []
    assert sum(entry[0] == OUT for entry in streams.log) == sum(entry[0] == BACK for entry in streams.log) >= 9


@pytest.mark.keeps("offload-cuda-access-memory")
@pytest.mark.parametrize(
    ("waiting", "awaited", "wrong"),
    [
        (OUT, COMPUTE, "out reads what compute may still use"),
        (COMPUTE, OUT, "memory goes back to the computation while out uses it"),
        (COMPUTE, BACK, "compute reads what back may still use"),
        (BACK, COMPUTE, "back reads what out may still use"),
    ],
)
def test_each_wait_is_needed(waiting, awaited, wrong):
    ignored = {(waiting, awaited)} | ({(BACK, OUT)} if waiting == BACK else set())
    streams = RecordingStreams(ignored)
    watched(OFFLOAD_ALL, streams)
    gc.collect()
    assert wrong in streams.violations


def test_the_next_values_are_on_their_way_before_they_are_asked_for():
    streams = RecordingStreams()
    watched(OFFLOAD_ALL, streams, steps=1)
    begun = waited = most = 0
    for entry in streams.log:
        begun += entry[0] == BACK
        waited += entry == ("wait", COMPUTE, BACK)
        most = max(most, begun - waited)
    assert most > 2, "copies were begun before the computation waited for them"
    assert begun == waited


def test_no_more_is_in_flight_than_a_block_offloads():
    streams = RecordingStreams()
    model, batch = decoder(), token_batch(2, 16)
    offload_store = SimulatedStore(OffloadSettings(smallest_bytes=1)).play(streams)
    apply_policies(model, dict.fromkeys(BLOCKS, OFFLOAD_ALL), offload_store=offload_store)
    loss = model_loss(model, batch)
    transfers = offload_store.transfers()
    on_host = offload_store.statistics(HOST).leased_bytes
    assert 0 < sum(departure.nbytes for departure in transfers._leaving) <= transfers.window_bytes < on_host / 2
    loss.backward()
    assert not transfers._leaving
    assert not transfers._there
    # The next step's window grows as this one's did, so that memory is freed in the same order in the first step.
    assert transfers.window_bytes == 0


def test_a_graph_that_nobody_runs_backward_leaves_nothing_behind():
    streams = RecordingStreams()
    with Computation(streams):
        model, batch = decoder(), token_batch(2, 16)
        offload_store = SimulatedStore(OffloadSettings(smallest_bytes=1)).play(streams)
        apply_policies(model, dict.fromkeys(BLOCKS, OFFLOAD_ALL), offload_store=offload_store)
        loss = model_loss(model, batch)
        again = model_loss(model, batch)
        (gradient,) = torch.autograd.grad(again, [model.layers[2].mlp.down_proj.weight])
        del loss, again, gradient
        gc.collect()
    assert not offload_store.transfers()._leaving
    assert offload_store.statistics(HOST).leased_bytes == 0
    assert streams.violations == []


def test_the_pool_is_flat_and_its_buffers_have_the_exact_size():
    streams = RecordingStreams()
    _, offload_store = trained(OFFLOAD_ALL, streams=streams, steps=1)
    first = offload_store.statistics(HOST)
    _, offload_store = trained(OFFLOAD_ALL, streams=RecordingStreams(), steps=20)
    last = offload_store.statistics(HOST)
    assert (last.high_water_bytes, last.misses) == (first.high_water_bytes, first.misses)
    assert last.hits == 19 * last.misses


@pytest.mark.keeps("offload-cuda-access-memory")
def test_a_full_host_keeps_values_on_the_device_and_says_so():
    streams = RecordingStreams()
    with pytest.warns(OffloadFallback, match="no room for a value of .* or free host memory"):
        found, offload_store = watched(OFFLOAD_ALL, streams, budget=40_000)
    assert found == trained()[0]
    assert offload_store.statistics(HOST).high_water_bytes <= 40_000
    assert streams.violations == []


def test_memory_that_somebody_holds_is_copied_before_the_block_is_left():
    """Writes after the block are seen by nobody: the copy must be complete by then."""

    class Leaking(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x):
            self.leaked = self.layer(x).exp()
            return self.leaked.sin().cos()

    streams = RecordingStreams()
    model = torch.nn.Sequential(Leaking())
    offload_store = SimulatedStore(OffloadSettings(smallest_bytes=1)).play(streams)
    apply_policies(model, {"0": OFFLOAD_ALL}, offload_store=offload_store)
    with Computation(streams):
        out = model(torch.ones(4, 8, requires_grad=True) * 2)
        model[0].leaked.detach().zero_()  # the memory itself; the values that backward wants are on the host
        out.sum().backward()
    assert streams.violations == []


def test_a_write_that_comes_before_the_copy_is_complete_is_an_error_as_without_the_lever():
    """Only the recorder sees a write in time, and from the second run on there is none."""

    class Writing(torch.nn.Module):
        writes = False

        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x):
            y = self.layer(x)
            z = y.sin()  # backward reads y
            if self.writes:
                y.detach().zero_()
            return z

    model = torch.nn.Sequential(Writing())
    offload_store = SimulatedStore(OffloadSettings(smallest_bytes=1)).play(RecordingStreams())
    apply_policies(model, {"0": OFFLOAD_ALL}, offload_store=offload_store)
    x = torch.ones(4, 8)
    for _ in range(2):
        model(x).sum().backward()
    model[0].writes = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x).sum().backward()


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_without_the_recorder_no_bit_changes_and_copies_are_ordered(policy):
    streams = RecordingStreams()
    found, offload_store = trained(policy, streams=streams)
    assert found == trained()[0]
    del offload_store
    gc.collect()
    assert streams.violations == []


def test_a_buffer_is_not_written_while_it_is_read_on_behalf_of_another_computation():
    """Two computing streams know nothing of each other: the copies themselves are ordered."""
    from tightfit.levers.offload.transfers import CudaTransfer, Lanes

    for ignored, wrong in ((set(), False), ({(OUT, BACK)}, True)):
        streams = RecordingStreams(ignored)
        lanes, buffer = Lanes(streams), PinnedStore(1 << 20, streams).allocate(1024)
        first, second = torch.ones(256), torch.zeros(256)
        transfer = CudaTransfer(lanes, buffer, first)
        brought = transfer.bring()
        streams.current = lambda: "another"
        CudaTransfer(lanes, buffer, second)
        lanes.begin()
        assert torch.equal(brought, first)
        assert bool(streams.violations) == wrong


def test_pages_are_let_go_of_when_the_last_copy_is_complete():
    streams = RecordingStreams()
    store = PinnedStore(8192, streams)
    buffer = store.allocate(5000)
    assert buffer.bytes.numel() == 5000
    assert store.allocate(5000) is None
    source = torch.ones(5000, dtype=torch.uint8)
    streams.copy(OUT, (buffer.bytes, source))
    buffer.uses["out"] = streams.mark(OUT)
    store.free(buffer, 5000)
    assert ("finish", OUT) in streams.log
    assert streams.violations == []
    del source
    assert streams.violations == ["memory goes back to the computation while out uses it"]
    assert store.allocate(8192) is not None


def test_a_host_budget_beyond_what_is_free_is_one_line():
    with pytest.raises(LeverError, match=r"of host memory that are free: lower the budget$"):
        PinnedStore(1 << 60)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@needs_cuda
def test_two_hundred_steps_of_small_layers_race_nowhere():
    """Layers of little arithmetic, so that copies are always behind."""
    import tightfit

    def run(offloads):
        torch.manual_seed(0)
        model = decoder(num_layers=6).cuda()
        batch = {name: tensor.cuda() for name, tensor in token_batch(2, 16).items()}
        optimizer = torch.optim.AdamW(model.parameters())
        handle = tightfit.offload(model, "layers.*", smallest=1) if offloads else None
        for _ in range(200):
            model_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        if handle is not None:
            assert handle.statistics.hits > handle.statistics.misses
            handle.undo()
        return [content(p.detach().cpu()) for p in model.parameters()]

    torch.use_deterministic_algorithms(True)
    try:
        assert run(offloads=True) == run(offloads=False)
    finally:
        torch.use_deterministic_algorithms(False)


@needs_cuda
def test_pinned_pages_are_pinned_and_take_what_they_were_asked_for():
    store = PinnedStore(1 << 24)
    buffer = store.allocate(5_000_000)
    assert buffer.bytes.is_pinned()
    assert store.used_bytes == 5_000_000
    store.free(buffer, 5_000_000)
    assert not buffer.bytes.is_pinned()


@needs_cuda
def test_the_peak_on_a_card_falls():
    import tightfit

    model = decoder(num_layers=8).cuda()
    batch = {name: tensor.cuda() for name, tensor in token_batch(size=16).items()}
    peaks = []
    for offloads in (False, True):
        handle = tightfit.offload(model, "layers.*", smallest=1) if offloads else None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                model_loss(model, batch).backward()
                model.zero_grad()
        peaks.append(torch.cuda.max_memory_allocated())
        if handle is not None:
            handle.undo()
    assert peaks[1] < 0.8 * peaks[0]
