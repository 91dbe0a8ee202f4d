"""Makes twins of models and batches on the meta device, or fake ones, so that they can run dry.

The twin's modules are copies of the model's. Its tensors are unbacked CPU tensors of the same shapes. A plan made with
the twin can be applied to the model once that has weights.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tightfit.errors import InputError, ModelError
from tightfit.runtime.internals import exchange, fake_mode_is_active, is_fake, no_modes
from tightfit.runtime.module_paths import named_modules, tensors_of
from tightfit.runtime.nested import tensors_in
from tightfit.step import Batch, TokenBatch
from tightfit.tracing.shapes import TensorShape
from tightfit.tracing.unbacked import is_unbacked

_STEP = 7919  # as in `TokenBatch`: neighbouring ids differ


def has_no_memory(tensor: Tensor) -> bool:
    """True if a tensor is on the meta device or fake."""
    return tensor.is_meta or is_fake(tensor)


@contextmanager
def real_tensors() -> Iterator[None]:
    """A context in which new tensors are real, even if the caller is within PyTorch's `FakeTensorMode`."""
    if not fake_mode_is_active():
        yield
        return
    with no_modes():
        yield


def twin_of(model: nn.Module) -> nn.Module:
    """The model itself if all of its tensors have memory, else its twin. Raises `ModelError` if it cannot be copied."""
    tensors = [tensor for _, module in named_modules(model) for tensor in tensors_of(module)]
    if not any(map(has_no_memory, tensors)):
        return model
    memo: dict[int, Any] = {id(tensor): _stand_in(tensor) if has_no_memory(tensor) else tensor for tensor in tensors}
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise ModelError(
            f"{type(model).__name__} has no memory (meta, or fake) and cannot be copied: {_reason(error)}: build it on "
            "the CPU"
        ) from error


def unbacked_copy(model: nn.Module) -> nn.Module:
    """A copy of a model that allocates no memory and can be changed: other modules, frozen parameters.

    Parameters and buffers are unbacked. Raises `ModelError` where Python cannot copy the modules.
    """
    tensors = (tensor for _, module in named_modules(model) for tensor in tensors_of(module))
    memo: dict[int, Any] = {id(tensor): _stand_in(tensor) for tensor in tensors if tensor.is_floating_point()}
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise ModelError(f"{type(model).__name__} cannot be copied: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def with_memory(batch: Batch, model: nn.Module) -> Batch:
    """The batch with CPU tensors in place of those without memory.

    Floating-point numbers are unknown. Booleans and masks are true. Integers are as in `TokenBatch`, and smaller than
    each embedding of the model.
    """
    if isinstance(batch, TokenBatch) or not any(map(has_no_memory, tensors_in(batch))):
        return batch
    sizes = [module.num_embeddings for _, module in named_modules(model) if isinstance(module, nn.Embedding)]
    below = min(sizes, default=2)

    made: dict[int, Tensor] = {}  # a tensor may have two names

    def filled(name: str, value: Any) -> Any:
        at_most = 2 if "mask" in name else below
        return tree_map_only(Tensor, lambda t: made.setdefault(id(t), _content(t, at_most)), value)

    if isinstance(batch, dict):
        return {name: filled(str(name), value) for name, value in batch.items()}
    return filled("", batch)


@contextmanager
def memory_given(held: Iterable[Tensor], others: Iterable[Tensor], modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context in which tensors on meta, or fake ones, are CPU tensors that can run dry; afterwards they are as
    before.

    `held` are those that the modules hold. The contents of the others are those of `with_memory`.
    """
    sizes = [module.num_embeddings for module in modules if isinstance(module, nn.Embedding)]
    below = min(sizes, default=2)
    made = {id(t): (t, _stand_in(t)) for t in held if has_no_memory(t)}
    for tensor in others:
        if has_no_memory(tensor) and id(tensor) not in made:
            made[id(tensor)] = tensor, _as_leaf(_content(tensor, below), tensor)
    exchanged: list[tuple[Tensor, Tensor]] = []
    try:
        for tensor, stand_in in made.values():
            try:
                exchange(tensor, stand_in)
            except RuntimeError as error:
                raise InputError(
                    f"a tensor of {tuple(tensor.shape)} without memory (meta, or fake) cannot run dry: "
                    f"{_reason(error)}: pass one that no graph and no view holds"
                ) from error
            exchanged.append((tensor, stand_in))
        yield
    finally:
        for tensor, stand_in in exchanged:
            exchange(tensor, stand_in)


def forget_numbers(tensors: Iterable[Tensor], but: Iterable[Tensor]) -> None:
    """Move tensors that a dry run left without memory to the meta device, in place, but for some of them."""
    kept = {id(tensor) for tensor in but}
    for tensor in tensors:
        is_plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta
        if is_plain and id(tensor) not in kept and is_unbacked(tensor):
            on_meta = tensor.detach().to("meta")
            with suppress(RuntimeError):  # a view or a graph holds it too: it stays as it is
                exchange(tensor, nn.Parameter(on_meta) if isinstance(tensor, nn.Parameter) else on_meta)


def _as_leaf(content: Tensor, like: Tensor) -> Tensor:
    return content.requires_grad_(like.requires_grad) if content.is_floating_point() else content


def _content(tensor: Tensor, below: int) -> Tensor:
    if not has_no_memory(tensor):
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return TensorShape.of(tensor).unbacked()
    if tensor.dtype == torch.bool or below <= 2:
        return torch.ones(tensor.shape, dtype=tensor.dtype)
    ids = torch.arange(tensor.numel()) * _STEP % below
    return ids.view(tensor.shape).to(tensor.dtype)


def _stand_in(tensor: Tensor) -> Tensor:
    """An unbacked tensor of the same shape, with the attributes that were set on the original."""
    unbacked = TensorShape.of(tensor).unbacked()
    if isinstance(tensor, nn.Parameter):
        unbacked = nn.Parameter(unbacked, requires_grad=tensor.requires_grad)
    else:
        unbacked.requires_grad_(tensor.requires_grad)
    for name, value in vars(tensor).items():
        if not is_fake(tensor):
            setattr(unbacked, name, value)
    return unbacked
