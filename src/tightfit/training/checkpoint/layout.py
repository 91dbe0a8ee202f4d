"""The safetensors format: names, dtypes, shapes and places of tensors in one file, without torch.

A file is the length of its header (8 bytes, little-endian), the header (JSON, filled up with blanks), then each
tensor's bytes, one after the other without gaps (https://huggingface.co/docs/safetensors). Larger elements come first,
so that each tensor lies at a multiple of its element's size.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tightfit.training.checkpoint import strict_json

LENGTH_BYTES = 8
METADATA = "__metadata__"
_ALIGNMENT = 8
_MAX_ELEMENTS = 2**63

# The format's name of a dtype, and the bytes of an element, by torch's name of it.
DTYPES = {
    "bool": ("BOOL", 1), "uint8": ("U8", 1), "int8": ("I8", 1), "int16": ("I16", 2), "uint16": ("U16", 2),
    "int32": ("I32", 4), "uint32": ("U32", 4), "int64": ("I64", 8), "uint64": ("U64", 8), "float16": ("F16", 2),
    "bfloat16": ("BF16", 2), "float32": ("F32", 4), "float64": ("F64", 8), "complex64": ("C64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1), "float8_e8m0fnu": ("F8_E8M0", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1), "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
}  # fmt: skip
_BY_CODE = {code: name for name, (code, _) in DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's dtype, by torch's name without `torch.`, and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def element_bytes(self) -> int:
        return DTYPES[self.dtype][1]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.element_bytes

    def __str__(self) -> str:
        return f"{self.dtype} of shape {list(self.shape)}"


@dataclass(frozen=True)
class TensorPlace:
    """A tensor and where its bytes begin in the file."""

    spec: TensorSpec
    start: int

    @property
    def end(self) -> int:
        return self.start + self.spec.nbytes


@dataclass(frozen=True)
class Layout:
    """A whole file: its first bytes (length and header), and the tensors by name in the order of their bytes."""

    head: bytes
    places: Mapping[str, TensorPlace]

    @property
    def nbytes(self) -> int:
        return max([len(self.head), *(place.end for place in self.places.values())])


def lay_out(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> Layout:
    """The file of these tensors: always the same for the same ones, whatever their order.

    Raises `ValueError` where they are too many to be read again.
    """
    names = sorted(specs, key=lambda name: (-specs[name].element_bytes, name))
    header: dict[str, Any] = {METADATA: dict(sorted(metadata.items()))}
    end = 0
    offsets = {}
    for name in names:
        spec = specs[name]
        offsets[name] = end
        end += spec.nbytes
        code = DTYPES[spec.dtype][0]
        header[name] = {"dtype": code, "shape": list(spec.shape), "data_offsets": [offsets[name], end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    try:
        strict_json.check_bounds(text)
    except ValueError as error:
        raise ValueError(f"the header of the tensors {error}: they are too many") from None
    head = struct.pack("<Q", len(text)) + text
    return Layout(head, {name: TensorPlace(specs[name], len(head) + offsets[name]) for name in names})


def header_bytes(first: bytes, file_bytes: int) -> int:
    """The length of the header, from the first 8 bytes of a file of that size. Raises `ValueError`."""
    if len(first) < LENGTH_BYTES:
        raise ValueError("is too short to be a safetensors file")
    (length,) = struct.unpack("<Q", first)
    if length > file_bytes - LENGTH_BYTES:
        raise ValueError(f"has a header of {length:,} bytes, and the file has {file_bytes:,}")
    if length > strict_json.MAX_BYTES:
        raise ValueError(f"has a header of {length:,} bytes, more than {strict_json.MAX_BYTES:,}")
    return length


def parse_layout(head: bytes, file_bytes: int) -> Layout:
    """The layout that a file's first bytes (length and header) say. Raises `ValueError` unless the tensors fill the
    rest of the file exactly.
    """
    header = strict_json.parse(head[LENGTH_BYTES:])
    if not isinstance(header, dict):
        raise ValueError("has a header that is no object")
    _check_metadata(header.pop(METADATA, {}))
    read = {name: _place(name, entry, len(head)) for name, entry in header.items()}
    places = dict(sorted(read.items(), key=lambda item: (item[1].start, item[1].end, item[0])))
    end = len(head)
    for name, place in places.items():
        if place.start != end:
            raise ValueError(f"has a gap or an overlap before the tensor {shown(name)}")
        end = place.end
    if end != file_bytes:
        raise ValueError(f"has {file_bytes:,} bytes where its header says {end:,}")
    return Layout(head, places)


def check_name(name: Any) -> str:
    """A tensor's name: a text on one line that can be printed. Raises `ValueError`."""
    if not isinstance(name, str) or not name or len(name) > 1000 or not name.isprintable() or name == METADATA:
        raise ValueError(f"names a tensor {shown(name)}")
    return name


def parse_spec(dtype: Any, shape: Any) -> TensorSpec:
    """Raises `ValueError` for what is no dtype (by torch's name), or no shape."""
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"has the unknown dtype {shown(dtype)}")
    if not isinstance(shape, list) or len(shape) > 64 or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("has a tensor with a shape that is none")
    if math.prod(size for size in shape if size) >= _MAX_ELEMENTS:
        raise ValueError("has a tensor larger than any memory")
    return TensorSpec(dtype, tuple(shape))


def shown(name: Any) -> str:
    """A text from a file as part of one line: no control characters, not long."""
    text = ascii(name)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("has metadata that are not texts by name")


def _place(name: str, entry: Any, head_bytes: int) -> TensorPlace:
    check_name(name)
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"describes the tensor {shown(name)} by something else than dtype, shape and offsets")
    code, offsets = entry["dtype"], entry["data_offsets"]
    if not isinstance(code, str) or code not in _BY_CODE:
        raise ValueError(f"has the unknown dtype {shown(code)}")
    spec = parse_spec(_BY_CODE[code], entry["shape"])
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
        raise ValueError(f"has no two offsets for the tensor {shown(name)}")
    if offsets[0] < 0 or offsets[1] - offsets[0] != spec.nbytes:
        raise ValueError(f"has offsets for the tensor {shown(name)} that do not fit its shape")
    return TensorPlace(spec, head_bytes + offsets[0])
