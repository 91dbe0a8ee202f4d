"""The reference decoder: plain PyTorch, to be read from top to bottom.

Pre-norm blocks (RMSNorm, rotary positions, grouped-query attention with optional QK-norm or a short convolution, gated
MLP or a mixture of experts), embeddings tied to the head. It saves no memory by itself: that is the levers' work, on
this model as on anybody's. Only where the configuration asks for it are the operators of `tightfit.ops` used directly.
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.errors import ModelError
from tightfit.models.convolution import ShortConvolution
from tightfit.models.decoder_config import PRESETS, DecoderConfig
from tightfit.models.dtypes import convert_weights
from tightfit.models.feed_forward import GatedMLP, MixtureOfExperts, RoutingSums, auxiliary_loss
from tightfit.models.kv_cache import ConvolutionCache, KVCache, LayerCache, WholeCache, WindowCache

__all__ = ["PRESETS", "Decoder", "DecoderConfig", "DecoderOutput", "next_token_loss"]

IGNORE_INDEX = -100
# Standard deviation of initial weights (Radford et al. 2019, GPT-2).
INITIAL_DEVIATION = 0.02


class DecoderOutput(NamedTuple):
    """`loss` is a scalar, or None without labels; `logits` (B, T, vocab_size).

    `auxiliary_loss`, a scalar: what a mixture of experts adds to the mean loss in training, already weighted, and part
    of `loss`; None in evaluation mode and without experts.
    """

    loss: Tensor | None
    logits: Tensor
    auxiliary_loss: Tensor | None = None


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight over the last dimension (Zhang and Sennrich 2019), computed in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).type_as(x)


class RotaryTable(nn.Module):
    """Cosines and sines of the rotary embedding (Su et al. 2021): position t turns pair i by t * theta^(-2i / D)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DecoderConfig):
        super().__init__()
        device = torch.get_default_device()
        # Of a model that is built on a card, on the host: what is computed on a card leaves a hole between its weights.
        with torch.device("cpu") if device.type == "cuda" else nullcontext():
            pairs = torch.arange(0, config.head_width, 2, dtype=torch.float32)
            # A quotient, not a negative power, which rounds otherwise: an exported model's logits are the same bits.
            frequencies = 1.0 / config.rope_theta ** (pairs / config.head_width)
            angles = torch.outer(torch.arange(config.max_position_embeddings, dtype=torch.float32), frequencies)
            angles = torch.cat((angles, angles), dim=-1)
            cos, sin = angles.cos(), angles.sin()
        self.register_buffer("cos", cos.to(device), persistent=False)
        self.register_buffer("sin", sin.to(device), persistent=False)

    def forward(self, length: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Both (length, D), for the positions from `first` on."""
        return self.cos[first : first + length], self.sin[first : first + length]

    def at(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Both (B, 1, T, D), for the positions (B, T) that tokens have in their documents."""
        return self.cos[position_ids].unsqueeze(1), self.sin[position_ids].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns x (B, H, T, D): the pairs are elements i and i + D/2 of each head."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).type_as(x)


class Documents(NamedTuple):
    """Which tokens of packed rows belong together: tokens of different documents do not see each other.

    `ids` (B, T) int64, equal within a document. `mask` (B, 1, T, T) is what PyTorch's fused attention adds to its
    scores, 0 or -inf, in the dtype of its computation; None where attention reads the ids instead: in chunks, or on a
    CPU a document at a time. One mask serves all layers: of a boolean one PyTorch would keep a copy in floats for each
    layer's backward.
    """

    ids: Tensor
    mask: Tensor | None


def document_ids(position_ids: Tensor) -> Tensor:
    """(B, T) int64: the number of documents that have begun in the row so far. A document begins at position 0."""
    return (position_ids == 0).cumsum(dim=1)


def document_mask(ids: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, 1, T, T): 0 where the query (third dimension) sees the key (fourth), -inf elsewhere."""
    length = ids.shape[1]
    hidden = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
    hidden = hidden | (ids[:, :, None] != ids[:, None, :])
    return torch.zeros(hidden.shape, dtype=dtype, device=ids.device).masked_fill_(hidden, -torch.inf).unsqueeze(1)


def computed_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which attention on such a tensor computes: autocast's where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class Attention(nn.Module):
    """Causal self-attention; each key and value head serves an equal group of query heads (Ainslie et al. 2023)."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        queries, keys = config.num_heads * config.head_width, config.kv_heads * config.head_width
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_width, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_width, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: WholeCache | WindowCache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        q = rotate(self.q_norm(self._heads(self.q_proj(x))), cos, sin)
        k = rotate(self.k_norm(self._heads(self.k_proj(x))), cos, sin)
        v = self._heads(self.v_proj(x))
        mixed = self._attend(q, k, v, documents) if cache is None else self._attend_behind(cache, q, k, v)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """(B, T, H * D) -> (B, H, T, D)."""
        return x.unflatten(-1, (-1, self.config.head_width)).transpose(1, 2)

    def _attend_behind(self, cache: WholeCache | WindowCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The queries see what was read before them, too."""
        seen = cache.read(k, v)
        return self._attend_in_chunks(q, seen.keys, seen.values, offset=seen.offset)

    def _attend_in_chunks(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor | None = None, offset: int = 0) -> Tensor:
        from tightfit.ops import attention

        window = self.config.attention_window
        chunk_size = self.config.attention_chunk_size if self.config.attention == "chunked" else None
        return attention(q, k, v, causal=True, window=window, document_ids=ids, offset=offset, chunk_size=chunk_size)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None) -> Tensor:
        if self.config.attends_in_chunks:
            return self._attend_in_chunks(q, k, v, None if documents is None else documents.ids)
        mask = None if documents is None else documents.mask
        if documents is not None and mask is None:
            from tightfit.ops import attention
            from tightfit.ops._documents import serves_documents

            if serves_documents(q):
                return attention(q, k, v, causal=True, document_ids=documents.ids)
            mask = document_mask(documents.ids, computed_dtype(q))
        dropout = self.config.attention_dropout if self.training else 0.0
        grouped = self.config.kv_heads != self.config.num_heads
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=dropout, enable_gqa=grouped
        )


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)), with dropout on what each half adds.

    The mixer is attention or a convolution, the MLP one or a mixture of experts: that of block number `layer`. With
    experts the three tensors of `RoutingSums` are returned beside the result.
    """

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        self.mixes_by_attention = config.has_attention(layer)
        if self.mixes_by_attention:
            self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
            self.attention = Attention(config)
        else:
            self.convolution_norm = RMSNorm(config.hidden_size, config.norm_eps)
            self.convolution = ShortConvolution(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MixtureOfExperts(config) if config.has_experts(layer) else GatedMLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache | None = None,
        documents: Documents | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
        x = x + self.dropout(self._mixed(x, cos, sin, cache, documents))
        if not isinstance(self.mlp, MixtureOfExperts):
            return x + self.dropout(self.mlp(self.mlp_norm(x)))
        out, *sums = self.mlp(self.mlp_norm(x))
        return x + self.dropout(out), *sums

    def _mixed(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None, documents: Documents | None
    ) -> Tensor:
        if self.mixes_by_attention:
            assert not isinstance(cache, ConvolutionCache), "a block with attention caches keys and values"
            return self.attention(self.attention_norm(x), cos, sin, cache, documents)
        assert cache is None or isinstance(cache, ConvolutionCache), "a block with a convolution caches its inputs"
        return self.convolution(self.convolution_norm(x), cache, None if documents is None else documents.ids)


class Decoder(nn.Module):
    """A causal language model of the shape that `config` gives.

    `forward(input_ids, labels=None, num_items_in_batch=None)`: input_ids and labels (B, T) int64, labels equal to the
    ids (the shift is made here) with -100 where nothing is to be learnt. The loss is the mean over the labels that
    count; `num_items_in_batch` divides the sum by that number instead, as the causal models of `transformers` do, so
    that the losses of several micro-batches add up to the loss of the whole batch. With a `cache` the ids follow what
    was read into it; that is for reading without gradients (`ModelError`).

    `position_ids` (B, T) int64 are for packed rows: each token's position in its document, 0 where one begins. Tokens
    of different documents do not see each other. A document's numbers do not depend on its neighbours: bit for bit in
    fp32 on a CPU while its place in the row stays, and within rounding with experts, whose products take the rows of
    all documents together.
    """

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.rotary = RotaryTable(config)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._initialise()
        if config.dtype == "bf16":  # rounded, not drawn in bf16: the seed gives the weights of the fp32 model
            convert_weights(self, torch.bfloat16)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    @property
    def tp_plan(self) -> dict[str, str]:
        """The weights that ranks of tensor parallel divide, in the words of `transformers`. MLPs with experts are
        whole.
        """
        normed = "replicated_with_grad_allreduce"
        own = {"attention.q_norm": normed, "attention.k_norm": normed} if self.config.qk_norm else {}
        own |= dict.fromkeys(("attention.q_proj", "attention.k_proj", "attention.v_proj"), "colwise")
        own |= {"attention.o_proj": "rowwise"}
        if self.config.num_experts is None:
            own |= {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}
        ends = {"embedding": "embedding_rowwise", "head": "colwise_gather_output"}
        return ends | {f"layers.*.{path}": style for path, style in own.items()}

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        cache: KVCache | None = None,
        position_ids: Tensor | None = None,
    ) -> DecoderOutput:
        if cache is not None and torch.is_grad_enabled():
            raise ModelError("a cache of keys and values is for reading, not for training: use torch.no_grad()")
        if position_ids is not None:
            self._check_packed(input_ids, position_ids, cache)
        x = self.dropout(self.embedding(input_ids))
        cos, sin = self._angles(input_ids, position_ids, cache)
        documents = None if position_ids is None else self._documents(position_ids, x)
        sums: list[RoutingSums] = []
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, None if cache is None else cache.layers[i], documents)
            if not isinstance(x, Tensor):
                x, *of_layer = x
                sums.append(RoutingSums(*of_layer))
        if cache is not None:
            cache.length += input_ids.shape[1]
        logits = self.head(self.norm(x))
        auxiliary = auxiliary_loss(self.config, sums, input_ids.numel()) if self.training and sums else None
        loss = None if labels is None else next_token_loss(logits, labels, num_items_in_batch)
        if labels is not None and loss is not None and auxiliary is not None:
            loss = loss + auxiliary * share_of_items(labels, num_items_in_batch)
        return DecoderOutput(loss, logits, auxiliary)

    def _angles(self, input_ids: Tensor, position_ids: Tensor | None, cache: KVCache | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the tokens' positions."""
        if position_ids is not None:
            return self.rotary.at(position_ids)
        return self.rotary(input_ids.shape[1], 0 if cache is None else cache.length)

    @staticmethod
    def _check_packed(input_ids: Tensor, position_ids: Tensor, cache: KVCache | None) -> None:
        """Raises `ModelError`."""
        if cache is not None:
            raise ModelError("position_ids and a cache exclude each other: read a packed row in one pass")
        if position_ids.shape != input_ids.shape:
            raise ModelError(
                f"position_ids {tuple(position_ids.shape)} are for other rows than input_ids {tuple(input_ids.shape)}: "
                "give each token its position in its document"
            )

    def _documents(self, position_ids: Tensor, x: Tensor) -> Documents:
        """The document boundaries that the blocks need for packed rows."""
        from tightfit.ops._documents import serves_documents

        ids = document_ids(position_ids)
        drops = self.training and self.config.attention_dropout > 0
        if self.config.attends_in_chunks or (serves_documents(x) and not drops):
            return Documents(ids, None)
        return Documents(ids, document_mask(ids, computed_dtype(x)))

    def _initialise(self) -> None:
        """GPT-2's: what a block adds to the stream is scaled down by the number of additions, 2 per block."""
        scaled = INITIAL_DEVIATION / (2 * self.config.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1 and not name.endswith("taps"):
                adds_to_stream = "o_proj" in name or "down_proj" in name
                nn.init.normal_(parameter, std=scaled if adds_to_stream else INITIAL_DEVIATION)


def next_token_loss(logits: Tensor, labels: Tensor, num_items_in_batch: int | Tensor | None = None) -> Tensor:
    """Cross entropy of logits (B, T, V) at t against the label at t + 1; the last position of a row has none.

    The labels are shifted and padded, not the logits: slicing those would copy the largest tensor of the step.
    """
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).flatten()
    scores = logits.view(-1, logits.shape[-1])
    if num_items_in_batch is None:
        return F.cross_entropy(scores, targets, ignore_index=IGNORE_INDEX)
    return F.cross_entropy(scores, targets, ignore_index=IGNORE_INDEX, reduction="sum") / num_items_in_batch


def share_of_items(labels: Tensor, num_items_in_batch: int | Tensor | None) -> Tensor | float:
    """The share of a micro-batch's auxiliary loss in the loss of the batch: that of its labels, 1 by itself."""
    if num_items_in_batch is None:
        return 1.0
    return (labels[:, 1:] != IGNORE_INDEX).sum() / num_items_in_batch
