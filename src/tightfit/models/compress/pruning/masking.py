"""Masks over single weights: which of them are zero, by magnitude, by Wanda, or two of every four.

Masks save no memory: a zero takes as many bytes as any other number, and a training keeps the mask beside it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from tightfit.errors import InputError, ModelError
from tightfit.models.compress.pruning.importance import By
from tightfit.models.compress.pruning.statistics import Statistics, statistics_of

Pattern = Literal["magnitude", "wanda", "2:4"]
PATTERNS: tuple[Pattern, ...] = ("magnitude", "wanda", "2:4")
Scope = Literal["layer", "global"]
SCOPES: tuple[Scope, ...] = ("layer", "global")
OF, KEPT = 4, 2  # of every four neighbours along the input, two stay: what sparse tensor cores read
EXPERTS = ("gate_up_proj", "down_proj")
_HIGH, _LOW = 1 << 16, 1 << 15  # a positive float's bits, as a number of 31 bits, are searched in two parts


def check_masks(sparsity: float, pattern: str, scope: str) -> None:
    """Raise `InputError` for settings that are unknown, out of range or do not go together."""
    if not 0 < sparsity < 1:
        raise InputError(f"--sparsity {sparsity:g} is not between 0 and 1: give the share of weights that become zero")
    if pattern not in PATTERNS:
        raise InputError(f"--pattern {pattern!r} is not known: choose {', '.join(PATTERNS[:-1])} or {PATTERNS[-1]}")
    if scope not in SCOPES:
        raise InputError(f"--scope {scope!r} is not known: choose {' or '.join(SCOPES)}")
    if pattern == "2:4" and sparsity != KEPT / OF:
        raise InputError(f"--pattern 2:4 sets half of the weights to zero: give --sparsity 0.5, not {sparsity:g}")
    if scope == "global" and pattern != "magnitude":
        raise InputError(f"--scope global is for --pattern magnitude: {pattern} compares the weights of one row")


@torch.no_grad()
def removed_weights(
    model: nn.Module, sparsity: float, pattern: Pattern, *, scope: Scope, by: By, rows: Tensor | None
) -> dict[str, Tensor]:
    """By the name of each masked weight, where it becomes zero. `by` is for 2:4. `rows` is calibration text, which
    Wanda, activations and gradients need.

    Raises `ModelError` for a model without linear layers, or a row that fours do not fill.
    """
    weights = maskable(model)
    if pattern == "magnitude":
        groups = [list(weights)] if scope == "global" else [[name] for name in weights]
        removed: dict[str, Tensor] = {}
        for names in groups:
            lowest = _lowest([weights[name].abs() for name in names], sparsity)
            removed |= dict(zip(names, lowest, strict=True))
        return removed
    scores = _scores(model, weights, "activation" if pattern == "wanda" else by, rows)
    if pattern == "wanda":
        return {name: lowest_of_rows(score, sparsity) for name, score in scores.items()}
    return {name: lowest_of_fours(score, name) for name, score in scores.items()}


def maskable(model: nn.Module) -> dict[str, Tensor]:
    """The weights of linear layers and of experts by name; not embeddings, the head, routers and norms.

    Raises `ModelError` where there are none.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            found[f"{path}.weight"] = module.weight.detach()
        elif isinstance(getattr(module, EXPERTS[0], None), nn.Parameter):
            found |= {f"{path}.{name}": getattr(module, name).detach() for name in EXPERTS}
    if not found:
        raise ModelError(
            f"{type(model).__name__} has no linear layers (torch.nn.Linear) to mask: its products are of another class"
        )
    return found


def _scores(model: nn.Module, weights: Mapping[str, Tensor], by: By, rows: Tensor | None) -> dict[str, Tensor]:
    """A figure for each weight, the lowest to become zero first."""
    if by == "norm":
        return {name: weight.abs() for name, weight in weights.items()}
    assert rows is not None, "activations and gradients are of a text"
    if by == "activation":
        statistics = statistics_of(model, rows)
        return {name: wanda_scores(weight, statistics, name) for name, weight in weights.items()}
    with torch.enable_grad():
        model.zero_grad(set_to_none=True)
        totals = {name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in weights.items()}
        parameters = dict(model.named_parameters())
        for row in rows:
            model(input_ids=row[None], labels=row[None]).loss.backward()
            for name, total in totals.items():
                gradient = parameters[name].grad
                if gradient is not None:
                    total += (parameters[name].detach().float() * gradient.float()).abs()
            model.zero_grad(set_to_none=True)
    return totals


def wanda_scores(weight: Tensor, statistics: Statistics, name: str) -> Tensor:
    """|weight| x norm of its input (Sun et al. 2023, arXiv 2306.11695); an expert's input is of the tokens it got."""
    if name not in statistics.inputs:
        raise ModelError(f"{name} was reached by no token of the calibration text: give a longer one")
    return weight.float().abs() * statistics.norm(name).unsqueeze(-2)


def lowest_of_rows(scores: Tensor, sparsity: float) -> Tensor:
    """True for the lowest of each row of inputs, `sparsity` of them; of equal ones the first."""
    count = int(sparsity * scores.shape[-1])
    order = scores.sort(dim=-1, stable=True).indices[..., :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, value=True)


def lowest_of_fours(scores: Tensor, name: str) -> Tensor:
    """True for the two lowest of every four neighbours along the input; of equal ones the first."""
    if scores.shape[-1] % OF:
        raise ModelError(f"{name} has rows of {scores.shape[-1]} weights, which fours do not fill: leave --pattern out")
    fours = scores.unflatten(-1, (-1, OF))
    order = fours.sort(dim=-1, stable=True).indices[..., : OF - KEPT]
    return torch.zeros_like(fours, dtype=torch.bool).scatter_(-1, order, value=True).flatten(-2)


def _lowest(magnitudes: Sequence[Tensor], sparsity: float) -> list[Tensor]:
    """True for the lowest of all numbers together, `sparsity` of them; of equal ones the first.

    No tensor of all numbers is made: the bits of floats above zero are in the order of the floats, so the threshold is
    found by counting them, first by their upper half.
    """
    left = round(sparsity * sum(one.numel() for one in magnitudes))
    upper = _counted(((_bits(one) >> 15) for one in magnitudes), _HIGH)
    high, left = _reached(upper, left)
    lower = _counted((bits[bits >> 15 == high] & (_LOW - 1) for bits in map(_bits, magnitudes)), _LOW)
    low, left = _reached(lower, left)
    threshold = (high << 15) | low
    removed = []
    for one in magnitudes:
        bits = _bits(one)
        below, equal = bits < threshold, bits == threshold
        first = equal & (equal.flatten().cumsum(0).view(equal.shape) <= left)
        left -= int(first.sum())
        removed.append(below | first)
    return removed


def _bits(magnitudes: Tensor) -> Tensor:
    return magnitudes.float().contiguous().view(torch.int32)


def _counted(parts: Iterable[Tensor], size: int) -> Tensor:
    total = torch.zeros(size, dtype=torch.int64)
    for part in parts:
        total += torch.bincount(part.flatten(), minlength=size)
    return total


def _reached(counts: Tensor, wanted: int) -> tuple[int, int]:
    """The bin in which the `wanted`-th number lies, and how many of that bin are wanted."""
    before = counts.cumsum(0)
    place = int(torch.searchsorted(before, wanted)) if wanted else 0
    return place, wanted - (int(before[place - 1]) if place else 0)
