"""A training that runs out of memory goes on as if it had not: same samples, same random numbers, same bits."""

import gc
import random
import signal
from contextlib import nullcontext

import pytest
import torch
from recovering import VOCABULARY, Awkward, Remembered, batch, config, plain_fit, planner_of, training
from torch import nn

from injected_out_of_memory import OutOfMemoryAt, cpu_error, cuda_error
from tightfit.errors import CannotFit, RecoveryError
from tightfit.levers.activity import activity, simulators
from tightfit.ranks.processes.ranks import Ranks
from tightfit.runtime.outside import outside
from tightfit.runtime.simulation import simulation
from tightfit.training.fitting import LeversInForce
from tightfit.training.interrupt import Interrupted
from tightfit.training.joining import CANNOT_FIT, GOES_ON, OtherCannotFit
from tiny import decoder

STEPS = 3


@pytest.fixture(scope="module")
def plain():
    return plain_fit()


@pytest.fixture(scope="module")
def recomputing():
    """A plan that recomputes and computes the same bits."""
    model = Awkward()
    planner = planner_of(model, config())
    found = planner.within(batch(1), int(plain_fit().planned.peak_bytes * 0.93))
    assert found.micro_batches == 1
    assert found.plan.levers
    return found


CONTEXTS = (simulation, outside, activity, simulators)


def nothing(number):
    return nullcontext()


@pytest.fixture(scope="module")
def uninterrupted():
    run = training()
    return run.run(STEPS, nothing), run.everything()


def injected(step, *numbers, error=cpu_error):
    """Contexts for the steps of a training: in one step, memory runs out at these operators."""
    mode = OutOfMemoryAt(*numbers, error=error)
    return mode, lambda number: mode if number == step else nullcontext()


def operators_of_step(step):
    mode, around = injected(step)
    training().run(STEPS, around)
    return mode.count


def assert_same(run, losses, uninterrupted, where=None):
    wanted_losses, wanted = uninterrupted
    assert losses == wanted_losses, where
    found = run.everything()
    assert len(found) == len(wanted), where
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), where


def assert_recovers_at(step, numbers, plain, recomputing, uninterrupted, error=cpu_error):
    for number in numbers:
        run = training(Remembered([recomputing]), fitted=plain)
        mode, around = injected(step, number, error=error)
        losses = run.run(STEPS, around)
        assert mode.raised == 1
        assert len(run.notes) <= 1
        assert_same(run, losses, uninterrupted, (step, number))


@pytest.mark.sampled(1)
@pytest.mark.keeps("training-runs-out-memory")
@pytest.mark.parametrize("step", [1, 3])
def test_memory_that_runs_out_at_some_operators_changes_no_bit(step, plain, recomputing, uninterrupted):
    count = operators_of_step(step)
    numbers = [0, count - 1, *random.Random(step).sample(range(count), 4)]
    assert_recovers_at(step, numbers, plain, recomputing, uninterrupted)


@pytest.mark.keeps("training-runs-out-memory")
@pytest.mark.slow  # some 600 trainings of three steps: minutes
@pytest.mark.parametrize("step", [1, 3])
def test_memory_that_runs_out_at_any_operator_changes_no_bit(step, plain, recomputing, uninterrupted):
    error = cpu_error if step == 1 else cuda_error
    assert_recovers_at(step, range(operators_of_step(step)), plain, recomputing, uninterrupted, error)


def bytes_alive():
    gc.collect()
    # Earlier tests may have left tensors without memory of their own: those of the compiler (fake, or wrapped) and
    # sparse ones.
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter) and not t.is_meta]
    tensors = [t for t in tensors if torch._C._has_storage(t) and not torch._is_functional_tensor(t)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.keeps("nothing-failed-step-held")
def test_nothing_of_the_failed_step_is_held_while_the_plan_is_made(plain, recomputing):
    """Inside the `except` the frames still hold the step's tensors: the planner would find no memory there."""

    class Looking(Remembered):
        def within(self, batch, budget_bytes, **options):
            seen.append(bytes_alive())
            return super().within(batch, budget_bytes, **options)

    count, seen, states = operators_of_step(2), [], [dict(vars(each)) for each in CONTEXTS]
    run = training(Looking([recomputing]), fitted=plain)
    run.run(1, nothing)
    before = bytes_alive()
    for number in range(20, count // 2, count // 12):
        mode = OutOfMemoryAt(number)
        with mode:
            run.stepper.attempt(batch(2), 2)
    assert len(seen) >= 3
    assert max(seen) - before < 4096, "a batch and numbers, no activation"
    assert [dict(vars(each)) for each in CONTEXTS] == states


def test_a_step_that_fails_again_takes_a_plan_that_is_tighter_still(plain, recomputing, uninterrupted):
    planner = Remembered([recomputing])
    run = training(planner, fitted=plain)
    mode, around = injected(3, 60, 165, 270)
    losses = run.run(STEPS, around)
    assert mode.raised == 3
    assert len(planner.asked) == 3
    peaks = [plain.planned.peak_bytes, *[recomputing.planned.peak_bytes] * 2]
    assert all(asked < peak for asked, peak in zip(planner.asked, peaks, strict=True))
    assert planner.asked[2] < planner.asked[1] < planner.asked[0]
    assert_same(run, losses, uninterrupted)


@pytest.mark.keeps("within-rounding-tighter-plan")
def test_a_real_planner_splits_the_batch_and_the_gradients_are_those_of_the_whole():
    """Micro-batches add up to the batch, token for token: to rounding, since sums run in another order."""
    settings = config(memory={"levers": ["micro_batch"]})
    shape = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY}
    model, other = decoder(**shape), decoder(**shape)
    plain = plain_fit(settings, model)
    wanted_losses = training(settings=settings, model=other).run(STEPS, nothing)
    run = training(planner_of(model, settings), settings, plain, model)
    _, around = injected(2, 100)
    losses = run.run(STEPS, around)
    assert run.stepper.micro_batches in (2, 4)
    assert run.stepper.levers.fitted.planned.peak_bytes < plain.planned.peak_bytes
    assert "micro-batches" in run.notes[0]
    assert "step 2" in run.notes[0]
    assert losses == pytest.approx(wanted_losses, rel=1e-5)
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, another, rtol=1e-4, atol=1e-6)


class NothingFits(Remembered):
    def __init__(self):
        super().__init__([])

    def within(self, batch, budget_bytes, **options):
        self.asked.append(budget_bytes)
        raise CannotFit("nothing fits", least_bytes=10**12)


@pytest.mark.keeps("tighter-plan-left-step")
def test_without_a_tighter_plan_the_training_ends_in_one_line_and_the_step_is_undone(plain):
    untouched = training()
    outcome = untouched.run(1, nothing), untouched.everything()
    run = training(NothingFits(), fitted=plain)
    losses = run.run(1, nothing)
    with pytest.raises(CannotFit, match=r"step 2: out of memory on cpu .* no tighter plan is left") as raised:
        with OutOfMemoryAt(200):
            run.stepper.attempt(batch(2), 2)
    assert "\n" not in str(raised.value)
    assert all(p.grad is None for p in run.stepper.model.parameters())
    assert_same(run, losses, outcome)


@pytest.mark.keeps("step-backward-undone-before")
def test_a_step_in_backward_is_undone_before_its_first_update_and_refused_after_it(plain, recomputing):
    settings = config(training={"step_in_backward": True, "grad_clip": None})
    wanted = training(settings=settings)
    uninterrupted = wanted.run(STEPS, nothing), wanted.everything()
    outcomes = []
    for number in (30, 250):
        run = training(Remembered([recomputing]), settings, plain)
        _, around = injected(3, number)
        try:
            found = run.run(STEPS, around)
        except RecoveryError as error:
            outcomes.append(str(error))
        else:
            outcomes.append("undone")
            assert_same(run, found, uninterrupted)
    assert outcomes[0] == "undone"
    assert "AdamW steps inside backward" in outcomes[1]


# The first run under a scaler has casts that the plan does not know, which is said once.
@pytest.mark.keeps("training-runs-out-memory")
@pytest.mark.filterwarnings("ignore::tightfit.levers.recompute.OtherOperators")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.8, 0.95, 0.99])
def test_a_scaled_step_is_recovered_with_its_scale(share, plain, recomputing):
    settings = config(training={"precision": "fp16"})
    wanted = training(settings=settings)
    mode, around = injected(3)
    outcome = wanted.run(STEPS, around), wanted.everything()
    run = training(Remembered([recomputing]), settings, plain)
    interrupted, around = injected(3, int(share * mode.count))
    losses = run.run(STEPS, around)
    assert interrupted.raised == 1
    assert run.stepper.scaler.state_dict() == wanted.stepper.scaler.state_dict()
    assert_same(run, losses, outcome)


@pytest.mark.slow  # two trainings
@pytest.mark.keeps("cuda-path-too-card")
def test_a_scaler_that_was_half_made_is_made_again():
    settings = config(training={"precision": "fp16"})
    wanted = training(settings=settings)
    outcome = wanted.run(STEPS, nothing), wanted.everything()
    plain = plain_fit(settings)
    tighter = planner_of(Awkward(), settings).within(batch(1), plain.planned.peak_bytes - 1)
    run = training(Remembered([tighter]), settings, plain)
    scale, memory = run.stepper.scaler.scale, OutOfMemoryAt(1)  # 0 makes the scale, 1 what counts its growth

    def in_short_memory(loss):
        with memory:
            return scale(loss)

    run.stepper.scaler.scale = in_short_memory
    losses = run.run(STEPS, nothing)
    assert memory.raised == 1
    assert_same(run, losses, outcome)


def test_any_other_error_goes_through(plain, recomputing):
    run = training(Remembered([recomputing]), fitted=plain)
    with pytest.raises(RuntimeError, match="something else"):
        with OutOfMemoryAt(30, error=lambda: RuntimeError("something else")):
            run.stepper.attempt(batch(1), 1)


def test_levers_can_be_aside_and_come_back(plain, recomputing):
    model = Awkward()
    with LeversInForce(recomputing, model) as levers:
        assert "forward" in vars(model.blocks[0]) or "forward" in vars(model.blocks[1])
        with levers.taken_off():
            assert all("forward" not in vars(block) for block in model.blocks)
        levers.replace(plain)
        assert all("forward" not in vars(block) for block in model.blocks)


class BesideAnEmptyOne(Ranks):
    """The first of two ranks. The other one has no samples, and says `word` of its step."""

    size = 2

    def __init__(self, word=GOES_ON):
        self.word, self.exchanged = word, []

    def flags(self, flags):
        self.exchanged.append(flags[0])
        return [max(flags[0], self.word), *flags[1:]]


def beside(ranks, planner, plain):
    run = training(planner, fitted=plain)
    run.stepper.ranks = ranks
    return run


def test_of_several_ranks_one_recovers_by_itself_and_exchanges_once_a_step(plain, recomputing, uninterrupted):
    ranks = BesideAnEmptyOne()
    run = beside(ranks, Remembered([recomputing]), plain)
    mode, around = injected(2, 200)
    assert_same(run, run.run(STEPS, around), uninterrupted)
    assert mode.raised == 1
    assert ranks.exchanged == [GOES_ON] * STEPS


def test_a_rank_without_a_tighter_plan_says_so_to_the_others(plain):
    ranks = BesideAnEmptyOne()
    run = beside(ranks, NothingFits(), plain)
    with pytest.raises(CannotFit), OutOfMemoryAt(200):
        run.stepper.attempt(batch(1), 1)
    assert ranks.exchanged == [CANNOT_FIT]


def test_the_others_undo_their_step_and_end_with_its_exit_code(plain):
    untouched = [p.detach().clone() for p in training().stepper.model.parameters()]
    run = beside(BesideAnEmptyOne(CANNOT_FIT), NothingFits(), plain)
    with pytest.raises(OtherCannotFit) as raised:
        run.run(1, nothing)
    run.stepper.undo()
    assert raised.value.exit_code == CannotFit.exit_code
    assert all(p.grad is None for p in run.stepper.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(run.stepper.model.parameters(), untouched, strict=True))


def test_a_signal_to_another_rank_cuts_the_step_here(plain):
    run = beside(BesideAnEmptyOne(int(signal.SIGTERM)), NothingFits(), plain)
    with pytest.raises(Interrupted):
        run.run(1, nothing)
    assert run.stepper.interrupt.received == signal.SIGTERM
