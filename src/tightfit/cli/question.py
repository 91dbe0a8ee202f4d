"""The question of a command line, as it was written, and what that means to a configuration. No torch here."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

from tightfit.cli.adapter import BASES, DEFAULT, adapter_setting, base_of
from tightfit.errors import InputError
from tightfit.names import FEW_BITS, OPTIMIZERS, optimizer_class, parse_optimizer, parts_between_commas
from tightfit.ranks.world import world_of
from tightfit.units import check_budget, parse_bytes

SIZE, LENGTH = 1, 1024  # of a batch, where a question about a --model gives none
LEVERS = "rounding"  # which `fit` and `plan --maximise` take for a --model: those of a training
NO_BUDGET = "a plan needs a budget: give --budget, for example 22GiB, 80% or 0.5x, or memory.budget in CONFIG"
DTYPES = ("auto", "fp32", "bf16")
ATTENTIONS = ("eager", "sdpa", "flash_attention_2")
OF_THE_DECODER = "chunked"  # an attention that the reference decoder has beside sdpa

# The options that are keys of the configuration, so that `--budget 0.5x` beside a CONFIG is `memory.budget=0.5x`.
KEYS = {
    "batch_size": "training.batch_size",
    "seq_len": "data.sequence_length",
    "precision": "training.precision",
    "optimizer": "training.optimizer",
    "dtype": "model.dtype",
    "attention": "model.attention",
    "micro_batches": "training.gradient_accumulation_steps",
    "grad_clip": "training.grad_clip",
    "device": "training.device",
    "budget": "memory.budget",
    "host_budget": "memory.host_budget",
    "levers": "memory.levers",
}


def _with_arguments(optimizer: str | None, text: str) -> str:
    """`--optimizer` and `--optimizer-args` as one text. Raises `InputError`."""
    if optimizer is None:
        raise InputError(f"--optimizer-args {text} is for an optimizer's class: give --optimizer module:Class too")
    try:
        named = parse_optimizer(optimizer)
    except ValueError as error:
        raise InputError(str(error)) from None
    if named.kind in OPTIMIZERS:
        raise InputError(
            f"--optimizer {optimizer} takes no --optimizer-args: name its class instead, such as "
            f"--optimizer {':'.join(named.facts.made.rsplit('.', 1))}"
        )
    arguments = dict(named.arguments)
    for item in parts_between_commas(text):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key.isidentifier() or not value:
            raise InputError(f"--optimizer-args {text!r}: {item!r} is no key=value: write lr=0.001,betas=(0.9,0.99)")
        arguments[key] = _literal(value)
    return optimizer_class(named.kind, arguments)


def _literal(text: str) -> Any:
    """A value as Python or YAML writes it; else the text itself."""
    named = {"true": True, "false": False, "null": None}
    try:
        return named[text] if text in named else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@dataclass(frozen=True)
class Question:
    """A CONFIG with overrides, or `--model`, and the options. None is what was not given."""

    config: str | None = None
    overrides: tuple[str, ...] = ()
    model: str | None = None
    batch_size: int | None = None
    seq_len: int | None = None
    image: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    optimizer_args: str | None = None
    dtype: str | None = None
    adapter: str | None = None
    base: str | None = None
    attention: str | None = None
    step_in_backward: bool | None = None
    micro_batches: int | Literal["auto"] | None = None
    grad_clip: float | None = None
    device: str | None = None
    host: str | None = None
    budget: str | None = None
    host_budget: str | None = None
    levers: str | None = None
    blocks: str | None = None
    world_size: int | None = None
    nodes: int | None = None
    parallel: str | None = None
    shape: Mapping[str, int] = field(default_factory=dict)  # keys of the decoder, laid over CONFIG's or the preset's

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Self:
        """From a command's parameters, those that it has. Raises `InputError` unless CONFIG or `--model` is given."""
        known = {field.name: params[field.name] for field in fields(cls) if params.get(field.name) is not None}
        if "base" in known and "config" not in known:
            known.setdefault("adapter", DEFAULT)  # frozen weights are those below adapters
        question = cls(**{**known, "overrides": tuple(known.get("overrides", ()))})
        if question.config is None and question.model is None:
            raise InputError("nothing to ask about: give a CONFIG, or --model with a folder, a config.json or a preset")
        if question.config is not None and question.model is not None:
            raise InputError(f"{question.config!r} and --model are both given: ask about one of them")
        question.check_weights()
        if question.optimizer_args is not None:
            question = replace(question, optimizer=_with_arguments(question.optimizer, question.optimizer_args))
        if question.budget is not None:
            check_budget(question.budget)
        if question.host_budget is not None:
            parse_bytes(question.host_budget)
        world_of(question.world_size, question.nodes, question.parallel)
        return question

    def check_weights(self) -> None:
        """Raise `InputError` for options about weights and attention that are unknown or do not go together."""
        named = (("dtype", DTYPES), ("base", BASES), ("attention", (*ATTENTIONS, OF_THE_DECODER)))
        for option, known in named:
            value = getattr(self, option)
            if value is not None and value not in known:
                raise InputError(f"--{option} {value!r} is not known: choose {', '.join(known[:-1])} or {known[-1]}")
        if self.adapter is None:
            return
        base = base_of(adapter_setting(self.adapter, self.base))
        if self.dtype not in (None, "auto") and base not in FEW_BITS:
            raise InputError(
                f"--dtype {self.dtype} and --adapter are both given: --base is the dtype of the frozen weights, leave "
                "--dtype out"
            )

    @property
    def settings(self) -> tuple[str, ...]:
        """The overrides, and the options as overrides."""
        given = {key: getattr(self, option) for option, key in KEYS.items()}
        if isinstance(self.allowed, list):
            given[KEYS["levers"]] = f"[{', '.join(self.allowed)}]"
        if self.adapter is not None:
            given["model.adapter"] = adapter_setting(self.adapter, self.base)
        else:
            given["model.adapter.base"] = self.base
        if self.step_in_backward:
            given["training.step_in_backward"] = "true"
        shape = (f"model.{key}={value}" for key, value in self.shape.items())
        return (*self.overrides, *(f"{key}={value}" for key, value in given.items() if value is not None), *shape)

    def as_settings(self) -> str:
        """Batch and shape as a line of `key=value`, for a CONFIG to be trained with."""
        asked = {KEYS["batch_size"]: self.batch_size, KEYS["seq_len"]: self.seq_len}
        if self.model is not None:
            asked = {KEYS["batch_size"]: self.batch_size or SIZE, KEYS["seq_len"]: self.seq_len or LENGTH}
        asked |= {f"model.{key}": value for key, value in self.shape.items()}
        return f"As settings: {' '.join(f'{key}={value}' for key, value in asked.items() if value is not None)}"

    @property
    def allowed(self) -> str | list[str] | None:
        """`--levers`: a set by its name, or the names of levers."""
        if self.levers is None or self.levers in ("exact", "rounding"):
            return self.levers
        return [name.strip() for name in self.levers.split(",")]
