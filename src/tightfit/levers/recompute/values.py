"""The values inside a block: those that are held, and those that can be computed again from them.

A value is the content of one storage between two writes into it. Tensors are only geometry over a value, so views
cost nothing, and each write makes a new value. A value is either a `Root`, whose memory is held, or a `Product`. For a
product only its operator is held, or a copy of its bytes outside of the allocator. References run from results to
arguments only. So when autograd frees a saved tensor, Python's reference counts free exactly the values that nothing
else needs.

A storage knows its present value only while the block's recorder sees every write into it. Afterwards the memory itself
is the truth.
"""

import itertools
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.weak import TensorWeakRef

from tightfit.levers.activity import offload
from tightfit.runtime.internals import counting_alias, function_switches
from tightfit.runtime.operators import Traits, flat, instances, map_instances, written_arguments

_ROOT, _PRODUCT, _HELD = "_tightfit_root", "_tightfit_product", "_tightfit_held"
_EXPOSED, _ALIASED, _STREAMED = "_tightfit_exposed", "_tightfit_aliased", "_tightfit_streamed"
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_sequence_numbers = itertools.count()


def has_plain_storage(tensor: torch.Tensor) -> bool:
    """True if a storage and a geometry over it describe the tensor completely."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not tensor.is_inference()
        and not tensor.is_quantized
    )


class Geometry(NamedTuple):
    """A tensor's position in its storage, and how its elements are read."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Geometry":
        return cls(
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def over(self, base: torch.Tensor) -> torch.Tensor:
        """A tensor with this geometry over the storage of `base`."""
        size, stride, offset, dtype, conjugated, negated = self
        if (
            base.shape == size
            and base.stride() == stride
            and base.dtype is dtype
            and base.storage_offset() == offset
            and base.is_conj() == conjugated
            and base.is_neg() == negated
        ):
            return base  # most contents are read as they were computed, and a new tensor takes longer than the question
        # `x.view(dtype)` shares a storage between dtypes, so the value may have been recorded with another one.
        if base.dtype != dtype:
            base = reinterpreted(base, dtype)
        tensor = base.as_strided(size, stride, offset)
        if tensor.is_conj() != conjugated:
            tensor = tensor.conj()
        return tensor if tensor.is_neg() == negated else torch.ops.aten._neg_view.default(tensor)


def reinterpreted(base: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The storage of `base` as a flat tensor of another dtype."""
    # By views, not by `set_`: a dry run follows views.
    if base.is_conj():
        base = base.conj()
    if base.is_neg():
        base = torch.ops.aten._neg_view.default(base)
    storage_bytes = base.untyped_storage().nbytes()
    whole = storage_bytes - storage_bytes % max(dtype.itemsize, base.itemsize)
    return base.as_strided((whole // base.itemsize,), (1,), 0).view(dtype)


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of `tensor` as a flat tensor, neither conjugated nor negated."""
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    return Geometry((count,), (1,), 0, tensor.dtype, conjugated=False, negated=False).over(tensor)


def modified_in_place(tensor: torch.Tensor, version: int) -> RuntimeError:
    """The error that autograd raises for a saved tensor that was written after it was saved."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"a {tensor.dtype} tensor of {tuple(tensor.shape)} that a recomputed block read at version {version} "
        "has been written since"
    )


class Root:
    """A value whose memory is held: a parameter, an input of the block, a kept output."""

    __slots__ = ("__weakref__", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor):
        # Not the tensor itself: it would hold the graph that computed it, and may get other memory (`p.data = ...`).
        self._tensor = counting_alias(tensor)
        self._version = tensor._version

    def is_current(self) -> bool:
        """True if the version counter shows no write into the storage."""
        return self._tensor._version == self._version

    def hold_copy(self) -> None:
        """Copy the present content of the storage, which is about to be written."""
        if self.is_current():  # else a write came first, and `base` reports it as autograd would
            self._tensor = whole_storage(self._tensor).clone()
            self._version = self._tensor._version

    def base(self) -> torch.Tensor:
        """A tensor over the held content. Raises `RuntimeError`, as autograd does, if it was written since."""
        fetch(self._tensor.untyped_storage())
        if not self.is_current():
            raise modified_in_place(self._tensor, self._version)
        return self._tensor


class RecordingScope:
    """The span in which the recorder that recorded a value sees every write."""

    __slots__ = ("is_open",)

    def __init__(self):
        self.is_open = True


class Copy(Protocol):
    """A storage's bytes outside of the allocator's memory. They are freed when this object is."""

    def fetch(self) -> torch.Tensor:
        """The bytes in new memory, as a flat tensor."""
        ...

    def settle(self) -> None:
        """Make the computation wait until the copy is complete, because the source is about to be written."""
        ...


class OffloadStore(Protocol):
    """The place to which values are offloaded."""

    @property
    def smallest_bytes(self) -> int:
        """Storages below this size are not offloaded."""
        ...

    def begin(self) -> None:
        """A call of a block begins. Backward will need the values that it stores together."""
        ...

    def end(self) -> None:
        """A call of a block ends. From here on no recorder calls `settle` before a write."""
        ...

    def put(self, tensor: torch.Tensor) -> Copy | None:
        """Copy the present content of the tensor's storage. None if there is no room."""
        ...


class Product:
    """A value that an operator computes. Its memory is held only after a replay, or if the block returns it.

    With an `offload_store` the value is offloaded. Its bytes are copied when the first operator appears that will need
    the value in backward. For most values no such operator appears.
    """

    __slots__ = (
        "__weakref__",
        "blank",
        "content",
        "left_as",
        "lent",
        "offload_store",
        "producer",
        "root",
        "scope",
        "shown",
    )

    def __init__(
        self,
        producer: "Operation | None",
        scope: RecordingScope,
        *,
        blank: bool = False,
        offload_store: OffloadStore | None = None,
    ):
        self.producer: Operation | Fetch | None = producer
        self.offload_store = offload_store
        self.scope = scope
        self.blank = blank  # from an operator that returns uninitialised memory, such as `empty`
        self.content: torch.Tensor | None = None  # recomputed, in memory that only the executor knows
        self.root: Root | None = None  # the original memory, held because the block returned it
        self.lent = False  # autograd got a tensor over the recomputed content, so no replay may write into it
        self.shown: Root | None = None  # the original memory, if code outside of PyTorch got its address
        self.left_as: tuple[tuple[TensorWeakRef, int], ...] = ()  # tensors that left the block, without being held

    @property
    def is_ready(self) -> bool:
        return self.content is not None or self.root is not None

    def is_in_storage(self) -> bool:
        """True if the product's storage still has this content, as far as recorder and version counters show."""
        if self.scope.is_open:
            return True
        left = [(reference(), version) for reference, version in self.left_as]
        return bool(left) and all(t is not None and t._version == version for t, version in left)

    def secure(self, tensor: torch.Tensor) -> None:
        """Note that backward will need this value, which is in the storage of `tensor` now."""
        if self.offload_store is None:
            return
        copy = self.offload_store.put(tensor)
        if copy is None:
            hold_memory(self, tensor)  # there is no room
        else:
            self.producer = Fetch(self, copy)
        self.offload_store = None

    def settle(self) -> bool:
        """Complete the copy of this value, because its memory is about to be written. False if there is none."""
        if not isinstance(self.producer, Fetch):
            return False
        self.producer.copy.settle()
        return True

    def fill(self, content: torch.Tensor) -> None:
        """Hold the recomputed content, and release the operator that computed it."""
        if not self.is_ready:
            self.content = content.detach() if content.requires_grad else content
            self.producer = None

    def hold(self, root: Root) -> None:
        """Hold the original memory, and release the operator that computed its content."""
        if not self.is_ready:
            self.root = root
            self.producer = None

    def base(self) -> torch.Tensor:
        """A tensor over the content."""
        if self.content is not None:
            return self.content
        assert self.root is not None, "a product is read before it was recomputed"
        return self.root.base()


class Reference:
    """A tensor argument of a recorded operator: a geometry over a value."""

    __slots__ = ("geometry", "value")

    def __init__(self, value: Root | Product, geometry: Geometry):
        self.value = value
        self.geometry = geometry

    def tensor(self) -> torch.Tensor:
        return self.geometry.over(self.value.base())


class Operation:
    """One recorded operator call, with everything needed to run it again.

    `args` and `kwargs` are those of the call, with a `Reference` in place of each tensor. `references` lists these, and
    `written` those that the operator writes into. `outputs` and `becomes` refer weakly to the products of the call: by
    position among the flat results, and by index into `written`.
    """

    __slots__ = (
        "args",
        "becomes",
        "generator_state",
        "kwargs",
        "operator",
        "outputs",
        "references",
        "sequence",
        "switches",
        "written",
    )

    def __init__(
        self,
        operator: Any,
        traits: Traits,
        args: tuple,
        kwargs: dict,
        references: list[Reference],
        generator_state: Any,
    ):
        self.operator = operator
        self.args = args
        self.kwargs = kwargs
        self.generator_state = generator_state
        # A replay must run the same kernels.
        self.switches = function_switches(convolves=traits.convolves, calls=False)
        self.sequence = next(_sequence_numbers)  # the order of replay: arguments are recorded before results
        self.references = references
        self.written: list[Reference] = []
        if traits.written:
            self.written = list(instances(Reference, written_arguments(traits, args, kwargs)))
        self.outputs: list[tuple[int, weakref.ref[Product]]] = []
        self.becomes: list[tuple[int, weakref.ref[Product]]] = []

    def values(self) -> Iterator["Root | Product"]:
        """The values that the operation reads."""
        return (reference.value for reference in self.references)

    def call(self, replaced: dict[int, torch.Tensor]) -> list[Any]:
        """Run the operator and return its flat results. `replaced` gives other memory to references, by identity."""

        def tensor(reference: Reference) -> torch.Tensor:
            base = replaced.get(id(reference))
            return reference.tensor() if base is None else reference.geometry.over(base)

        args = map_instances(Reference, tensor, self.args)
        values = map_instances(Reference, tensor, self.kwargs.values())
        return flat(self.operator(*args, **dict(zip(self.kwargs, values, strict=True))))


class Fetch:
    """An offloaded copy of a value. In a replay it acts as an operator that computes the value and reads nothing."""

    __slots__ = ("copy", "product", "sequence")

    def __init__(self, product: Product, copy: Copy):
        self.product = weakref.ref(product)
        self.copy = copy
        self.sequence = next(_sequence_numbers)

    def values(self) -> Iterator[Root | Product]:
        """The values that it reads: none."""
        return iter(())

    def deliver(self) -> None:
        """Bring the bytes back, if something still holds the value."""
        product = self.product()
        if product is not None:
            with offload():
                product.fill(self.copy.fetch())


def product_of(storage: Any) -> Product | None:
    """The product whose value this storage holds now; None if there is none, or if the storage was written since."""
    product = storage.__dict__.get(_PRODUCT)
    if product is None or product.is_in_storage():
        return product
    del storage.__dict__[_PRODUCT]
    return None


def set_product(storage: Any, product: Product | None) -> None:
    if product is None:
        storage.__dict__.pop(_PRODUCT, None)
    else:
        storage.__dict__[_PRODUCT] = product


def hold_memory(product: Product, tensor: torch.Tensor) -> None:
    """Hold the original memory of a product, which is that of `tensor`. Nothing is recorded about it any more."""
    storage = tensor.untyped_storage()
    set_product(storage, None)  # else storage, product and root would be a reference cycle
    product.hold(root_of(tensor))
    storage.__dict__[_HELD] = weakref.ref(product)


def held_product(storage: Any) -> Product | None:
    """The product whose original memory this storage is, if it was not written since."""
    reference = storage.__dict__.get(_HELD)
    product = None if reference is None else reference()
    return product if product is not None and product.root is not None and product.root.is_current() else None


def forget_held(storage: Any) -> None:
    storage.__dict__.pop(_HELD, None)


def existing_root(storage: Any) -> Root | None:
    reference = storage.__dict__.get(_ROOT)
    return None if reference is None else reference()


def root_of(tensor: torch.Tensor, storage: Any = None) -> Root:
    """The root that holds the present content of the tensor's storage. All callers get the same one."""
    storage = tensor.untyped_storage() if storage is None else storage
    root = existing_root(storage)
    if root is None or not root.is_current():
        root = Root(tensor)
        storage.__dict__[_ROOT] = weakref.ref(root)
    return root


def forget_root(storage: Any) -> None:
    storage.__dict__.pop(_ROOT, None)


def is_exposed(storage: Any) -> bool:
    """True if code outside of PyTorch may write into the storage at any time."""
    return _EXPOSED in storage.__dict__


def expose(storage: Any) -> None:
    storage.__dict__[_EXPOSED] = True


def is_aliased(storage: Any) -> bool:
    """True if a tensor over the storage exists whose writes autograd does not count (`.data`)."""
    return _ALIASED in storage.__dict__


class Streamed(Protocol):
    """Weights that are not always on the device."""

    def needed(self) -> None:
        """Something reads them in backward."""
        ...


def fetch_by(storage: Any, streamed: Streamed | None) -> None:
    """Name the weights of a storage that leaves the device and comes back; None: it stays."""
    if streamed is None:
        storage.__dict__.pop(_STREAMED, None)
    else:
        storage.__dict__[_STREAMED] = weakref.ref(streamed)  # which holds the storage


def fetch(storage: Any) -> bool:
    """Have the bytes of a storage on the device, if it is one of streamed weights. True if it is."""
    reference = storage.__dict__.get(_STREAMED)
    streamed = None if reference is None else reference()
    if streamed is not None:
        streamed.needed()
    return streamed is not None


def present(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that backward reads now, whose bytes are on the device."""
    if not has_plain_storage(tensor) or not fetch(tensor.untyped_storage()) or not torch.is_grad_enabled():
        return tensor
    # For gradients of gradients, backward makes a graph, which reads the weight when nobody sees it.
    with torch.no_grad(), offload():
        return tensor.clone()


def alias(storage: Any) -> None:
    storage.__dict__[_ALIASED] = True
