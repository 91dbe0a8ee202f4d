"""Special tensors: fake ones, classes that dispatch themselves, ones without memory, and the text of tensors."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

no_torch_dispatch: Any = torch._C._disabled_torch_dispatch_impl  # the `__torch_dispatch__` of plain tensors
no_torch_function: Any = torch._C._disabled_torch_function_impl  # for classes of tensors that dispatch themselves


def is_fake(tensor: torch.Tensor) -> bool:
    """True if a tensor was made under PyTorch's `FakeTensorMode`: it reports a device, and has no memory."""
    fake_tensors: Any = sys.modules.get("torch._subclasses.fake_tensor")
    return fake_tensors is not None and isinstance(tensor, fake_tensors.FakeTensor)


def fake_mode_is_active() -> bool:
    """True if a `FakeTensorMode` is active."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


@contextmanager
def meta_kernels_of(kind: str) -> Iterator[None]:
    """A context in which meta kernels lay results out as kernels of this kind of device do: `"cpu"`, `"cuda"`."""
    # They ask `device_hint`, which takes every tensor on meta that is not fake for one of a card.
    asking: list[Any] = [sys.modules.get(name) for name in ("torch._meta_registrations", "torch._refs.nn.functional")]
    before = [(module, module.device_hint) for module in asking if hasattr(module, "device_hint")]
    for module, hint in before:
        module.device_hint = lambda tensor, hint=hint: hint(tensor) if is_fake(tensor) else kind
    try:
        yield
    finally:
        for module, hint in before:
            module.device_hint = hint


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements fill the memory that they span, each exactly once."""
    return torch.ops.aten.is_non_overlapping_and_dense.default(tensor)


def orthogonalised(matrix: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """The orthogonal matrix near a matrix (m x n), in bf16, by Newton and Schulz's iteration, as `torch.optim.Muon`
    computes it with the settings of a group.
    """
    from torch.optim import _muon

    return _muon._zeropower_via_newtonschulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])


def tensor_without_memory(kind: type, like: torch.Tensor, strides: Sequence[int] | None = None) -> Any:
    """A tensor of a class that dispatches itself, with the shape, dtype and device of another one, and no memory."""
    return torch.Tensor._make_wrapper_subclass(kind, like.size(), strides=strides, dtype=like.dtype, device=like.device)


def exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange two tensors under their names: everything that holds the one holds the other afterwards.

    Raises `RuntimeError` for a tensor that C++ holds too: a view's base, a graph's leaf.
    """
    # `torch.utils.swap_tensors`, which refuses tensors with weak references to them. Those of fake tensors are their
    # mode's, and follow the name like all others.
    torch._C._swap_tensor_impl(one, other)
    one.__class__, other.__class__ = other.__class__, one.__class__
    attributes: Any = "__dict__"  # which PyTorch lets go over too, and type checkers do not
    held = one.__dict__
    setattr(one, attributes, other.__dict__)
    setattr(other, attributes, held)


@contextmanager
def data_set_by(assigns: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """A context in which `assigns(tensor)` is called before Python code gives a tensor other memory:
    `tensor.data = ...`.
    """
    kind: Any = torch.Tensor
    inherited: Any = torch._C.TensorBase.data
    before = vars(kind).get("data")
    asked = [assigns]  # emptied at the end: who copies the class's attributes meanwhile holds nothing of the caller's

    def assign(self: torch.Tensor, data: torch.Tensor) -> None:
        for each in asked:
            each(self)
        inherited.__set__(self, data)

    kind.data = property(inherited.__get__, assign)
    try:
        yield
    finally:
        asked.clear()
        if before is None:
            del kind.data  # the class has its base's again
        else:
            kind.data = before


@contextmanager
def text_of_tensors_by(contents: Callable[[torch.Tensor], str | None]) -> Iterator[None]:
    """A context in which `repr` of a tensor shows the result of `contents` instead of numbers, unless that is None."""
    from torch import _tensor_str

    write = _tensor_str._str

    def text(self: torch.Tensor, *, tensor_contents: str | None = None) -> str:
        return write(self, tensor_contents=contents(self) if tensor_contents is None else tensor_contents)

    _tensor_str._str = text  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        _tensor_str._str = write
