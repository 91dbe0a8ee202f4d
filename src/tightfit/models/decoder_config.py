"""The shape of the reference decoder, without torch: the command line and the configuration read it too."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, Strict

from tightfit.errors import ModelError
from tightfit.names.exclusions import CHUNKED_ATTENTION_AND_DROPOUT, WINDOW_AND_DROPOUT

Count = Annotated[int, Strict(), Field(gt=0)]
Positive = Annotated[float, Strict(), Field(gt=0)]
Share = Annotated[float, Strict(), Field(ge=0, lt=1)]
Switch = Annotated[bool, Strict()]

# The gate of a gated MLP has 8/3 of the model's width, so that its three matrices hold as many parameters as the two
# of a plain MLP with 4 times the width (Shazeer 2020, "GLU Variants Improve Transformer", section 2).
GATED_WIDTH = (8, 3)
WIDTH_MULTIPLE = 64


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

    def __post_init__(self):
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
        if self.attention == "chunked" and self.attention_dropout:
            raise ModelError(CHUNKED_ATTENTION_AND_DROPOUT.refusal())
        if self.attention_window is not None and self.attention_dropout:
            raise ModelError(WINDOW_AND_DROPOUT.refusal())

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
        """Whether attention is `tightfit.ops.attention`, not PyTorch's own."""
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
}
