"""Out of memory in a step of FSDP2's ranks: all undo it and run it again, and nothing of the training changes."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from recovering import Awkward, config
from sharded_recovering import (
    BLOCKS,
    FailingGradients,
    Training,
    assert_recovered,
    batch,
    fits,
    in_step,
    operators,
    same,
    training,
)
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.devices.known import find
from tightfit.devices.present import lookup_present
from tightfit.errors import CannotFit, RecoveryError
from tightfit.ranks.processes.ranks import ALONE, Ranks
from tightfit.ranks.sent_messages import SentMessages
from tightfit.ranks.world import Sharding
from tightfit.ranks.wrapping import change_sharding, in_fsdp2
from tightfit.runtime.internals import fake_process_group, forget_placements, groups_of_state, states_of_fsdp2
from tightfit.training.fitting import Fit
from tightfit.training.objective import CausalLMLoss
from tightfit.training.recovery.catching import caught
from tightfit.training.sharded.fitting import planner_of_shards
from tightfit.training.sharded.steps import TOKENS, Stranded, small_parts

TESTS = Path(__file__).resolve().parents[1]
PLAIN, RECOMPUTING, SPLIT = 0, 1, 2


@pytest.fixture(scope="module")
def made() -> tuple[Fit, Fit, Fit]:
    return fits()


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of one rank, which sends nothing."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class FirstOfTwo(Ranks):
    size = 2


@pytest.fixture
def mesh_of_two() -> Iterator[Any]:
    """Of two ranks on a process group that sends nothing."""
    forget_placements()
    with fake_process_group(0, 2):
        yield dist.init_device_mesh("cpu", (2,))
    forget_placements()


def undisturbed(mesh: Any, given: Any) -> tuple[list[float], list[torch.Tensor]]:
    run = training(mesh, given)
    return run.run(lambda number: nullcontext()), run.everything()


@pytest.mark.sampled(1)
@pytest.mark.keeps("step-runs-out-memory")
@pytest.mark.parametrize("step", [1, 3])
def test_a_step_that_is_undone_and_run_again_changes_no_bit(mesh: Any, made: tuple[Fit, Fit, Fit], step: int):
    given = made[:2]
    losses, expected = undisturbed(mesh, given)
    count = len(operators(mesh, given, ALONE, step))
    for number in [0, count - 1, *random.Random(step).sample(range(count), 2)]:
        run = training(mesh, given)
        failing = FailingGradients(run.stepper, {1: number})
        assert run.run(in_step(step, failing)) == losses, number
        assert failing.raised == 1
        assert same(run.everything(), expected), number
        learnt = run.stepper.corrections
        assert (learnt.failures, learnt.plan) == (1, made[RECOMPUTING].plan)
        assert len(run.notes) == 1
        assert f"step {step}: rank 0 is out of memory" in run.notes[0]
        assert "it is undone on all ranks and runs again with a tighter plan" in run.notes[0]


@pytest.mark.keeps("step-runs-out-memory")
def test_a_plan_in_more_micro_batches_is_the_training_that_had_it_from_there(mesh: Any, made: tuple[Fit, Fit, Fit]):
    given = [made[PLAIN], made[SPLIT]]
    run = training(mesh, given)
    losses, expected = run.run(lambda number: nullcontext(), {2: made[SPLIT]}), run.everything()
    failing = training(mesh, given)
    assert failing.run(in_step(2, FailingGradients(failing.stepper, {1: 40}))) == losses
    assert failing.stepper.micro_batches == made[SPLIT].micro_batches > 1
    assert same(failing.everything(), expected)


@pytest.mark.keeps("resumed-run-ranks-begins")
def test_where_nothing_is_tighter_the_step_is_undone_and_the_plans_tried_are_named(
    mesh: Any, made: tuple[Fit, Fit, Fit]
):
    run = training(mesh, made[:2])
    assert run.stepper.plans is not None

    def nothing(bound: int) -> Fit:
        raise CannotFit("nothing fits", least_bytes=10**12)

    run.stepper.plans.make = nothing
    with FailingGradients(run.stepper, {1: 60}), pytest.raises(CannotFit) as error:
        run.stepper.attempt(batch(1, 0), 1)
    assert not isinstance(error.value, Stranded)
    assert str(error.value).startswith("step 1: rank 0: out of memory on cpu")
    assert "no tighter plan is left: tried at a predicted peak of" in str(error.value)
    assert all(parameter.grad is None for parameter in run.stepper.model.parameters())
    found = run.run(lambda number: nullcontext()), run.everything()
    losses, expected = undisturbed(mesh, made[:2])
    assert found[0] == losses
    assert same(found[1], expected)


@pytest.mark.keeps("out-memory-recovered-memory")
def test_a_rank_that_cannot_stand_in_for_itself_ends_all(mesh: Any, made: tuple[Fit, Fit, Fit]):
    run = training(mesh, made[:2])
    failing = FailingGradients(run.stepper, dict.fromkeys(range(1, 100), 30))
    with failing, pytest.raises(Stranded, match=r"the step is not repeated: there is no room for the messages"):
        run.stepper.attempt(batch(1, 0), 1)
    assert 2 < failing.raised < 10

    run = training(mesh, made[:2])
    model: Any = run.stepper.model
    own = model.forward

    def forward(input_ids: torch.Tensor) -> Any:
        if len(input_ids) < 2:
            raise ValueError("wanted two rows")
        return own(input_ids)

    model.forward = forward
    with FailingGradients(run.stepper, {1: 30}), pytest.raises(Stranded, match="ValueError: wanted two rows"):
        run.stepper.attempt(batch(1, 0), 1)


def test_without_recovery_a_rank_ends_all(mesh: Any, made: tuple[Fit, Fit, Fit]):
    run = training(mesh, made[:1], recovers=False)
    with FailingGradients(run.stepper, {1: 30}), pytest.raises(Stranded, match=r"memory.recover is false.*--resume"):
        run.stepper.attempt(batch(1, 0), 1)


class Messages(TorchDispatchMode):
    """What is really sent: each collective, and the sizes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, list[int]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "c10d":
            self.sent.append((str(func), [each.numel() for each in args if isinstance(each, torch.Tensor)]))
        return func(*args, **(kwargs or {}))


def sent_by(run: Training, step: int, failing: FailingGradients) -> list[tuple[str, list[int]]]:
    """The messages of a step, up to the end of its gradients under the first plan."""
    for number in range(1, step):
        run.stepper.attempt(batch(number, 0), number)
    with Messages() as messages, failing:
        run.stepper._exchanged(*_begun(run, step))
    return messages.sent


def _begun(run: Training, step: int) -> tuple[Any, dict[str, Any], int]:
    from tightfit.training.sharded.steps import _ShardedStep

    run.stepper._state.remember()
    given = batch(step, 0)
    return _ShardedStep(run.stepper, given), given, step


@pytest.mark.slow  # a training of two ranks
@pytest.mark.keeps("rank-fails-sends-messages")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fitted", [PLAIN, RECOMPUTING, SPLIT])
@pytest.mark.parametrize("step", [1, 2])
def test_a_rank_that_fails_sends_what_the_others_wait_for(
    mesh_of_two: Any, made: tuple[Fit, Fit, Fit], fitted: int, step: int
):
    given, ranks = [made[fitted], made[RECOMPUTING]], FirstOfTwo()
    run = training(mesh_of_two, given, ranks)
    counted_in = FailingGradients(run.stepper, {})
    expected = sent_by(run, step, counted_in)
    assert {name for name, _ in expected} == {"c10d._allgather_base_.default", "c10d._reduce_scatter_base_.default"}
    count = counted_in.counts[0]
    for number in [0, count - 1, *random.Random(fitted).sample(range(count), 2)]:
        run = training(mesh_of_two, given, ranks)
        failing = FailingGradients(run.stepper, {1: number, 2: count // 3, 3: count // 2})
        assert sent_by(run, step, failing) == expected, number
        assert failing.raised == 3, "twice as a stand-in, too"


@pytest.mark.slow  # a plan within a training
@pytest.mark.keeps("nothing-failed-step-held-begins")
def test_nothing_of_a_failed_step_is_held_when_the_stand_in_begins(mesh_of_two: Any, made: tuple[Fit, Fit, Fit]):
    """Gathered weights, and gradients that were not reduced: the stand-in needs their memory."""

    def held(group: Any) -> int:
        gathered = [tensor for each in group.fsdp_params for tensor in each.all_gather_outputs]
        left = [getattr(each, "_unsharded_param", None) for each in group.fsdp_params]
        gradients = [each.grad for each in left if each is not None and each.grad is not None]
        return sum(tensor.untyped_storage().nbytes() for tensor in [*gathered, *gradients])

    run = training(mesh_of_two, made[:2], FirstOfTwo())
    groups = [group for state in states_of_fsdp2(run.stepper.model.modules()) for group in groups_of_state(state)]
    found: set[bool] = set()
    for number in range(5, 330, 13):
        step, *_ = _begun(run, 1)
        run.stepper._messages.begin(1)
        with FailingGradients(run.stepper, {1: number}) as failing:
            caught(step.compute_gradients, torch.device("cpu"))
        found.add(failing.raised == 1 and any(map(held, groups)))
        run.stepper._messages.begin_again()
        assert not any(map(held, groups)), number
        assert not groups[0].comm_ctx.post_forward_order
        run.stepper.undo()
    assert True in found, "there was something to let go of"


@pytest.mark.keeps("rank-fails-sends-messages")
def test_units_keep_or_free_their_weights_as_if_they_had_been_sharded_so(mesh_of_two: Any):
    """A tighter plan frees weights that the plan before it kept, which shows in the messages of a step."""

    def sharded(reshards: bool | None) -> Awkward:
        model: Any = Awkward()
        return in_fsdp2(model, BLOCKS, mesh_of_two, Sharding(reshards))

    def sent(model: Awkward) -> list[tuple[str, list[int]]]:
        with Messages() as messages:
            CausalLMLoss()(model, batch(1, 0)).backward()
        return messages.sent

    frees, keeps = sent(sharded(None)), sent(sharded(False))
    assert len(frees) == len(keeps) + len(BLOCKS)
    for begun, then in ((None, False), (False, None)):
        model = sharded(begun)
        assert sent(model) == (frees if begun is None else keeps)
        change_sharding(model, Sharding(then))
        assert sent(model) == (frees if then is None else keeps)


@pytest.mark.keeps("rank-fails-sends-messages")
def test_a_stand_in_that_would_send_another_message_sends_none(mesh_of_two: Any, made: tuple[Fit, Fit, Fit]):
    """Such as of experts: few tokens use fewer of them."""
    model: Any = Awkward()
    in_fsdp2(model, BLOCKS, mesh_of_two)
    messages, loss = SentMessages(model), CausalLMLoss()
    messages.begin(1)
    loss(model, batch(1, 0)).backward()
    messages.end()
    messages.begin(1)
    loss(model, batch(2, 0))
    messages.begin_again()
    model.blocks[1].down.forward = lambda x: x[..., : x.shape[-1] // 2]  # its weights get no gradient
    with pytest.raises(RecoveryError, match=r"message .* of its step is another one for few tokens.*--resume"):
        loss(model, batch(2, 0)).backward()


@pytest.mark.slow  # a plan within a training
@pytest.mark.keeps("nothing-failed-step-held-begins")
@pytest.mark.sampled(1)  # 9 s each
@pytest.mark.parametrize("device", ["cpu", "RTX 4090"])
def test_a_plan_made_in_the_middle_of_a_training_leaves_nothing_of_its_played_ranks(
    mesh: Any, made: tuple[Fit, Fit, Fit], device: str
):
    """On a CPU it is made in a fork. On a card autograd has threads, so there it is made in the process itself."""
    card = find(device)
    spec = lookup_present("cpu") if card is None else card.spec
    make = planner_of_shards(Awkward(), batch(1, 0), CausalLMLoss(), config(), spec, 2)
    losses, expected = undisturbed(mesh, made[:1])
    run = training(mesh, made[:1])
    run.stepper.attempt(batch(1, 0), 1)
    found = make(8 << 30)
    with pytest.raises(CannotFit):
        make(1000)
    assert found.is_sharded
    assert found.plan is not None
    assert (found.plan.world_size, found.plan.budget_bytes) == (2, 8 << 30)
    assert [run.stepper.attempt(batch(number, 0), number).loss for number in (2, 3)] == losses[1:]
    assert same(run.everything(), expected)


def test_a_stand_in_has_few_tokens_and_nothing_to_learn():
    ids = torch.arange(3 * 40).view(3, 40)
    given = {"input_ids": ids, "labels": ids, "position_ids": ids, "valid_tokens": 7, "scale": torch.ones(3, 2)}
    parts = small_parts(given, 2, 1)
    assert len(parts) == 2
    assert all(parts[0][name].shape == (1, TOKENS) for name in ("input_ids", "labels", "position_ids"))
    assert parts[0]["scale"].shape == (1, 2)
    assert set(parts[0]["labels"].flatten().tolist()) == {-100}
    assert small_parts({"input_ids": ids[:, :5], "labels": ids[:, :5]}, 1, 1)[0]["input_ids"].shape == (1, 5)


@pytest.mark.keeps("step-runs-out-memory")
@pytest.mark.slow  # hundreds of trainings of three steps on two or three ranks: minutes
@pytest.mark.parametrize(("ranks", "stride"), [(2, 23), (3, 71)])
def test_ranks_that_run_out_of_memory_anywhere_change_no_bit(tmp_path: Path, ranks: int, stride: int):
    script = Path(__file__).with_name("sharded_recovering.py")
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), str(script)]
    paths = [str(TESTS), str(TESTS / "training"), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [*words, str(tmp_path), str(stride)], capture_output=True, text=True, timeout=1200, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert_recovered(tmp_path, ranks)
