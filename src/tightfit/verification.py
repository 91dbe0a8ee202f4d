"""Verifies on the user's own model and batch that a plan changes nothing: the plain run against the planned run.

Exact levers must be bit-equal: loss, every gradient, every buffer, and the states of the random generators afterwards.
Levers that are exact to rounding are compared with a run in fp64. Dropout is off then, so that both precisions compute
the same function. The planned error may be at most the plain error times the lever's `spread`. Inexact levers add their
`bound`. If something differs, parts of the plan are run until the lever and the module are found.
"""

import copy
import math
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from tightfit.errors import ModelError
from tightfit.levers.micro_batch import as_tensors
from tightfit.levers.recompute import OtherOperators
from tightfit.ops.weights.low_bit import at_full_width
from tightfit.planner.apply import apply_plan
from tightfit.planner.levers import ROUNDING_SPREAD, Exactness, Lever, Recompute
from tightfit.planner.plans import BlockChoice, Plan
from tightfit.planner.step_figures import fingerprint
from tightfit.planner.wrapped import refuse_distributed
from tightfit.runtime.dropout import without_dropout
from tightfit.runtime.outside import outside_training
from tightfit.runtime.simulation import has_numbers
from tightfit.step import Batch, Loss, forward_backward, model_loss
from tightfit.tracing.restore import attributes_of, random_states, untouched
from tightfit.tracing.twin import has_no_memory

# The norm of the errors of few numbers scatters more: by up to 10% on 1152 numbers and 13% on 3600, by 2% on 48,000
# (notes/exactness.md, "Rounding"). This factor over the root of how many make up the norm allows for that.
FEW_NUMBERS = 8.0


@dataclass(frozen=True)
class Difference:
    """The largest difference between two runs. `lever` and `module` name its cause."""

    what: str  # "loss", "gradient of layers.0.mlp.weight", "buffer ...", "random state of torch"
    largest: float  # absolute; NaN for states
    lever: str = ""
    module: str = ""

    def __str__(self) -> str:
        cause = f", caused by {self.lever}" + (f" in {self.module}" if self.module else "") if self.lever else ""
        return f"{self.what} differs by up to {self.largest:.3g}{cause}"


@dataclass(frozen=True)
class Verification:
    """The result of a verification. `ok` says that the plan may be trusted.

    `worst` is the largest difference between the plain run and the run under the bit-exact levers; None if all is
    bit-equal. The errors are those of all gradients together, relative to fp64. They are None if the plan uses only
    bit-exact levers.
    """

    ok: bool
    repeatable: bool
    compared: int
    worst: Difference | None = None
    plain_error: float | None = None
    planned_error: float | None = None
    spread: float = ROUNDING_SPREAD
    bound: float = 0.0  # the additional error that the plan's inexact levers state

    def __str__(self) -> str:
        if not self.repeatable:
            return f"not verified: two plain runs differ from each other ({self.worst})"
        if self.worst is not None:
            return f"NOT EQUAL: {self.worst}"
        equal = f"bit-equal: loss and {self.compared} tensors (gradients, buffers, random states)"
        if self.planned_error is None:
            return equal
        if math.isnan(self.plain_error or 0.0):
            return f"not verified: the plain run's gradients are not finite, and no error tells them apart; {equal}"
        errors = f"error of the gradients against fp64 {self.planned_error:.3e}"
        limit = f"{self.spread - 1:.0%} above the plain run's {self.plain_error:.3e}"
        if self.bound:
            limit += f" and {self.bound:.3g} that inexact levers state"
        if self.ok:
            return f"{equal}; {errors}, at most {limit}"
        return f"NOT EQUAL: {errors}, more than {limit}; exact levers are bit-equal"


@dataclass(frozen=True)
class ChangedValues:
    """Everything that a forward and backward changes, by name."""

    tensors: Mapping[str, torch.Tensor]
    states: Mapping[str, Any]

    def worst_difference(self, other: "ChangedValues") -> Difference | None:
        """The largest difference of a tensor, else a differing state, else None."""
        found = [Difference(name, _largest(t, other.tensors.get(name))) for name, t in self.tensors.items()]
        found += [Difference(n, math.inf) for n in other.tensors.keys() - self.tensors.keys()]
        unequal = [d for d in found if d.largest != 0]
        if unequal:
            return max(unequal, key=lambda d: math.inf if math.isnan(d.largest) else d.largest)
        moved = [name for name, state in self.states.items() if state != other.states[name]]
        return Difference(moved[0], math.nan) if moved else None


@outside_training()
def verify(model: nn.Module, batch: Batch, plan: Plan, *, loss: Loss | None = None) -> Verification:
    """Run the model on this batch without and with the plan, and compare. The model does not change.

    Args:
        model: The module that the plan was made for, with its weights.
        batch: A batch of the plan's shape.
        plan: The plan to prove.
        loss: As for `tightfit.plan`.

    Returns:
        The result of the comparison. `ok` says whether loss, gradients, buffers and random states are the same: to the
        bit for exact levers, to rounding (against fp64) for others.

    Raises:
        LeverError: The plan was made for another model.
        ModelError: The model has no weights or is spread over processes, or a plan with rounding levers cannot be
            judged because the model does not run in fp64.

    Example:
        >>> import tightfit, torch
        >>> def block():
        ...     return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
        >>> model = torch.nn.Sequential(block(), block(), block())
        >>> def loss(model, batch):
        ...     return model(*batch).square().mean()
        >>> batch = (torch.randn(512, 16),)
        >>> plan = tightfit.plan(model, batch, "0.8x", loss=loss)
        >>> tightfit.verify(model, batch, plan, loss=loss).ok
        True
    """
    refuse_distributed(model, "verify")
    refuse_without_memory(model)
    loss = loss or model_loss
    batch = as_tensors(batch)
    # The exact levers alone must be bit-equal, even in a plan that rounds: otherwise a broken exact lever could hide in
    # the allowed rounding.
    not_compiled = tuple(choice for choice in plan.choices if choice.action != "compile")
    exact_levers = tuple(lever for lever in plan.levers if lever.exactness is Exactness.EXACT)
    exact = replace(plan, levers=exact_levers, choices=not_compiled)
    plain = run(model, batch, loss, without_levers(plan))
    # A model that draws from the system's own generator (Reformer) differs from itself. No plan of it can be judged.
    again = plain.worst_difference(run(model, batch, loss, without_levers(plan)))
    if again is not None:
        return Verification(ok=False, repeatable=False, compared=len(plain.tensors), worst=again)
    worst = plain.worst_difference(run(model, batch, loss, exact))
    if worst is not None:
        blocks = find_cause(model, batch, loss, exact, plain)
        lever = find_lever(model, batch, loss, replace(exact, choices=blocks), plain)
        worst = replace(worst, lever=lever, module=", ".join(choice.path for choice in blocks))
    compared = len(plain.tensors) + len(plain.states) - 1
    if exact.levers == plan.levers:
        return Verification(worst is None, repeatable=True, compared=compared, worst=worst)
    before, after = rounding_errors(model, batch, loss, plan)
    spread, bound = rounding_spread(plain, plan), sum(lever.bound for lever in plan.levers)
    ok = worst is None and after <= spread * before + bound
    return Verification(ok, True, compared, worst, before, after, spread, bound)


def refuse_without_memory(model: nn.Module) -> None:
    """Raise `ModelError` for a model on meta, a fake one, or one on a null card, which computes nothing to compare."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if has_no_memory(tensor):
            raise ModelError(f"verify compares numbers, and {name} has none (meta, or fake): load weights first")
        if not has_numbers(tensor):
            raise ModelError(
                f"verify compares numbers, and {name} is on a card that computes none: take tightfit run --values"
            )


def run(model: nn.Module, batch: Batch, loss: Loss, plan: Plan) -> ChangedValues:
    """Run forward and backward under a plan, from the model's present state, which is restored afterwards."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        untouched(model, batch, loss) as attributes,
        apply_plan(plan, model) as applied,
    ):
        value = forward_backward(model, applied.parts(batch, loss), loss, plan.precision)
        gradients = {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        buffers = {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
        return ChangedValues({"loss": value.clone()} | gradients | buffers, random_states(attributes))


def without_levers(plan: Plan) -> Plan:
    """The plain step as a plan."""
    return replace(plan, choices=(), levers=())


def without_lever(plan: Plan, lever: Lever) -> Plan:
    """The plan without one of its levers. It recomputes the same operators."""
    levers = tuple(each for each in plan.levers if each is not lever)
    return replace(plan, choices=lever.taken_out(plan.choices), levers=levers)


def find_cause(model: nn.Module, batch: Batch, loss: Loss, plan: Plan, plain: ChangedValues) -> tuple[BlockChoice, ...]:
    """The block whose choice alone makes a difference; several blocks if only their combination does."""
    choices = tuple(c for c in plan.choices if c.action != "keep" or c.captured or c.compiled)

    def differs(some: tuple[BlockChoice, ...]) -> bool:
        return plain.worst_difference(run(model, batch, loss, replace(plan, choices=some))) is not None

    while len(choices) > 1:
        half = len(choices) // 2
        halves = [part for part in (choices[:half], choices[half:]) if differs(part)]
        if not halves:
            break  # neither half differs alone, so the choices in both are needed
        choices = halves[0]
    return choices


def find_lever(model: nn.Module, batch: Batch, loss: Loss, plan: Plan, plain: ChangedValues) -> str:
    """The exact lever without which the plan makes no difference; recompute, where it is none of them."""
    for lever in plan.levers:
        if plain.worst_difference(run(model, batch, loss, without_lever(plan, lever))) is None:
            return lever.name
    return Recompute.name


def rounding_spread(plain: ChangedValues, plan: Plan) -> float:
    """The factor by which the error against fp64 may change: the largest spread of the plan's levers, and more where
    few numbers make up the gradients' norm.
    """
    spread = max((lever.spread for lever in plan.levers), default=ROUNDING_SPREAD)
    # The participation ratio: the count of all numbers where they are alike, and one where a single one is the norm,
    # whose error in the plain run may happen to be next to nothing.
    gradients = [_dense(t).double() for name, t in plain.tensors.items() if name.startswith("gradient")]
    squares, fourths = (sum(float(t.pow(power).sum()) for t in gradients) for power in (2, 4))
    return spread + FEW_NUMBERS / math.sqrt(max(squares**2 / fourths, 1.0) if fourths else 1.0)


def rounding_errors(model: nn.Module, batch: Batch, loss: Loss, plan: Plan) -> tuple[float, float]:
    """The relative errors of all gradients against fp64, of the plain and of the planned run, with dropout off."""
    training = {name: module.training for name, module in model.named_modules()}
    model.eval()  # dropout would draw other numbers in fp64
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):  # its statistics are those of the batch: parts differ
            module.training = training[name]
    try:
        plain = run(model, batch, loss, without_levers(plan))
        drops = plain.states != random_states(attributes_of(model))
        # Functions drop in either mode (`F.dropout(x, 0.1)`). Where none does, no mode is in the way of compiled and
        # captured blocks.
        with without_dropout(model) if drops else nullcontext():
            plain = run(model, batch, loss, without_levers(plan)) if drops else plain
            exact = at_full_width(copy.deepcopy(model)).double()
            double_plan = replace(without_levers(plan), precision="fp32", fingerprint=fingerprint(exact))
            truth = true_outcome(exact, batch, loss, double_plan)
            refuse_another_way(plain, truth)
            with warnings.catch_warnings():
                # Blocks of a plan that keeps what dropout draws or scales run other operators without it.
                warnings.simplefilter("ignore", OtherOperators)
                planned = run(model, batch, loss, plan)
    finally:
        for name, module in model.named_modules():
            module.training = training[name]
    return relative_error(plain, truth), relative_error(planned, truth)


def true_outcome(exact: nn.Module, batch: Batch, loss: Loss, plan: Plan) -> ChangedValues:
    """The plain run in fp64. Raises `ModelError` if the model does not run in fp64."""
    try:
        return run(exact, _in_double(batch), loss, plan)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ModelError(
            "the model does not run in fp64, against which levers that are exact to rounding are judged: "
            f"{(str(error) or type(error).__name__).splitlines()[0]}; verify a plan of exact levers"
        ) from error


def refuse_another_way(plain: ChangedValues, truth: ChangedValues) -> None:
    """Raise `ModelError` if the run in fp64 gives gradients to other parameters: it took another way by its numbers."""
    others = sorted({name for name in plain.tensors.keys() ^ truth.tensors.keys() if name.startswith("gradient")})
    if others:
        where = "fp64" if others[0] in truth.tensors else "the model's own dtype"
        raise ModelError(
            "levers that are exact to rounding are judged against fp64, in which the model takes another way by its "
            f"numbers: there is a {others[0]} in {where} alone; verify a plan of exact levers, or take another batch"
        )


def relative_error(outcome: ChangedValues, truth: ChangedValues) -> float:
    """The norm of the error of all gradients together, divided by the norm of the true gradients."""
    names = [name for name in truth.tensors if name.startswith("gradient")]
    pairs = [(_dense(outcome.tensors[n]).double(), _dense(truth.tensors[n])) for n in names]
    error = sum(float((found - true).square().sum()) for found, true in pairs)
    size = sum(float(true.square().sum()) for _, true in pairs)
    return math.sqrt(error / size) if size else 0.0


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _in_double(batch: Batch) -> Batch:
    return tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, batch)


def _largest(left: torch.Tensor, right: torch.Tensor | None) -> float:
    """The largest absolute difference: 0 if the two are bit-equal, infinite if they cannot be compared."""
    if right is None or left.shape != right.shape or left.dtype != right.dtype or left.layout != right.layout:
        return math.inf
    if left.layout is not torch.strided:
        return _largest_of_parts(left, right)
    if torch.equal(left, right) or _same_bits(left, right):
        return 0.0
    return float((left.double() - right.double()).abs().max())


def _largest_of_parts(left: torch.Tensor, right: torch.Tensor) -> float:
    """`_largest` for sparse and nested tensors, whose values and places are tensors."""
    if left.layout is torch.jagged:
        jagged: Any = left, right  # `offsets` is an attribute of nested tensors only
        parts = [(each[0](), each[1]()) for each in zip(*((t.values, t.offsets) for t in jagged), strict=True)]
    elif left.layout is torch.sparse_coo:
        parts = [(left._values(), right._values()), (left._indices(), right._indices())]
    else:
        return _largest(left.to_dense(), right.to_dense())
    return max(_largest(one, other) for one, other in parts)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True if two tensors are equal with NaN in the same places. `torch.equal` denies that NaN equals NaN."""
    infinite = {"posinf": math.inf, "neginf": -math.inf}
    numbers = [t.nan_to_num(**infinite) if t.is_floating_point() else t for t in (left, right)]
    return torch.equal(left.isnan(), right.isnan()) and torch.equal(*numbers)
