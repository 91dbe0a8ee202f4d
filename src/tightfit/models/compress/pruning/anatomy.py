"""The parts of a model of `transformers`, from its configuration alone, and the configuration after parts are gone.

All layers lose the same number of each part: `transformers` loads no layers of different widths.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from tightfit.errors import InputError, ModelError
from tightfit.models.pretrained import transformers_package

MULTIPLE = 8  # of widths that were one before: grouped products take rows of 16 bytes, and tensor cores like them
TOLERANCE = 0.01  # of a group of heads, so that 0.3333 is a third


@dataclass(frozen=True)
class ExpertFamily:
    """The key of a configuration that says the width of the experts; None where there are none."""

    expert_ffn: str | None = None


# By `model_type`. Their layers compute what `slicing.LAYER` says of their weights, and nothing else has a width.
FAMILIES = {
    "llama": ExpertFamily(),
    "mistral": ExpertFamily(),
    "qwen2": ExpertFamily(),
    "qwen3": ExpertFamily(),
    "mixtral": ExpertFamily(expert_ffn="intermediate_size"),
    "qwen3_moe": ExpertFamily(expert_ffn="moe_intermediate_size"),
}


@dataclass(frozen=True)
class Anatomy:
    """Counts of a model's parts. `groups` are key and value heads, each with `queries` query heads. `ffn` is the width
    of MLPs and `expert_ffn` that of experts, None where there are none. `dense` are the numbers of the layers without
    experts.
    """

    model_type: str
    layers: int
    groups: int
    queries: int
    head_width: int
    hidden: int
    ffn: int | None
    expert_ffn: int | None
    dense: tuple[int, ...]
    is_mixed: bool  # layers differ: in their window, or some have experts and some have none

    @classmethod
    def of(cls, config: Any) -> "Anatomy":
        """Raises `ModelError` for a model that cannot be sliced."""
        family = FAMILIES.get(config.model_type)
        if family is None:
            raise ModelError(
                f"a model of type {config.model_type!r} cannot be sliced: whole parts are taken out of "
                f"{', '.join(FAMILIES)}; --sparsity sets single weights to zero instead"
            )
        layers = config.num_hidden_layers
        groups = config.num_key_value_heads or config.num_attention_heads
        dense = tuple(range(layers)) if family.expert_ffn is None else _dense_layers(config)
        kinds = set(getattr(config, "layer_types", None) or ())
        return cls(
            model_type=config.model_type,
            layers=layers,
            groups=groups,
            queries=config.num_attention_heads // groups,
            head_width=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            hidden=config.hidden_size,
            ffn=config.intermediate_size if dense else None,
            expert_ffn=getattr(config, family.expert_ffn) if family.expert_ffn and len(dense) < layers else None,
            dense=dense,
            is_mixed=len(kinds) > 1 or 0 < len(dense) < layers,
        )


def _dense_layers(config: Any) -> tuple[int, ...]:
    """The layers without experts of a model that has some (`Qwen3MoeDecoderLayer`); none of Mixtral's."""
    named, step = getattr(config, "mlp_only_layers", None) or (), getattr(config, "decoder_sparse_step", 1)
    return tuple(i for i in range(config.num_hidden_layers) if i in named or (i + 1) % step)


@dataclass(frozen=True)
class Ratios:
    """The share of each part that is taken out; None: none of it. Raises `InputError` for one out of range."""

    layers: float | None = None
    ffn: float | None = None
    heads: float | None = None
    width: float | None = None

    def __post_init__(self):
        for name, ratio in vars(self).items():
            if ratio is not None and not 0 < ratio < 1:
                raise InputError(f"--{name} {ratio:g} is not between 0 and 1: give the share that is taken out")

    def __bool__(self) -> bool:
        return any(ratio is not None for ratio in vars(self).values())


@dataclass(frozen=True)
class Removal:
    """How many of each part are taken out: layers in all, channels of each MLP and of each expert, groups of heads of
    each layer, channels of the hidden states.
    """

    layers: int = 0
    ffn: int = 0
    expert_ffn: int = 0
    groups: int = 0
    hidden: int = 0

    def __bool__(self) -> bool:
        return any(astuple(self))

    def in_words(self, anatomy: Anatomy) -> str:
        said = [
            f"{self.layers} of {anatomy.layers} layers" if self.layers else "",
            f"{self.ffn} of {anatomy.ffn} channels of each MLP" if self.ffn else "",
            f"{self.expert_ffn} of {anatomy.expert_ffn} channels of each expert" if self.expert_ffn else "",
            f"{self.groups} of {anatomy.groups} key and value heads of each layer, with {anatomy.queries} query "
            f"head{'' if anatomy.queries == 1 else 's'} each"
            if self.groups
            else "",
            f"{self.hidden} of {anatomy.hidden} hidden channels" if self.hidden else "",
        ]
        return "; ".join(one for one in said if one)


def removal_of(anatomy: Anatomy, ratios: Ratios) -> Removal:
    """The counts that ratios mean for a model. Layers and channels are rounded, heads are not: they are few.

    Raises `InputError` where a ratio removes nothing, or a fraction of a group of heads.
    """
    groups = 0
    if ratios.heads is not None:
        exact = ratios.heads * anatomy.groups
        groups = round(exact)
        if abs(exact - groups) > TOLERANCE or not 0 < groups < anatomy.groups:
            raise InputError(
                f"--heads {ratios.heads:g} of {anatomy.groups} key and value heads is {exact:g}: heads go in whole "
                f"groups, {_possible(anatomy.groups)}"
            )
    return Removal(
        layers=_rounded("--layers", ratios.layers, anatomy.layers, "layers", 1),
        ffn=_rounded("--ffn", ratios.ffn, anatomy.ffn, "channels of an MLP"),
        expert_ffn=_rounded("--ffn", ratios.ffn, anatomy.expert_ffn, "channels of an expert"),
        groups=groups,
        hidden=_rounded("--width", ratios.width, anatomy.hidden, "hidden channels"),
    )


def _possible(groups: int) -> str:
    if groups == 1:
        return "and there is one: leave --heads out"
    return f"give a multiple of {1 / groups:.4g} up to {(groups - 1) / groups:.4g}"


def _rounded(option: str, ratio: float | None, total: int | None, what: str, multiple: int = 0) -> int:
    """The nearest count, in multiples of `MULTIPLE` where the total is one."""
    if ratio is None or total is None:
        return 0
    unit = multiple or unit_of(total)
    removed = round(ratio * total / unit) * unit
    if not 0 < removed < total:
        raise InputError(
            f"{option} {ratio:g} of {total} {what} is {'none' if not removed else 'all'} of them (they go by {unit}): "
            "give another share"
        )
    return removed


def unit_of(total: int) -> int:
    """The number of channels that are taken out together: widths that are multiples of `MULTIPLE` stay so."""
    return MULTIPLE if total % MULTIPLE == 0 and total > MULTIPLE else 1


def config_after(config: Any, anatomy: Anatomy, removal: Removal, kept_layers: Sequence[int] | None = None) -> Any:
    """The configuration of the model without the removed parts. `kept_layers` None: any of them, all are alike."""
    kept = range(anatomy.layers - removal.layers) if kept_layers is None else kept_layers
    groups = anatomy.groups - removal.groups
    changed: dict[str, Any] = {
        "num_hidden_layers": len(kept),
        "num_key_value_heads": groups,
        "num_attention_heads": groups * anatomy.queries,
        "head_dim": anatomy.head_width,
        "hidden_size": anatomy.hidden - removal.hidden,
        **_ffn_after(anatomy, removal),
    }
    raw: Mapping[str, Any] = config.to_dict()
    if raw.get("layer_types"):
        changed["layer_types"] = [raw["layer_types"][layer] for layer in kept]
    if "mlp_only_layers" in raw:
        changed["mlp_only_layers"] = [new for new, old in enumerate(kept) if old in anatomy.dense]
        changed["decoder_sparse_step"] = 1
    whole = {**raw, **changed}
    if is_refused_as_llama(config, whole["hidden_size"], whole["num_attention_heads"]):
        return _as_mistral(whole)
    return type(config).from_dict(whole)


def loads_after(config: Any, anatomy: Anatomy, removal: Removal) -> bool:
    """True if `transformers` loads what a removal leaves."""
    heads, hidden = (anatomy.groups - removal.groups) * anatomy.queries, anatomy.hidden - removal.hidden
    return not is_refused_as_llama(config, hidden, heads) or not _has_biases(config)


def is_refused_as_llama(config: Any, hidden: int, heads: int) -> bool:
    """True if `transformers` refuses a Llama of that shape: its heads must divide its hidden channels, although their
    width is given (`LlamaConfig.validate_architecture`, 5.23).
    """
    return config.model_type == "llama" and hidden % heads != 0


def _has_biases(config: Any) -> bool:
    return bool(getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False))


def _as_mistral(raw: Mapping[str, Any]) -> Any:
    """The same computation as a Mistral without a window, whose weights have the same names, and whose heads need
    divide nothing. Raises `ModelError` for a Llama with biases, which a Mistral has no place for.
    """
    transformers = transformers_package()

    if raw.get("attention_bias") or raw.get("mlp_bias"):
        raise ModelError(
            f"transformers loads no Llama with {raw['hidden_size']} hidden channels and {raw['num_attention_heads']} "
            "query heads, which do not divide them, and Mistral, which computes the same, has no biases: change "
            "--heads or --width"
        )
    left_out = ("model_type", "architectures", "attention_bias", "mlp_bias", "pretraining_tp")
    kept = {key: value for key, value in raw.items() if key not in left_out}
    return transformers.AutoConfig.for_model(
        "mistral", **kept, architectures=["MistralForCausalLM"], sliding_window=None
    )


def _ffn_after(anatomy: Anatomy, removal: Removal) -> dict[str, int]:
    changed: dict[str, int] = {}
    if anatomy.ffn is not None:
        changed["intermediate_size"] = anatomy.ffn - removal.ffn
    key = FAMILIES[anatomy.model_type].expert_ffn
    if key is not None and anatomy.expert_ffn is not None:
        changed[key] = anatomy.expert_ffn - removal.expert_ffn
    return changed
