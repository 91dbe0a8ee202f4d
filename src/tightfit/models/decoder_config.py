"""The shape of the reference decoder, without torch: the command line and the configuration read it too."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, Strict

from tightfit.errors import ModelError
from tightfit.names import CHUNKED_ATTENTION_AND_DROPOUT, EXPERTS_AND_TILES, WINDOW_AND_DROPOUT

Count = Annotated[int, Strict(), Field(gt=0)]
Positive = Annotated[float, Strict(), Field(gt=0)]
Share = Annotated[float, Strict(), Field(ge=0, lt=1)]
CountOrZero = Annotated[int, Strict(), Field(ge=0)]
Weight = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)]
Switch = Annotated[bool, Strict()]

# The gate of a gated MLP has 8/3 of the model's width, so that its three matrices hold as many parameters as the two
# of a plain MLP with 4 times the width (Shazeer 2020, "GLU Variants Improve Transformer", section 2).
GATED_WIDTH = (8, 3)
WIDTH_MULTIPLE = 64
# Grouped products want rows of a multiple of 16 bytes, in 16 bits too (`check_valid_strides` in
# torch/_meta_registrations.py).
EXPERT_MULTIPLE = 8


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a `Decoder`. Raises `ModelError` where the numbers do not go together."""

    __pydantic_config__ = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    hidden_size: Count = 256
    """Width of the residual stream."""
    num_layers: Count = 8
    """Number of blocks."""
    num_heads: Count = 8
    """Query heads of the attention."""
    num_kv_heads: Count | None = None
    """Key and value heads, each shared by an equal group of query heads; null: as many as `num_heads`."""
    head_dim: Count | None = None
    """Width of one head, an even number; null: `hidden_size / num_heads`."""
    intermediate_size: Count | None = None
    """Width of the gated MLP; null: 8/3 of `hidden_size`, rounded up to a multiple of 64."""
    vocab_size: Count = 6400
    """Rows of the embedding: at least the tokenizer's vocabulary."""
    max_position_embeddings: Count = 2048
    """The longest sequence the rotary table reaches, in tokens."""
    rope_theta: Positive = 10000.0
    """Base of the rotary frequencies."""
    norm_eps: Positive = 1e-6
    """Added to the mean square inside RMSNorm."""
    qk_norm: Switch = False
    """RMSNorm on every head's query and key before the rotation."""
    tie_embeddings: Switch = True
    """The head uses the embedding's matrix."""
    dropout: Share = 0.0
    """Probability of dropping an element of the embedding and of each half-block's output."""
    attention_dropout: Share = 0.0
    """Probability of dropping an attention weight; only with `attention: sdpa`."""
    activation: Literal["swiglu", "geglu", "geglu_tanh"] = "swiglu"
    """The gated MLP: SiLU, exact GELU (erf) or GELU's tanh approximation on the gate."""
    attention: Literal["sdpa", "chunked"] = "sdpa"
    """PyTorch's fused attention, or the chunked online softmax in O(sequence) memory everywhere."""
    attention_chunk_size: Count = 128
    """Queries and keys in one chunk of `attention: chunked`."""
    attention_window: Count | None = None
    """Positions that a query sees, its own included (sliding-window attention); null: all up to its own."""
    mlp: Literal["plain", "low_memory"] = "plain"
    """`low_memory` recomputes the gate's activation in backward instead of keeping it."""
    mlp_tile: Count | None = None
    """Tokens of the sequence that the MLP treats at a time, forward and backward, keeping its input only; null: all."""

    num_experts: Count | None = None
    """Experts of a mixture in the place of the MLP, of which each token visits a few; null: one MLP for all tokens."""
    experts_per_token: Count = 2
    """Experts that a token visits: the likeliest of its router (top-k). No token is dropped."""
    num_shared_experts: CountOrZero = 0
    """Experts that every token visits, beside those of its router."""
    expert_intermediate_size: Count | None = None
    """Width of one expert's gated MLP, a multiple of 8; null: that of the MLP, `intermediate_size` or its default."""
    norm_topk: Switch = True
    """A token's weights for its experts sum to 1."""
    first_dense_layers: CountOrZero = 0
    """Blocks at the beginning that keep the MLP."""
    auxiliary_loss_coefficient: Weight = 0.01
    """Weight of the balance loss in the training loss: it spreads tokens evenly over experts (Switch Transformer). Each
    micro-batch is balanced by itself."""
    z_loss_coefficient: Weight = 0.001
    """Weight of the router's z-loss in the training loss: it keeps the router's logits small (ST-MoE)."""
    conv_kernel: Count | None = None
    """Tokens that a gated depthwise causal convolution reaches, its own included; null: every block has attention."""
    attention_every: Count = 1
    """With `conv_kernel`: the last of every so many blocks has attention, the others have the convolution in its
    place."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of the weights; `auto`: fp32."""

    def __post_init__(self):
        self._check_heads()
        self._check_experts()
        self._check_convolution()
        if self.attention == "chunked" and self.attention_dropout:
            raise ModelError(CHUNKED_ATTENTION_AND_DROPOUT.refusal())
        if self.attention_window is not None and self.attention_dropout:
            raise ModelError(WINDOW_AND_DROPOUT.refusal())

    def _check_heads(self) -> None:
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ModelError(
                f"model.hidden_size {self.hidden_size} is not a multiple of model.num_heads {self.num_heads}: "
                "change one of them or give model.head_dim"
            )
        if self.num_heads % self.kv_heads:
            raise ModelError(
                f"model.num_heads {self.num_heads} is not a multiple of model.num_kv_heads {self.kv_heads}: "
                "every key head serves an equal group of query heads"
            )
        if self.head_width % 2:
            raise ModelError(
                f"a head is {self.head_width} wide, but the rotary embedding turns pairs: make model.head_dim even"
            )

    def _check_experts(self) -> None:
        if self.num_experts is None:
            for name in ("num_shared_experts", "expert_intermediate_size", "first_dense_layers"):
                if getattr(self, name):
                    raise ModelError(
                        f"model.{name} {getattr(self, name)} is about experts, and model.num_experts is not given: "
                        "give it, or leave the key out"
                    )
            return
        if self.experts_per_token > self.num_experts:
            raise ModelError(
                f"model.experts_per_token {self.experts_per_token} is more than model.num_experts {self.num_experts}: "
                "lower it"
            )
        if self.first_dense_layers >= self.num_layers:
            raise ModelError(
                f"model.first_dense_layers {self.first_dense_layers} leaves none of model.num_layers {self.num_layers} "
                "with experts: lower it, or leave model.num_experts out"
            )
        for name, width in (("expert_intermediate_size", self.expert_width), ("hidden_size", self.hidden_size)):
            if width % EXPERT_MULTIPLE:
                raise ModelError(
                    f"model.{name} {width} is not a multiple of {EXPERT_MULTIPLE}, as products of experts need it: "
                    "round it up"
                )
        if self.mlp_tile is not None:
            raise ModelError(EXPERTS_AND_TILES.refusal())

    def _check_convolution(self) -> None:
        if self.conv_kernel is None and self.attention_every > 1:
            raise ModelError(
                f"model.attention_every {self.attention_every} leaves blocks without attention, and model.conv_kernel "
                "does not say what they have: give it, or leave the key out"
            )
        if self.conv_kernel is not None and self.attention_every == 1:
            raise ModelError(
                f"model.conv_kernel {self.conv_kernel} has no block to stand in: with model.attention_every above 1 "
                "the others have the convolution"
            )

    def has_attention(self, layer: int) -> bool:
        """True if block number `layer`, from 0, has attention, not the convolution."""
        return (layer + 1) % self.attention_every == 0

    def has_experts(self, layer: int) -> bool:
        """True if block number `layer`, from 0, has experts, not one MLP."""
        return self.num_experts is not None and layer >= self.first_dense_layers

    @property
    def expert_width(self) -> int:
        """Width of one expert, after the default."""
        return self.expert_intermediate_size or self.mlp_width

    @property
    def kv_heads(self) -> int:
        """Key and value heads, after the default."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        """Width of one head, after the default."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def attends_in_chunks(self) -> bool:
        """True if attention is `tightfit.ops.attention`, not PyTorch's own."""
        return self.attention == "chunked" or self.attention_window is not None

    @property
    def mlp_width(self) -> int:
        """Width of the gated MLP, after the default."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        times, share = GATED_WIDTH
        return -(-self.hidden_size * times // (share * WIDTH_MULTIPLE)) * WIDTH_MULTIPLE


_MM26 = {"hidden_size": 512, "num_layers": 8, "num_heads": 8, "num_kv_heads": 2}

# Sizes that are measured again and again; a key given beside `preset` wins over the preset's.
PRESETS: dict[str, dict[str, Any]] = {
    "cpu8": {"hidden_size": 256, "num_layers": 8, "num_heads": 8},
    "cpu26": _MM26,
    "mm26": _MM26,
    "mm104": {"hidden_size": 768, "num_layers": 16, "num_heads": 8, "num_kv_heads": 2},
    # MiniMind2-MoE's shape (github.com/jingyaogong/minimind): one shared and four routed experts, 145M parameters.
    "lite-moe": {
        "hidden_size": 640,
        "num_layers": 8,
        "num_heads": 8,
        "num_kv_heads": 2,
        "num_experts": 4,
        "experts_per_token": 2,
        "num_shared_experts": 1,
    },
    # Llama 3.2 1B's shape (its config.json on the hub), without its scaled rotary frequencies: 1.24B parameters.
    "1b": {
        "hidden_size": 2048,
        "num_layers": 16,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "norm_eps": 1e-5,
        "max_position_embeddings": 8192,
    },
}
