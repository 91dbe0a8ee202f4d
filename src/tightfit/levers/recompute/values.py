"""The values inside a block: what is held, and what can be computed again from what is held.

A value is the content of one storage between two writes into it. Tensors are only geometry over a value, so views
cost nothing and a write makes a new value. A value is either a `Root` (its memory is held) or a `Product` (only the
operator that makes it is held). References run from results to arguments only; so when autograd lets go of a saved
tensor, Python's reference counts free exactly what nothing else needs.
"""

import itertools
import weakref
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_iter
from torch.utils.weak import TensorWeakRef

from tightfit.operators import traits_of, written_arguments

_ROOT, _PRODUCT = "_tightfit_root", "_tightfit_product"
_sequence = itertools.count()


class Geometry(NamedTuple):
    """Where a tensor lies in its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Geometry":
        return cls(tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def over(self, base: torch.Tensor) -> torch.Tensor:
        """The tensor of this geometry over the storage of `base`."""
        if base.dtype == self.dtype:
            return base.as_strided(self.size, self.stride, self.offset)
        empty = torch.empty(0, dtype=self.dtype, device=base.device)
        return empty.set_(base.untyped_storage(), self.offset, self.size, self.stride)


def copy_of_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole storage of `tensor`, flat, so that any geometry can be laid over it."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0).clone()


def modified_in_place(tensor: torch.Tensor, version: int) -> RuntimeError:
    """The error that autograd raises for a saved tensor that was written afterwards."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"a {tensor.dtype} tensor of {tuple(tensor.shape)} that a recomputed block read at version {version} "
        "has been written since"
    )


class Root:
    """A value whose memory is held: a parameter, an input of the block, a kept output."""

    __slots__ = ("__weakref__", "_source", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor.detach()  # never the tensor itself: it would hold the graph that made it
        self._source: TensorWeakRef | None = TensorWeakRef(
            tensor
        )  # below autograd, a detached alias counts no versions
        self._version = tensor._version

    def is_current(self) -> bool:
        """Whether nobody is known to have written into the storage."""
        source = None if self._source is None else self._source()
        return source is None or source._version == self._version

    def hold_copy(self) -> None:
        """The storage is about to be written: hold its present content elsewhere."""
        self._tensor = copy_of_storage(self._tensor)
        self._source = None

    def base(self) -> torch.Tensor:
        """A tensor over the held content. Raises `RuntimeError`, as autograd does, if somebody wrote into it."""
        if not self.is_current():
            raise modified_in_place(self._tensor, self._version)
        return self._tensor


class Product:
    """A value that an operator makes: nothing is held until `content` is computed again."""

    __slots__ = ("__weakref__", "blank", "content", "producer")

    def __init__(self, producer: "Operation", *, blank: bool = False):
        self.producer: Operation | None = producer
        self.content: torch.Tensor | None = None
        self.blank = blank  # made by an operator that returns unwritten memory

    def fill(self, content: torch.Tensor) -> None:
        """Hold the content; how to make it is no longer needed."""
        if self.content is None:
            self.content = content.detach()
            self.producer = None

    def base(self) -> torch.Tensor:
        """A tensor over the recomputed content."""
        assert self.content is not None, "a product is read before it was recomputed"
        return self.content


class Reference:
    """A tensor argument of a recorded operator: a geometry over a value."""

    __slots__ = ("geometry", "value")

    def __init__(self, value: Root | Product, geometry: Geometry):
        self.value = value
        self.geometry = geometry

    def tensor(self) -> torch.Tensor:
        return self.geometry.over(self.value.base())


class Operation:
    """One recorded operator call, enough to run it again.

    `args` and `kwargs` are the call's own with a `Reference` in the place of each tensor; `references` lists these,
    `written` those that the operator writes into. `outputs` and `becomes` say, weakly, which products it makes: by
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
        "written",
    )

    def __init__(self, operator: Any, args: tuple, kwargs: dict, generator_state: Any):
        self.operator = operator
        self.args = args
        self.kwargs = kwargs
        self.generator_state = generator_state
        self.sequence = next(_sequence)  # arguments are always recorded before results
        self.references = [r for r in tree_iter((args, kwargs)) if isinstance(r, Reference)]
        targets = written_arguments(traits_of(operator), args, kwargs)
        self.written = [r for r in tree_iter(targets) if isinstance(r, Reference)]
        self.outputs: list[tuple[int, weakref.ref[Product]]] = []
        self.becomes: list[tuple[int, weakref.ref[Product]]] = []


def product_of(storage: Any) -> Product | None:
    """The product whose value this storage holds now."""
    return storage.__dict__.get(_PRODUCT)


def set_product(storage: Any, product: Product | None) -> None:
    if product is None:
        storage.__dict__.pop(_PRODUCT, None)
    else:
        storage.__dict__[_PRODUCT] = product


def existing_root(storage: Any) -> Root | None:
    reference = storage.__dict__.get(_ROOT)
    return None if reference is None else reference()


def root_of(tensor: torch.Tensor) -> Root:
    """The root that holds the present content of the tensor's storage; the same one for all who ask."""
    storage = tensor.untyped_storage()
    root = existing_root(storage)
    if root is None or not root.is_current():
        root = Root(tensor)
        storage.__dict__[_ROOT] = weakref.ref(root)
    return root


def forget_root(storage: Any) -> None:
    storage.__dict__.pop(_ROOT, None)
