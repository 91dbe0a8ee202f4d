"""Low-rank adapters of `peft` on experts that are held in few bits.

`peft` adapts parameters (`target_parameters`) by their sum with the product of two factors, at full width and for all
experts at once. Beside codes there is no such sum: the experts add the factors' product to their own. Configuration,
names of weights and files are those of `peft`.
"""

import functools
import importlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.errors import ModelError
from tightfit.ops.weights.experts import LowBitExperts, LowRank


@contextmanager
def adapting_codes(model: nn.Module) -> Iterator[None]:
    """While `peft` puts adapters on a model, its experts in few bits have weights of their full shapes, which take no
    memory. After it, the adapters of these weights are for their codes.
    """
    experts = [module for module in model.modules() if isinstance(module, LowBitExperts)]
    codes = [{name: module._parameters[name] for name in module.wide_shapes} for module in experts]
    for module in experts:
        for name in module.wide_shapes:
            module._parameters[name] = _stand_in(module, name)
    try:
        yield
    finally:
        for module, held in zip(experts, codes, strict=True):
            module._parameters.update(held)
    adapters: list[Any] = [m for m in model.modules() if type(m) is _wrapper()] if experts else []
    for adapter in adapters:
        if isinstance(adapter.get_base_layer(), LowBitExperts):
            adapter.__class__ = _wrapper_of_codes()


def _stand_in(experts: LowBitExperts, name: str) -> nn.Parameter:
    """A weight of its full shape in one number. fp32, which is what `peft` trains beside 16 bits too."""
    codes: Any = experts._parameters[name]
    return nn.Parameter(torch.zeros((), device=codes.device).expand(experts.wide_shapes[name]), requires_grad=False)


class AdapterOfCodes:
    """Mixed into the wrapper of `peft`: the forward of experts in few bits knows of the factors."""

    parameter_name: str
    num_experts: int
    lora_A: Any
    lora_B: Any
    scaling: dict[str, float]

    def _activate_lora(self, active_adapters: Sequence[str]) -> AbstractContextManager[None]:
        experts = self._experts()
        if experts is None:
            return super()._activate_lora(active_adapters)  # pyright: ignore[reportAttributeAccessIssue] - of peft's
        factors = [self._factors(adapter) for adapter in active_adapters if adapter in self.lora_A]
        return _adapted(experts, self.parameter_name, factors)

    def _factors(self, adapter: str) -> LowRank:
        out_of: Tensor = self.lora_A[adapter].weight.unflatten(0, (self.num_experts, -1))
        into: Tensor = self.lora_B[adapter].weight.unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)
        return LowRank(out_of, into, self.scaling[adapter])

    def _experts(self) -> LowBitExperts | None:
        """The experts below, or None if they were widened since, for a reference run."""
        found = self.get_base_layer()  # pyright: ignore[reportAttributeAccessIssue] - of peft's
        return found if isinstance(found, LowBitExperts) else None

    def get_param(self) -> Tensor:
        """The weight that is adapted; one of its shape where it is codes."""
        experts = self._experts()
        if experts is None or self.parameter_name not in experts.wide_shapes:
            return super().get_param()  # pyright: ignore[reportAttributeAccessIssue] - of peft's
        return _stand_in(experts, self.parameter_name)

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """Raises `ModelError` beside codes."""
        if self._experts() is not None:
            raise ModelError(
                f"adapters of {self.parameter_name} cannot be merged into its codes in few bits: keep them beside it"
            )
        super().merge(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue] - of peft's


@contextmanager
def _adapted(experts: LowBitExperts, name: str, factors: Sequence[LowRank]) -> Iterator[None]:
    """Experts whose weight of that name has these factors beside it, for the length of a forward."""
    before = experts.low_rank
    experts.low_rank = {**before, name: factors}
    try:
        yield
    finally:
        experts.low_rank = before


def _wrapper() -> Any:
    """The class of adapters on parameters in `peft`, which is in use by now."""
    return importlib.import_module("peft.tuners.lora.layer").ParamWrapper


@functools.cache
def _wrapper_of_codes() -> Any:
    return type("AdapterOfExpertCodes", (AdapterOfCodes, _wrapper()), {"__module__": __name__})
