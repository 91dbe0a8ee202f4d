"""The record of a folder with quantised weights, read without its weights."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tightfit.errors import ModelError, why_unreadable
from tightfit.names import QUANTISED_FILE

# Not model.safetensors: other readers would find none of the names that they want, and start from random weights.
QUANTISED_WEIGHTS = "quantised.safetensors"
FORMAT = 1


@dataclass(frozen=True)
class QuantisedRecord:
    """How a model was quantised. `layers` has what it takes to put each quantised weight together, by its name, and
    `left` why other linear layers are at full width. `source` names the folder and hashes its weights.
    """

    method: str
    kind: str  # "decoder", or "transformers"
    dtype: str  # of the weights at full width
    versions: dict[str, str]
    source: dict[str, Any]
    layers: dict[str, dict[str, Any]]
    left: dict[str, str]
    settings: dict[str, Any] = field(default_factory=dict)
    sha256: str = ""  # of the file with the weights
    format: int = FORMAT

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def is_quantised(folder: str | Path) -> bool:
    """True if a folder holds a model that `tightfit quantise` wrote."""
    return (Path(folder) / QUANTISED_FILE).is_file()


def read_record(folder: Path) -> QuantisedRecord:
    """Raises `ModelError` for a file that is damaged, or of another version."""
    path = folder / QUANTISED_FILE
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {why_unreadable(error)}: quantise the model again") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ModelError(f"{path}: is of another format than {FORMAT}: quantise the model again with this tightfit")
    kinds = {entry.name: type_ for entry, type_ in zip(fields(QuantisedRecord), _KINDS, strict=True)}
    if raw.keys() != kinds.keys() or not all(isinstance(raw[name], kind) for name, kind in kinds.items()):
        raise ModelError(f"{path}: has other fields than it was written with: quantise the model again")
    return QuantisedRecord(**raw)


_KINDS = (str, str, str, dict, dict, dict, dict, dict, str, int)


def refuse_quantised(folder: str | Path, named: str) -> None:
    """Raise `ModelError` where a folder holds quantised weights, which cannot be trained."""
    if is_quantised(folder):
        method = read_record(Path(folder)).method
        raise ModelError(
            f"{named} is quantised ({method}): it is for generate, score and estimate --inference; name the folder "
            "that it was made from"
        )
