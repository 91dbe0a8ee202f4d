"""A dispatch mode that records operators with their prices, the storages that they allocate, and the level of memory.

Dry runs (`tracing/dry_run.py`) and observed real steps (`monitoring/real_run.py`) share this bookkeeping.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.devices.clocks import Clocks, Seconds, clocks_of
from tightfit.levers.activity import activity
from tightfit.runtime.internals import ENGINE_CODE, current_node, is_dense, no_torch_dispatch
from tightfit.runtime.operators import Traits, chooses, tensors_among, written_arguments
from tightfit.runtime.simulation import simulation
from tightfit.tracing.cpu_measured import BY_NORM, is_measured, measured_scratch
from tightfit.tracing.ledger import Cell, Ledger
from tightfit.tracing.modules import ModuleTracker
from tightfit.tracing.questions import Questions
from tightfit.tracing.record import OperatorRecord, Phase
from tightfit.tracing.rules import ADDED_IN_PLACE, PRODUCTS, inside
from tightfit.tracing.shapes import TensorShape
from tightfit.tracing.unbacked import is_unbacked
from tightfit.tracing.workspace import Workspace, cpu_workspace

MODE_DEPTH = 6  # frames between the `__torch_dispatch__` of a mode and that of the next one, at most
OperatorCost = Callable[[str, Sequence[TensorShape], Sequence[TensorShape], tuple], float]


def no_cost(name: str, inputs: Sequence[TensorShape], outputs: Sequence[TensorShape], arguments: tuple) -> float:
    """The cost of an operator in a run that needs no seconds."""
    return 0.0


class Call(NamedTuple):
    """An operator with the arguments of one call."""

    operator: Any
    args: tuple
    kwargs: dict[str, Any]

    @property
    def constants(self) -> tuple:
        """The positional arguments that are no tensors."""
        return tuple(each for each in self.args if not isinstance(each, torch.Tensor))


_measured: dict[Any, int | None] = {}  # scratch memory of calls that ran, by their key; None: it is not known


@dataclass(frozen=True)
class ExecutorCost:
    """The recompute executor's own seconds, without the kernel, for an operator that it records or replays.

    `captured` is what an operator in the program of a captured block takes more than in eager code: negative if less.
    """

    recorded: float = 0.0
    replayed: float = 0.0
    captured: float = 0.0

    def seconds(self) -> float:
        """The executor's seconds for the operator that runs now."""
        if activity.captured:
            return self.captured
        if activity.offloading:
            return 0.0
        return self.replayed if activity.recomputing else self.recorded if activity.recording else 0.0


NO_EXECUTOR_COST = ExecutorCost()


class Recording(TorchDispatchMode):
    """Fills a `Ledger` and a list of operators. Subclasses say how operators run."""

    def __init__(
        self,
        ledger: Ledger,
        modules: ModuleTracker,
        cost: OperatorCost = no_cost,
        workspace: Workspace = cpu_workspace,
        executor: ExecutorCost = NO_EXECUTOR_COST,
    ):
        super().__init__()
        self.executor = executor
        self.ledger = ledger
        self.modules = modules
        self.cost = cost
        self.workspace = workspace
        self.phase = Phase.FORWARD
        self.questions = Questions(modules)  # stays empty in a real step, whose numbers are known
        self.operators: list[OperatorRecord] = []
        self.levels: list[int] = []
        self.starts: list[int] = []
        self.with_gradient: tuple[str, ...] = ()
        self.gradients_before: tuple[str, ...] = ()
        self._costs: dict[Any, tuple[float, int]] = {}
        self._chooses: dict[Any, bool] = {}  # whether a call's results are indices
        self._sum: tuple[int, int] | None = None  # the last sum in place: its left operand's storage, its time
        self._product: tuple[int, Any] | None = None  # the last operator, if it is a product: its storage, its caller
        self._continued: int | None = None  # the product's storage, while an operator runs that the same call asked for
        self._nodes: dict[int, int] = {}  # the node of the graph, by its number, in which each operator of backward ran

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # PyTorch would wrap `__torch_dispatch__` in two frames otherwise, and `_called_by_engine` would never see the
        # engine's frame (notes/recompute.md, "The engine's frames").
        return False

    def see(self, tensor: torch.Tensor) -> Cell:
        """The cell of a tensor's storage. A storage without one existed before the step."""
        raise NotImplementedError  # whether its numbers are known differs between a dry run and a real one

    def begin_again(self) -> None:
        """Forget the operators so far and start to record here."""
        self.settle_sum()
        for recorded in (self.operators, self.levels, self.starts, self._nodes):
            recorded.clear()
        self.ledger.begin_again()
        self.modules.begin_again()

    # The steps of one operator

    def view(self, func: Any, args: tuple, kwargs: dict) -> Any:
        for tensor in tensors_among(args):
            self.see(tensor)
        out = func(*args, **kwargs)
        for tensor in tensors_among((out,)):
            self.see(tensor)
        return out

    def begin(self, inputs: Sequence[torch.Tensor]) -> int:
        product, self._product = self._product, None
        self._continued = product[0] if product and product[1] and product[1] == _caller() else None
        del product  # and with it the frame, whose tensors may end with it
        self.settle_sum()
        index = self.ledger.now = len(self.operators)
        self.starts.append(self.ledger.live_bytes)
        if self.phase is Phase.BACKWARD and (node := current_node()) is not None:
            self._nodes[index] = node._sequence_nr()
        return index

    def account(
        self, traits: Traits, args: tuple, kwargs: dict, out: Any, index: int, *, known: bool
    ) -> tuple[int, ...]:
        """Enter new storages and new values. Returns the values that this operator made."""
        made = []
        if traits.written:
            for target in tensors_among(written_arguments(traits, args, kwargs)):
                made.append(self.ledger.new_value(self.see(target), index))
        forward = self.phase is Phase.FORWARD or activity.recomputing > 0
        for tensor in tensors_among((out,)):
            if self.ledger.cell_of(tensor) is None:
                cell = self.ledger.track(
                    tensor, known=known or not is_unbacked(tensor), operator=index, forward=forward
                )
                made.append(cell.value)
        return tuple(made)

    def finish(
        self, traits: Traits, inputs: Sequence[torch.Tensor], call: Call, out: Any, key: Any, reads: Any, makes: Any
    ) -> None:
        seconds, workspace = self.priced(traits, inputs, call, out, key)
        is_choice = self._chooses.get(key)
        if is_choice is None:
            is_choice = self._chooses[key] = chooses(traits, out)
        executor_seconds, alone, whole = self.executor.seconds(), None, simulation.repeats * seconds
        host, device = clocks_of(seconds, executor_seconds / simulation.repeats)
        if isinstance(seconds, Seconds):
            alone = Clocks(simulation.repeats * seconds.clocks.host, simulation.repeats * seconds.clocks.device)
            executor_seconds = max(alone.host + executor_seconds, alone.device) - whole
        phase = Phase.RECOMPUTE if activity.recomputing else self.modules.phase(self.phase)
        watched = phase is Phase.FORWARD
        module, turn = self.modules.attribute(phase)
        self.levels.append(self.ledger.live_bytes + workspace)
        self.operators.append(
            OperatorRecord(
                traits.name, phase, module, whole + executor_seconds, workspace,
                activity.region if watched else None, activity.occurrence, reads, makes, is_choice,
                executor_seconds=executor_seconds, call=turn, operands=activity.operands if watched else "",
                host_seconds=simulation.repeats * host, device_seconds=simulation.repeats * device, alone=alone,
            )
        )  # fmt: skip
        self.note_sum(traits, inputs, out)

    def note(
        self,
        name: str,
        seconds: float,
        *,
        reads: tuple[int, ...] = (),
        makes: tuple[int, ...] = (),
        copied_bytes: int = 0,
        scratch_bytes: int = 0,
    ) -> None:
        """Enter an event that is no operator of PyTorch, with the memory that it needs while it runs. Call it after
        `begin`.
        """
        phase = Phase.RECOMPUTE if activity.recomputing else self.phase
        module, call = self.modules.attribute(phase)
        host, device = clocks_of(seconds)
        self.levels.append(self.ledger.live_bytes + scratch_bytes)
        self.operators.append(
            OperatorRecord(
                name, phase, module, seconds, scratch_bytes, None, -1, reads, makes, False,
                copied_bytes=copied_bytes, call=call, host_seconds=host, device_seconds=device,
            )
        )  # fmt: skip

    def priced(
        self, traits: Traits, inputs: Sequence[torch.Tensor], call: Call, out: Any, key: Any
    ) -> tuple[float, int]:
        key = key, simulation.host > 0  # the host's prices are not the device's
        price = self._costs.get(key)
        if price is None:
            shapes = [TensorShape.of(t) for t in inputs]
            outputs = [TensorShape.of(t) for t in tensors_among((out,))]
            seconds = self.cost(traits.name, shapes, outputs, call.constants)
            price = self._costs[key] = seconds, self.scratch(traits.name, inputs, call, shapes, outputs, key)
        return price

    def scratch(
        self,
        name: str,
        inputs: Sequence[torch.Tensor],
        call: Call,
        shapes: Sequence[TensorShape],
        outputs: Sequence[TensorShape],
        key: Any,
    ) -> int:
        """Bytes that a call allocates and frees before it returns."""
        if self.workspace is not cpu_workspace or not is_measured(call.operator, inputs, call.constants):
            return self.workspace(name, shapes, outputs, call.constants)
        if key not in _measured:
            _measured[key] = measured_scratch(*call, outputs)
        if name in BY_NORM and inputs[0].numel() == inputs[0].shape[-1] ** 2:
            self.questions.note(f"the norm of the matrix given to {name}", "large", moves_peak=True)
        if (scratch := _measured[key]) is None:
            self.questions.note(f"the scratch memory of {name}", "none")
        return scratch or 0

    # PyTorch's own in-place operators: autograd's, the mask that plain attention adds to its scores, and the bias that
    # `linear` adds to a product. Autograd adds into a gradient that nothing else holds, and scatters into new zeros, in
    # place. Under a dispatch mode all this is out of place, which makes peaks up to 8% too high (Mamba, MusicGen). A
    # view's base holds the memory as well, so autograd does not add into a view.

    def note_sum(self, traits: Traits, inputs: Sequence[torch.Tensor], out: Any) -> None:
        if traits.name in PRODUCTS:
            self._product = self.see(out).index, _caller()
            return
        is_sum = traits.name in ADDED_IN_PLACE and (
            (inside.operator and inside.adds_in_place)
            or (self.phase is Phase.BACKWARD and _called_by_engine() and not self._is_of_a_formula(traits, inputs[0]))
            # `linear` (native/Linear.cpp) and plain attention (native/transformers/attention.cpp) add to a product in
            # place, unless a dispatch mode is active.
            or self._continued == self.see(inputs[0]).index
        )
        if is_sum and is_dense(inputs[0]) and not inputs[0]._is_view():
            self._sum = (self.see(inputs[0]).index, self.ledger.now)

    def _is_of_a_formula(self, traits: Traits, left: torch.Tensor) -> bool:
        """True if a sum is a formula's own (`var_mean_backward`, torch/csrc/autograd/FunctionsManual.cpp).

        A formula adds what it computed itself, out of place. The engine adds the gradients that nodes give: two of one
        node only where it gives both to the same place.
        """
        made = self.ledger.entries[self.see(left).index].operator
        if traits.name != "aten.add.Tensor" or made is None or self._nodes.get(made) is None:
            return False
        node = current_node()
        if node is None or node._sequence_nr() != self._nodes[made]:
            return False
        places = [place for place in node.next_functions if place[0] is not None]
        return len(set(places)) == len(places)

    def settle_sum(self) -> None:
        """Count the last sum in place if its left operand was freed right after it, as the real step would run it."""
        self._product = None
        if self._sum is None:
            return
        left, when = self._sum
        self._sum = None
        entry = self.ledger.entries[left]
        if entry.died == when + 1:
            entry.died = when
            self.levels[when] -= entry.bytes


@functools.cache
def answers_itself(kind: type) -> bool:
    """True if a class of tensors implements `__torch_dispatch__`: quantised states, gradients on the host."""
    return kind.__torch_dispatch__ is not no_torch_dispatch


def _caller() -> tuple[FrameType, int] | None:
    """The frame and the instruction of the Python code that called the operator; None if another dispatch mode did."""
    # The frame itself: one that ended gives its address to the next one, which may be of the same code (a loop that
    # calls operators).
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
        frame = frame.f_back
    caller = outer = None if frame is None else frame.f_back
    for _ in range(MODE_DEPTH):
        if outer is None:
            break
        if outer.f_code.co_name == "__torch_dispatch__":
            return None
        outer = outer.f_back
    return None if caller is None else (caller, caller.f_lasti)


def _called_by_engine() -> bool:
    """True if autograd's engine itself called the operator, and not Python code that runs in backward."""
    # Python code in backward (a custom Function) runs the same operators out of place in the real step too.
    frame = sys._getframe(1)
    while frame.f_code.co_name != "__torch_dispatch__":
        assert frame.f_back is not None, "only a mode asks"
        frame = frame.f_back
    return frame.f_back is not None and frame.f_back.f_code is ENGINE_CODE  # a device thread of the engine has no frame
