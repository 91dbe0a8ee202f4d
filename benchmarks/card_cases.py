"""The steps of `benchmarks/card.py`: kinds of models, and how each is trained on which card."""

import importlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tightfit.models.adapters import add_adapter
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.training.config.schema import AdapterConfig

CARDS = ("t4", "rtx3060", "rtx4090", "a100-80", "h100")
LENGTHS = (509, 512, 333, 768)  # tokens; most are multiples of nothing
VOCABULARY = 8000

_LLAMA = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 1024, "pad_token_id": 0,
}  # fmt: skip
_BERT = {
    "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8,
    "vocab_size": VOCABULARY, "max_position_embeddings": 1024,
}  # fmt: skip
_GPT = {"n_embd": 512, "n_layer": 4, "n_head": 8, "n_positions": 1024, "vocab_size": VOCABULARY}
_EXPERTS = {**_LLAMA, "num_experts_per_tok": 2, "moe_intermediate_size": 512}

# By the name that `transformers` gives a kind of model: its configuration's fields.
_CAUSAL: dict[str, dict[str, Any]] = {
    "gpt2": _GPT,
    "gptj": {**_GPT, "rotary_dim": 32},
    "gpt_neox": _BERT,
    "opt": {**_LLAMA, "ffn_dim": 2048, "word_embed_proj_dim": 512},
    "bloom": {"hidden_size": 512, "n_layer": 4, "n_head": 8, "vocab_size": VOCABULARY},
    "falcon": {**_LLAMA, "new_decoder_architecture": False},
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "sliding_window": 256},
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, "head_dim": 64},
    "gemma": {**_LLAMA, "head_dim": 64},
    "gemma2": {**_LLAMA, "head_dim": 64},
    "gemma3_text": {**_LLAMA, "head_dim": 256},
    "phi": _LLAMA,
    "phi3": _LLAMA,
    "stablelm": _LLAMA,
    "olmo2": _LLAMA,
    "cohere": _LLAMA,
    "granite": _LLAMA,
    "starcoder2": _LLAMA,
    "smollm3": _LLAMA,
    "mixtral": {**_EXPERTS, "num_local_experts": 4},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "head_dim": 64},
}
_ATTENDS_ONE_WAY = {"bloom", "t5"}  # kinds that have no choice of attention
_REFUSES_SDPA = {"gemma2"}  # it caps its scores


@dataclass(frozen=True)
class Kind:
    """A kind of model: builds it with a way of attention, and makes a batch of a size and length on the CPU."""

    build: Callable[[str], nn.Module]
    batch: Callable[[int, int], Mapping[str, torch.Tensor]]
    attentions: tuple[str, ...] = ("eager", "sdpa")


@dataclass(frozen=True)
class Step:
    """One step on one card. `lever`: plain, blocks (all blocks recomputed by hand), or a plan's levers at a budget."""

    card: str
    kind: str
    attention: str
    precision: str  # fp32, bf16, fp16 (autocast), or weights (in bf16)
    optimizer: str
    lever: str
    size: int
    length: int

    @property
    def name(self) -> str:
        model = f"{self.kind} {self.attention}, {self.size} x {self.length}"
        return f"{self.card}, {model}, {self.precision}, {self.optimizer}, {self.lever}"


def _tokens(size: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (size, length), generator=torch.Generator().manual_seed(seed))


def _text(size: int, length: int) -> dict[str, torch.Tensor]:
    ids = _tokens(size, length)
    return {"input_ids": ids, "labels": ids.clone()}


def _of_transformers(auto: str, kind: str, fields: Mapping[str, Any], attention: str) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **fields)
    choice = {} if kind in _ATTENDS_ONE_WAY else {"attn_implementation": attention}
    return getattr(transformers, auto).from_config(config, **choice).train()


def _images(size: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"pixel_values": torch.rand(size, 3, 224, 224, generator=generator), "labels": torch.arange(size) % 10}


def _speech(size: int, length: int) -> dict[str, torch.Tensor]:
    features = torch.rand(size, 80, 600, generator=torch.Generator().manual_seed(0))
    return {"input_features": features, "labels": _tokens(size, min(length, 400))}


class UNet(nn.Module):
    """Convolutions down and up with skips between them, group norms and one block of attention; predicts noise."""

    def __init__(self, width: int = 64):
        super().__init__()
        widths = (width, 2 * width, 4 * width)
        self.stem = nn.Conv2d(4, width, 3, padding=1)
        self.down = nn.ModuleList(self._block(a, b) for a, b in pairwise(widths))
        self.middle = nn.MultiheadAttention(widths[-1], 4, batch_first=True)
        self.up = nn.ModuleList(self._block(2 * b, a) for a, b in zip(widths[-2::-1], widths[:0:-1], strict=True))
        self.out = nn.Conv2d(width, 4, 3, padding=1)

    @staticmethod
    def _block(inner: int, outer: int) -> nn.Sequential:
        return nn.Sequential(
            nn.GroupNorm(8, inner), nn.SiLU(), nn.Conv2d(inner, outer, 3, padding=1),
            nn.GroupNorm(8, outer), nn.SiLU(), nn.Conv2d(outer, outer, 3, padding=1),
        )  # fmt: skip

    def forward(self, latents: torch.Tensor, noise: torch.Tensor) -> Any:
        x, skips = self.stem(latents + noise), []
        for block in self.down:
            x = F.avg_pool2d(block(x), 2)
            skips.append(x)
        tokens = x.flatten(2).transpose(1, 2)
        x = x + self.middle(tokens, tokens, tokens, need_weights=False)[0].transpose(1, 2).reshape(x.shape)
        for block, skip in zip(self.up, reversed(skips), strict=True):
            x = F.interpolate(block(torch.cat((x, skip), 1)), scale_factor=2.0)
        return _Output(F.mse_loss(self.out(x).float(), noise))


@dataclass
class _Output:
    loss: torch.Tensor


def _latents(size: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(size, 4, 64, 64, generator=generator) for name in ("latents", "noise")}


def _decoder(**fields: Any) -> Kind:
    sizes = {"hidden_size": 512, "num_layers": 4, "num_heads": 8, "num_kv_heads": 2, "max_position_embeddings": 1024}
    config = DecoderConfig(vocab_size=VOCABULARY, **{**sizes, **fields})
    return Kind(lambda attention: Decoder(config), _text, ("own",))


def _adapted(base: Any, attention: str) -> nn.Module:
    model = _of_transformers("AutoModelForCausalLM", "llama", _LLAMA, attention)
    return add_adapter(model, AdapterConfig(base=base, target_modules="all-linear")).train()


_SEQ2SEQ = {
    "d_model": 512, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048,
    "encoder_attention_heads": 8, "decoder_attention_heads": 8, "vocab_size": VOCABULARY,
}  # fmt: skip
_MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_T5 = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 3, "num_heads": 8, "vocab_size": VOCABULARY, **_MARKS}
_SPEECH = {**_SEQ2SEQ, **_MARKS, "max_source_positions": 300, "num_mel_bins": 80, "suppress_tokens": None}
_OTHERS: dict[str, tuple[str, dict[str, Any], Callable[[int, int], dict[str, torch.Tensor]]]] = {
    "bert": ("AutoModelForMaskedLM", _BERT, _text),
    "roberta": ("AutoModelForMaskedLM", {**_BERT, "pad_token_id": 0}, _text),
    "t5": ("AutoModelForSeq2SeqLM", _T5, _text),
    "bart": ("AutoModelForSeq2SeqLM", {**_SEQ2SEQ, **_MARKS, "max_position_embeddings": 1024}, _text),
    "vit": ("AutoModelForImageClassification", {**_BERT, "num_labels": 10}, _images),
    "whisper": ("AutoModelForSpeechSeq2Seq", _SPEECH, _speech),
}


def kinds() -> dict[str, Kind]:
    """All kinds of models, by name."""
    found = {
        "decoder": _decoder(),
        "decoder with dropout": _decoder(dropout=0.1),
        "decoder of experts": _decoder(num_experts=4, experts_per_token=2),
    }
    causal = {kind: ("AutoModelForCausalLM", fields, _text) for kind, fields in _CAUSAL.items()}
    for kind, (auto, fields, batch) in {**causal, **_OTHERS}.items():
        one = ("eager",) if kind in _REFUSES_SDPA else ("own",) if kind in _ATTENDS_ONE_WAY else None
        attentions = one or ("eager", "sdpa")
        found[kind] = Kind(partial(_of_transformers, auto, kind, fields), batch, attentions)
    for base in ("bf16", "int8", "nf4"):
        found[f"llama, adapters on {base}"] = Kind(partial(_adapted, base), _text)
    return {**found, "unet": Kind(lambda _: UNet(), _latents, ("own",))}


def kind(name: str) -> Kind:
    """The kind of model of a step: one of `kinds()`, or a class of the zoo."""
    if name not in kinds():
        zoo = tiny_causal_lms()
        return Kind(lambda attention: zoo.tiny_model(name).train(), lambda size, length: zoo.tiny_batch(name), ("own",))
    return kinds()[name]


def tiny_causal_lms() -> Any:
    """Every causal language model class of `transformers`, tiny: the zoo, which lives with the tests."""
    folder = str(Path(__file__).parent.parent / "tests" / "zoo")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("tiny_causal_lms")


def zoo_steps(card: str = "rtx4090") -> Iterator[Step]:
    """Every class of the zoo under autocast: plain, and planned with exact levers."""
    zoo = tiny_causal_lms()
    for name in zoo.classes():
        for lever in ("plain", "exact at 0.6x"):
            yield Step(card, name, "own", "bf16", "adamw fused", lever, zoo.BATCH.size, zoo.BATCH.length)


COMPILED = ("llama", "gpt2", "qwen3", "decoder with dropout")


def compiled_steps(seed: int = 0) -> Iterator[Step]:
    """Plans whose blocks PyTorch's compiler may write, on every card: they need Triton."""
    for kind in COMPILED:
        for card in CARDS:
            drawn = random.Random(f"{seed} compiled {kind} {card}")
            precision = drawn.choice(("bf16", "fp32", "weights") if card != "t4" else ("fp32", "fp16"))
            lever = f"compile at {drawn.choice(BUDGETS[1:5])}"
            attention = "own" if kinds()[kind].attentions == ("own",) else "sdpa"
            yield Step(card, kind, attention, precision, "adamw fused", lever, 4, drawn.choice(LENGTHS))


PRECISIONS = ("bf16", "fp32", "fp16", "weights")
OPTIMIZERS = ("adamw fused", "adamw foreach", "adamw loop", "sgd", "adamw8bit")
LEVERS = ("plain", "blocks", "exact", "exact", "rounding", "offload")
BUDGETS = ("0.9x", "0.8x", "0.7x", "0.6x", "0.5x", "0.4x", "0.3x")


def steps(each: int = 3, seed: int = 0) -> Iterator[Step]:
    """`each` steps of every kind on every card: the first is plain, the others are drawn; the same for one seed."""
    for kind, made in kinds().items():
        for card in CARDS:
            drawn = random.Random(f"{seed} {kind} {card}")
            for number in range(each):
                lever = "plain" if number == 0 else drawn.choice(LEVERS)
                if lever not in ("plain", "blocks"):
                    lever = f"{lever} at {drawn.choice(BUDGETS)}"
                precision = drawn.choice(PRECISIONS if card != "t4" else ("fp32", "fp16"))
                yield Step(
                    card,
                    kind,
                    drawn.choice(made.attentions),
                    precision,
                    drawn.choice(OPTIMIZERS),
                    lever,
                    drawn.choice((2, 4)),
                    drawn.choice(LENGTHS),
                )
