"""A dry step predicts what a real step takes from the allocator, and leaves everything as it was."""

import copy
import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.levers.recompute import recompute
from tightfit.planner.api import estimate
from tightfit.step import Part, StepSettings, model_loss
from tightfit.tracing.record import Category, Phase
from tightfit.tracing.step import trace_step
from tiny import VOCABULARY, allocator_peak, decoder, token_batch

TOLERANCE = 0.001


def traced(model, batch, micro_batches=1, **options):
    return trace_step(model, as_parts(split_batch(batch, micro_batches), model_loss), model_loss, **options)


@pytest.mark.keeps("predicted-peak-step-equals")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", [StepSettings(), StepSettings("bf16"), StepSettings(grad_clip=1.0)], ids=str)
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("lever", ["plain", "recompute", "recompute mlp", "segments"])
def test_predicted_peak_is_the_allocators(settings, micro_batches, lever):
    model, batch = decoder(), token_batch()
    if lever == "recompute":
        recompute(model, "layers.*")
    elif lever == "recompute mlp":
        recompute(model, "layers.*.mlp")
    elif lever == "segments":
        recompute(model, "layers.*", segments=2)
    predicted = traced(model, batch, micro_batches, settings=settings).peak_bytes
    measured = allocator_peak(model, batch, settings=settings, micro_batches=micro_batches)
    assert predicted == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.sampled(1)
@pytest.mark.keeps("predicted-peak-step-equals")
@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_optimizer_states_are_counted(optimizer):
    model, batch = decoder(), token_batch()
    predicted = traced(model, batch, optimizer=optimizer).peak_bytes
    assert predicted == pytest.approx(allocator_peak(model, batch, optimizer=optimizer), rel=TOLERANCE)


@pytest.mark.sampled(2)
@pytest.mark.keeps("predicted-peak-step-equals")
@pytest.mark.parametrize(
    "options", [{"dropout": 0.1}, {"qk_norm": True}, {"tie_embeddings": True}, {"activation": "geglu"}], ids=str
)
def test_variants_of_the_decoder_are_predicted(options):
    model, batch = decoder(**options), token_batch()
    assert traced(model, batch).peak_bytes == pytest.approx(allocator_peak(model, batch), rel=TOLERANCE)


def test_frozen_parameters_have_no_gradients_and_no_states():
    model, batch = decoder(), token_batch()
    for parameter in model.layers.parameters():
        parameter.requires_grad = False
    trace = traced(model, batch)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert trace.by_category(0)[Category.OPTIMIZER_STATE] == pytest.approx(2 * trained, rel=TOLERANCE)
    assert trace.peak_bytes == pytest.approx(allocator_peak(model, batch), rel=TOLERANCE)


class Branching(nn.Module):
    """Looks at its mask, as MiniMind does, and at positions that it computes."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.branches: list[str] = []

    def forward(self, input_ids, labels):
        mask = (input_ids != 0).long().cumsum(-1) > 0
        hidden = self.embedding(input_ids)
        if mask.all():
            self.branches.append("all valid")
        else:
            self.branches.append("padded")
            hidden = (
                torch.cat([hidden, hidden[mask].sum(0).expand_as(hidden)], -1).view(*hidden.shape[:2], 2, 32).sum(2)
            )
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("padded", [False, True])
def test_a_model_that_looks_at_its_data_gets_true_answers(padded):
    model, batch = Branching(), token_batch()
    batch["input_ids"] = batch["input_ids"].clamp(min=1)
    if padded:
        batch["input_ids"][:, :5] = 0
    predicted = traced(model, batch).peak_bytes
    assert model.branches == []  # what the dry run appended is gone again
    assert predicted == pytest.approx(allocator_peak(model, batch), rel=TOLERANCE)
    assert set(model.branches) == {"padded" if padded else "all valid"}


class SharedInput(nn.Module):
    """Readers of one tensor that keep nothing: the step is highest where autograd sums their gradients."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(256, 256)

    def forward(self, x):
        hidden = self.first(x)
        return sum(hidden.mul(factor).sum() for factor in (2.0, 3.0, 4.0))


def test_sums_of_gradients_are_in_place_where_the_real_ones_are():
    model, batch = SharedInput(), {"x": torch.randn(2048, 256)}
    predicted = trace_step(model, [Part(batch, 1.0)], lambda m, b: m(**b)).peak_bytes
    assert predicted == pytest.approx(allocator_peak(model, batch, loss=lambda m, b: m(**b)), rel=TOLERANCE)


class Meddling(nn.Module):
    """Does in forward what a dry run must not leave behind."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, 8)
        self.calls, self.seen, self.table = 0, [], {"last": None}
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        self.count += 1
        self.seen.append(x)
        self.table["last"] = random.random() + numpy.random.rand() + torch.rand_like(self.count).item()
        self.extra = x * 2
        return self.linear(self.norm(x)).square().mean()


@pytest.mark.keeps("dry-step-changes-nothing")
def test_a_dry_step_leaves_no_trace():
    model, batch = Meddling(), {"x": torch.randn(16, 8)}
    model(**batch).backward()
    before = copy.deepcopy({k: v for k, v in model.__dict__.items() if k not in ("_modules",)})
    gradients = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    state = {name: t.clone() for name, t in model.state_dict().items()}
    versions = [p._version for p in (*model.parameters(), *model.buffers())]
    generators = torch.get_rng_state(), random.getstate(), repr(numpy.random.get_state())
    trace_step(model, [Part(batch, 1.0)], lambda m, b: m(**b), settings=StepSettings(grad_clip=1.0))
    assert model.__dict__.keys() - {"_modules"} == before.keys()
    assert (model.calls, len(model.seen), model.table) == (1, 1, before["table"])
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    for name, parameter in model.named_parameters():
        held, content = gradients[name]
        assert parameter.grad is held
        assert torch.equal(held, content)
    assert versions == [p._version for p in (*model.parameters(), *model.buffers())]
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1:] == (random.getstate(), repr(numpy.random.get_state()))


@pytest.mark.keeps("dry-step-changes-nothing")
def test_a_users_optimizer_is_taken_over_but_not_stepped():
    model, batch = decoder(), token_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weights = [p.clone() for p in model.parameters()]
    trace = traced(model, batch, optimizer=optimizer)
    assert not optimizer.state
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    states = trace.by_category(0)[Category.OPTIMIZER_STATE]
    assert states == sum(p.nbytes for p in model.parameters())  # one momentum buffer each


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.Adafactor, torch.optim.RMSprop])
def test_an_optimizer_instance_is_traced_like_its_class(kind):
    model, batch = decoder(num_layers=1), token_batch(2, 32)
    instance = traced(model, batch, optimizer=kind(model.parameters(), lr=0.1))
    assert instance.peak_bytes == traced(model, batch, optimizer=lambda p: kind(p, lr=0.1)).peak_bytes


def test_phases_and_modules_are_named():
    trace = traced(decoder(), token_batch(), settings=StepSettings(grad_clip=1.0))
    assert [p for p in Phase if trace.phase_peaks()[p]] == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    by_module = {(o.phase, o.module) for o in trace.operators}
    paths = [m for phase, m in by_module if phase is Phase.FORWARD and m.startswith("layers.1.")]
    assert paths
    assert {(Phase.BACKWARD, path) for path in paths if "norm" not in path} & by_module


def test_recomputation_is_its_own_phase():
    model = decoder()
    with recompute(model, "layers.*"):
        trace = traced(model, token_batch())
    assert any(o.phase is Phase.RECOMPUTE and o.module.startswith("layers.0") for o in trace.operators)


def test_categories_add_up_to_the_level_everywhere():
    trace = traced(decoder(), token_batch())
    for index in range(0, len(trace.levels), 37):
        assert sum(trace.by_category(index).values()) == trace.levels[index]
    assert [sum(column) for column in zip(*trace.timeline().values(), strict=True)] == list(trace.levels)


class Scaled(nn.Module):
    """Reads numbers of buffers, whose content is known."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.tensor([3.0]))

    def forward(self, x):
        assert self.scale.item() == 3.0
        assert torch.equal(self.scale, self.scale + 0)
        return (self.linear(x) * float(self.scale)).mean()


def test_what_is_known_is_answered_truly_and_no_question():
    assert estimate(Scaled(), {"x": torch.randn(4, 8)}, loss=lambda m, b: m(**b)).assumptions == ()


class Asking(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(300, 300)

    def forward(self, x):
        hidden = self.linear(x)
        if hidden.abs().max() > 100:
            raise AssertionError("the documented answer is 1.0")
        return hidden.mean()


def test_a_question_about_unknown_numbers_is_answered_and_told():
    answer = estimate(Asking(), {"x": torch.randn(300, 300)}, loss=lambda m, b: m(**b))
    assert any("test_step_trace.py" in line and "assumed" in line for line in answer.assumptions)


def test_accumulation_repeats_in_time_but_not_in_memory():
    model, batch = decoder(), token_batch(8)
    two, four = traced(model, batch, 4), traced(model, token_batch(16), 8)
    assert (two.loop_repeats, four.loop_repeats) == (3, 7)
    assert two.peak_bytes + sum(t.nbytes for t in token_batch(8).values()) == four.peak_bytes


class Marked(nn.Module):
    """Marks its layers for the profiler: each mark is an operator with an object that refuses to be compared."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(20))

    def forward(self, x):
        for layer in self.layers:
            with torch.profiler.record_function("layer"):
                x = layer(x)
        return x.square().mean()


def test_marks_for_the_profiler_are_no_hindrance():
    found = {estimate(Marked(), (torch.ones(4, 8),), loss=lambda model, batch: model(*batch)).peak_bytes for _ in "ab"}
    assert len(found) == 1
