"""Configurations that a browser sends: files of strangers. Nothing that they name is opened, loaded or run."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from tightfit.cli.explorer.limits import DEPTH, UPLOAD_BYTES, check_number
from tightfit.devices.known import find
from tightfit.errors import ConfigError, InputError, ModelError
from tightfit.models.decoder_config import DecoderConfig
from tightfit.models.published import Published, find_published, published
from tightfit.training.config.load import parse_config
from tightfit.training.config.schema import PretrainedModel
from tightfit.training.config.yaml_text import parse_yaml

OWN_TYPE = "tightfit_decoder"  # `model_type` of a run of ours
# Fields of a config.json that make `transformers` load something: code, kernels of the hub, packages of quantisation.
# Others only say how weights were stored or which files lie beside it.
LEFT_OUT = {
    "auto_map",
    "architectures",
    "attn_implementation",
    "experts_implementation",
    "quantization_config",
    "compression_config",
    "torch_dtype",
    "dtype",
    "device_map",
    "name_or_path",
    "tokenizer_class",
    "transformers_version",
    "trust_remote_code",
    "use_kernels",
    "custom_pipelines",
    "task_specific_params",
    "id2label",
    "label2id",
}
OF_IMAGES_OR_SPEECH = ("vit", "whisper")  # `model_type` of published models that need more than token ids
UNREAD = ("data.source", "data.tokenizer", "output.folder", "memory.offload_folder")  # places of another machine
NO_SIZES = ("seed", "steps", "documents", "lines", "budget", "theta", "bytes")  # endings of keys of other numbers
PATH_MARKS = ("/", "\\", "--", "..", ":")  # a text with one of them may name a file, a repository or a module


@dataclass(frozen=True)
class Upload:
    """A file as it came: its name, and its text."""

    name: str
    text: str

    @classmethod
    def of(cls, name: str, content: bytes) -> "Upload":
        """Raises `InputError` for a file that is too large, of another kind, or no text."""
        short = shown(name)
        if len(content) > UPLOAD_BYTES:
            raise InputError(f"{short} has {len(content):,} bytes: a configuration has at most {UPLOAD_BYTES:,}")
        if not name.lower().endswith((".yaml", ".yml", ".json")):
            raise InputError(f"{short} is not a configuration: choose a .yaml file or a config.json")
        try:
            return cls(short, content.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise InputError(f"{short}: not UTF-8 text: {error.reason} at byte {error.start}") from None

    @property
    def is_json(self) -> bool:
        return self.name.lower().endswith(".json")


@dataclass(frozen=True)
class Described:
    """The source of a model: a section of ours, or the fields of a config.json for `transformers`."""

    name: str
    decoder: DecoderConfig | None = None
    fields: Mapping[str, Any] | None = None
    path: str | None = None  # for `model.path`, where the weights are published


@dataclass(frozen=True)
class UploadedModel:
    """The contents of an upload: a model, values for the page's fields, and the keys that the page does not use."""

    described: Described
    values: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def shown(name: str) -> str:
    """A file's name without folders and control characters, cut where it is very long."""
    last = name.replace("\\", "/").rpartition("/")[2]
    return "".join(mark if mark.isprintable() else "?" for mark in last)[-60:] or "the file"


def read_upload(upload: Upload) -> UploadedModel:
    """Read an uploaded file. Raises `InputError` and `ConfigError` in one line."""
    try:
        return _from_json(upload) if upload.is_json else _from_yaml(upload)
    except RecursionError:
        raise InputError(f"{upload.name}: its mappings and lists are nested too deeply") from None


def published_place(path: str) -> tuple[str, Published]:
    """The published model that a name or a repository means. No file and no hub is asked. Raises `ModelError`."""
    known = find_published(path)
    if known is None or not reads_text(known):
        raise ModelError(
            f"model.path {shown_value(path)} is no published model that this page knows, and it reads no folders and "
            "no hub: upload the model's config.json"
        )
    return next(name for name, entry in published().items() if entry is known), known


def reads_text(entry: Published) -> bool:
    """True if a published model is trained on token ids alone."""
    return not entry.is_denoiser and entry.config["model_type"] not in OF_IMAGES_OR_SPEECH


# config.json


def _from_json(upload: Upload) -> UploadedModel:
    try:
        raw = json.loads(upload.text)
    except ValueError as error:
        raise InputError(f"{upload.name}: not valid JSON: {error}") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise InputError(f"{upload.name}: has no model_type: choose the config.json of a model")
    notes: list[str] = []
    fields = _plain_fields(raw, upload.name, notes, depth=0)
    left_out = tuple(f"{upload.name}: not used here: {', '.join(sorted(set(notes)))}" for _ in notes[:1])
    if raw["model_type"] == OWN_TYPE:
        own = {key: value for key, value in fields.items() if key != "model_type"}
        model = parse_config({"model": own}, source=upload.name).model
        assert isinstance(model, DecoderConfig), "a section without a path is a decoder"
        return UploadedModel(Described(upload.name, decoder=model), notes=left_out)
    return UploadedModel(Described(upload.name, fields=fields), notes=left_out)


def _plain_fields(raw: Mapping[str, Any], source: str, notes: list[str], depth: int) -> dict[str, Any]:
    """The fields that say a model's shape. Raises `InputError` for one that could name something to load."""
    kept = {}
    for name, value in raw.items():
        if name.startswith("_") or name in LEFT_OUT:
            notes.append(name)
            continue
        kept[name] = _plain_value(name, value, source, notes, depth)
    return kept


def _plain_value(name: str, value: Any, source: str, notes: list[str], depth: int) -> Any:
    if depth > DEPTH:
        raise InputError(f"{source}: {name} is nested too deeply: a configuration has at most {DEPTH} levels")
    if isinstance(value, Mapping):
        return _plain_fields(value, source, notes, depth + 1)
    if isinstance(value, list):
        if len(value) > 1024:
            raise InputError(f"{source}: {name} has {len(value):,} items: this page takes at most 1,024")
        return [_plain_value(name, item, source, notes, depth + 1) for item in value]
    if isinstance(value, str) and any(mark in value for mark in PATH_MARKS):
        raise InputError(f"{source}: {name} is {shown_value(value)}, which may name a file or code: remove the field")
    if isinstance(value, int | float) and not isinstance(value, bool) and not name.endswith("theta"):
        check_number(name, value)
    return value


def shown_value(value: object) -> str:
    """A value in an error, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# YAML


def _from_yaml(upload: Upload) -> UploadedModel:
    _refuse_aliases(upload)
    raw = parse_yaml(upload.text, upload.name)
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{upload.name}: holds no sections: choose the YAML of a training")
    _check_numbers(raw)
    config = parse_config(raw, source=upload.name)
    described, values = _described(upload.name, config.model)
    training = config.training
    values |= {
        "sequence_length": config.data.sequence_length,
        "batch_size": training.batch_size,
        "precision": training.precision,
        "optimizer": training.optimizer,
        "step_in_backward": training.step_in_backward,
    }
    if config.memory.budget is not None:
        values["budget"] = str(config.memory.budget)
    unread = [name for name in UNREAD if _is_given(raw, name)]
    card = find(training.device)
    if card is not None:
        values["device"] = card.key
    elif training.device != "auto":
        unread.append("training.device")
    notes = (f"{upload.name}: not read here: {', '.join(unread)}",) if unread else ()
    return UploadedModel(described, values, notes)


def _described(name: str, section: Any) -> tuple[Described, dict[str, Any]]:
    """The model of a section `model`, and what the section says about weights and adapters."""
    if isinstance(section, DecoderConfig):
        return Described(name, decoder=section), {"dtype": "bf16" if section.dtype == "bf16" else "fp32"}
    assert isinstance(section, PretrainedModel), "a section is one of the two"
    if section.gguf_file is not None:
        raise ModelError(f"{name}: model.gguf_file {section.gguf_file!r} is not read here: upload the config.json")
    known, entry = published_place(section.path)
    values: dict[str, Any] = {"dtype": "bf16" if section.dtype == "bf16" else "fp32"}
    if section.adapter is not None:
        adapter = section.adapter
        targets = adapter.target_modules
        values |= {
            "rank": adapter.r,
            "base": adapter.base,
            "targets": "+".join(targets) if isinstance(targets, tuple) else targets or "",
        }
    return Described(f"{known} ({name})", fields=entry.config, path=entry.source), values


def _refuse_aliases(upload: Upload) -> None:
    """Raise `ConfigError` for `&anchor` and `*alias`: a few of them make a text of many gigabytes."""
    depth = 0
    try:
        for token in yaml.scan(upload.text, Loader=yaml.SafeLoader):
            if isinstance(token, yaml.AliasToken | yaml.AnchorToken | yaml.TagToken):
                line = token.start_mark.line + 1
                raise ConfigError(
                    f"{upload.name}, line {line}: anchors, aliases and tags are not taken here: write the value out"
                )
            opens = yaml.BlockMappingStartToken | yaml.BlockSequenceStartToken | yaml.FlowMappingStartToken
            closes = yaml.BlockEndToken | yaml.FlowMappingEndToken | yaml.FlowSequenceEndToken
            depth += isinstance(token, opens | yaml.FlowSequenceStartToken)
            depth -= isinstance(token, closes)
            if depth > DEPTH:
                raise ConfigError(f"{upload.name}: nested too deeply: a configuration has at most {DEPTH} levels")
    except yaml.YAMLError:
        return  # the reader says what and where


def _check_numbers(raw: Any, name: str = "") -> None:
    for key, value in raw.items() if isinstance(raw, Mapping) else enumerate(raw):
        full = str(key) if isinstance(raw, Mapping) else name
        if isinstance(value, Mapping | list):
            _check_numbers(value, full)
        elif isinstance(value, int) and not isinstance(value, bool) and not full.endswith(NO_SIZES):
            check_number(full, value)


def _is_given(raw: Mapping[Any, Any], name: str) -> bool:
    section, _, key = name.partition(".")
    found = raw.get(section)
    return isinstance(found, Mapping) and key in found
