"""Takes parts out of a model: the same architecture with fewer layers, channels and heads, and the weights that stay.

`LAYER` and `TOP` name the axes of every weight. A weight without a name there is refused, so that nothing is cut where
nobody has thought about it.
"""

import copy
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.errors import ModelError
from tightfit.models.compress.pruning.anatomy import Anatomy, Removal, config_after
from tightfit.models.pretrained import transformers_package


class Axis(Enum):
    """The part of the model to which the numbers along one axis of a weight belong."""

    OTHER = "other"  # never cut: ids, experts, the numbers of one head
    WIDTH = "width"  # channels of the hidden states
    FFN = "ffn"  # channels of an MLP
    QUERIES = "queries"  # query heads, those of a group side by side
    KEYS = "keys"  # key and value heads
    EXPERT_FFN = "expert_ffn"  # channels of an expert
    GATE_UP = "gate_up"  # channels of an expert's gate, then those of its up projection


_A = Axis
_PROJECTIONS = {
    **{f"mlp.{name}": (_A.FFN, _A.WIDTH) for name in ("gate_proj", "up_proj")},
    "mlp.down_proj": (_A.WIDTH, _A.FFN),
    "self_attn.q_proj": (_A.QUERIES, _A.WIDTH),
    "self_attn.k_proj": (_A.KEYS, _A.WIDTH),
    "self_attn.v_proj": (_A.KEYS, _A.WIDTH),
    "self_attn.o_proj": (_A.WIDTH, _A.QUERIES),
}
ROUTER = "mlp.gate.weight"
EXPERTS_IN, EXPERTS_OUT = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
LAYER: Mapping[str, tuple[Axis, ...]] = {
    **{f"{name}.weight": axes for name, axes in _PROJECTIONS.items()},
    **{f"{name}.bias": axes[:1] for name, axes in _PROJECTIONS.items()},
    **{f"{name}.weight": (_A.WIDTH,) for name in ("input_layernorm", "post_attention_layernorm")},
    **{f"self_attn.{name}.weight": (_A.OTHER,) for name in ("q_norm", "k_norm")},
    ROUTER: (_A.OTHER, _A.WIDTH),
    EXPERTS_IN: (_A.OTHER, _A.GATE_UP, _A.WIDTH),
    EXPERTS_OUT: (_A.OTHER, _A.WIDTH, _A.EXPERT_FFN),
}
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
TOP: Mapping[str, tuple[Axis, ...]] = {
    EMBEDDING: (_A.OTHER, _A.WIDTH),
    FINAL_NORM: (_A.WIDTH,),
    HEAD: (_A.OTHER, _A.WIDTH),
}
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
# What a layer adds to the hidden states is made by these.
WRITERS = ("self_attn.o_proj.weight", "mlp.down_proj.weight", EXPERTS_OUT)


@dataclass(frozen=True)
class WeightAxes:
    """A weight: its layer's number (None outside of layers), its name there, and what its axes are."""

    layer: int | None
    name: str
    axes: tuple[Axis, ...]


def part_of(name: str) -> WeightAxes:
    """Raises `ModelError` for a weight that cannot be sliced."""
    found = _IN_LAYER.fullmatch(name)
    layer, inner = (int(found[1]), found[2]) if found else (None, name)
    axes = (TOP if layer is None else LAYER).get(inner)
    if axes is None:
        raise ModelError(f"the weight {name} cannot be sliced: it is none that a pruned model of this type has")
    return WeightAxes(layer, inner, axes)


def parts(model: nn.Module) -> Iterator[tuple[str, WeightAxes, Tensor]]:
    """Every weight, a tied one once. Raises `ModelError` for one that cannot be sliced."""
    for name, parameter in model.named_parameters():
        yield name, part_of(name), parameter.detach()


@dataclass(frozen=True)
class Kept:
    """The parts that stay, as sorted indices. `ffn` and `groups` are by layer; `ffn` has a row for each expert where a
    layer has experts. `rescaled` has a factor for the weights of each norm by name.
    """

    layers: list[int]
    ffn: Mapping[int, Tensor]
    groups: Mapping[int, Tensor]
    width: Tensor
    rescaled: Mapping[str, float] = field(default_factory=dict)


@torch.no_grad()
def sliced(model: Any, anatomy: Anatomy, removal: Removal, kept: Kept) -> nn.Module:
    """A new model with the parts that stay; the first one is as it was. Raises `ModelError`."""
    transformers = transformers_package()

    config = config_after(model.config, anatomy, removal, kept.layers)
    with torch.random.fork_rng(devices=[]):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=next(model.parameters()).dtype)
    held = {name: (part, weight) for name, part, weight in parts(model)}
    for name, target in made.named_parameters():
        here = part_of(name)
        old = name if here.layer is None else f"model.layers.{kept.layers[here.layer]}.{here.name}"
        part, weight = held[old]
        target.data.copy_(cut(weight, part, anatomy, kept) * kept.rescaled.get(old, 1.0))
    made.config.use_cache = model.config.use_cache
    if getattr(model, "generation_config", None) is not None:
        made.generation_config = copy.deepcopy(model.generation_config)
    return made.train(model.training)


def cut(weight: Tensor, part: WeightAxes, anatomy: Anatomy, kept: Kept) -> Tensor:
    """The rows and columns of a weight that stay."""
    for dim, axis in enumerate(part.axes):
        if axis is Axis.WIDTH:
            weight = weight.index_select(dim, kept.width)
        elif axis in (Axis.QUERIES, Axis.KEYS):
            assert part.layer is not None, "attention is in a layer"
            heads = anatomy.queries if axis is Axis.QUERIES else 1
            weight = weight.index_select(dim, spread(kept.groups[part.layer], heads * anatomy.head_width))
        elif axis is Axis.FFN:
            assert part.layer is not None, "an MLP is in a layer"
            weight = weight.index_select(dim, kept.ffn[part.layer])
        elif axis in (Axis.EXPERT_FFN, Axis.GATE_UP):
            assert part.layer is not None, "experts are in a layer"
            weight = _cut_experts(weight, dim, axis, kept.ffn[part.layer])
    return weight


def _cut_experts(weight: Tensor, dim: int, axis: Axis, kept: Tensor) -> Tensor:
    """Each expert (the first axis) keeps channels of its own."""
    if axis is Axis.GATE_UP:
        kept = torch.cat((kept, kept + weight.shape[dim] // 2), dim=1)
    return torch.stack([one.index_select(dim - 1, index) for one, index in zip(weight, kept, strict=True)])


def spread(groups: Tensor, size: int) -> Tensor:
    """The indices of groups of `size` neighbours each."""
    return (groups[:, None] * size + torch.arange(size)).flatten()


def reduced(values: Tensor, part: WeightAxes, axis: Axis, anatomy: Anatomy) -> Tensor:
    """The sums of values over all that belongs to the same part of one kind: (channels,), (groups,) for `KEYS`, or
    (experts, channels).
    """
    if axis is Axis.KEYS:
        dim, size = next((d, a) for d, a in enumerate(part.axes) if a in (Axis.KEYS, Axis.QUERIES))
        width = anatomy.head_width * (anatomy.queries if size is Axis.QUERIES else 1)
        return values.movedim(dim, 0).reshape(values.shape[dim] // width, -1).sum(1)
    if axis is Axis.EXPERT_FFN:
        if Axis.GATE_UP in part.axes:
            gate, up = values.chunk(2, dim=1)
            return gate.sum(2) + up.sum(2)
        return values.sum(1)
    dim = part.axes.index(axis)
    return values.movedim(dim, 0).flatten(1).sum(1) if values.dim() > 1 else values


def rescaling(energy: Mapping[str, Tensor], kept: Tensor) -> dict[str, float]:
    """The factor of each norm's weights that makes up for the channels that its mean square no longer has.

    `energy` has the mean square of each channel of what a norm reads, by the norm's name.
    """
    found: dict[str, float] = {}
    for name, squares in energy.items():
        whole, left = float(squares.sum()), float(squares[kept].sum())
        found[name] = math.sqrt(len(squares) * left / (len(kept) * whole)) if whole and left else 1.0
    return found
