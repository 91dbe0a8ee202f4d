"""Finds the linear head whose logits a cross-entropy reads, from the operators of the traced step."""

from torch import nn

from tightfit.tracing.record import OperatorRecord, Phase, StepTrace

_LOSS = ("aten._log_softmax.default",)
_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
_PASSES = ("aten._to_copy.default", "aten.clone.default", "aten.copy_.default")  # casts and copies in between


def find_head(trace: StepTrace, model: nn.Module) -> str | None:
    """Path of the `nn.Linear` whose product is read, perhaps cast, by a log-softmax. None if there is no such pair."""
    for operator in reversed(trace.operators):
        if operator.phase is Phase.FORWARD and operator.name in _LOSS:
            product = _source(trace, operator)
            if product is not None and isinstance(model.get_submodule(product.module), nn.Linear):
                return product.module
    return None


def _source(trace: StepTrace, operator: OperatorRecord) -> OperatorRecord | None:
    """The matrix product behind an operator's first input."""
    while operator.reads:
        made_by = trace.values[operator.reads[0]].operator
        if made_by is None:
            return None
        operator = trace.operators[made_by]
        if operator.name in _PRODUCTS:
            return operator
        if operator.name not in _PASSES:
            return None
    return None
