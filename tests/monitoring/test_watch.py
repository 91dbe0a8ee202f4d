"""`tightfit.monitor` around real loops."""

import json
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tightfit
from drawn_figures import drawn_figures, lines, texts, top_of_stack
from exactness import bits
from tightfit.errors import InputError
from tightfit.levers.chunked_loss import apply_chunked_loss
from tightfit.levers.deferred_logits import DeferredHead
from tightfit.memory import pool
from tightfit.step import StepSettings, model_loss
from tightfit.training.monitoring.real_run import RealRun
from tightfit.training.monitoring.record import Record
from tightfit.units import format_bytes
from tiny import allocator_peak, decoder, token_batch


class Loop:
    """A training loop as people write it."""

    def __init__(self, model=None, *, precision="fp32", micro_batches=1, clip=None, kind=torch.optim.AdamW):
        self.model = decoder() if model is None else model
        self.batch = token_batch()
        self.optimizer = kind(self.model.parameters(), lr=1e-3)
        self.precision, self.micro_batches, self.clip = precision, micro_batches, clip
        self.losses = []

    def step(self):
        for _ in range(self.micro_batches):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16"):
                loss = model_loss(self.model, self.batch)
            loss.backward()
            self.losses.append(loss.item())
            del loss
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def steps(self, count):
        for _ in range(count):
            self.step()

    def run(self, steps=3, **settings):
        with tightfit.monitor(self.model, self.optimizer, **settings) as watch:
            self.steps(steps)
        return watch


@pytest.fixture(scope="module")
def watched():
    return Loop().run(steps=4)


@pytest.mark.keeps("monitor-reports-step-allocator")
def test_the_peak_of_the_traced_step_is_the_allocators(watched):
    assert watched.peak_bytes == allocator_peak(decoder(), token_batch())


def test_logits_that_a_lever_never_makes_whole_are_not_made_by_watching(monkeypatch):
    """The model returns logits, and the loop takes the loss: a hook on them waits for backward."""
    model, batch = decoder(), token_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    monkeypatch.setattr(DeferredHead, "logits", lambda head: pytest.fail("the logits were made"))
    with apply_chunked_loss(model, "head"), tightfit.monitor(model, optimizer) as watch:
        for _ in range(3):
            logits = model(batch["input_ids"]).logits
            F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
            del logits
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    assert [sample.phase for sample in watch.samples][:3] == ["forward", "backward", "optimizer"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "settings", [{"precision": "bf16"}, {"clip": 1.0}, {"kind": torch.optim.SGD}], ids=["bf16", "clip", "sgd"]
)
def test_the_peak_is_the_allocators_in_other_loops(settings):
    watch = Loop(**settings).run()
    optimizer = "sgd" if settings.get("kind") is torch.optim.SGD else "adamw"
    step = StepSettings(settings.get("precision", "fp32"), settings.get("clip"))
    assert watch.peak_bytes == allocator_peak(decoder(), token_batch(), optimizer=optimizer, settings=step)


class Branching(nn.Module):
    """Readers of one tensor that keep nothing: the step is highest where autograd sums their gradients."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)

    def forward(self, input_ids, labels):
        hidden = self.first(nn.functional.one_hot(input_ids % 64, 64).float())
        return sum(hidden.mul(factor).sum() for factor in (2.0, 3.0, 4.0))


def test_no_handler_of_signals_is_set_in_a_training_that_is_only_watched(monkeypatch):
    def watch(self):
        raise AssertionError("a watched step has all its memory")

    monkeypatch.setattr("tightfit.tracing.faults.Faults.watch", watch)
    assert Loop().run().peak_bytes > 0


@pytest.mark.keeps("monitor-reports-step-allocator")
def test_sums_of_gradients_count_as_they_are_without_the_watch():
    watch = Loop(Branching()).run()
    unseen = allocator_peak(Branching(), token_batch()) - watch.peak_bytes
    assert 0 <= unseen <= 64  # numbers that Python wraps; a second buffer of a sum would be 98304


def test_categories_and_modules_add_up_to_the_peak(watched):
    assert sum(watched.by_category.values()) == watched.peak_bytes
    assert sum(watched.by_module.values()) == watched.peak_bytes
    model = decoder()
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert watched.by_category["parameters"] >= held
    assert watched.by_category["optimizer states"] == 2 * sum(p.nbytes for p in model.parameters()) + 4 * len(
        list(model.parameters())
    )
    assert "layers.1.mlp.gate_proj" in watched.by_module


def test_the_record_names_phase_module_and_largest_tensors(watched):
    record = watched.record()
    assert record.peak_phase == "backward"
    names = [group.name for group in record.traced.top]
    assert "layers.*.mlp" in names
    assert any(name.startswith("layers.*.") and name.endswith(" exp_avg") for name in names)
    assert record.phase_peaks["backward"] == record.peak_bytes
    assert set(record.phase_peaks) == {"forward", "backward", "optimizer"}
    assert (record.steps, record.traced_step, record.complete) == (4, 2, True)
    assert record.parameters == sum(p.numel() for p in decoder().parameters())


def test_gradients_that_wait_for_the_next_micro_batch_count_as_gradients():
    watch = Loop(micro_batches=2).run()
    assert watch.steps == 3
    assert watch.by_category["gradients"] > 0
    assert watch.peak_bytes > Loop().run().peak_bytes


@pytest.mark.keeps("monitor-reports-step-allocator")
def test_the_training_computes_the_same_bits():
    plain, watched = Loop(clip=1.0), Loop(clip=1.0)
    plain.steps(3)
    watched.run()
    assert plain.losses == watched.losses
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(bits(parameter), bits(watched.model.get_parameter(name))), name


@pytest.mark.keeps("monitor-reports-step-allocator")
def test_nothing_of_the_model_is_left_changed():
    loop = Loop()
    before = {name: set(vars(module)) for name, module in loop.model.named_modules()}
    loop.run()
    loop.optimizer.zero_grad()
    for name, module in loop.model.named_modules():
        hooks = [value for key, value in vars(module).items() if "hooks" in key and hasattr(value, "__len__")]
        assert not any(hooks)
        assert set(vars(module)) == before[name]
    assert not loop.optimizer._optimizer_step_pre_hooks
    assert not loop.optimizer._optimizer_step_post_hooks
    states = [t for state in loop.optimizer.state.values() for t in state.values()]
    assert not any(t.untyped_storage().__dict__ for t in (*loop.model.parameters(), *states))
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_watch_lets_go_of_the_model():
    import weakref

    loop = Loop()
    watch = loop.run()
    reference = weakref.ref(loop.model)
    del loop
    assert reference() is None
    assert watch.peak_bytes


def test_samples_are_taken_where_phases_end(watched):
    phases = [sample.phase for sample in watched.samples]
    assert phases[:4] == ["forward", "backward", "optimizer", "forward"]
    assert all(sample.rss_highest_bytes >= sample.rss_bytes > 0 for sample in watched.samples)
    assert watched.rss_bytes >= max(sample.rss_bytes for sample in watched.samples)
    assert [sample.seconds for sample in watched.samples] == sorted(sample.seconds for sample in watched.samples)


def test_without_a_traced_step_resident_memory_is_what_is_known():
    watch = Loop().run(traced_step=None)
    record = watch.record()
    assert (record.peak_source, record.peak_bytes) == ("resident memory", watch.rss_bytes)
    assert record.traced is None
    assert record.by_category["optimizer states"] > 0


def test_live_memory_is_by_category_within_the_loop():
    loop = Loop()
    with tightfit.monitor(loop.model, loop.optimizer) as watch:
        loss = model_loss(loop.model, loop.batch)
        traced = watch.live()
        loss.backward()
        loop.optimizer.step()
        loop.step()
        loop.step()
        sampled = watch.live()
    assert traced["activations"] > 0
    assert sampled["optimizer states"] > sampled["parameters"] > 0


def test_without_an_optimizer_each_backward_ends_a_step():
    model, batch = decoder(), token_batch()
    with tightfit.monitor(model) as watch:
        for _ in range(3):
            model_loss(model, batch).backward()
    assert watch.steps == 3
    assert watch.record().optimizer is None


def test_a_second_optimizer_belongs_to_the_same_step():
    model, batch = decoder(), token_batch()
    vectors = [p for p in model.parameters() if p.dim() == 1]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    first, second = torch.optim.SGD(matrices, lr=0.1), torch.optim.AdamW(vectors)
    with tightfit.monitor(model, first) as watch:
        for _ in range(3):
            model_loss(model, batch).backward()
            first.step()
            second.step()
            model.zero_grad()
    assert watch.steps == 3


def test_an_exception_passes_through_and_the_record_is_kept():
    loop = Loop()

    def training():
        loop.steps(3)
        raise ValueError("bad luck")

    watch = tightfit.monitor(loop.model, loop.optimizer)
    with pytest.raises(ValueError, match="bad luck"), watch:
        training()
    assert watch.steps == 3
    assert watch.failure.kind == "ValueError"
    assert watch.peak_bytes == allocator_peak(decoder(), token_batch())


class Greedy(nn.Module):
    """Asks in its second call for more than any machine has."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + torch.empty(10**15) if self.calls == 2 else x


def greedy_decoder():
    model = decoder()
    model.layers[1].mlp = nn.Sequential(model.layers[1].mlp, Greedy())
    return model


@pytest.mark.keeps("out-memory-monitor-leaves")
def test_running_out_of_memory_leaves_a_usable_watch():
    loop = Loop(greedy_decoder())
    watch = tightfit.monitor(loop.model, loop.optimizer)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"), watch:
        loop.steps(2)
    failure = watch.failure
    place = (failure.phase, failure.module, failure.operator)
    assert place == ("forward", "layers.1.mlp.1", "aten.empty.memory_format")
    assert failure.out_of_memory.requested_bytes == 4 * 10**15
    record = watch.record()
    assert not record.complete
    assert record.peak_bytes > 4 * 10**15
    assert record.by_category["optimizer states"] > 0
    assert "Ended by RuntimeError in forward, layers.1.mlp.1" in str(watch)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_dispatch_mode_of_the_users_own_may_stand_around_each_step():
    from torch.utils.flop_counter import FlopCounterMode

    loop = Loop()
    with tightfit.monitor(loop.model, loop.optimizer) as watch:
        for _ in range(4):
            with FlopCounterMode(display=False) as flops:
                loop.step()
    assert flops.get_total_flops() > 0
    assert watch.peak_bytes == allocator_peak(decoder(), token_batch())
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_recomputing_model_is_watched_as_it_runs():
    model = decoder()
    with tightfit.recompute(model, "layers.*"):
        watch = Loop(model).run()
    assert watch.phase_peaks["recompute"] > 0
    again = decoder()
    with tightfit.recompute(again, "layers.*"):
        assert watch.peak_bytes == allocator_peak(again, token_batch())


@pytest.mark.keeps("monitor-shows-current-state")
def test_the_pool_of_what_is_offloaded_is_in_the_record(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "_NAMED", weakref.WeakSet())  # without the pools of other tests
    model = decoder()
    with tightfit.offload(model, "layers.*", folder=tmp_path, smallest=1024) as offloaded:
        watch = Loop(model).run()
        assert watch.record().pools["offload to disk"] == offloaded.statistics
    watch.to_json(tmp_path / "record.json")
    back = Record.from_json(tmp_path / "record.json")
    assert back.pools == watch.record().pools
    assert back.pools["offload to disk"].hits > back.pools["offload to disk"].misses > 0
    table = str(back).split("pool ")[1].splitlines()
    assert table[0].split() == ["highest", "now", "in", "use", "buffers", "hits", "misses", "refused"]
    assert table[2].startswith("offload to disk")


def test_a_record_survives_its_json(watched, tmp_path):
    watched.to_json(tmp_path / "record.json")
    back = Record.from_json(tmp_path / "record.json")
    assert json.loads(json.dumps(back.to_dict())) == json.loads((tmp_path / "record.json").read_text())
    assert str(back) == str(watched)


def test_the_picture_shows_the_traced_step_and_the_counters(watched, tmp_path, monkeypatch):
    figures = drawn_figures(monkeypatch)
    watched.to_png(tmp_path / "record.png")
    assert (tmp_path / "record.png").read_bytes().startswith(b"\x89PNG")
    (figure,), record = figures, watched.record()
    step, training = figure.axes
    peak = format_bytes(watched.peak_bytes)
    assert figure.get_suptitle() == f"Memory of Decoder: peak {peak} ({record.peak_source})"
    assert step.get_title() == f"Step {record.traced_step}: its operators in the order in which they ran"
    assert texts(step)[0] == f"peak {peak} in {record.traced.peak_phase}, {record.traced.peak_module or 'top level'}"
    assert {"forward", "backward", "optimizer"} <= set(texts(step))
    assert top_of_stack(step) == pytest.approx(watched.peak_bytes / 2**20)
    samples = record.samples
    assert len(samples) > 4
    (resident,) = lines(training).values()
    unit = 2**30 if training.get_ylabel() == "GiB" else 2**20
    assert resident == [(sample.seconds, sample.rss_bytes / unit) for sample in samples]


def test_the_summary_has_the_peak_first(watched):
    lines = str(watched).splitlines()
    assert lines[0].startswith("Decoder, 186.3K parameters, AdamW, cpu; 4 steps")
    assert lines[1].startswith("Peak ")
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("model", None), "model is a str, wanted a torch.nn.Module"),
        ((nn.Linear(2, 2), "adamw"), "optimizer is a str"),
    ],
)
def test_a_wrong_argument_is_named(arguments, said):
    with pytest.raises(InputError, match=said):
        tightfit.monitor(*arguments)


def test_a_step_is_counted_from_one():
    with pytest.raises(InputError, match="traced_step 0"):
        tightfit.monitor(nn.Linear(2, 2), traced_step=0)


@pytest.mark.slow  # compiles a model: half a minute
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
def test_a_compiled_model_is_traced_as_it_was_written_and_then_runs_compiled():
    plain, compiled = Loop(decoder(num_layers=1)), Loop(torch.compile(decoder(num_layers=1)))
    assert compiled.run(steps=4).peak_bytes == plain.run().peak_bytes
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0


def test_operators_whose_scratch_memory_is_measured_are_watched(monkeypatch):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), nn.Flatten()), torch.ones(64, 3, 256)

    def loss(model, batch):
        return model(batch["x"]).square().sum()

    def watched():
        optimizer = torch.optim.SGD(model.parameters())
        with tightfit.monitor(model, optimizer, traced_step=1) as watch:
            loss(model, {"x": x}).backward()
            optimizer.step()
            optimizer.zero_grad()
        return watch.peak_bytes

    found = watched()
    assert found == allocator_peak(model, {"x": x}, loss=loss, optimizer="sgd")
    monkeypatch.setattr(RealRun, "scratch", lambda self, *call: 1 << 24)  # how much it is, the processor decides
    assert watched() > found + (1 << 23)
