"""Applies a plan to a model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tightfit.errors import InputError, LeverError
from tightfit.levers.handle import Applied, Removable
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.levers.offload import HostStore
from tightfit.levers.recompute import KEEP_ALL, Expected, OperatorKey, Policy, Ran
from tightfit.levers.recompute.lever import apply_policies
from tightfit.levers.recompute.region import forwards_on
from tightfit.levers.stream import settle
from tightfit.planner.levers import BlockLever, Lever, MicroBatches, Stream
from tightfit.planner.outcome import PlanRecord
from tightfit.planner.records import BlockChoice, PlannedProgram
from tightfit.planner.separation import refuse_coupled
from tightfit.planner.step_figures import fingerprint
from tightfit.planner.wrapped import refuse_wrapped
from tightfit.ranks.context_parallel import in_context_parallel
from tightfit.ranks.tensor_parallel import in_tensor_parallel
from tightfit.ranks.world import SHARDED, world_of
from tightfit.ranks.wrapping import in_fsdp2, mesh_of
from tightfit.step import Batch, Loss, Part, forward_backward, model_loss


class AppliedPlan(Applied):
    """A plan in force on a model: `undo()` or leaving the `with` block restores the model exactly."""

    def __init__(self, plan: PlanRecord, model: nn.Module, parts: Sequence[Removable]):
        super().__init__(parts)
        self.plan = plan
        self.model = model
        split = plan.lever(MicroBatches)
        self._tried = split is None or split.tried
        self._numbers = {forward.number for forward in forwards_on(model)}

    def undo(self) -> None:
        """Remove every lever from the model. Calling it again does nothing."""
        super().undo()
        # A copy of a block carries a copy of its lever with the same number. It may be in the model by now.
        for forward in forwards_on(self.model):
            if forward.number in self._numbers:
                forward.remove()

    remove = undo

    def parts(self, batch: Batch, loss: Loss | None = None) -> list[Part]:
        """The batch in the plan's micro-batches, each with its weight in the loss of the whole batch."""
        return as_parts(split_batch(batch, self.plan.micro_batches), loss or model_loss)

    def backward(self, batch: Batch, loss: Loss | None = None, *, model: nn.Module | None = None) -> torch.Tensor:
        """Run forward and backward over all micro-batches of the plan, in its precision. Return the batch's loss,
        detached.

        If the plan has one micro-batch, the usual `model(**batch).loss.backward()` does the same. `model` is the
        `DistributedDataParallel` around the planned model, whose gradients are added up in the last micro-batch.

        Raises `LeverError` in the first call if the plan splits the batch, was made without numbers to try that on, and
        the loss couples samples.
        """
        loss, model = loss or model_loss, self.model if model is None else model
        if not self._tried:
            refuse_coupled(self.model, batch, loss)
            self._tried = True
        # FSDP2 casts weights and activations itself.
        precision = "fp32" if self.plan.parallel in SHARDED else self.plan.precision
        return forward_backward(model, self.parts(batch, loss), loss, precision)


def policy_of(choice: BlockChoice) -> Policy:
    """The executor's policy for a block's choice."""
    if choice.action in ("keep", "compile"):
        return KEEP_ALL
    kept = frozenset(OperatorKey(*each) for each in choice.kept)
    offloaded = frozenset(OperatorKey(*each) for each in choice.offloaded)
    return Policy(kept, offloaded=offloaded, offloads_inputs=choice.offloads_inputs)


def apply_plan(plan: PlanRecord, model: nn.Module) -> AppliedPlan:
    """Apply a plan's levers to the model that it was made for.

    Raises `LeverError` if the model is another one, or if there is less room for offload than the plan needs.
    Raises `ModelError` if the model is wrapped for several processes, and `OutputError` if the offload folder cannot be
    used.
    """
    if fingerprint(model) != plan.fingerprint:
        # A wrapper prefixes all names of parameters. Its own message helps more than "other parameters".
        refuse_wrapped(model, "applying a plan")
        raise LeverError(
            "the plan was made for a model with other parameters (names, shapes, dtypes or which are trained): "
            "plan again"
        )
    policies = {c.path: policy_of(c) for c in plan.choices if c.action not in ("keep", "compile")}
    paths = [choice.path for choice in plan.choices]
    levers = [lever.within(paths) if isinstance(lever, BlockLever) else lever for lever in plan.levers]
    stores = (lever.offload_store() for lever in levers if isinstance(lever, BlockLever))
    offload_store = next((store for store in stores if store is not None), None)
    if offload_store is None and any(policy.offloads for policy in policies.values()):
        offload_store = HostStore()  # plans of before offloaded choices always had their lever
    # On another kind of device, blocks run other operators: nothing is expected of them there.
    card = None if plan.lever(Stream) is None else card_for(plan, model)
    is_on_card = card is not None or any(parameter.is_cuda for parameter in model.parameters())
    is_there = (plan.room is not None) == is_on_card
    if is_on_card:
        # What building a model leaves in the allocator's cache decides which blocks later steps split: up to 0.6% of a
        # peak on an H200, with which 4 of 50 plans were above their budgets. Given back, peaks are the predicted ones.
        torch.cuda.empty_cache()
    programs = plan.programs if is_there else ()
    expected = {path: each for program in programs for path, each in expected_of(program).items()}
    levers_on = apply_levers(model, policies, levers, joined_paths(plan), offload_store, expected)
    applied = AppliedPlan(plan, model, levers_on)
    if plan.lever(Stream) is not None:
        try:
            settle(model, card)
        except BaseException:  # the host has no room, Ctrl-C
            applied.undo()
            raise
    return applied


def card_for(plan: PlanRecord, model: nn.Module) -> torch.device | None:
    """The card to which a model goes that its plan streams from the host; None where it stays."""
    if plan.room is None or not torch.cuda.is_available() or any(p.is_cuda for p in model.parameters()):
        return None
    return torch.device("cuda", torch.cuda.current_device())


def expected_of(program: PlannedProgram) -> dict[str, Expected]:
    """The operators that each block of a kind is expected to run, which its blocks share."""
    return dict.fromkeys(program.paths, Expected(Ran(*each) for each in program.operators))


def joined_paths(plan: PlanRecord) -> list[str]:
    return [choice.path for choice in plan.choices if choice.joined]


def apply_levers(
    model: nn.Module,
    policies: Mapping[str, Policy],
    levers: Sequence[Lever],
    joined: Sequence[str] = (),
    offload_store: HostStore | None = None,
    expected: Mapping[str, Expected] | None = None,
    *,
    is_built: bool = True,
) -> list[Removable]:
    """Apply the levers of a plan, or of a candidate, to a model, and return their handles.

    `expected` are the operators that blocks run, by a plan. `is_built`: compiled blocks are for this machine, whose
    compilers build them. If one lever raises, the others are removed again.
    """
    of_blocks = [lever for lever in levers if isinstance(lever, BlockLever)]
    captured = {path: fused for lever in of_blocks for path, fused in lever.captured().items()}
    compiled = {path: share for lever in of_blocks for path, share in lever.compiled().items()}
    recorded = {path: policy for path, policy in policies.items() if path not in captured}
    handles: list[Removable] = [
        apply_policies(model, recorded, joined=joined, offload_store=offload_store, expected=expected)
    ]
    try:
        if captured:
            from tightfit.levers.captured import capture_paths

            fused = [path for path, is_fused in captured.items() if is_fused]
            kept = {path: policies.get(path, KEEP_ALL) for path in captured}
            handles.append(capture_paths(model, kept, fused=fused, is_built=is_built))
        if compiled:
            from tightfit.levers.compiled import compile_paths

            handles.append(compile_paths(model, compiled))
        # Micro-batches split the batch, and no module changes.
        handles += (lever.apply(model) for lever in levers if not isinstance(lever, BlockLever | MicroBatches))
    except BaseException:  # Ctrl-C too: a lever without a handle could not be removed
        Applied(handles).undo()
        raise
    return handles


def shard_as_planned(plan: PlanRecord, model: nn.Module, mesh: Any) -> nn.Module:
    """Divide a model over the ranks as its plan says: by FSDP2, in tensor or in context parallel.

    Raises `InputError`.
    """
    from torch import distributed

    if plan.parallel not in (*SHARDED, "tp"):
        raise InputError(
            "the plan is not one of FSDP2, HSDP, tensor or context parallel: plan with world_size and "
            "parallel='fsdp2', 'hsdp', 'tp' or 'cp', and apply that"
        )
    world = world_of(plan.world_size, plan.nodes, plan.parallel)
    assert world is not None, "a plan has the number of its ranks"
    if mesh is None:
        if not distributed.is_initialized():
            raise InputError("no process group was made: call torch.distributed.init_process_group before plan.shard")
        devices = {parameter.device.type for parameter in model.parameters()}
        if (there := distributed.get_world_size()) != plan.world_size:
            raise InputError(f"the plan is of {plan.world_size} ranks, and there are {there}: plan again")
        mesh = mesh_of(world, devices.pop() if len(devices) == 1 else "cpu")
    if tuple(mesh.mesh.shape) != world.mesh_shape:
        raise InputError(
            f"the plan is of a mesh of {world.mesh_shape} ranks, and this one has {tuple(mesh.mesh.shape)}: "
            "leave the mesh out, or plan again"
        )
    if plan.parallel == "tp":
        return in_tensor_parallel(model, mesh)
    engine = in_context_parallel if plan.parallel == "cp" else in_fsdp2
    return engine(model, plan.sharded_blocks, mesh, plan.sharding, precision=plan.precision)
