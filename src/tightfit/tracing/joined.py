"""Joins a trace of forward and backward with a trace of an optimizer's phase to the trace of a step.

Several optimizers share one trace of forward and backward this way. The optimizer's states lie beside it from the
beginning, and its phase follows. With the step in backward, each parameter's update happens where its gradient is
ready.
"""

from dataclasses import replace
from typing import NamedTuple

from tightfit.tracing.cuda.replay import as_allocated
from tightfit.tracing.record import Category, OperatorRecord, Phase, StepTrace, StorageRecord
from tightfit.tracing.step import STEPPED


def state_bytes(update: StepTrace) -> int:
    """Bytes of the optimizer's states."""
    return sum(storage.bytes for storage in _states(update))


def joined(part: StepTrace, update: StepTrace, *, on_cuda: bool) -> StepTrace:
    """The trace of a whole step.

    `part` was made by `trace_part` without states and `update` by `trace_update`, of the same model. Both were made for
    the step in backward, or neither.
    """
    in_backward = any(operator.name.startswith(STEPPED) for operator in part.operators)
    trace = _inside(part, update) if in_backward else _one_after_the_other(part, update)
    return as_allocated(trace) if on_cuda else trace


def _states(update: StepTrace) -> list[StorageRecord]:
    """The tensors that the optimizer holds when a step begins: its states, and tables and generators of its own."""
    return [s for s in _not_made(update) if s.died is None or s.category is Category.OPTIMIZER_STATE]


def _met(update: StepTrace) -> list[StorageRecord]:
    """Tensors that no operator makes and that die in the phase, such as the number 1 that foreach updates add."""
    return [s for s in _not_made(update) if s.died is not None and s.category is not Category.OPTIMIZER_STATE]


def _not_made(update: StepTrace) -> list[StorageRecord]:
    others = (Category.PARAMETER, Category.GRADIENT)
    existed = (s for s in update.storages if s.operator is None and s.category not in others and s.died != 0)
    return [s for s in existed if s.dtype]  # memory that is reserved without a tensor is in the other trace too


def _one_after_the_other(part: StepTrace, update: StepTrace) -> StepTrace:
    count, states = len(part.operators), sum(s.bytes for s in _states(update))
    # A death is counted after the operator before it, of which an update by kernels of its own may have none.
    last = len(update.operators)
    freed = {s.name: min(s.died, last) for s in update.storages if s.category is Category.GRADIENT and s.died}

    def storage(record: StorageRecord) -> StorageRecord:
        is_gradient = record.category is Category.GRADIENT and record.died is None
        died = freed.get(record.name) if is_gradient else None
        return record if died is None else record._replace(died=count + died)

    held = [storage(record) for record in part.storages]
    # What the optimizer makes, and its states. All else in its trace is in the other trace too.
    made = [
        _later(s, count)._replace(operator=s.operator + count, born=s.born + count)
        for s in update.storages
        if s.operator is not None
    ]
    # A tensor is met before the operator that reads it, so that of the first one comes after the last one of backward.
    made += [_later(s, count)._replace(born=count + (s.born or -1)) for s in _met(update)]
    left = sum(s.bytes for s in part.storages if s.died is None)
    shift = left - (update.starts[0] - states) if update.starts else 0
    return replace(
        part,
        operators=(*part.operators, *map(_alone, update.operators)),
        storages=(*held, *made, *(_later(state, count) for state in _states(update))),
        levels=(*(level + states for level in part.levels), *(level + shift for level in update.levels)),
        starts=(*(start + states for start in part.starts), *(start + shift for start in update.starts)),
        assumptions=tuple(dict.fromkeys((*part.assumptions, *update.assumptions))),
    )


def _later(record: StorageRecord, count: int) -> StorageRecord:
    return record if record.died is None else record._replace(died=record.died + count)


def _alone(operator: OperatorRecord) -> OperatorRecord:
    """An operator of the optimizer without its values, which are numbered as in its own trace."""
    return operator._replace(reads=(), makes=(), call=-1)


def _inside(part: StepTrace, update: StepTrace) -> StepTrace:
    updates = _by_parameter(update)
    operators, levels = list(part.operators), list(part.levels)
    states = sum(s.bytes for s in _states(update))
    for index, operator in enumerate(operators):
        levels[index] += states
        if operator.name.startswith(STEPPED):
            update_of = updates.get(operator.name, _ParameterUpdate())
            operators[index] = operator._replace(**update_of._asdict(), phase=Phase.OPTIMIZER)
            levels[index] += update_of.workspace_bytes
    return replace(
        part,
        operators=tuple(operators),
        storages=(*part.storages, *_states(update)),
        levels=tuple(levels),
        starts=tuple(start + states for start in part.starts),
        assumptions=tuple(dict.fromkeys((*part.assumptions, *update.assumptions))),
    )


class _ParameterUpdate(NamedTuple):
    """The update of one parameter: its seconds, those of either clock, and how far memory rises in it."""

    seconds: float = 0.0
    host_seconds: float = 0.0
    device_seconds: float = 0.0
    workspace_bytes: int = 0


def _by_parameter(update: StepTrace) -> dict[str, _ParameterUpdate]:
    """The updates by the names of their notes."""
    found: dict[str, _ParameterUpdate] = {}
    name, base = "", 0
    for operator, level, start in zip(update.operators, update.levels, update.starts, strict=True):
        if operator.name.startswith(STEPPED):
            name, base = operator.name, -1
            found[name] = _ParameterUpdate()
        elif name:
            base = start if base < 0 else base
            sofar = found[name]
            found[name] = _ParameterUpdate(
                sofar.seconds + operator.seconds,
                sofar.host_seconds + operator.host_seconds,
                sofar.device_seconds + operator.device_seconds,
                max(sofar.workspace_bytes, level - base),
            )
    return found
