"""What tightfit promises to its users, read from the package: names and signatures, options, keys, fields of JSON.

`python tests/promises.py > tests/records/promises.json` writes the record that `tests/test_promises.py` compares with.
"""

import dataclasses
import inspect
import json
from typing import Any, get_args

import typer

import tightfit
from command_line import tightfit as run_command
from tightfit.cli.app import app

ASKED = ("--model", "cpu26", "--seq-len", "256", "--batch-size", "16")
QUESTIONS = {
    "estimate": ("estimate", *ASKED, "--device", "rtx4090", "--json"),
    "plan": ("plan", *ASKED, "--device", "rtx4090", "--budget", "0.7x", "--levers", "exact", "--json"),
    "fit": (
        "fit",
        "--model",
        "cpu26",
        "--seq-len",
        "64",
        "--device",
        "rtx4090",
        "--optimizer",
        "sgd",
        "--dtype",
        "fp32",
        "--json",
    ),
}


def promised() -> dict[str, Any]:
    """Everything that `tests/records/promises.json` holds, as of this package."""
    return {"python": _python(), "commands": _commands(), "keys": sorted(_keys()), "json": _fields_of_answers()}


def _python() -> dict[str, Any]:
    return {name: _signatures(getattr(tightfit, name)) for name in tightfit.__all__ if name != "__version__"}


def _signatures(value: Any) -> dict[str, Any]:
    if not inspect.isclass(value):
        return {"()": _parameters(value)}
    public = [name for name in dir(value) if not name.startswith("_")]
    methods = {name: getattr(value, name) for name in public if callable(getattr(value, name))}
    fields = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    return {
        "attributes": sorted({*public, *fields} - methods.keys()),
        **{name: _parameters(method) for name, method in methods.items()},
    }


def _parameters(function: Any) -> list[str]:
    """The parameters in order, as `name`, `name=default`, `*, name`; without annotations, which name rooms."""
    parameters = inspect.signature(function).parameters.values()
    return [str(each.replace(annotation=each.empty)) for each in parameters]


def _commands() -> dict[str, Any]:
    return dict(sorted(_options(typer.main.get_command(app))))


def _options(command: Any, path: str = "tightfit"):
    yield path, sorted(option for each in command.params for option in [*each.opts, *each.secondary_opts])
    for name, below in getattr(command, "commands", {}).items():
        yield from _options(below, f"{path} {name}")


def _keys(model: Any = None, before: str = "") -> set[str]:
    """The keys of the YAML schema, with the dots between sections."""
    from tightfit.training.config import Config

    found = set()
    for name, field in (model or Config).model_fields.items():
        found.add(before + name)
        found |= {key for section in _sections(field.annotation) for key in _keys(section, f"{before}{name}.")}
    return found


def _sections(annotation: Any) -> list[Any]:
    if hasattr(annotation, "model_fields"):
        return [annotation]
    return [section for part in get_args(annotation) for section in _sections(part)]


def _fields_of_answers() -> dict[str, list[str]]:
    return {name: sorted(fields(json.loads(run_command(*question).out))) for name, question in QUESTIONS.items()}


def fields(value: Any, before: str = "") -> set[str]:
    """The paths of an answer's fields; the entries of a list share theirs, and tables by name count as one field."""
    if isinstance(value, list):
        return {path for each in value for path in fields(each, f"{before}[]")}
    if not isinstance(value, dict):
        return {before} if before else set()
    return {path for name, each in value.items() for path in {f"{before}.{name}", *fields(each, f"{before}.{name}")}}


if __name__ == "__main__":
    print(json.dumps(promised(), indent=1))
