"""The page's question: the values of its fields, checked. No torch here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tightfit.cli.explorer.limits import check_tokens
from tightfit.cli.explorer.uploads import Described, Upload, published_place, read_upload, reads_text
from tightfit.devices.known import find, known_devices
from tightfit.errors import DeviceError, InputError, ModelError
from tightfit.models.decoder_config import PRESETS, DecoderConfig
from tightfit.models.published import published
from tightfit.names import OPTIMIZERS, parse_optimizer
from tightfit.training.config.schema import AdapterConfig
from tightfit.units import check_budget

PRECISIONS = {"bf16": "bf16 autocast", "fp16": "fp16 autocast, scaled loss", "fp32": "no autocast"}
DTYPES = {"fp32": "fp32", "bf16": "bf16"}
BASES = {"nf4": "nf4 (4 bits)", "int8": "int8", "bf16": "bf16", "fp32": "fp32"}
ALLOWED = {
    "exact": "bit-exact levers",
    "rounding": "also levers exact to rounding",
    "rounding+offload": "also offload of activations",
}
HIGHEST_RANK = 1024


@dataclass(frozen=True)
class PageQuestion:
    """A step, as the fields of the page describe it. `rank` 0 trains all weights; `targets` empty is peft's choice."""

    model: str = "llama-3.2-1b"
    upload: Upload | None = None  # in place of `model`
    device: str = "rtx4090"
    sequence_length: int = 2048
    batch_size: int = 1
    precision: str = "bf16"
    dtype: str = "fp32"
    optimizer: str = "adamw_fused"
    step_in_backward: bool = False
    rank: int = 0
    targets: str = ""
    base: str = "nf4"
    budget: str = "100%"
    levers: str = "rounding"

    def __post_init__(self) -> None:
        """Raises `InputError` and its like in one line."""
        check_tokens(self.sequence_length, self.batch_size)
        for name, value, known in (
            ("precision", self.precision, PRECISIONS),
            ("weights", self.dtype, DTYPES),
            ("base", self.base, BASES),
            ("levers", self.levers, ALLOWED),
        ):
            if value not in known:
                raise InputError(f"{name} {value!r} is not known: choose one of {', '.join(known)}")
        try:
            named = parse_optimizer(self.optimizer)
        except ValueError as error:
            raise InputError(str(error)) from None
        if named.kind not in OPTIMIZERS:  # the page's visitors name no code that this machine imports
            raise InputError(f"optimizer {self.optimizer!r} is no name of the list: choose {', '.join(OPTIMIZERS)}")
        if find(self.device) is None:
            raise DeviceError(f"device {self.device!r} is no card that this page knows: choose one of the list")
        if not 0 <= self.rank <= HIGHEST_RANK:
            raise InputError(f"rank {self.rank} is not from 0 (all weights are trained) to {HIGHEST_RANK}")
        check_budget(self.budget)
        if self.upload is None and self.model not in choosable_models():
            raise ModelError(f"model {self.model!r} is none of the list: choose one, or upload its config.json")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "PageQuestion":
        """From the values of the page's fields, where numbers may be missing or fractions."""
        known = {each.name: each for each in fields(cls)}
        clean = {name: value for name, value in values.items() if name in known}
        for name in ("sequence_length", "batch_size", "rank"):
            if name in clean:
                clean[name] = whole(name.replace("_", " "), clean[name])
        for name in ("model", "device", "precision", "dtype", "optimizer", "targets", "base", "budget", "levers"):
            if name in clean:
                clean[name] = text(name, clean[name])
        if "step_in_backward" in clean:
            clean["step_in_backward"] = clean["step_in_backward"] is True
        return cls(**clean)

    @property
    def adapter(self) -> AdapterConfig | None:
        """The adapters, with an alpha of twice the rank, as is usual; None if all weights are trained."""
        if not self.rank:
            return None
        names = tuple(name.strip() for name in self.targets.split("+") if name.strip())
        targets = "all-linear" if names == ("all-linear",) else names or None
        return AdapterConfig(r=self.rank, alpha=2.0 * self.rank, base=self.base, target_modules=targets)  # pyright: ignore[reportArgumentType] - checked above

    @property
    def allowed(self) -> str | list[str]:
        """The levers, as `tightfit.plan` takes them."""
        return self.levers if "+" not in self.levers else self.levers.split("+")

    @property
    def described(self) -> Described:
        """The source that the model is built from. Raises `InputError` for an upload that cannot be used."""
        if self.upload is not None:
            return read_upload(self.upload).described
        if self.model in PRESETS:
            return Described(self.model, decoder=DecoderConfig(**PRESETS[self.model]))
        name, entry = published_place(self.model)
        return Described(name, fields=entry.config, path=entry.source)


def choosable_models() -> dict[str, str]:
    """The models of the list, by name, each with a line about its size."""
    sizes = {name: f"{name} ({billions(entry.parameters)})" for name, entry in published().items() if reads_text(entry)}
    return dict(sorted(sizes.items())) | {name: f"{name} (preset)" for name in PRESETS}


def choosable_devices() -> dict[str, str]:
    """The cards of the list, by key, each with its name, memory and key, which people type; the smallest first."""
    cards = sorted(known_devices().items(), key=lambda item: (item[1].spec.memory_bytes, item[0]))
    return {key: f"{card.spec.name}, {card.spec.memory_bytes / 2**30:.1f} GiB ({key})" for key, card in cards}


def choosable_optimizers() -> dict[str, str]:
    return {name: name for name in OPTIMIZERS}


def billions(parameters: int) -> str:
    """`1.24B`, `135M`."""
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


def whole(name: str, value: Any) -> int:
    """A whole number of a field. Raises `InputError`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or int(value) != value:
        raise InputError(f"{name} is {'empty' if value is None else repr(value)}: give a whole number")
    return int(value)


def text(name: str, value: Any) -> str:
    """A text of a field, without spaces around it. Raises `InputError`."""
    if value is None:
        value = ""
    if not isinstance(value, str):
        raise InputError(f"{name} is no text: choose it again")
    if len(value) > 200:
        raise InputError(f"{name} has {len(value)} characters: at most 200")
    return value.strip()
