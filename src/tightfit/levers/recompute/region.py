"""Replaces the `forward` of a module instance by one under a lever, and restores it."""

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from tightfit.errors import RecomputeError
from tightfit.levers.activity import activity
from tightfit.levers.recompute.expected import Expected
from tightfit.levers.recompute.exposure import TAKES_ANOTHER_PATH
from tightfit.levers.recompute.policy import Policy
from tightfit.levers.recompute.recorder import Recorder
from tightfit.levers.recompute.saved import hooks_around, unpack
from tightfit.levers.recompute.saves import Again, Noting, Saves
from tightfit.levers.recompute.values import (
    OffloadStore,
    Product,
    RecordingScope,
    has_plain_storage,
    hold_memory,
    is_aliased,
    is_exposed,
    product_of,
    set_product,
)
from tightfit.runtime.internals import (
    checkpoint_is_around,
    dual_numbers_are_active,
    nothing_is_watched,
    transforms_are_active,
    without_dynamo,
    without_function_modes,
)
from tightfit.runtime.module_paths import plain_tensors_of
from tightfit.runtime.nested import tensors_in

STREAMED = "streamed"
_numbers = itertools.count()
_MOST_MISFITS = 2  # of one kind of input, after which each run of it is recorded
_MOST_NOTES = 256  # of one block: ragged batches have many shapes


class FrugalForward:
    """Replaces the `forward` of one module instance. It is copied and pickled with its module."""

    does = "recomputed"  # the lever's effect on the block, for error messages

    @property
    def reads_streamed(self) -> bool:
        """True if the block may be streamed too: this forward runs the one that it replaces, and reads weights of no
        other block.
        """
        return False

    @property
    def begins_otherwise(self) -> bool:
        """True if its next run on a card is the first one, and runs by another executor than every later one."""
        return False

    def __init__(self, module: nn.Module, path: str):
        self.path = path
        self.previous: Callable[..., Any] | None = module.__dict__.get("forward")
        self.number = next(_numbers)  # a copy of the module has a copy of this forward with the same number
        self.removed = False
        self._module = weakref.ref(module)  # the module holds this object: a strong reference would be a cycle

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "a module's forward outlives the module"
        return module

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that this one replaces."""
        if self.previous is not None:
            return self.previous
        return type(self.module).forward.__get__(self.module)

    def install(self) -> None:
        self.removed = False
        self.module.__dict__["forward"] = self

    @property
    def steps_aside(self) -> bool:
        """True to run the original forward unchanged.

        That is so without gradients, after `remove` (others may still hold this forward), in a `torch.func` transform,
        which does not support saved-tensor hooks, and with dual numbers: their gradients are added in another order.
        """
        return self.removed or not torch.is_grad_enabled() or transforms_are_active() or dual_numbers_are_active()

    def remove(self) -> None:
        """Restore the previous forward exactly, if the module still has this one. Calling it again does nothing.

        If other code has wrapped this forward meanwhile, the wrapper stays, and this forward runs the original.
        """
        self.removed = True
        module = self._module()
        if module is None or module.__dict__.get("forward") is not self:
            return
        if self.previous is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = self.previous

    @contextmanager
    def moving_no_state(self) -> Iterator[None]:
        """A context for a run of the block. Raises `RecomputeError` if a checkpoint around it would move its buffers.

        That checkpoint runs code again as far as a tensor that it saved. The block saves others than the plain run.
        """
        if not checkpoint_is_around():
            yield
            return
        before = buffer_versions(self.module)
        yield
        after = buffer_versions(self.module)
        moved = [name for name in before if after.get(name) != before[name]]
        if moved:
            raise RecomputeError(
                f"{self.path}: it writes its buffer {moved[0]} and lies within a checkpoint of the model's own, which "
                "writes it again in backward, depending on what the block saves: take that checkpoint away, or leave "
                "this block out"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _module=weakref.ref(state["_module"]))


def forwards_on(model: nn.Module) -> list[FrugalForward]:
    """The forwards of levers on the modules of a model."""
    found = [module.__dict__.get("forward") for module in model.modules()]
    return [forward for forward in found if isinstance(forward, FrugalForward)]


class RecordedForward(FrugalForward):
    """Runs a block so that each operator's output is kept, recomputed or offloaded, as the policy says.

    `holds_output` says whether the block's results are held for the next block; false if both are in one segment. The
    policy offloads to the `offload_store`. The first run is compared with the operators that are `expected`.
    """

    def __init__(
        self,
        module: nn.Module,
        path: str,
        policy: Policy,
        *,
        offload_store: OffloadStore | None = None,
        holds_output: bool = True,
        expected: Expected | None = None,
    ):
        super().__init__(module, path)
        assert offload_store is not None or not policy.offloads, f"{path} has no offload_store to offload to"
        self.policy = policy
        self.offload_store = offload_store
        self.holds_output = holds_output
        self.expected = expected if policy.kept or policy.offloaded else None
        self.saves: dict[tuple, Saves] = {}  # where all is offloaded: by the kind of input
        self.changing: dict[tuple, int] = {}  # by the kind of input: how often a run saved other tensors than noted
        self.sees_functions = not any(isinstance(part, TAKES_ANOTHER_PATH) for part in module.modules())

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "saves": {}, "changing": {}}  # a copy notes its own

    @property
    def reads_streamed(self) -> bool:
        return self.holds_output  # in a segment, backward of one block computes others again

    @without_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.steps_aside:
            return self.original(*args, **kwargs)
        notes = (
            self.policy.offloads_all
            and self.holds_output  # in a segment, a block reads values that another one computes
            and activity.on_save is None
            and nothing_is_watched()
            and hooks_around() is None
        )
        kind = self._kind_of(args, kwargs) if notes else ()
        notes = notes and self.changing.get(kind, 0) < _MOST_MISFITS
        saves = self.saves.get(kind) if notes else None
        if saves is not None and self.offload_store is not None:
            return self._offload_again(saves, self.offload_store, kind, args, kwargs)
        recorder = Recorder(
            self.path, self.policy, offload_store=self.offload_store, sees_functions=self.sees_functions
        )
        with self.moving_no_state(), recorder.observers, self._named():
            recorder.start()
            if self.expected is not None:
                recorder.ran = []
            if notes:
                recorder.noting = Noting()
            # Inputs first: an operator of the block may already need them in backward.
            if self.policy.offloads_inputs and self.offload_store is not None:
                enter((args, kwargs), recorder.scope, self.offload_store)
            outputs = self.original(*args, **kwargs)
            recorder.observers.enter_context(without_function_modes())  # what follows is no function of the block
            leave(outputs, held=self.holds_output)
            if recorder.noting is not None:
                self._remember(kind, recorder.noting.finished())
        if self.expected is not None and recorder.ran is not None:
            self.policy, self.expected = self.expected.bind(self.policy, recorder.ran, self.path), None
        return outputs

    def _kind_of(self, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """A key that tells apart inputs for which different tensors are saved."""
        shapes = [tensor.shape for tensor in tensors_in((args, kwargs))]  # a cache in a dict grows
        return (self.module.training, *shapes)

    def _remember(self, kind: tuple, saves: Saves | None) -> None:
        """Let later runs on this kind of input do without the recorder."""
        if len(self.saves) + len(self.changing) >= _MOST_NOTES:
            self.saves.clear()
            self.changing.clear()
        if saves is not None:
            self.saves[kind] = saves

    def _offload_again(
        self, saves: Saves, offload_store: OffloadStore, kind: tuple, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Run the block with saved-tensor hooks alone."""
        scope = RecordingScope()
        again = Again(saves, scope, offload_store)
        offload_store.begin()
        try:
            with torch.autograd.graph.saved_tensors_hooks(again.save, unpack):
                if self.policy.offloads_inputs:
                    enter((args, kwargs), scope, offload_store)
                outputs = self.original(*args, **kwargs)
                leave(outputs, held=True)
            if not again.close():
                self.saves.pop(kind, None)
                # Or its runs would by turns be noted, and hold what the note does not fit.
                self.changing[kind] = self.changing.get(kind, 0) + 1
        finally:
            scope.is_open = False
            offload_store.end()
            again.close()
        return outputs

    @contextmanager
    def _named(self) -> Iterator[None]:
        """A context in which PyTorch's refusal of saved-tensor hooks becomes an error that names the block."""
        try:
            yield
        except RuntimeError as error:
            if not (str(error).startswith("torch.func.") and "saved tensor hooks" in str(error)):
                raise
            raise RecomputeError(
                f"{self.path}: the block uses torch.func.grad, or another transform that does not support saved-tensor "
                "hooks, and so cannot be recomputed: leave this block out"
            ) from error


class ReentrantForward(FrugalForward):
    """Runs a block under PyTorch's reentrant checkpoint, on request (`use_reentrant=True`).

    That checkpoint runs the block's Python code twice, and gives gradients only to tensors that the block returns. A
    block for which this changes gradients or buffers is refused by name.
    """

    @property
    def reads_streamed(self) -> bool:
        return True

    @without_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.steps_aside:
            return self.original(*args, **kwargs)
        attributes, versions = attributes_with_tensors(self.module), buffer_versions(self.module)
        outputs = checkpoint(self.original, *args, use_reentrant=True, **kwargs)
        left = changed(attributes, attributes_with_tensors(self.module))
        # A mixture of experts keeps its auxiliary loss as an attribute. On MiniMind's, 73 of 86 gradients were wrong,
        # with the same loss.
        if left:
            raise RecomputeError(
                f"{self.path}: the block leaves tensors on {left}, whose gradients a reentrant recompute drops: "
                "use use_reentrant=False"
            )
        moved = changed(versions, buffer_versions(self.module))
        # With spectral norm, updated twice, 40 of 45 gradients were wrong, with the same loss.
        if moved:
            raise RecomputeError(
                f"{self.path}: the block updates its buffers {moved}, which a reentrant recompute moves twice: "
                "use use_reentrant=False"
            )
        return outputs


def changed(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The names with a new or different entry, for an error message."""
    return ", ".join(sorted(name for name, entry in after.items() if entry != before.get(name)))


def buffer_versions(block: nn.Module) -> dict[str, tuple[int, int]]:
    """Identity and version counter of each buffer: a write in place or a new tensor changes one of them."""
    return {n: (_number_of(b), 0 if b.is_inference() else b._version) for n, b in block.named_buffers()}


def attributes_with_tensors(block: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names of plain attributes that hold tensors, with the identity of what they hold."""
    found = {}
    for path, module in block.named_modules():
        for name, tensors in plain_tensors_of(module):
            if tensors:
                found[f"{path}.{name}".lstrip(".")] = tuple(map(_number_of, tensors))
    return found


_numbers_of_tensors: Any = WeakTensorKeyDictionary()


def _number_of(tensor: torch.Tensor) -> int:
    """A number that no other tensor had or will have: an `id` passes to another tensor when its own has gone."""
    return _numbers_of_tensors.setdefault(tensor, next(_numbers))


def enter(inputs: Any, scope: RecordingScope, offload_store: OffloadStore) -> None:
    """Mark the block's inputs that the model computed for offload.

    Masks, positions and the model's own inputs are not offloaded, because others hold them anyway.
    """
    for tensor in tensors_in(inputs):
        if tensor.grad_fn is None or not has_plain_storage(tensor):
            continue
        storage = tensor.untyped_storage()
        is_ours = product_of(storage) is None and not is_exposed(storage) and not is_aliased(storage)
        if is_ours and storage.nbytes() >= offload_store.smallest_bytes:
            set_product(storage, Product(None, scope, offload_store=offload_store))


def leave(outputs: Any, *, held: bool) -> None:
    """Prepare the block's results for its caller.

    With `held`, the caller holds their memory from now on. Otherwise (within a segment) they remain recomputable as
    long as nobody writes into them.
    """
    for tensor in tensors_in(outputs):
        if not has_plain_storage(tensor):
            continue
        storage = tensor.untyped_storage()
        product = product_of(storage)
        if product is None:
            continue
        product.settle()
        if held:
            hold_memory(product, tensor)
        else:
            # Outside of the block no recorder sees writes. The version counter then shows whether there was one.
            product.left_as = (*product.left_as, (TensorWeakRef(tensor), tensor._version))
