"""The manifest of a checkpoint: what belongs to it, with the size and the hash of everything, and the record.

It is JSON that begins with the hash of the rest: `{"blake2b": "...", "content": {...}}`. The hash is over the bytes of
the content as they stand in the file, so that reading and writing again cannot differ.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tightfit.training.checkpoint import record as records
from tightfit.training.checkpoint import strict_json
from tightfit.training.checkpoint.layout import TensorSpec, check_name, parse_spec, shown
from tightfit.training.checkpoint.reading import digest_of

MANIFEST, TENSORS = "manifest.json", "tensors.safetensors"
FORMAT, VERSION = "tightfit checkpoint", 1
SHARDED = 2  # the version of one whose tensors lie in several files: what reads only the first version refuses it
MAX_STEP = 2**63
MAX_FILE_BYTES = 1 << 28  # of a further file, which is read into memory as a whole
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # no folder, nothing hidden, nothing to escape
_SHARD_NAME = re.compile(r"tensors-[0-9]{5}\.safetensors")
MOST_SHARDS = 1 << 14
_TEXT = re.compile(rb'\{"blake2b": "([0-9a-f]{64})", "content": (.*)\}\n', re.DOTALL)


@dataclass(frozen=True)
class Content:
    """The size and the hash of some bytes: a file, or a part of one."""

    nbytes: int
    blake2b: str


@dataclass(frozen=True)
class TensorsFile:
    """The file of the tensors: its size, its first bytes, and what each tensor is.

    The header says where a tensor's bytes are, and `parse_layout` that they and the first bytes are the whole file: the
    hashes of all tensors and of `head` leave none out. `same_as` names tensors that share another's memory.
    """

    nbytes: int
    head: Content
    specs: Mapping[str, TensorSpec]
    digests: Mapping[str, str]
    same_as: Mapping[str, str]


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint. `record` is any JSON; `files` are further files by name.

    `shards` are the tensors' files of the second rank and of those after it, where several have written. A tensor of
    theirs has its first rows in the first file, and further ones in each of theirs, in their order.
    """

    step: int
    tensors: TensorsFile
    files: Mapping[str, Content]
    record: Mapping[str, Any]
    shards: tuple[TensorsFile, ...] = ()

    def to_bytes(self) -> bytes:
        """Raises `ValueError` where the record is no JSON, or all of it too long to be read again."""
        content = {
            "format": FORMAT,
            "version": SHARDED if self.shards else VERSION,
            "step": self.step,
            "files": {name: {"bytes": file.nbytes, "blake2b": file.blake2b} for name, file in self.files.items()},
            "tensors": tensors_section(self.tensors, TENSORS),
            **(
                {"shards": [tensors_section(shard, shard_name(rank)) for rank, shard in enumerate(self.shards, 1)]}
                if self.shards
                else {}
            ),
            "record": records.encoded(self.record),
        }
        text = json.dumps(content, allow_nan=False).encode()
        whole = b'{"blake2b": "%s", "content": %s}\n' % (digest_of(text).encode(), text)
        try:
            strict_json.check_bounds(whole)
        except ValueError as error:
            raise ValueError(f"{MANIFEST} {error}: the record or the number of tensors is too large") from None
        return whole


def shard_name(rank: int) -> str:
    """The file of a rank's tensors, in a checkpoint of several; that of the first rank is `TENSORS`."""
    return f"tensors-{rank:05d}.safetensors" if rank else TENSORS


def tensors_section(tensors: TensorsFile, file: str) -> dict[str, Any]:
    """A file of tensors in JSON."""
    return {
        "file": file,
        "bytes": tensors.nbytes,
        "head": {"bytes": tensors.head.nbytes, "blake2b": tensors.head.blake2b},
        "entries": {
            name: {"dtype": spec.dtype, "shape": list(spec.shape), "blake2b": tensors.digests[name]}
            for name, spec in tensors.specs.items()
            if name not in tensors.same_as
        },
        "same_as": dict(tensors.same_as),
    }


def check_file_name(name: Any) -> str:
    """The name of a further file. Raises `ValueError`."""
    is_name = isinstance(name, str) and _FILE_NAME.fullmatch(name) is not None
    if not is_name or name in (MANIFEST, TENSORS) or _SHARD_NAME.fullmatch(name):
        raise ValueError(f"names a file {shown(name)}")
    return name


def check_file_bytes(nbytes: int) -> int:
    """The size of a further file. Raises `ValueError`."""
    if nbytes > MAX_FILE_BYTES:
        raise ValueError(f"has a file of {nbytes:,} bytes beside the tensors, more than {MAX_FILE_BYTES:,}")
    return nbytes


def parse_manifest(text: bytes) -> Manifest:
    """Raises `ValueError`, with the reason on one line, for anything that `to_bytes` cannot have written."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError("is no manifest, or not the whole of one")
    if digest_of(found[2]) != found[1].decode():
        raise ValueError("does not match its own hash")
    content = strict_json.parse(found[2])
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError("is not the manifest of a checkpoint of tightfit")
    version = content.get("version")
    if version not in (VERSION, SHARDED) or type(version) is not int:
        raise ValueError(f"has the format {shown(version)}, and this version reads {VERSION} and {SHARDED}")
    keys = ["format", "version", "step", "files", "tensors", "record", *(["shards"] if version == SHARDED else [])]
    _, _, step, files, tensors, record, *shards = _values(content, "manifest", *keys)
    contents = {check_file_name(name): _content(entry) for name, entry in _mapping(files, "files").items()}
    for each in contents.values():
        check_file_bytes(each.nbytes)
    first = parse_tensors(tensors, TENSORS)
    return Manifest(
        step=_count(step, "step"),
        tensors=first,
        files=contents,
        record=records.decoded(_mapping(record, "record")),
        shards=_shards(shards[0], first) if shards else (),
    )


def _shards(sections: Any, first: TensorsFile) -> tuple[TensorsFile, ...]:
    if not isinstance(sections, list) or not 1 <= len(sections) < MOST_SHARDS:
        raise ValueError("has no list of shards")
    shards = tuple(parse_tensors(section, shard_name(rank)) for rank, section in enumerate(sections, 1))
    for shard in shards:
        demand_shard(shard, first)
        if shard.specs.keys() != shards[0].specs.keys():
            raise ValueError("has shards of unlike tensors")
    return shards


def demand_shard(shard: TensorsFile, first: TensorsFile) -> None:
    """Raise `ValueError` unless the tensors of a further file have the other rows of tensors of the first one."""
    for name, spec in shard.specs.items():
        of_first = first.specs.get(name)
        if (
            of_first is None
            or not spec.shape
            or not of_first.shape
            or (spec.dtype, spec.shape[1:]) != (of_first.dtype, of_first.shape[1:])
            or name in first.same_as
            or shard.same_as
        ):
            raise ValueError(f"has a shard of the tensor {shown(name)} that does not continue the first one")


def parse_tensors(section: Any, name_of_file: str) -> TensorsFile:
    """A file of tensors from JSON. Raises `ValueError`."""
    file, size, head, entries, same_as = _values(section, "tensors", "file", "bytes", "head", "entries", "same_as")
    if file != name_of_file:
        raise ValueError(f"names a file of tensors {shown(file)}")
    specs, digests = {}, {}
    for name, entry in _mapping(entries, "tensors").items():
        dtype, shape, digest = _values(entry, "a tensor", "dtype", "shape", "blake2b")
        specs[check_name(name)] = parse_spec(dtype, shape)
        digests[name] = _digest(digest)
    stored = dict(specs)
    for name, other in _mapping(same_as, "same_as").items():
        if name in stored or not isinstance(other, str) or other not in stored:
            raise ValueError(f"has nothing that the tensor {shown(name)} is the same as")
        specs[check_name(name)] = stored[other]
    return TensorsFile(_count(size, "bytes"), _content(head), specs, digests, same_as)


def _content(entry: Any) -> Content:
    size, digest = _values(entry, "a file", "bytes", "blake2b")
    return Content(_count(size, "bytes"), _digest(digest))


def _values(section: Any, what: str, *keys: str) -> list[Any]:
    """The values of a section that has these keys and no others."""
    if not isinstance(section, dict) or set(section) != set(keys):
        raise ValueError(f"has other keys than it should in {what}")
    return [section[key] for key in keys]


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"has no object in {what}")
    return value


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < MAX_STEP:
        raise ValueError(f"has no whole number in {what}")
    return value


def _digest(value: Any) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValueError("has a hash that is none")
    return value
