"""Checkpoints that somebody made to do harm: built, and opened in a process of its own that watches itself.

`python malicious.py FOLDER` prints one JSON object for each: its name, the line that refuses it, and what Python
reported of code that was run or files that were opened. It has little memory, and no torch.
"""

import copy
import json
import os
import resource
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEP, MANIFEST, TENSORS = "step-00000050", "manifest.json", "tensors.safetensors"
MEMORY_BYTES = 1 << 30
# What Python reports when code is run, found or loaded, and when anything is fetched (the table of audit events).
RUNS = ("exec", "compile", "import", "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen",
        "socket.connect", "ctypes.dlopen", "marshal.loads")  # fmt: skip
MADE: dict[str, Callable[[Path], None]] = {}

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "U8", "shape": [3], "data_offsets": [8, 11]},
}
DATA = bytes(range(11))


def digest(content: bytes) -> str:
    from tightfit.training.checkpoint.reading import digest_of

    return digest_of(content)


def content() -> dict[str, Any]:
    """The content of an honest manifest."""
    file = tensors_file(HEADER)
    head = file[: -len(DATA)]
    return {
        "format": "tightfit checkpoint", "version": 1, "step": 50,
        "files": {"plan.json": {"bytes": 2, "blake2b": digest(b"{}")}},
        "tensors": {
            "file": TENSORS, "bytes": len(file), "head": {"bytes": len(head), "blake2b": digest(head)},
            "entries": {
                "a": {"dtype": "float32", "shape": [2], "blake2b": digest(DATA[:8])},
                "b": {"dtype": "uint8", "shape": [3], "blake2b": digest(DATA[8:])},
            },
            "same_as": {"c": "a"},
        },
        "record": {"loss": 1.5},
    }  # fmt: skip


def tensors_file(header: Any, data: bytes = DATA) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def signed(text: bytes) -> bytes:
    """A manifest with this content, whose own hash is right."""
    return b'{"blake2b": "%s", "content": %s}\n' % (digest(text).encode(), text)


def build(folder: Path, manifest: bytes | None = None, file: bytes | None = None) -> Path:
    """An honest checkpoint but for what is given."""
    step = folder / STEP
    step.mkdir(parents=True)
    (step / "plan.json").write_bytes(b"{}")
    (step / TENSORS).write_bytes(tensors_file(HEADER) if file is None else file)
    (step / MANIFEST).write_bytes(signed(json.dumps(content()).encode()) if manifest is None else manifest)
    return step


def made(name: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def keep(make: Callable[[Path], None]) -> Callable[[Path], None]:
        assert name not in MADE
        MADE[name] = make
        return make

    return keep


def text(name: str, manifest: bytes) -> None:
    """Something else instead of a manifest."""
    MADE[name] = lambda folder: build(folder, manifest=manifest) and None


def edited(name: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    """An honest manifest with one thing changed, and its hash right."""

    def make(folder: Path) -> None:
        changed = copy.deepcopy(content())
        edit(changed)
        build(folder, manifest=signed(json.dumps(changed).encode()))

    MADE[name] = make


def replaced(name: str, *keys: str, by: bytes) -> None:
    """An honest manifest with the JSON of one value replaced by any text, and its hash right."""

    def make(folder: Path) -> None:
        changed = copy.deepcopy(content())
        at: Any = changed
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = "REPLACED"
        build(folder, manifest=signed(json.dumps(changed).encode().replace(b'"REPLACED"', by)))

    MADE[name] = make


def headed(name: str, header: Any, data: bytes = DATA) -> None:
    """Another header in the file of tensors, with a manifest that has its size and hash."""

    def make(folder: Path) -> None:
        changed = content()
        file = tensors_file(header, data)
        head = file[: len(file) - len(data)]
        changed["tensors"].update(bytes=len(file), head={"bytes": len(head), "blake2b": digest(head)})
        build(folder, manifest=signed(json.dumps(changed).encode()), file=file)

    MADE[name] = make


def filed(name: str, file: bytes) -> None:
    """Something else instead of the file of tensors, with a manifest that has its size and hash."""

    def make(folder: Path) -> None:
        changed = content()
        changed["tensors"].update(bytes=len(file), head={"bytes": len(file), "blake2b": digest(file)})
        build(folder, manifest=signed(json.dumps(changed).encode()), file=file)

    MADE[name] = make


PICKLE = b"cos\nsystem\n(S'touch executed'\ntR."  # what `pickle.loads` would run
ZIP = b"PK\x03\x04" + bytes(26) + PICKLE  # as `torch.save` begins

# The manifest is something else
text("an empty manifest", b"")
text("a pickle for a manifest", PICKLE)
text("a pickle of a later protocol for a manifest", b"\x80\x04\x95" + PICKLE)
text("a manifest without its hash", json.dumps({"content": {}}).encode())
text("a manifest with another hash", b'{"blake2b": "' + b"0" * 64 + b'", "content": {}}\n')
text("a manifest that is a list", signed(b"[]"))
text("a manifest that is a number", signed(b"1"))
text("a manifest that is null", signed(b"null"))
text("a manifest that is not UTF-8", signed(b'{"format": "\xff\xfe"}'))
text("a manifest with a null byte", signed(b'{"format": "\x00"}'))
text("a manifest nested deep in lists", signed(b"[" * 100_000 + b"]" * 100_000))
text("a manifest nested deep in objects", signed(b'{"a":' * 50_000 + b"1" + b"}" * 50_000))
text("a manifest of many lists", signed(b"[" + b"[]," * (3 << 20) + b"[]]"))
text("a manifest that is too long", signed(b'"' + b"a" * (20 << 20) + b'"'))
text("a manifest with two contents", signed(b'{}, "content": {}'))
text("a manifest that goes on behind its end", signed(json.dumps(content()).encode()) + b"x")
text(
    "a manifest with a key twice",
    signed(json.dumps(content()).encode().replace(b'"version": 1', b'"version": 1, "step": 50')),
)

# Its values are something else
edited("another format", lambda c: c.update(format="pickle"))
edited("a later version", lambda c: c.update(version=2))
edited("a version that is true", lambda c: c.update(version=True))
edited("another step than the folder", lambda c: c.update(step=51))
edited("a step below zero", lambda c: c.update(step=-1))
edited("a step that is true", lambda c: c.update(step=True))
edited("a step that is a fraction", lambda c: c.update(step=50.0))
replaced("a step of five thousand digits", "step", by=b"9" * 5000)
edited("a key more", lambda c: c.update(__reduce__="os.system"))
edited("a key less", lambda c: c.pop("record"))
replaced("a record with NaN", "record", by=b'{"x": NaN}')
replaced("a record with infinity", "record", by=b'{"x": -Infinity}')
replaced("a record with a number beyond a float", "record", by=b'{"x": 1e999}')
replaced("a record with a long whole number", "record", by=b'{"x": ' + b"7" * 10_000 + b"}")
replaced("a record nested deeply", "record", by=b'{"x": ' + b"[" * 400 + b"]" * 400 + b"}")
edited("a record that is a list", lambda c: c.update(record=[]))
edited("a record with an unknown mark", lambda c: c.update(record={"$eval": "1"}))
edited("a record with a number that is none", lambda c: c.update(record={"x": {"$float": "__import__('os')"}}))
edited("a record with a long number that is none", lambda c: c.update(record={"x": {"$int": "os"}}))

# Names of files
NAMES = ("../plan.json", "/etc/passwd", "a/../../plan.json", "..", ".hidden", "a\nb", "a\x00b", "a\x1b[31mb", "a\\b",
         "", "C:plan", "x" * 300, MANIFEST, TENSORS)  # fmt: skip
for path in NAMES:
    edited(f"a file {path[:20]!a}", lambda c, path=path: c["files"].update({path: c["files"]["plan.json"]}))
edited("tensors in another file", lambda c: c["tensors"].update(file="../../tensors.safetensors"))
edited("tensors in a file by its number", lambda c: c["tensors"].update(file=3))
edited("a file of a size below zero", lambda c: c["files"]["plan.json"].update(bytes=-2))
edited("a file larger than any disk", lambda c: c["files"]["plan.json"].update(bytes=2**70))
edited("a file with a hash that is none", lambda c: c["files"]["plan.json"].update(blake2b="g" * 64))

# Tensors
edited("a shape below zero", lambda c: c["tensors"]["entries"]["a"].update(shape=[-2]))
edited("a shape beyond any memory", lambda c: c["tensors"]["entries"]["a"].update(shape=[2**62, 2**62, 0]))
edited("a shape with true", lambda c: c["tensors"]["entries"]["a"].update(shape=[True, 2]))
edited("a shape with fractions", lambda c: c["tensors"]["entries"]["a"].update(shape=[2.0]))
edited("a shape of a thousand sizes", lambda c: c["tensors"]["entries"]["a"].update(shape=[1] * 1000))
edited("a dtype that is an attribute", lambda c: c["tensors"]["entries"]["a"].update(dtype="__class__"))
edited("a dtype that is a list", lambda c: c["tensors"]["entries"]["a"].update(dtype=["float32"]))
edited("another shape than the header", lambda c: c["tensors"]["entries"]["a"].update(shape=[2, 1]))
edited("a tensor that is not in the file", lambda c: c["tensors"]["entries"].update(d=c["tensors"]["entries"]["a"]))
edited("a tensor the same as itself", lambda c: c["tensors"]["same_as"].update(c="c"))
edited("a tensor the same as none", lambda c: c["tensors"]["same_as"].update(c="nothing"))
edited("a stored tensor the same as another", lambda c: c["tensors"]["same_as"].update(a="b"))
edited("a name with an escape", lambda c: c["tensors"]["same_as"].update({"\x1b]0;x\x07": "a"}))
edited("a name on two lines", lambda c: c["tensors"]["same_as"].update({"x\nerror: y": "a"}))

# The file of tensors
filed("a pickle for the tensors", PICKLE)
filed("a zip with a pickle for the tensors", ZIP)
filed("no bytes for the tensors", b"")
filed("a header of 2^64 - 1 bytes", b"\xff" * 8 + b"{}")
filed("a header longer than the file", struct.pack("<Q", 1 << 40) + b"{}")
headed("a header that is a list", [])
headed("a header nested deeply", b'{"a":' * 50_000 + b"1" + b"}" * 50_000)
headed("a header with a tensor twice", json.dumps(HEADER).encode().replace(b'"b"', b'"a"'))
headed("a header with NaN", b'{"a": NaN}')
headed("metadata that are not texts", {**HEADER, "__metadata__": {"x": [1]}})
headed("an unknown dtype", {**HEADER, "a": {**HEADER["a"], "dtype": "OBJECT"}})
headed("a dtype of torch's", {**HEADER, "a": {**HEADER["a"], "dtype": "float32"}})
headed("offsets below zero", {**HEADER, "a": {**HEADER["a"], "data_offsets": [-8, 0]}})
headed("offsets the other way", {**HEADER, "a": {**HEADER["a"], "data_offsets": [8, 0]}})
headed("offsets beyond the file", {**HEADER, "b": {**HEADER["b"], "data_offsets": [1000, 1003]}})
headed("offsets that overlap", {**HEADER, "b": {**HEADER["b"], "data_offsets": [4, 7]}}, DATA[:8])
headed("offsets with a gap", {**HEADER, "b": {**HEADER["b"], "data_offsets": [9, 12]}}, DATA + b"x")
headed("offsets that do not fit the shape", {**HEADER, "b": {**HEADER["b"], "data_offsets": [8, 12]}}, DATA + b"x")
headed("three offsets", {**HEADER, "b": {**HEADER["b"], "data_offsets": [8, 9, 11]}})
headed("offsets that are texts", {**HEADER, "b": {**HEADER["b"], "data_offsets": ["8", "11"]}})
headed("an entry with more in it", {**HEADER, "b": {**HEADER["b"], "code": "import os"}})
headed("bytes that belong to no tensor", HEADER, DATA + PICKLE)


# What stands in the folder is no file
@made("a link out of the folder")
def _link(folder: Path) -> None:
    step = build(folder)
    (folder / "outside").write_bytes((step / TENSORS).read_bytes())
    (step / TENSORS).unlink()
    (step / TENSORS).symlink_to(folder / "outside")


@made("a link for a manifest")
def _manifest_link(folder: Path) -> None:
    step = build(folder)
    (step / MANIFEST).rename(folder / "outside")
    (step / MANIFEST).symlink_to("../outside")


@made("a link for the whole checkpoint")
def _folder_link(folder: Path) -> None:
    build(folder).rename(folder / "elsewhere")
    (folder / STEP).symlink_to(folder / "elsewhere")


@made("a link to itself")
def _loop(folder: Path) -> None:
    step = build(folder)
    (step / MANIFEST).unlink()
    (step / MANIFEST).symlink_to(MANIFEST)


@made("a pipe for the tensors")
def _pipe(folder: Path) -> None:
    step = build(folder)
    (step / TENSORS).unlink()
    os.mkfifo(step / TENSORS)


@made("a pipe for a manifest")
def _manifest_pipe(folder: Path) -> None:
    step = build(folder)
    (step / MANIFEST).unlink()
    os.mkfifo(step / MANIFEST)


@made("a link to a device that never ends")
def _device(folder: Path) -> None:
    step = build(folder)
    (step / MANIFEST).unlink()
    (step / MANIFEST).symlink_to("/dev/zero")


@made("a folder for the tensors")
def _folder(folder: Path) -> None:
    step = build(folder)
    (step / TENSORS).unlink()
    (step / TENSORS).mkdir()


@made("a file for the checkpoint")
def _file(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / STEP).write_bytes(PICKLE)


@made("a manifest of many gigabytes, all of them holes")
def _holes(folder: Path) -> None:
    os.truncate(build(folder) / MANIFEST, 1 << 42)


def main(root: Path) -> None:
    from tightfit.errors import TightfitError
    from tightfit.training.checkpoint.find import newest_intact

    build(honest := root / "honest")
    assert newest_intact(honest).checkpoint is not None  # what the others differ from, and every import is done
    watched: list[str] = []
    is_watching = False

    def watch(event: str, arguments: tuple) -> None:
        if is_watching and (event in RUNS or (event == "open" and not _is_within(arguments[0], root))):
            watched.append(f"{event} {arguments!a:.200}")

    assert "torch" not in sys.modules, "checkpoints are listed and verified without it"
    sys.addaudithook(watch)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for number, (name, make) in enumerate(MADE.items()):
        folder = root / str(number)
        make(folder)
        watched.clear()
        is_watching, lines, error = True, (), ""
        try:
            found = newest_intact(folder)
            lines = found.passed_over
            assert found.checkpoint is None
        except TightfitError as refused:
            lines = (str(refused),)
        except BaseException as unexpected:
            error = f"{type(unexpected).__name__}: {unexpected}"
        is_watching = False
        sys.stdout.write(json.dumps({"name": name, "lines": lines, "error": error, "watched": watched}) + "\n")


def _is_within(path: object, root: Path) -> bool:
    """Whether Python opens a file in the folder; by its descriptor alone it has been opened before."""
    if isinstance(path, int):
        return True
    name = os.fsdecode(path) if isinstance(path, str | bytes) else ""
    return os.path.normpath(name) == name and (name.startswith(str(root)) or "/" not in name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
