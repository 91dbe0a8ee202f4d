"""A change of a training as lines to copy: Python, YAML, and options of the command line."""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tightfit.names import parse_optimizer
from tightfit.planner.levers import CLASSES, allowed_levers, lever_types
from tightfit.ranks.world import World
from tightfit.recipes.records import Recipe
from tightfit.training.config.schema import AdapterConfig

_BRACKETS = re.compile(r"[(),\[\]{}]")  # which a text in YAML's flow style cannot have without quotes
FOLDER = "FOLDER"  # stands for the folder of a model


@dataclass(frozen=True)
class CodeLines:
    """The lines that change a training. `python` ends with the plan; `statements` are those before it.

    `overrides` change a configuration where it is used, as `key=value` behind its name.
    """

    python: str
    yaml: str
    flags: str
    statements: str = ""
    overrides: str = ""


def change_in_words(before: Recipe, after: Recipe) -> list[str]:
    """The changes of a recipe, a few words each."""
    words = []
    if after.adapter is not None and after.adapter != before.adapter:
        words.append(f"low-rank adapters (r = {after.adapter.r}) on {after.adapter.base}")
    elif after.dtype != before.dtype:
        words.append(f"{after.dtype} weights")
    if after.precision != before.precision:
        words.append(f"autocast to {after.precision}" if after.precision != "fp32" else "no autocast")
    if after.optimizer != before.optimizer:
        words.append(f"optimizer {after.optimizer}")
    if after.step_in_backward and not before.step_in_backward:
        words.append("step in backward")
    return words


def statements_for(before: Recipe, after: Recipe) -> list[str]:
    """Statements of Python that change `model`, and make `optimizer`."""
    found: list[str] = []
    if after.adapter is not None and after.adapter != before.adapter:
        found += _adapters(after.adapter)
    elif after.dtype != before.dtype:
        found += ["import torch", "from tightfit.models.dtypes import convert_weights"]
        found.append(f"convert_weights(model, torch.{'bfloat16' if after.dtype == 'bf16' else 'float32'})")
    if remakes_optimizer(before, after):
        found += optimizer_statements(after)
    return list(dict.fromkeys(found))


def remakes_optimizer(before: Recipe, after: Recipe) -> bool:
    """True if the optimizer has to be made anew."""
    return (before.optimizer, before.step_in_backward) != (after.optimizer, after.step_in_backward)


def optimizer_statements(recipe: Recipe) -> list[str]:
    """Statements that import and make a recipe's optimizer."""
    parsed = parse_optimizer(recipe.optimizer)
    facts, fraction = parsed.facts, parsed.fraction
    home, name = facts.home, facts.made.removeprefix(f"{facts.home}.")
    ours = home == "tightfit.optim"
    settings = [facts.settings] if facts.settings else [f"fraction={fraction:g}"] if fraction is not None else []
    made = f"{name if ours else facts.made}({', '.join(['model.parameters()', *settings])})"
    own = f"from {home} import {name}" if ours else "import torch" if facts.package is None else f"import {home}"
    found = [own, f"optimizer = {made}"]
    if recipe.step_in_backward:
        found[1:1] = ["from tightfit.optim import step_in_backward"]
        found.append("step_in_backward(optimizer, model)")
    return found


def _adapters(config: AdapterConfig) -> list[str]:
    if config.base in ("fp32", "bf16") and config.config is None:
        targets = "None" if config.target_modules is None else _literal(config.target_modules)
        lora = f"peft.LoraConfig(r={config.r}, lora_alpha={config.alpha:g}, target_modules={targets})"
        return ["import peft", f"model = peft.get_peft_model(model, {lora})"]
    return [
        "from tightfit.training.config import AdapterConfig",
        "from tightfit.models.adapters import add_adapter",
        f"model = add_adapter(model, AdapterConfig({_keywords(_of_adapter(config))}))",
    ]


def _of_adapter(config: AdapterConfig) -> dict[str, Any]:
    """The settings of an adapter that are not the defaults."""
    return {name: value for name, value in config.model_dump().items() if value != getattr(AdapterConfig(), name)}


def _keywords(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_literal(value)}" for name, value in arguments.items())


def _literal(value: Any) -> str:
    """A value as Python, with double quotes."""
    return repr(value) if isinstance(value, bool) else json.dumps(list(value) if isinstance(value, tuple) else value)


def in_short(levers: Iterable[str]) -> list[str]:
    """Names of levers as a user writes them: a class, and the levers beside it."""
    names = set(levers)
    whole = [each for each in CLASSES if allowed_levers(each) <= names][-1:]
    inside = allowed_levers(whole) if whole else frozenset()
    return [*map(str, whole), *(kind.name for kind in lever_types() if kind.name in names - inside)]


def yaml_of(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Sections of a configuration, a line each."""
    return "\n".join(f"{name}: {_flow(keys)}" for name, keys in sections.items() if keys)


def overrides_of(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """The same as overrides, quoted for a shell. A model's folder stays the one that it is."""
    found = [f"{name}.{key}={_flow(value)}" for name, keys in sections.items() for key, value in keys.items()]
    return " ".join(shlex.quote(each) for each in found if each != f"model.path={FOLDER}")


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_flow(each)}' for key, each in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value) if _BRACKETS.search(str(value)) else str(value)


def sections_for(before: Recipe, after: Recipe) -> dict[str, dict[str, Any]]:
    """The keys of the configuration that change, by section. `FOLDER` stands for the model's."""
    model: dict[str, Any] = {}
    if after.adapter is not None and after.adapter != before.adapter:
        model = {"path": FOLDER, "adapter": _of_adapter(after.adapter)}
    elif after.dtype != before.dtype:
        model = {"path": FOLDER, "dtype": after.dtype}
    training: dict[str, Any] = {}
    if after.precision != before.precision:
        training["precision"] = after.precision
    if after.optimizer != before.optimizer:
        training["optimizer"] = after.optimizer
    if after.step_in_backward and not before.step_in_backward:
        training |= {"step_in_backward": True, "grad_clip": None}
    return {"model": model, "training": training}


def flags_for(before: Recipe, after: Recipe) -> list[str]:
    """The options of the command line that change."""
    flags = []
    if after.adapter is not None and after.adapter != before.adapter:
        settings = _of_adapter(after.adapter)
        base = settings.pop("base", None)
        named = settings.pop("config", None) or ",".join(f"{name}={_flag(value)}" for name, value in settings.items())
        flags += [f"--adapter {named or 'default'}", *([f"--base {base}"] if base else [])]
    elif after.dtype != before.dtype:
        flags.append(f"--dtype {after.dtype}")
    if after.precision != before.precision:
        flags.append(f"--precision {after.precision}")
    if after.optimizer != before.optimizer:
        flags.append(f"--optimizer {shlex.quote(after.optimizer)}")
    if after.step_in_backward and not before.step_in_backward:
        flags.append("--step-in-backward")
    return flags


def _flag(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "+".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def keywords_of(world: World | None) -> str:
    """The arguments of a plan for several ranks, behind others; empty for one process."""
    if world is None:
        return ""
    nodes = {} if world.nodes == 1 else {"nodes": world.nodes}
    return f", {_keywords({'world_size': world.size, **nodes, 'parallel': world.parallel})}"


def lines_for(
    before: Recipe,
    after: Recipe,
    *,
    budget: str,
    levers: Sequence[str] | None = None,
    device: str | None = None,
    world: World | None = None,
) -> CodeLines:
    """The lines for a recipe in the place of another one, with a plan within `budget`.

    `levers` are the names that the plan may use, where they are others than before. `device` is the key of another
    device. `world` is that of a plan for several ranks.
    """
    statements = statements_for(before, after)
    arguments: dict[str, Any] = {} if device is None else {"device": device}
    sections, flags = sections_for(before, after), flags_for(before, after)
    memory: dict[str, Any] = {"budget": budget}
    if after.optimizer != before.optimizer:
        arguments["optimizer"] = after.optimizer
    if after.step_in_backward and not before.step_in_backward:
        arguments["step_in_backward"] = True
    if after.precision != before.precision:
        arguments["precision"] = after.precision
    if levers is not None:
        short = in_short(levers)
        arguments["levers"] = short[0] if len(short) == 1 and short[0] in CLASSES else short
        memory["levers"] = arguments["levers"]
        flags.append(f"--levers {','.join(short)}")
    if device is not None:
        sections["training"]["device"] = device
        flags += [f"--device {device}", f"--budget {budget}"]
    changed = sections if levers is None else {**sections, "memory": {"levers": memory["levers"]}}
    keywords = (f", {_keywords(arguments)}" if arguments else "") + keywords_of(world)
    plan = f'plan = tightfit.plan(model, batch, "{budget}"{keywords})'
    return CodeLines(
        python="; ".join(["import tightfit", *statements, plan]),
        yaml=yaml_of({**sections, "memory": memory}),
        flags=" ".join(flags),
        statements="; ".join(statements),
        # A configuration trains on a device that is there.
        overrides=overrides_of(changed) if device is None else "",
    )
