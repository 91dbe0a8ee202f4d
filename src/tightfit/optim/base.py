"""The base class of this package's optimizers: settings, the outline of a step, twins, copying and pickling."""

from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from tightfit.optim.adamw_step import SETTINGS, settings
from tightfit.optim.strict_state import StrictStateOptimizer
from tightfit.runtime.internals import without_dynamo

_OWN, _CHOICE = "own_settings", "choice"


class Shared(TypedDict, total=False):
    """The settings of every kind of optimizer, besides the learning rate."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float


class FrugalOptimizer(StrictStateOptimizer):
    """An optimizer with AdamW's settings and further ones.

    A subclass defines `update`, which updates the parameters. If it has further settings, it returns them from
    `own_settings` and reads them in `prepare`, before there are parameters. `adopt` prepares new parameters.

    An optimizer that is copied or pickled together with its model belongs to the copied parameters. A step in backward
    is not copied with it. Raises `InputError` for settings out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ):
        self._is_built = False
        super().__init__(params, settings(lr, betas, eps, weight_decay))
        self._is_built = True
        self.adopt(self._parameters())

    def prepare(self) -> None:
        """Store the further settings, before there are parameters. Raises `InputError` if one is out of range."""

    def own_settings(self) -> dict[str, Any]:
        """The arguments of `prepare`."""
        return {}

    def adopt(self, parameters: Sequence[Tensor], choice: Any = None) -> None:
        """Prepare new parameters. A copied optimizer passes the `choice` of its original."""

    def choice(self) -> Any:
        """The decision of `adopt` about the parameters, for copies."""

    def update(self) -> None:
        """Update every parameter that has a gradient. Called without autograd."""
        raise NotImplementedError  # each optimizer has its own

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        # `Optimizer.__init__` calls this for each group too, before all of them are known.
        if self._is_built:
            self.adopt(self.param_groups[-1]["params"])

    def twin(self, groups: list[dict[str, Any]] | None = None) -> "FrugalOptimizer":
        """An optimizer with the same settings, without states, over the same parameters or those of `groups`."""
        groups = [dict(group) for group in self.param_groups] if groups is None else groups
        shared = {name: self.defaults[name] for name in SETTINGS}
        return type(self)(groups, **shared, **self.own_settings())

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _run_update(self)
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), _OWN: self.own_settings(), _CHOICE: self.choice()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        rest = dict(state)
        # The choice is copied, not made again: the states exist where the original optimizer put them.
        own, choice = rest.pop(_OWN), rest.pop(_CHOICE)
        self._is_built = True
        self.prepare(**own)
        super().__setstate__(rest)
        self.adopt(self._parameters(), choice)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]


@without_dynamo  # where a user compiles the step: updates make states and other optimizers, and wait for copies
def _run_update(optimizer: FrugalOptimizer) -> None:
    optimizer.update()
