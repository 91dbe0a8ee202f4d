"""Observes a block's forward: decides for each operator's output whether it is kept, and records how to compute it
again if not.

Three observers are active during the forward. The dispatch mode sees every operator below autograd, and records those
whose output is not kept. The saved-tensor hooks see every tensor that autograd saves, and save a promise instead if the
tensor's operator is recorded. A function mode sees memory that is handed to code outside of PyTorch (`exposure.py`).
The user's Python code never runs a second time, so its side effects (updated buffers, appended caches, hooks, random
numbers of other libraries) happen once.
"""

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.errors import RecomputeError
from tightfit.levers.activity import activity, hooks_of_others
from tightfit.levers.recompute.expected import Ran
from tightfit.levers.recompute.exposure import ExposureMode
from tightfit.levers.recompute.generators import GeneratorState, draws, generator_of
from tightfit.levers.recompute.policy import KEEP_ALL, Decision, OperatorKey, Policy, operands_of
from tightfit.levers.recompute.saved import Hooks, hooks_around, pack, pass_on, unpack
from tightfit.levers.recompute.saves import Noting
from tightfit.levers.recompute.values import (
    Geometry,
    OffloadStore,
    Operation,
    Product,
    RecordingScope,
    Reference,
    existing_root,
    forget_held,
    forget_root,
    has_plain_storage,
    is_exposed,
    product_of,
    root_of,
    set_product,
)
from tightfit.runtime.internals import dispatch_is_watched, notice_compiled_calls
from tightfit.runtime.nested import tensors_in
from tightfit.runtime.operators import (
    Traits,
    chooses,
    flat,
    instances,
    map_instances,
    traits_of,
    written_arguments,
)


class Recorder(TorchDispatchMode):
    """The observer of one call of one block (a region)."""

    def __init__(
        self, region: str, policy: Policy, *, offload_store: OffloadStore | None = None, sees_functions: bool = True
    ):
        super().__init__()
        self.region = region
        self.policy = policy
        self.decides_for_all = not (policy.kept or policy.offloaded)
        self.recording = policy != KEEP_ALL and not policy.offloads_all  # the latter once only (`saves.py`)
        self.offload_store = offload_store
        self.by_operands = policy.counts_by_operands
        self.counts: dict[tuple[str, str], int] = {}  # calls so far, by name and operands
        self.scope = RecordingScope()
        self.sees_functions = sees_functions
        self.ran: list[Ran] | None = None  # a list: every operator is noted, to be compared with the plan's
        self.noting: Noting | None = None  # notes what becomes of saved tensors, for later runs
        self.around: Hooks | None = None  # saved-tensor hooks of others
        self.observers = ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the block runs outside of dynamo already; PyTorch would leave dynamo again for each operator

    def start(self) -> None:
        """Activate the observers until `observers` exits. Call it inside of `observers`."""
        # Inside, so that an interrupt at any line here removes those that are active already. One that remained would
        # record the operators after this block.
        if self.offload_store is not None:
            self.offload_store.begin()
            self.observers.callback(self.offload_store.end)
        notice_compiled_calls()
        self.observers.enter_context(self)
        # These know the recorder. Only the stack holds them, and not for longer than the block: no cycle remains.
        if self.sees_functions:
            self.observers.enter_context(ExposureMode(self.region, self.show))
        self.around = hooks_around()
        self.observers.enter_context(torch.autograd.graph.saved_tensors_hooks(self.save, unpack))
        self.observers.callback(self._close)

    def meets_compiled(self, function: Any) -> None:
        """Refuse a block that calls a function under `torch.compile`: as eager code it would round otherwise."""
        name = getattr(function, "__qualname__", type(function).__name__)
        raise RecomputeError(
            f"{self.region}: it calls {name} under torch.compile, whose code no lever can run again operator by "
            "operator: call the function without torch.compile, or leave this block out"
        )

    def show(self) -> None:
        """The block shows its memory to code outside of PyTorch."""
        if self.noting is not None:
            self.noting.fails = True

    def _close(self) -> None:
        self.scope.is_open = False
        self.noting = None  # autograd holds this object with its hook, and frees each value by itself

    def save(self, tensor: torch.Tensor) -> Any:
        """Saved-tensor hook."""
        saved = pack(tensor)
        if self.noting is not None:
            self.noting.note(tensor, saved)
        if self.around is None:
            return saved
        with hooks_of_others():
            return pass_on(tensor, saved, self.around)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        traits = traits_of(func)
        if activity.recomputing or activity.offloading or activity.passing:
            return func(*args, **kwargs)  # replays, copies for offload and hooks of others are none of the block's
        if traits.is_view:
            return func(*args, **kwargs)  # it only changes geometry
        is_watched = dispatch_is_watched()  # by modes other than this one, which ask what runs
        policy = self.policy
        if self.decides_for_all and not is_watched:
            return self.run(func, traits, policy.default, args, kwargs)  # nobody needs the operator's number
        operands = operands_of((*args, *kwargs.values())) if self.by_operands or is_watched else ""
        key = self.next_key(traits.name, operands if self.by_operands else "")
        decision = policy.decide(key)
        if not is_watched:
            return self.run(func, traits, decision, args, kwargs)
        known = key if self.by_operands else self.next_key(traits.name, operands)
        with activity.observed(self.region, known[1], operands, self.recording):
            return self.run(func, traits, decision, args, kwargs)

    def next_key(self, name: str, operands: str) -> OperatorKey:
        """Count a call, and give it its key."""
        occurrence = self.counts.get((name, operands), 0)
        self.counts[name, operands] = occurrence + 1
        return OperatorKey(name, occurrence, operands)

    def run(self, func: Any, traits: Traits, decision: Decision, args: tuple, kwargs: dict) -> Any:
        """Run the operator, and record it unless its outputs are kept."""
        if decision is Decision.OFFLOAD and traits.is_uninitialised:
            # `empty` has no content to copy. The operator that writes into it decides about the content.
            decision = Decision.RECOMPUTE
        if traits.exchanges_memory:
            if _exchanges_nothing(args) or _only_looks(func, args):  # parametrisations set a parameter to itself
                return func(*args, **kwargs)
            raise RecomputeError(
                f"{self.region}: {traits.name} exchanges the memory under a tensor, which cannot be recomputed: "
                "leave this block out"
            )
        targets: Sequence[torch.Tensor] = ()
        if traits.written:
            targets = list(instances(torch.Tensor, written_arguments(traits, args, kwargs)))
            trust_only_what_was_written(traits, targets)
        operation = None
        # Nobody knows whether an operator of another library gives the same result again, so it is never replayed. A
        # write into held memory makes nothing that could be dropped.
        if decision is Decision.RECOMPUTE and not traits.is_foreign and not writes_only_held(traits, targets):
            # Before the operator runs: its references must name the values that it reads, not those that it writes.
            operation = record(func, traits, args, kwargs, targets)
        # PyTorch's selective checkpoint caches outputs by tensor. A later in-place operator changes the cached memory
        # through an alias with a fresh version counter (`_unsafe_view`), and gradients are wrong without an error
        # (pytorch#119590). So storages are observed here, and old content is copied before each write.
        for target in targets:
            if preserve(target) and self.noting is not None:
                self.noting.fails = True
        results = func(*args, **kwargs)
        if self.ran is not None:
            operands = operands_of((*args, *kwargs.values()))
            self.ran.append(Ran(traits.name, operands, bytes_made((args, kwargs), results, targets)))
        offload_store = self.offload_store if decision is Decision.OFFLOAD and not traits.is_foreign else None
        if chooses(traits, results):
            # A recomputed router may send tokens to other experts than the forward did (pytorch#171355,
            # torchtitan#1117). Indices of routing and sorting are always kept.
            operation = offload_store = None
        if targets:
            note_writes(operation, targets, self.scope, offload_store)
        if operation is not None and not traits.returns_written:
            note_results(operation, traits, results, targets, self.scope)
        if offload_store is not None and not traits.returns_written:
            note_offloaded(offload_store, (args, kwargs), results, self.scope)
        return results


def _exchanges_nothing(args: tuple) -> bool:
    """True if a tensor is set to the memory that it has, with the same geometry."""
    if len(args) != 2 or not all(isinstance(each, torch.Tensor) and has_plain_storage(each) for each in args):
        return False
    target, source = args
    same = target.untyped_storage()._cdata == source.untyped_storage()._cdata
    return same and Geometry.of(target) == Geometry.of(source)


def _only_looks(func: Any, args: tuple) -> bool:
    """True if a tensor without memory is set to that of another: it becomes a view, and nothing is exchanged.

    So PyTorch looks at all weights of a recurrent network as one (`try_get_weight_buf` in cudnn/RNN.cpp).
    """
    target = args[0]
    is_set = isinstance(target, torch.Tensor) and func.overloadpacket is torch.ops.aten.set_ and len(args) > 1
    return is_set and has_plain_storage(target) and target.untyped_storage().nbytes() == 0


def trust_only_what_was_written(traits: Traits, targets: Sequence[torch.Tensor]) -> None:
    """Hold uninitialised memory unless this operator overwrites all of it."""
    # A kernel launched from Python (Triton, ctypes) may have written into memory of `empty` without the dispatcher. A
    # replay would start from other content.
    for target in targets:
        storage = target.untyped_storage() if has_plain_storage(target) else None
        product = None if storage is None else product_of(storage)
        if storage is None or product is None or not product.blank:
            continue
        if not traits.overwrites or target.numel() * target.itemsize != storage.nbytes():
            set_product(storage, None)


def bytes_made(arguments: Any, results: Any, targets: Sequence[torch.Tensor]) -> int:
    """Bytes of the storages that an operator allocated or wrote."""
    given = {tensor.untyped_storage()._cdata for tensor in tensors_in(arguments) if has_plain_storage(tensor)}
    made = [t for t in flat(results) if isinstance(t, torch.Tensor) and has_plain_storage(t)]
    storages = [t.untyped_storage() for t in made if t.untyped_storage()._cdata not in given]
    storages += [t.untyped_storage() for t in targets if has_plain_storage(t)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def writes_only_held(traits: Traits, targets: Sequence[torch.Tensor]) -> bool:
    """True if the operator returns what it writes, and writes only into memory that is held anyway."""
    return traits.returns_written and all(
        not has_plain_storage(t) or product_of(t.untyped_storage()) is None for t in targets
    )


def record(func: Any, traits: Traits, args: tuple, kwargs: dict, targets: Sequence[torch.Tensor]) -> Operation | None:
    """Record a call before it runs, with references in place of tensors.

    Returns None if the call reads memory that code outside of PyTorch may write: a replay could read other content.
    """
    exposed = False
    references: list[Reference] = []

    def refer(tensor: torch.Tensor) -> Any:
        nonlocal exposed
        if not has_plain_storage(tensor):
            return tensor  # a subclass or a sparse tensor: geometry over a storage does not describe it, so it is held
        storage = tensor.untyped_storage()
        exposed |= is_exposed(storage)
        value = product_of(storage)
        if value is None or (value.blank and not any(tensor is target for target in targets)):
            # Uninitialised memory that is read: nobody knows its content, so the memory itself is held.
            value = root_of(tensor, storage)
        elif not value.blank:
            # Backward will read this value in the replay, so an offloaded one is copied now.
            value.secure(tensor)
        references.append(Reference(value, Geometry.of(tensor)))
        return references[-1]

    held_args = map_instances(torch.Tensor, refer, args)
    held_kwargs = kwargs and dict(zip(kwargs, map_instances(torch.Tensor, refer, kwargs.values()), strict=True))
    if exposed:
        return None
    state = GeneratorState.of(generator_of(args, kwargs)) if draws(traits, args, kwargs) else None
    return Operation(func, traits, held_args, held_kwargs, references, state)


def preserve(target: torch.Tensor) -> bool:
    """Prepare for a write into the storage of `target`.

    A root that holds its content gets a copy. An unfinished copy to an offload store is completed first; then the
    result is true.
    """
    if not has_plain_storage(target):
        return False
    storage = target.untyped_storage()
    product = product_of(storage)
    is_offloaded = product is not None and product.settle()
    forget_held(storage)
    root = existing_root(storage)
    if root is not None:
        root.hold_copy()
        forget_root(storage)
    return is_offloaded


def note_writes(
    operation: Operation | None,
    targets: Sequence[torch.Tensor],
    scope: RecordingScope,
    offload_store: OffloadStore | None = None,
) -> None:
    """Give each written storage that held a product a new one, or none if its memory is kept."""
    plain = [target.untyped_storage() for target in targets if has_plain_storage(target)]
    for index, storage in enumerate(plain):
        if product_of(storage) is None:
            continue  # a parameter, an input or a kept output: others hold this memory, so a replay saves nothing
        is_worth_it = offload_store is not None and storage.nbytes() >= offload_store.smallest_bytes
        after = Product(operation, scope, offload_store=offload_store) if is_worth_it or operation is not None else None
        set_product(storage, after)
        if operation is not None and after is not None:
            operation.becomes.append((index, weakref.ref(after)))


def note_results(
    operation: Operation, traits: Traits, results: Any, targets: Sequence[torch.Tensor], scope: RecordingScope
) -> None:
    """Give each new storage among the results a product of this operation."""
    # Some operators return an argument, or memory of one. That storage belongs to another value.
    arguments = [id(reference.value) for reference in operation.references]
    if operation.becomes:
        arguments += [id(after()) for _, after in operation.becomes]
    written = [target.untyped_storage()._cdata for target in targets] if targets else ()
    for position, result in enumerate(flat(results)):
        if not isinstance(result, torch.Tensor) or not has_plain_storage(result):
            continue
        storage = result.untyped_storage()
        product, root = product_of(storage), existing_root(storage)
        if id(product) in arguments or id(root) in arguments or (written and storage._cdata in written):
            continue
        if product is None:
            product = Product(operation, scope, blank=traits.is_uninitialised)
            set_product(storage, product)
        operation.outputs.append((position, weakref.ref(product)))


def note_offloaded(offload_store: OffloadStore, arguments: Any, results: Any, scope: RecordingScope) -> None:
    """Give each new storage among the results that is large enough a product that goes to the offload store."""
    given = {tensor.untyped_storage()._cdata for tensor in tensors_in(arguments) if has_plain_storage(tensor)}
    for result in flat(results):
        if not isinstance(result, torch.Tensor) or not has_plain_storage(result):
            continue
        storage = result.untyped_storage()
        is_fresh = product_of(storage) is None and existing_root(storage) is None and storage._cdata not in given
        if is_fresh and storage.nbytes() >= offload_store.smallest_bytes:
            set_product(storage, Product(None, scope, offload_store=offload_store))
