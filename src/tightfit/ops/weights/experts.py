"""Frozen experts in few bits: the fused weights of a mixture of experts in `transformers`, and their grouped product.

Since transformers 5 all experts of a layer are two or three parameters of three dimensions, and no linear layers. Here
they are codes. A product widens as many experts at a time as take no more memory than its own result, in forward and in
backward. No tensor's size depends on the routing. What low-rank adapters of these weights add is two such products
with their factors; it never exists as a weight.

A product is one operator, so that recompute replays it as one, whatever the routing; so is the gradient of a factor. A
dry run runs their loops once for each shape.
"""

import functools
import importlib
import itertools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from tightfit.ops.weights.int8 import coded, widened

_LIBRARY = torch.library.Library("tightfit", "FRAGMENT")
_LIBRARY.define(
    "experts_product(Tensor rows, Tensor codes, Tensor? scale, int[] shape, int? block, int[] ends, bool transposed) "
    "-> Tensor"
)
_LIBRARY.define("experts_gradient(Tensor left, Tensor right, int[] ends) -> Tensor")
PRODUCT: Any = torch.ops.tightfit.experts_product.default
GRADIENT: Any = torch.ops.tightfit.experts_gradient.default

NAMES = ("gate_up_proj", "up_proj", "down_proj")  # of the weights of experts (`integrations/moe.py` in transformers)


class ExpertWeights(NamedTuple):
    """Weights of experts in few bits. `block` is the number of 4-bit weights with one scale; None: a row has one.
    Without a scale the codes are the weights.
    """

    codes: Tensor
    scale: Tensor | None
    shape: tuple[int, ...]  # experts, rows, columns
    block: int | None

    def wide(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """The experts from `first` to before `last`, (last - first, rows, columns), in `dtype`."""
        if self.scale is None:
            return self.codes[first:last].to(dtype)
        if self.block is None:
            return widened(self.codes[first:last], self.scale[first:last], dtype)
        count = math.prod(self.shape[1:])
        codes = self.codes.view(-1)[first * count // 2 : last * count // 2]
        scale = self.scale[first * count // self.block : last * count // self.block]
        # Not in the weights' shape: where rows are no whole blocks, bitsandbytes 0.50 misreads scales with AVX512.
        flat = (count * (last - first) // self.block, self.block)
        wide = torch.ops.bitsandbytes.dequantize_4bit(codes[:, None], scale, self.block, "nf4", flat, dtype)
        return wide.view(last - first, *self.shape[1:])


def fused_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model that hold fused experts as `transformers` does, by path."""
    return {path: module for path, module in model.named_modules() if _is_fused(module)}


def _is_fused(module: nn.Module) -> bool:
    known = all(hasattr(module, name) for name in ("_apply_gate", "is_transposed", "has_gate", "has_bias"))
    return known and not isinstance(module, LowBitExperts)


def freeze_experts(module: nn.Module, kind: Literal["int8", "fp8", "nf4"]) -> None:
    """Replace a module's expert weights by codes, in place. An expert whose weights do not fill whole blocks of 4-bit
    ones stays as it is.
    """
    shapes = {}
    for name in NAMES:
        weight = module._parameters.get(name)
        if weight is None or (kind == "nf4" and math.prod(weight.shape[1:]) % BLOCK):
            continue
        shapes[name] = tuple(weight.shape)
        if kind == "nf4":
            packed = _packed(weight.detach())
        else:
            packed, scale = coded(weight.detach(), kind)
            module.register_parameter(_scale_of(name), nn.Parameter(scale, requires_grad=False))
            packed = nn.Parameter(packed, requires_grad=False)
        module._parameters[name] = packed
    module.__dict__["wide_shapes"] = shapes
    module.__class__ = _class_in_few_bits(type(module))


def widen_experts(module: "LowBitExperts") -> None:
    """Replace the codes by the fp32 weights that they represent, in place."""
    for name in module.wide_shapes:
        held = module.held(name)
        assert isinstance(held, ExpertWeights), "it has codes"
        module._parameters.pop(_scale_of(name), None)
        module._parameters[name] = nn.Parameter(held.wide(0, held.shape[0], torch.float32), requires_grad=False)
    del module.__dict__["wide_shapes"]
    module.__class__ = type(module).__mro__[2]


BLOCK = 64  # weights with one scale in NormalFloat (Dettmers et al. 2023)


def _packed(weight: Tensor) -> Any:
    package: Any = importlib.import_module("bitsandbytes")
    made = package.nn.Params4bit(
        weight.reshape(-1, weight.shape[-1]), requires_grad=False, quant_type="nf4", blocksize=BLOCK,
        compress_statistics=False,
    )  # fmt: skip
    return made.to(weight.device)  # bitsandbytes quantises in `to`


def _scale_of(name: str) -> str:
    return f"{name}_scale"


@functools.cache
def _class_in_few_bits(kind: type) -> type:
    """The class of experts that are held in few bits: what it has beside them stays."""
    return type(f"LowBit{kind.__name__}", (LowBitExperts, kind), {})


class LowRank(NamedTuple):
    """An adapter's part of the experts' weights: `scaling * into[e] @ out_of[e]` to the matrix of expert e."""

    out_of: Tensor  # experts, rank, inputs
    into: Tensor  # experts, outputs, rank
    scaling: float


class LowBitExperts(nn.Module):
    """The forward of fused experts whose weights are codes, in the dtype of its input, or of autocast. Mixed into the
    class of `transformers`, which has the activation and the biases.
    """

    wide_shapes: dict[str, tuple[int, ...]]  # of the weights that are held in few bits
    low_rank: Mapping[str, Sequence[LowRank]] = MappingProxyType({})  # of adapters, by weight, for the next forward
    num_experts: int
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool

    def held(self, name: str) -> ExpertWeights | Tensor:
        """A weight by name: its codes, or itself where it is as it was."""
        weight: Any = self._parameters[name]
        if name not in self.wide_shapes:
            return weight
        state = getattr(weight, "quant_state", None)
        if state is None:
            scale = self._parameters[_scale_of(name)]
            assert scale is not None, "codes have their scales"
            return ExpertWeights(weight, scale, self.wide_shapes[name], None)
        return ExpertWeights(weight.data, state.absmax, self.wide_shapes[name], state.blocksize)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sum the chosen experts' results of each token, weighted.

        Args:
            hidden_states: Tokens (N, D).
            top_k_index: The experts of each token, int64 (N, K).
            top_k_weights: Their weights (N, K).

        Returns:
            (N, D), in the dtype of `hidden_states`.
        """
        x, choices = hidden_states, top_k_index.shape[-1]
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        experts, order = top_k_index.reshape(-1).sort(stable=True)
        everyone = torch.arange(self.num_experts, device=x.device)
        ends = torch.searchsorted(experts, everyone, right=True).tolist()
        entry = "gate_up_proj" if self.has_gate else "up_proj"
        out = self._product(entry, x[order // choices], experts, ends)
        out = self._apply_gate(out) if self.has_gate else self.act_fn(out)  # pyright: ignore[reportCallIssue] - of the class
        out = self._product("down_proj", out, experts, ends)
        if self.has_post_expert_norm:
            out = self.post_expert_norm(out)  # pyright: ignore[reportCallIssue] - of the class
        out = out * top_k_weights.reshape(-1)[order, None]
        # A sum in the tokens' order: adding into places would leave the order of the terms to chance on CUDA.
        return out[order.argsort()].unflatten(0, (-1, choices)).sum(dim=1).to(hidden_states.dtype)

    def _product(self, name: str, rows: Tensor, experts: Tensor, ends: Sequence[int]) -> Tensor:
        """The rows (S, n), sorted by expert, times their experts' weights: (S, m)."""
        held = self.held(name)
        if not isinstance(held, ExpertWeights):
            held = ExpertWeights(held, None, tuple(held.shape), None)
        codes, scale, shape, block = held
        result: Any = _ExpertsProduct.apply(rows, codes, scale, shape, block, ends, self.is_transposed)
        for factors in self.low_rank.get(name, ()):
            result.add_(_added(rows, factors, ends))  # no other tensor of its size beside the two
        return result + self._parameters[f"{name}_bias"][experts].to(result.dtype) if self.has_bias else result  # pyright: ignore[reportOptionalSubscript] - it says so


def _added(rows: Tensor, factors: LowRank, ends: Sequence[int]) -> Tensor:
    """An adapter's part of the product of rows (S, n), sorted by expert: (S, m), in their dtype."""
    out_of, into = factors.out_of.to(rows.dtype), factors.into.to(rows.dtype)
    inner: Any = _ExpertsProduct.apply(rows, out_of, None, tuple(out_of.shape), None, ends, False)  # (S, rank)
    result: Any = _ExpertsProduct.apply(inner * factors.scaling, into, None, tuple(into.shape), None, ends, False)
    return result


class _ExpertsProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, codes: Tensor, scale: Tensor | None, shape: Any, block: Any, ends: Any, transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(codes, scale, rows if ctx.needs_input_grad[1] else None)
        ctx.told = shape, block, ends, transposed
        return PRODUCT(rows, codes, scale, shape, block, ends, transposed)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        shape, block, ends, transposed = ctx.told
        codes, scale, rows = ctx.saved_tensors
        (gradient,) = gradients
        of_rows = of_weight = None
        if ctx.needs_input_grad[0]:
            of_rows = PRODUCT(gradient, codes, scale, shape, block, ends, not transposed)
        if ctx.needs_input_grad[1]:
            of_weight = GRADIENT(*((rows, gradient) if transposed else (gradient, rows)), ends)
        return of_rows, of_weight, *(None,) * 5


def multiplied(
    rows: Tensor,
    codes: Tensor,
    scale: Tensor | None,
    shape: Sequence[int],
    block: int | None,
    ends: Sequence[int],
    transposed: bool,
) -> Tensor:
    """rows (S, n) times each expert's matrix, which is (n, m) if `transposed`, else (m, n): the operator's kernel."""
    held = ExpertWeights(codes, scale, tuple(shape), block)
    experts, *sides = held.shape
    result = rows.new_empty(len(rows), sides[1] if transposed else sides[0])
    at_once = max(1, result.numel() // math.prod(sides))
    counts = _counts(ends)
    shares, results = rows.split(counts), result.split(counts)
    for first in range(0, experts, at_once):
        last = min(first + at_once, experts)
        if not any(counts[first:last]):
            continue
        wide = held.wide(first, last, rows.dtype)
        for each, matrix in enumerate((wide if transposed else wide.mT).unbind(), first):
            if counts[each]:
                torch.mm(shares[each], matrix, out=results[each])
        del wide, matrix
    return result


def summed(left: Tensor, right: Tensor, ends: Sequence[int]) -> Tensor:
    """The gradients of the experts' matrices (E, a, b): of each, the sum over its rows of the outer products of left
    (S, a) and right (S, b), zero where it has none: the operator's kernel.
    """
    counts = _counts(ends)
    result = left.new_zeros(len(ends), left.shape[1], right.shape[1])
    for each, (mine, others) in enumerate(zip(left.split(counts), right.split(counts), strict=True)):
        if counts[each]:
            torch.mm(mine.T, others, out=result[each])
    return result


def _counts(ends: Sequence[int]) -> list[int]:
    """How many rows each expert has."""
    return [end - begin for begin, end in itertools.pairwise((0, *ends))]


LOOPS = {str(PRODUCT): multiplied, str(GRADIENT): summed}  # the kernels, which call other operators
_LIBRARY.impl("experts_product", multiplied, "CompositeExplicitAutograd")
_LIBRARY.impl("experts_gradient", summed, "CompositeExplicitAutograd")


@torch.library.register_fake("tightfit::experts_product", lib=_LIBRARY)
def _shape(
    rows: Tensor, codes: Tensor, scale: Tensor | None, shape: Sequence[int], block: Any, ends: Any, transposed: bool
) -> Tensor:
    return rows.new_empty(len(rows), shape[2] if transposed else shape[1])


@torch.library.register_fake("tightfit::experts_gradient", lib=_LIBRARY)
def _shape_of_gradient(left: Tensor, right: Tensor, ends: Sequence[int]) -> Tensor:
    return left.new_empty(len(ends), left.shape[1], right.shape[1])
