"""How much each part of a model matters: by the norm of its weights, by what flows through it on real text, or by the
loss that its removal costs to first order.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from tightfit.models.compress.pruning.anatomy import Anatomy, Removal
from tightfit.models.compress.pruning.slicing import (
    EMBEDDING,
    FINAL_NORM,
    WRITERS,
    Axis,
    Kept,
    WeightAxes,
    part_of,
    parts,
    reduced,
    rescaling,
)
from tightfit.models.compress.pruning.statistics import Rows, Statistics, statistics_of

By = Literal["norm", "activation", "gradient"]
BY: tuple[By, ...] = ("norm", "activation", "gradient")
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
OUTPUTS = {
    "self_attn.o_proj.weight": Axis.KEYS,
    "mlp.down_proj.weight": Axis.FFN,
    "mlp.experts.down_proj": Axis.EXPERT_FFN,
}


@dataclass(frozen=True)
class Scores:
    """A figure for each part, the least important the lowest: by layer (layers,), for each layer's channels (channels,)
    or (experts, channels) and its groups of heads (groups,), and for the hidden channels (channels,).

    `energy` is what `slicing.rescaling` needs.
    """

    layers: Tensor
    ffn: Mapping[int, Tensor]
    groups: Mapping[int, Tensor]
    width: Tensor
    energy: Mapping[str, Tensor]


def scores_of(model: nn.Module, anatomy: Anatomy, by: By, rows: Rows | None) -> Scores:
    """The scores of a model's parts. `rows` are calibration text, which `norm` needs none of."""
    if by == "norm":
        return _by_norm(model, anatomy)
    assert rows is not None, "activations and gradients are of a text"
    if by == "activation":
        return _by_activation(model, anatomy, statistics_of(model, rows))
    return _by_gradient(model, anatomy, rows)


def kept_parts(scores: Scores, anatomy: Anatomy, removal: Removal) -> Kept:
    """The most important parts, as many as stay, in the order in which they were."""
    width = _best(scores.width, anatomy.hidden - removal.hidden)
    return Kept(
        layers=_best(scores.layers, anatomy.layers - removal.layers).tolist(),
        ffn={
            layer: _best(score, score.shape[-1] - (removal.ffn if score.dim() == 1 else removal.expert_ffn))
            for layer, score in scores.ffn.items()
        },
        groups={layer: _best(score, anatomy.groups - removal.groups) for layer, score in scores.groups.items()},
        width=width,
        rescaled=rescaling(scores.energy, width) if removal.hidden else {},
    )


def _best(scores: Tensor, count: int) -> Tensor:
    """The indices of the `count` highest along the last axis, sorted; of equal ones the first."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :count].sort(dim=-1).values


@torch.no_grad()
def _by_norm(model: nn.Module, anatomy: Anatomy) -> Scores:
    """Sums of squares of all weights of a part; of a layer, those of what it adds to the hidden states."""

    def squares() -> Iterator[tuple[WeightAxes, Tensor]]:
        for _, part, weight in parts(model):
            yield part, weight.float().square()

    sums = _summed(squares, anatomy, of_outputs=False)
    return Scores(*sums, energy=_energy_of_weights(model, anatomy))


def _by_activation(model: nn.Module, anatomy: Anatomy, found: Statistics) -> Scores:
    """Of channels and heads, the squares of what they write; of hidden channels, their share of what norms read; of
    layers, by how much they turn what they are given (Men et al. 2024, arXiv 2403.03853).
    """
    ffn: dict[int, Tensor] = {}
    groups: dict[int, Tensor] = {}
    for name, part, weight in parts(model):
        axis = OUTPUTS.get(part.name)
        if axis is None or part.layer is None:
            continue
        energy = found.inputs[name]
        squares = weight.float().square() * (energy[:, None, :] if axis is Axis.EXPERT_FFN else energy)
        target = groups if axis is Axis.KEYS else ffn
        target[part.layer] = reduced(squares, part, axis, anatomy)
    energies = _energy(found)
    width = torch.stack([squares / squares.sum().clamp_min(1e-30) for squares in energies.values()]).sum(0)
    layers = torch.stack([found.changes[layer] for layer in range(anatomy.layers)])
    return Scores(layers, ffn, groups, width, energies)


def _by_gradient(model: nn.Module, anatomy: Anatomy, rows: Rows) -> Scores:
    """The loss that a part's removal costs to first order: |sum of gradient x weight| of what it writes, one text after
    the other (Molchanov et al. 2019, arXiv 1906.10771). One set of gradients exists at a time.
    """
    totals: list[list[Tensor | dict[int, Tensor]]] = []
    was_training, wanted = model.training, [p.requires_grad for p in model.parameters()]
    model.eval()
    try:
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        for row in rows:
            model.zero_grad(set_to_none=True)
            model(input_ids=row[None], labels=row[None]).loss.backward()
            totals.append([_absolute(one) for one in _summed(lambda: _first_order(model), anatomy, of_outputs=True)])
    finally:
        model.zero_grad(set_to_none=True)
        for parameter, trained in zip(model.parameters(), wanted, strict=True):
            parameter.requires_grad_(trained)
        model.train(was_training)
    layers, ffn, groups, width = (_added(kind) for kind in zip(*totals, strict=True))
    assert isinstance(layers, Tensor), "one figure for each layer"
    assert isinstance(width, Tensor), "one figure for each channel"
    assert isinstance(ffn, dict), "by layer"
    assert isinstance(groups, dict), "by layer"
    return Scores(layers, ffn, groups, width, _energy(statistics_of(model, rows)))


def _first_order(model: nn.Module) -> Iterator[tuple[WeightAxes, Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield part_of(name), parameter.detach().float() * parameter.grad.float()


Sums = tuple[Tensor, dict[int, Tensor], dict[int, Tensor], Tensor]


def _summed(values: Callable[[], Iterator[tuple[WeightAxes, Tensor]]], anatomy: Anatomy, *, of_outputs: bool) -> Sums:
    """Sums over the numbers that belong to each layer, channel, group of heads and hidden channel.

    With `of_outputs` a part's numbers are only those by which it writes; without it, all its weights.
    """
    layers = torch.zeros(anatomy.layers)
    ffn: dict[int, Tensor] = {}
    groups: dict[int, Tensor] = {}
    width = torch.zeros(anatomy.hidden)
    for part, numbers in values():
        writes = part.name in WRITERS
        if part.layer is not None and writes:
            layers[part.layer] += numbers.sum()
        if Axis.WIDTH in part.axes and numbers.dim() > 1 and (writes or part.name == EMBEDDING or not of_outputs):
            width += reduced(numbers, part, Axis.WIDTH, anatomy)
        if part.layer is None or (of_outputs and not writes):
            continue
        if Axis.FFN in part.axes:
            _add(ffn, part.layer, reduced(numbers, part, Axis.FFN, anatomy))
        if Axis.EXPERT_FFN in part.axes or Axis.GATE_UP in part.axes:
            _add(ffn, part.layer, reduced(numbers, part, Axis.EXPERT_FFN, anatomy))
        if Axis.KEYS in part.axes or Axis.QUERIES in part.axes:
            _add(groups, part.layer, reduced(numbers, part, Axis.KEYS, anatomy))
    return layers, ffn, groups, width


def _add(sums: dict[int, Tensor], layer: int, more: Tensor) -> None:
    sums[layer] = sums[layer] + more if layer in sums else more


def _absolute(sums: Tensor | dict[int, Tensor]) -> Tensor | dict[int, Tensor]:
    return sums.abs() if isinstance(sums, Tensor) else {layer: one.abs() for layer, one in sums.items()}


def _added(kind: tuple[Tensor | dict[int, Tensor], ...]) -> Tensor | dict[int, Tensor]:
    """The sum over texts."""
    first = kind[0]
    if isinstance(first, Tensor):
        return torch.stack([one for one in kind if isinstance(one, Tensor)]).sum(0)
    return {layer: torch.stack([one[layer] for one in kind if isinstance(one, dict)]).sum(0) for layer in first}


def _energy(found: Statistics) -> dict[str, Tensor]:
    """The energy of the inputs that each norm over the hidden channels reads."""
    return {name: one for name, one in found.inputs.items() if name == FINAL_NORM or part_of(name).name in NORMS}


@torch.no_grad()
def _energy_of_weights(model: nn.Module, anatomy: Anatomy) -> dict[str, Tensor]:
    """Without a text: for every norm, the squares of all weights that write a channel."""
    total = torch.zeros(anatomy.hidden)
    norms: list[str] = []
    for name, part, weight in parts(model):
        if part.name in WRITERS or part.name == EMBEDDING:
            total += reduced(weight.float().square(), part, Axis.WIDTH, anatomy)
        if part.name in NORMS or part.name == FINAL_NORM:
            norms.append(name)
    return dict.fromkeys(norms, total)
