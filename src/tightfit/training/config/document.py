"""The page `docs/configuration.md`, made from the schema and the table of aliases, so that it cannot fall behind them.

`python -m tightfit.training.config.document > docs/configuration.md` writes it.
"""

import inspect
import sys
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter

from tightfit.models.decoder_config import PRESETS, DecoderConfig
from tightfit.training.config.aliases import ALIASES
from tightfit.training.config.schema import (
    AdapterConfig,
    CheckpointConfig,
    DataConfig,
    DistilConfig,
    GrpoConfig,
    MemoryConfig,
    OutputConfig,
    PretrainedModel,
    RecomputeConfig,
    TrainingConfig,
)

_INTRODUCTION = """\
# Configuration

A YAML file with the sections `model`, `data`, `training`, `memory`, `output`, `checkpoint` and `distil`; every key has
a default. On the command line, `key=value` overrides the file's value: `training.max_steps=20`, `memory.budget=0.5x`,
`memory.recompute.blocks=layers.*`. Unknown keys and wrong types are errors. Paths are relative to the working folder.
"""

_PAGES = (
    ("model", "", DecoderConfig, "The reference decoder."),
    ("model", ", with a path", PretrainedModel, "A causal language model from `transformers`."),
    ("model.adapter", ", with a path", AdapterConfig, inspect.getdoc(AdapterConfig)),
    ("data", "", DataConfig, inspect.getdoc(DataConfig)),
    ("training", "", TrainingConfig, inspect.getdoc(TrainingConfig)),
    ("training.grpo", "", GrpoConfig, inspect.getdoc(GrpoConfig)),
    ("memory", "", MemoryConfig, inspect.getdoc(MemoryConfig)),
    ("memory.recompute", "", RecomputeConfig, inspect.getdoc(RecomputeConfig)),
    ("output", "", OutputConfig, inspect.getdoc(OutputConfig)),
    ("checkpoint", "", CheckpointConfig, inspect.getdoc(CheckpointConfig)),
    ("distil", ", for `tightfit distil`", DistilConfig, inspect.getdoc(DistilConfig)),
)


def configuration_page() -> str:
    """The whole page, as Markdown."""
    sections = ["\n".join(_section(*page)) for page in _PAGES]
    return "\n".join([_INTRODUCTION, *sections, *_presets(), "", *_aliases()]) + "\n"


def _section(name: str, condition: str, section: type, what: str | None) -> Iterator[str]:
    yield f"## `{name}`{condition}\n\n{what}\n\n| key | default | meaning |\n|---|---|---|"
    schema = TypeAdapter(section).json_schema()
    for key, field in schema["properties"].items():
        default = "required" if key in schema.get("required", ()) else f"`{_yaml(field.get('default'))}`"
        choices = f" One of {', '.join(f'`{choice}`' for choice in field['enum'])}." if "enum" in field else ""
        yield f"| `{key}` | {default} | {' '.join(field['description'].split())}{choices} |"
    yield ""


def _presets() -> Iterator[str]:
    yield "## `model.preset`\n\nA size by name; keys given beside it win.\n\n| preset | keys |\n|---|---|"
    for name, keys in PRESETS.items():
        yield f"| `{name}` | {', '.join(f'`{key}: {value}`' for key, value in keys.items())} |"


def _aliases() -> Iterator[str]:
    yield (
        "## Keys from elsewhere\n\nAccepted at the top level or within any section. An alias that contradicts its "
        "key is an error.\n\n| alias | key | value |\n|---|---|---|"
    )
    for alias in ALIASES.values():
        yield f"| `{alias.name}` | `{alias.key}` | {alias.note} |"


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


if __name__ == "__main__":
    sys.stdout.write(configuration_page())
