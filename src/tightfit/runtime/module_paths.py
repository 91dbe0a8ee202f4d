"""Paths of modules in a model, including modules in plain lists, tuples and dicts.

PyTorch registers the modules in `nn.ModuleList`, `nn.ModuleDict` and attributes. A module in a plain container runs as
well, so it has a path here: `blocks.3` for `model.blocks[3]`.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from tightfit.runtime.nested import INERT, tensors_in

_CONTAINERS = (list, tuple, dict)
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})


def without_ddp(model: nn.Module) -> nn.Module:
    """The model that `DistributedDataParallel` is around; any other model itself."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def unwrapped(model: nn.Module) -> nn.Module:
    """The model that DDP and `torch.compile` are around; any other model itself."""
    held = without_ddp(model)
    inner = held._modules.get("_orig_mod")
    return held if inner is None else inner


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model with their paths, each once: those that PyTorch registers, in its order, then those in
    plain containers.
    """
    registered = list(registered_modules(model))
    seen = {id(module) for _, module in registered}
    yield from registered
    for path, module in registered:
        yield from _in_containers(module, path, seen)


def registered_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of `model.named_modules()`, in the same order."""
    # PyTorch's passes each module through a generator for each level above it. Every dry run walks the model some ten
    # times, which took a fifth of the time of an 8B with adapters.
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        if module._modules:
            prefix = f"{path}." if path else ""
            children = [(f"{prefix}{name}", child) for name, child in module._modules.items() if child is not None]
            waiting.extend(reversed(children))


def module_at(model: nn.Module, path: str) -> nn.Module:
    """The module at a path. Raises `AttributeError` if there is none."""
    item: Any = model
    for part in path.split(".") if path else ():
        item = _child(item, part)
    if not isinstance(item, nn.Module):
        raise AttributeError(f"{type(model).__name__} has no module {path!r}")
    return item


def tensors_of(module: nn.Module) -> list[Tensor]:
    """The tensors that a module itself holds: parameters, buffers, and plain attributes, including containers."""
    plain = [tensor for _, tensors in plain_tensors_of(module) for tensor in tensors]
    return [*module.parameters(recurse=False), *module.buffers(recurse=False), *plain]


def plain_tensors_of(module: nn.Module) -> list[tuple[str, list[Tensor]]]:
    """The tensors in a module's plain attributes, including containers, by the attribute's name."""
    return [
        (name, list(tensors_in(value)))
        for name, value in vars(module).items()
        if type(value) not in INERT and name not in _REGISTERED
    ]


def globs_of(paths: Iterable[str]) -> list[str]:
    """Globs that match these blocks: `layers.*`, `block[0-9]*`. Paths that differ only in numbers share a glob."""
    return sorted({".".join(map(_any_number, path.split("."))) for path in paths})


def _in_containers(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    for name, value in list(vars(module).items()):
        if isinstance(value, _CONTAINERS) and value and name not in _REGISTERED:
            yield from _held(value, f"{path}.{name}".lstrip("."), seen)


def _held(item: Any, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a container, and in nested containers, that were not seen before."""
    if not isinstance(item, (nn.Module, *_CONTAINERS)) or id(item) in seen:
        return
    seen.add(id(item))
    if not isinstance(item, nn.Module):
        for name, child in item.items() if isinstance(item, dict) else enumerate(item):
            if type(child) not in INERT and "." not in str(name):
                yield from _held(child, f"{path}.{name}", seen)
        return
    yield path, item
    for name, child in item.named_children():
        yield from _held(child, f"{path}.{name}", seen)
    yield from _in_containers(item, path, seen)


def _child(item: Any, name: str) -> Any:
    if isinstance(item, nn.Module):
        return getattr(item, name)
    if isinstance(item, dict):
        return next((value for key, value in item.items() if str(key) == name), None)
    if isinstance(item, _CONTAINERS) and name.isdecimal() and int(name) < len(item):
        return item[int(name)]
    return None


def _any_number(part: str) -> str:
    return "*" if part.isdecimal() else re.sub(r"\d+$", "[0-9]*", part)
