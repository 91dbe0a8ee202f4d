"""Tensor parallel: each rank holds a part of each large weight, and all ranks read the same batch.

What is divided is the model's own plan, in the words of `transformers` (`model.tp_plan`, from `base_model_tp_plan` of
its configuration). What no rule names is whole on every rank. The mathematics is that of Shoeybi et al. 2019,
"Megatron-LM", section 3: a linear layer divided by its rows is followed by one divided by its columns, and between both
nothing is sent. A rank's parts are plain parameters. With PyTorch's `parallelize_module` they would be DTensors beside
plain ones, and PyTorch's optimizers and its clipping refuse lists of both (README.md beside this).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.errors import ModelError
from tightfit.ranks.sharing import exchanged
from tightfit.runtime.module_paths import module_at, named_modules

_OR_FSDP2 = "take parallel='fsdp2', or another number of ranks"


def in_tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    """The model itself, divided in place over the ranks of a one-dimensional mesh, as its plan says.

    All ranks must have the same weights. Each parameter that is divided is replaced by a rank's own part of it. The
    model gets two methods, which all ranks call together: `clip_grad_norm_(max_norm)`, by the norm of all parts, since
    PyTorch's function sees those of one rank; and `full_state_dict()`, the whole tensors on the CPU of rank 0.

    Raises `ModelError` for a model without a plan, for styles and modules that are not known, for weights that the
    ranks cannot share evenly, and for a model that is divided already.
    """
    import torch.distributed as dist

    if "full_state_dict" in model.__dict__:
        raise ModelError(f"{type(model).__name__} is divided over ranks already: divide a model once")
    rules = rules_of(model)
    demand_even(model, rules, mesh.size())
    ranks = _Ranks(mesh.get_group(), mesh.get_local_rank(), mesh.size(), dist.all_reduce)
    ties, lengths = _ties(model), {name: parameter.shape for name, parameter in model.named_parameters()}
    for path, style in rules.items():
        _STYLES[style].divide(module_at(model, path), ranks)
    _tie_again(model, ties)
    sides = {name: _side(lengths[name], parameter.shape) for name, parameter in model.named_parameters()}
    parts = _Parts(ranks, {name: side for name, side in sides.items() if side is not None})
    model.__dict__["clip_grad_norm_"] = partial(parts.clip, model)
    model.__dict__["full_state_dict"] = partial(parts.whole, model)
    return model


def rules_of(model: nn.Module) -> dict[str, str]:
    """The style of each module that is divided, by path. Raises `ModelError` where there is none, or an unknown one."""
    name = type(model).__name__
    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise ModelError(
            f"{name} has no plan for tensor parallel (`tp_plan`, in the words of transformers): take parallel='fsdp2'"
        )
    modules = dict(named_modules(model))
    parameters = [path for path, _ in model.named_parameters()]
    rules: dict[str, str] = {}
    for pattern, style in plan.items():
        found = [path for path in modules if _matches(path, pattern)]
        if not found and not any(_matches(path, pattern) for path in parameters):
            continue  # a rule for a part that this model does not have
        known = [path for path in found if style in _STYLES and isinstance(modules[path], _STYLES[style].kind)]
        if not found or known != found or any(_computes_otherwise(modules[path]) for path in found):
            raise ModelError(
                f"{name} divides {pattern} by the style {style!r}, with which no rank is predicted: take "
                "parallel='fsdp2'"
            )
        rules.update(dict.fromkeys(found, str(style)))
    return rules


def _computes_otherwise(module: nn.Module) -> bool:
    """True if a linear layer has a forward of its own, which would be lost."""
    return isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward


def demand_even(model: nn.Module, rules: Mapping[str, str], size: int) -> None:
    """Raise `ModelError` for heads or weights that so many ranks cannot share evenly."""
    name, config = type(model).__name__, getattr(model, "config", None)
    for what in ("num_attention_heads", "num_key_value_heads", "num_heads", "num_kv_heads"):
        heads = getattr(config, what, None)
        if isinstance(heads, int) and heads % size:
            raise ModelError(f"{name} has {what} {heads}, which {size} ranks cannot share evenly: {_OR_FSDP2}")
    for path, style in rules.items():
        side = _STYLES[style].side
        if side is None:
            continue
        length, what = module_at(model, path).get_parameter("weight").shape[side], ("rows", "columns")[side]
        if length % size:
            raise ModelError(
                f"{name} divides {path}.weight by its {length} {what}, which {size} ranks cannot share evenly: "
                f"{_OR_FSDP2}"
            )


def _side(whole: Sequence[int], part: Sequence[int]) -> int | None:
    """The dimension along which a shape is divided; None for one that is whole."""
    return next((side for side, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b), None)


def _matches(path: str, pattern: str) -> bool:
    return path.count(".") == pattern.count(".") and fnmatchcase(path, pattern)


class _Ranks(NamedTuple):
    """The ranks that share a model, and this one's number. `add_up` sums a tensor over them, in place."""

    group: Any
    number: int
    size: int
    add_up: Callable[..., Any]

    def part(self, whole: Tensor, side: int) -> Tensor:
        """This rank's part of a tensor, with memory of its own."""
        return whole.detach().chunk(self.size, side)[self.number].clone(memory_format=torch.contiguous_format)

    def joined(self, part: Tensor, side: int) -> Tensor:
        """The parts of all ranks, side by side."""
        import torch.distributed as dist

        part = part.detach().contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part, group=self.group)
        return torch.cat(parts, side)

    def summed(self, gradient: Tensor) -> Tensor:
        """The sum of a gradient over all ranks, in memory of its own: others may read the same gradient."""
        whole = gradient.clone(memory_format=torch.contiguous_format)
        self.add_up(whole, group=self.group)
        return whole


@dataclass(frozen=True)
class _Parts:
    """The parameters of a model that are divided, by name, and along which dimension."""

    ranks: _Ranks
    sides: Mapping[str, int]

    @torch.no_grad()
    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`. Returns the norm before that."""
        parts: list[Tensor] = []
        whole: list[Tensor] = []
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                (parts if name in self.sides else whole).append(parameter.grad)
        norm = nn.utils.get_total_norm(parts).square()
        self.ranks.add_up(norm, group=self.ranks.group)
        norm = (norm + nn.utils.get_total_norm(whole).square()).sqrt()
        nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
        return norm

    @torch.no_grad()
    def whole(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's state dict with whole tensors, on the CPU of rank 0. The others get an empty one."""
        state: dict[str, Tensor] = {}
        # As `state_dict` names them: both names of a tied weight.
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, held in model.state_dict(keep_vars=True).items():
            side, found = self.sides.get(names.get(id(held), "")), held.detach()
            if side is not None:
                found = self.ranks.joined(found, side)
            if self.ranks.number == 0:
                state[name] = found.cpu()
        return state


class _Summed(torch.autograd.Function):
    """Parts of a sum become the sum. The gradient is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: _Ranks) -> Tensor:
        ctx.mark_dirty(part)
        ranks.add_up(part, group=ranks.group)
        return part

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def _read(whole: Tensor, ranks: _Ranks) -> Any:
    """Each rank reads, for its part, a tensor that all ranks have. The gradients of the parts are added up."""
    return exchanged(whole, lambda whole: whole.view_as(whole), ranks.summed)


def _gathered(part: Tensor, ranks: _Ranks) -> Any:
    """Parts of the last dimension become the whole. The gradient is the same on all ranks, and each takes its part."""
    return exchanged(part, lambda part: ranks.joined(part, -1), lambda whole: ranks.part(whole, -1))


def _split(whole: Tensor, ranks: _Ranks) -> Any:
    """Each rank takes its part of the last dimension of what all have. The parts of the gradient become the whole."""
    return exchanged(whole, lambda whole: ranks.part(whole, -1), lambda part: ranks.joined(part, -1))


def _columns(linear: nn.Linear, ranks: _Ranks, *, gathers: bool = False) -> None:
    """Each rank computes a part of the outputs: the weight is divided by its rows."""
    _hold_part(linear, "weight", ranks, 0)
    _hold_part(linear, "bias", ranks, 0)
    linear.out_features //= ranks.size

    def forward(x: Tensor) -> Tensor:
        out = F.linear(_read(x, ranks), linear.weight, linear.bias)
        return _gathered(out, ranks) if gathers else out

    linear.__dict__["forward"] = forward


def _rows(linear: nn.Linear, ranks: _Ranks, *, splits: bool = False) -> None:
    """Each rank reads a part of the inputs: the weight is divided by its columns. The bias is added to the sum."""
    _hold_part(linear, "weight", ranks, 1)
    linear.in_features //= ranks.size

    def forward(x: Tensor) -> Tensor:
        own = _split(x, ranks) if splits else x
        summed: Any = _Summed.apply(F.linear(own, linear.weight), ranks)
        return summed if linear.bias is None else summed + linear.bias

    linear.__dict__["forward"] = forward


def _rows_of_table(table: nn.Embedding, ranks: _Ranks) -> None:
    """Each rank has some rows of a table, and gives zeros for the others."""
    _hold_part(table, "weight", ranks, 0)
    rows = table.num_embeddings = table.num_embeddings // ranks.size
    first = rows * ranks.number
    padding = None if table.padding_idx is None else table.padding_idx - first
    # What is no row of this rank's would count as one from the end.
    table.padding_idx = padding if padding is not None and 0 <= padding < rows else None

    def forward(ids: Tensor) -> Tensor:
        own = ids - first
        elsewhere = (own < 0) | (own >= rows)
        # A class of its own may do more with each row, as the scaled embeddings of Gemma do.
        found = type(table).forward(table, own.masked_fill(elsewhere, 0))
        return _Summed.apply(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), ranks)

    table.__dict__["forward"] = forward


def _whole_in_parts(module: nn.Module, ranks: _Ranks) -> None:
    """Every rank has the whole module, which reads only the rank's heads: the gradients are parts of a sum."""
    # As a gradient arrives, not as it has been added up: that of an earlier micro-batch is a whole sum already.
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(ranks.summed)


def _whole(module: nn.Module, ranks: _Ranks) -> None:
    """Every rank has the whole module, and reads all of its inputs."""


def _hold_part(module: nn.Module, name: str, ranks: _Ranks, side: int) -> None:
    whole = module._parameters.get(name)
    if whole is not None:
        module.register_parameter(name, nn.Parameter(ranks.part(whole, side), requires_grad=whole.requires_grad))


def _ties(model: nn.Module) -> list[list[str]]:
    """The names of parameters that are one and the same, in groups."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _tie_again(model: nn.Module, ties: Iterable[list[str]]) -> None:
    """Let parameters that were one be one: each was divided by itself. Raises `ModelError` if their parts differ."""
    for first, *others in ties:
        kept = model.get_parameter(first)
        for name in others:
            path, _, own = name.rpartition(".")
            if model.get_parameter(name).shape != kept.shape:
                raise ModelError(
                    f"{type(model).__name__} has one weight as {first} and {name}, and divides only one of them: take "
                    "parallel='fsdp2'"
                )
            module_at(model, path).register_parameter(own, kept)


class _Style(NamedTuple):
    """How a module is divided, of which class it is, and along which dimension of its weight; None: not at all."""

    divide: Callable[[Any, _Ranks], None]
    kind: type[nn.Module]
    side: int | None = None


_GATHERED = _Style(partial(_columns, gathers=True), nn.Linear, 0)
_STYLES = {
    "colwise": _Style(_columns, nn.Linear, 0),
    "colwise_rep": _GATHERED,
    "colwise_gather_output": _GATHERED,
    "rowwise": _Style(_rows, nn.Linear, 1),
    "rowwise_split_input": _Style(partial(_rows, splits=True), nn.Linear, 1),
    "embedding_rowwise": _Style(_rows_of_table, nn.Embedding, 0),
    "replicated_with_grad_allreduce": _Style(_whole_in_parts, nn.Module),
    "replicate": _Style(_whole, nn.Module),
}
