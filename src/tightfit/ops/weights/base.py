"""The frozen weights below adapters: their bytes, and those that a base in few bits does not reach."""

import re
from typing import NamedTuple

from torch import nn

from tightfit.memory.allocator import scales_of, storage_bytes
from tightfit.ops.weights.low_bit import is_in_low_bits

_WRAPPERS = re.compile(r"^base_model\.model\.|\.(base_layer|original_module)(?=\.|$)")
_COUNT = re.compile(r"(?<=\.)\d+(?=\.|$)")


class FrozenBase(NamedTuple):
    """The frozen weights of a model.

    `bytes` are those of all frozen weights with their scales. `not_quantised` are the bytes of those at full width
    where others are in few bits, by the name of their module with `*` for the numbers of layers, the largest first.
    `adapted` are the names of the layers that have adapters.
    """

    bytes: int
    not_quantised: dict[str, int]
    adapted: tuple[str, ...]


def frozen_base(model: nn.Module) -> FrozenBase:
    """The frozen weights of a model."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    narrow = {id(p) for m in model.modules() if is_in_low_bits(m) for p in m._parameters.values()}
    wide: dict[str, int] = {}
    for path, parameter in model.named_parameters() if narrow else ():
        if not parameter.requires_grad and id(parameter) not in narrow:
            name = _COUNT.sub("*", _WRAPPERS.sub("", path)).removesuffix(".weight")
            wide[name] = wide.get(name, 0) + parameter.nbytes
    adapted = {path.rpartition(".")[2] for path, module in model.named_modules() if "base_layer" in module._modules}
    return FrozenBase(
        bytes=storage_bytes([*frozen, *(scale for parameter in frozen for scale in scales_of(parameter))]),
        not_quantised=dict(sorted(wide.items(), key=lambda item: -item[1])),
        adapted=tuple(sorted(adapted)),
    )
