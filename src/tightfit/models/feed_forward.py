"""The feed-forward that follows attention in a block: a gated MLP, or a mixture of them of which each token visits a
few.

The mixture sorts the tokens by expert and multiplies all experts' rows in one grouped product. No tensor's size then
depends on the routing, so neither does the memory of a step: it is predicted for any routing, not for a balanced one.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.models.decoder_config import DecoderConfig
from tightfit.runtime.internals import without_dynamo

# The least CUDA capability with grouped products (`_grouped_mm_cuda`, ATen/native/cuda/GroupedBlas.cpp).
GROUPED_CAPABILITY = (8, 0)


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer 2020), `width` wide: the configuration's width if not given."""

    def __init__(self, config: DecoderConfig, width: int | None = None):
        super().__init__()
        self.config = config
        width = config.mlp_width if width is None else width
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.config.mlp_tile is None:
            return self._project(x)
        from tightfit.ops import tiled

        return tiled(self._project, x, self.config.mlp_tile, self.parameters())

    def _project(self, x: Tensor) -> Tensor:
        return self.down_proj(gated(self.config, self.gate_proj(x), self.up_proj(x)))


def gated(config: DecoderConfig, gate: Tensor, up: Tensor) -> Tensor:
    """activation(gate) * up, with the configuration's activation."""
    approximate = "tanh" if config.activation == "geglu_tanh" else "none"
    if config.mlp == "low_memory":
        from tightfit.ops import geglu, swiglu

        return swiglu(gate, up) if config.activation == "swiglu" else geglu(gate, up, approximate=approximate)
    if config.activation == "swiglu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate=approximate) * up


class RoutingSums(NamedTuple):
    """One layer's routing as the auxiliary losses need it, summed over its tokens.

    `assigned` (E,): tokens that each expert got. `probabilities` (E,): the router's. `squared_log_sums`: a scalar, of
    (log sum exp of a token's router logits)². All fp32; the first has no gradient.
    """

    assigned: Tensor
    probabilities: Tensor
    squared_log_sums: Tensor


class MixtureOfExperts(nn.Module):
    """The sum of the gated MLPs of the `experts_per_token` experts that the router finds likeliest, by its weights
    (Shazeer et al. 2017; Lepikhin et al. 2021), and of the experts that every token visits (Dai et al. 2024).

    Router and experts compute what those of Mixtral and Qwen3-MoE in `transformers` do. No token is dropped.
    `forward` returns the result and the three tensors of `RoutingSums`, side by side: PyTorch's reentrant checkpoint
    drops the gradients of tensors that are returned deeper, or left on the module.
    """

    def __init__(self, config: DecoderConfig):
        super().__init__()
        assert config.num_experts is not None, "a mixture has experts"
        self.config = config
        count, width, hidden = config.num_experts, config.expert_width, config.hidden_size
        self.router = nn.Linear(hidden, count, bias=False)
        # Of all experts in one matrix each, gate above up: what a grouped product takes, and transformers' layout.
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, width))
        shared = config.num_shared_experts
        self.shared = GatedMLP(config, shared * width) if shared else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tokens = x.flatten(0, -2)
        logits = self.router(tokens)
        probabilities = logits.float().softmax(dim=-1)
        weights, chosen = probabilities.topk(self.config.experts_per_token, dim=-1)
        if self.config.norm_topk:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        experts, order = chosen.flatten().sort(stable=True)
        everyone = torch.arange(len(self.down_proj), device=x.device)
        ends = torch.searchsorted(experts, everyone, right=True)
        mixed = self._mixed(tokens, weights.to(logits.dtype), order, ends).view_as(x)
        if self.shared is not None:
            mixed = mixed + self.shared(x)
        assigned = ends.diff(prepend=ends.new_zeros(1)).float()
        squared_log_sums = logits.float().logsumexp(dim=-1).square().sum()
        return mixed, assigned, probabilities.sum(dim=0), squared_log_sums

    def _mixed(self, tokens: Tensor, weights: Tensor, order: Tensor, ends: Tensor) -> Tensor:
        """The weighted sum over each token's experts. `order` sorts the choices by expert, the last choice of expert e
        comes before place `ends[e]`.
        """
        choices = weights.shape[-1]
        gate, up = grouped_product(tokens[order // choices], self.gate_up_proj, ends).chunk(2, dim=-1)
        out = grouped_product(gated(self.config, gate, up), self.down_proj, ends)
        out = out * weights.flatten()[order, None]
        # A sum in the tokens' order: adding into places would leave the order of the terms to chance on CUDA.
        return out[order.argsort()].unflatten(0, (-1, choices)).sum(dim=1).to(tokens.dtype)


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """rows (S, n) times the transpose of their expert's matrix of weights (E, m, n): (S, m).

    Expert e has the rows from `ends[e - 1]` (0 for the first) to `ends[e]`, int64 (E,).
    """
    if torch.is_autocast_enabled(rows.device.type):  # grouped products are on no list of autocast
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weights = rows.to(dtype), weights.to(dtype)
    if has_grouped_products(rows):
        # PyTorch's compiler knows them in bf16 only (`_meta_grouped_mm_common`): others run between two compiled parts.
        return (_grouped if rows.dtype == torch.bfloat16 else _between_compiled_parts)(rows, weights, ends)
    parts = rows.tensor_split(ends[:-1].cpu())
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights.unbind(), strict=True)])


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows, weights.mT, offs=ends.to(torch.int32))


_between_compiled_parts = without_dynamo(_grouped)


def has_grouped_products(rows: Tensor) -> bool:
    """True if PyTorch multiplies rows of this dtype in groups on their device."""
    if rows.dtype == torch.float64:
        return False
    return not rows.is_cuda or torch.cuda.get_device_capability(rows.device) >= GROUPED_CAPABILITY


def auxiliary_loss(config: DecoderConfig, layers: list[RoutingSums], tokens: int) -> Tensor | None:
    """The weighted auxiliary loss that is added to the loss of a batch of so many tokens, a scalar; None where its
    weights are zero.

    The balance loss is E * sum over experts of f * P: f the experts' share of all tokens, P their mean probability,
    both over all layers (Fedus et al. 2021, eq. 4-6, summed as Mixtral and Qwen3-MoE in `transformers` do). The z-loss
    is the mean of (log sum exp of the router's logits)² over tokens and layers (Zoph et al. 2022, eq. 5).
    """
    balance, z = config.auxiliary_loss_coefficient, config.z_loss_coefficient
    rows = tokens * len(layers)
    total: Tensor | None = None
    if balance:
        share = torch.stack([layer.assigned for layer in layers]).sum(dim=0) / rows
        probability = torch.stack([layer.probabilities for layer in layers]).sum(dim=0) / rows
        total = balance * (len(share) * (share * probability).sum())
    if z:
        squares = z * (torch.stack([layer.squared_log_sums for layer in layers]).sum() / rows)
        total = squares if total is None else total + squares
    return total
