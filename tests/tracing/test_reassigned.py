"""Steps that give tensors other memory (`p.data = ...`): each has its own back, and the peak is the measured one."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tightfit
from tightfit.errors import CannotFit
from tightfit.memory.allocator import measured_peak
from tightfit.optim.by_name import build_optimizer, state_tensors
from tightfit.tracing.surroundings import plain_tensors

WIDTH = 48
BATCH = {"x": torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))}


class Momentum(nn.Module):
    """A contrastive model as MoCo has it: the weights of the key encoder follow those of the query encoder."""

    def __init__(self, hidden=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        keys = nn.Sequential(*copy.deepcopy(self.layers)).requires_grad_(False)
        self.keys = [keys] if hidden else keys

    def forward(self, x):
        keys = self.keys[0] if isinstance(self.keys, list) else self.keys
        with torch.no_grad():
            for key, query in zip(keys.parameters(), self.layers.parameters(), strict=True):
                key.data = 0.9 * key.data + 0.1 * query.data
            target = keys(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, target)


class Hidden(Momentum):
    """The key encoder is in a plain list, as models have it that are to keep it out of their checkpoints."""

    def __init__(self):
        super().__init__(hidden=True)


class Normalised(nn.Module):
    """A trained weight that forward normalises, and a buffer that it moves."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        for layer in self.layers:
            layer.weight.data = F.normalize(layer.weight.data, dim=1)
            x = torch.tanh(layer(x))
        self.mean.data = 0.9 * self.mean.data + 0.1 * x.detach().mean(0)
        return (x - self.mean).square().mean()


MODELS = {"followed": Momentum, "in a plain list": Hidden, "normalised": Normalised}


def loss(model, batch):
    return model(**batch)


def all_tensors(model):
    hidden = [t for part in getattr(model, "keys", ()) if isinstance(model, Hidden) for t in part.parameters()]
    return [*model.parameters(), *model.buffers(), *plain_tensors(model), *hidden]


def measured(model, optimizer):
    """The peak of the third step."""
    real = build_optimizer(optimizer, model.parameters())

    def step():
        loss(model, BATCH).backward()
        real.step()
        real.zero_grad()

    step()
    step()
    return measured_peak(step, [*all_tensors(model), *state_tensors(real), *BATCH.values()])


@pytest.mark.keeps("dry-step-changes-nothing")
@pytest.mark.parametrize("kind", MODELS.values(), ids=MODELS)
def test_tensors_that_a_step_gives_other_memory_have_their_own_back(kind):
    model = kind()
    before = [(t, t.data_ptr(), t.detach().clone()) for t in all_tensors(model)]
    tightfit.estimate(model, BATCH, loss=loss)
    tightfit.trace(lambda: loss(model, BATCH).backward())
    for tensor, address, content in before:
        assert tensor.data_ptr() == address
        assert torch.equal(tensor, content)
    assert "data" not in vars(torch.Tensor)


@pytest.mark.keeps("verify-dry-runs-leave")
@pytest.mark.parametrize("kind", MODELS.values(), ids=MODELS)
def test_verify_leaves_their_content(kind):
    model = kind()
    before = [(t, t.detach().clone()) for t in all_tensors(model)]
    made = tightfit.plan(model, BATCH, "2x", loss=loss, optimizer="sgd")
    assert tightfit.verify(model, BATCH, made, loss=loss).ok
    for tensor, content in before:
        assert torch.equal(tensor, content)


@pytest.mark.sampled(3)
@pytest.mark.keeps("predicted-peak-step-equals")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("kind", MODELS.values(), ids=MODELS)
def test_the_peak_of_such_a_step_is_the_measured_one(kind, optimizer):
    found = tightfit.estimate(kind(), BATCH, loss=loss, optimizer=optimizer)
    assert found.peak_bytes == pytest.approx(measured(kind(), optimizer), rel=1e-3)


class Teacher:
    """A loss with a teacher that follows the model, and a counter of its steps."""

    def __init__(self, model):
        self.teacher, self.steps = copy.deepcopy(model).requires_grad_(False), 0
        self.mean = torch.zeros(WIDTH)

    def __call__(self, model, batch):
        with torch.no_grad():
            for one, other in zip(self.teacher.parameters(), model.parameters(), strict=True):
                one.data.mul_(0.9).add_(other.data, alpha=0.1)
            target = self.teacher(batch["x"])
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * target.mean(0)
        return F.mse_loss(model(batch["x"]), target - self.mean)


def in_a_closure(model):
    """The same as a function, whose teacher and counter are variables around it."""
    teacher, steps = copy.deepcopy(model).requires_grad_(False), 0

    def follow(model, batch):
        nonlocal steps
        steps += 1
        with torch.no_grad():
            for one, other in zip(teacher.parameters(), model.parameters(), strict=True):
                one.data.lerp_(other.data, 0.1 / steps)
            target = teacher(batch["x"])
        return F.mse_loss(model(batch["x"]), target)

    return follow


def student():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


class Centred(nn.Module):
    """A loss that is a module with a buffer of its own, as DINO's is."""

    def __init__(self, model):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.steps, self.last = 0, []

    def forward(self, model, batch):
        found = model(batch["x"])
        self.steps += 1
        self.last.append(found.detach().mean())
        centred = (found - self.mean).square().mean()
        self.mean = 0.9 * self.mean + 0.1 * found.detach().mean(0)
        return centred


@pytest.mark.keeps("dry-step-changes-nothing")
@pytest.mark.parametrize("kind", [Teacher, Centred])
def test_a_loss_keeps_its_own_tensors_and_counters_through_an_estimate(kind):
    model = student()
    made = kind(model)
    before = made.mean
    tightfit.estimate(model, BATCH, loss=made)
    assert made.mean is before
    assert made.steps == 0
    assert float(made.mean.sum()) == 0.0
    assert getattr(made, "last", []) == []


class Collects:
    """A trainer whose method is the loss, and which keeps what it sees in nested containers."""

    def __init__(self):
        self.noted, self.steps = {"losses": []}, 0

    def loss(self, model, batch, weight=1.0):
        found = model(batch["x"]).square().mean() * weight
        self.steps += 1
        self.noted["losses"].append(found.detach())
        return found


@pytest.mark.keeps("verify-dry-runs-leave")
@pytest.mark.parametrize("given", [lambda made: made.loss, lambda made: functools.partial(made.loss, weight=2.0)])
def test_a_loss_that_is_a_method_leaves_its_object_as_it_was(given):
    model, made = student(), Collects()
    loss = given(made)
    tightfit.estimate(model, BATCH, loss=loss)
    assert made.noted == {"losses": []}
    with pytest.raises(CannotFit):
        tightfit.plan(model, BATCH, "0.1x", loss=loss, levers="rounding")
    assert made.noted == {"losses": []}
    plan, counted = tightfit.plan(model, BATCH, "2x", loss=loss), made.steps
    assert tightfit.verify(model, BATCH, plan, loss=loss).ok
    assert made.noted == {"losses": []}
    assert made.steps == counted


def verified(model, follows):
    made = tightfit.plan(model, BATCH, "2x", loss=follows, optimizer="sgd")
    assert tightfit.verify(model, BATCH, made, loss=follows).ok


def tried_in_parts(model, follows):
    with pytest.raises(CannotFit):
        tightfit.plan(model, BATCH, "0.1x", loss=follows, levers="rounding", optimizer="sgd")


@pytest.mark.keeps("verify-dry-runs-leave")
@pytest.mark.parametrize("question", [verified, tried_in_parts])
@pytest.mark.parametrize("kind", [Teacher, in_a_closure])
def test_a_teacher_that_follows_within_the_loss_stays_where_it_was(kind, question):
    model = student()
    follows = kind(model)
    with torch.no_grad():
        model[0][0].weight.add_(0.5)  # the teacher is behind
    held = [follows.teacher] if kind is Teacher else [cell.cell_contents for cell in follows.__closure__]
    before = [t.clone() for each in held if isinstance(each, nn.Module) for t in each.parameters()]
    counted = copy.copy(vars(follows)), [each for each in held if isinstance(each, int)]
    question(model, follows)
    now = [follows.teacher] if kind is Teacher else [cell.cell_contents for cell in follows.__closure__]
    assert all(map(torch.equal, before, [t for e in now if isinstance(e, nn.Module) for t in e.parameters()]))
    assert [each for each in now if isinstance(each, int)] == counted[1]
    if kind is Teacher:
        assert follows.mean is counted[0]["mean"]


class Followed(nn.Module):
    """A student and its teacher in one model, which has micro-batches tried on it."""

    def __init__(self):
        super().__init__()
        self.layers = student()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)
        with torch.no_grad():
            self.layers[0][0].weight.add_(0.5)

    def forward(self, x):
        with torch.no_grad():
            torch._foreach_lerp_([*self.teacher.parameters()], [*self.layers.parameters()], 0.5)
            target = self.teacher(x)
        return F.mse_loss(self.layers(x), target)


@pytest.mark.keeps("verify-dry-runs-leave")
def test_weights_that_forward_moves_stay_where_they_were_when_micro_batches_are_tried(monkeypatch):
    monkeypatch.setattr("tightfit.planner.separation.FEW_BYTES", 0)  # on the model itself, as where it is large
    model = Followed()
    before = [p.detach().clone() for p in model.parameters()]
    tried_in_parts(model, loss)
    assert all(map(torch.equal, before, model.parameters()))
