"""One checkpoint in its folder: verified, and read into the memory of tensors that are there."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tightfit.errors import CheckpointError
from tightfit.training.checkpoint import reading, strict_json
from tightfit.training.checkpoint.layout import Layout, TensorSpec, shown
from tightfit.training.checkpoint.manifest import MANIFEST, Content, Manifest, TensorsFile, parse_manifest, shard_name
from tightfit.training.checkpoint.names import step_of
from tightfit.training.checkpoint.parallel import workers
from tightfit.training.checkpoint.tensor_file import demand_specs, read_layout, reading_errors

if TYPE_CHECKING:
    from torch import Tensor


class TensorRows(NamedTuple):
    """A part of a tensor: the number of its file, its name there, its first row in the whole, and its rows."""

    file: int
    name: str
    start: int
    rows: int


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest is whole. `verify` says whether the rest is; what is read is verified as well."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def record(self) -> Mapping[str, Any]:
        """The record that `save` was given, tuples as lists."""
        return self.manifest.record

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Dtype and shape of each tensor by its name, those too that share another's memory; whole where several ranks
        have written their rows.
        """
        found = dict(self.manifest.tensors.specs)
        for name in self._split:
            rows = sum(file.specs[name].shape[0] for file in self._files)
            found[name] = TensorSpec(found[name].dtype, (rows, *found[name].shape[1:]))
        return found

    @property
    def digests(self) -> Mapping[str, str]:
        """The hash of each tensor's bytes: equal tensors of two checkpoints have equal ones, if as many ranks have
        written them.
        """
        tensors = self.manifest.tensors
        found = {name: tensors.digests[tensors.same_as.get(name, name)] for name in tensors.specs}
        for name in self._split:
            found[name] = reading.digest_of("".join(file.digests[name] for file in self._files).encode())
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of its files, but for the manifest."""
        return sum(file.nbytes for file in [*self._files, *self.manifest.files.values()])

    def check_sizes(self) -> None:
        """Every file is there and has its size. Raises `CheckpointError`."""
        sizes = {name: content.nbytes for name, content in self.manifest.files.items()}
        for name, nbytes in (sizes | {shard_name(n): file.nbytes for n, file in enumerate(self._files)}).items():
            with self._of(name), reading.opened(self.path, name) as descriptor:
                _demand_size(descriptor, nbytes)

    def verify(self) -> None:
        """Every byte is as it was written. Raises `CheckpointError`."""
        self.check_sizes()
        for name, content in self.manifest.files.items():
            with self._of(name), reading.opened(self.path, name) as descriptor:
                if reading.digest_of_range(descriptor, 0, content.nbytes) != content.blake2b:
                    raise ValueError("is damaged: its hash is another")
        for number, file in enumerate(self._files):
            with self._opened(number) as (descriptor, layout), workers(file.nbytes) as submit:
                digests = {
                    name: submit(reading.digest_of_range, descriptor, place.start, place.spec.nbytes)
                    for name, place in layout.places.items()
                }
                for name, digest in digests.items():
                    if digest.result() != file.digests[name]:
                        raise ValueError(f"holds the tensor {shown(name)} damaged")

    def read_into(self, tensors: Mapping[str, "Tensor"]) -> None:
        """Read into the memory of these tensors, by name; it may hold others.

        The bytes go straight where they belong, and are hashed as they arrive. Raises `CheckpointError` before
        anything is read where a tensor is not in it or has another dtype or shape. Where bytes turn out to be damaged
        it raises that too, and the tensors are then to be given up: `verify` before, as `newest_intact` does.
        """
        from tightfit.training.checkpoint.tensors import read_tensors

        demand_specs(self.path, self.specs, tensors)
        for number, file in enumerate(self._files):
            wanted = {
                name: (piece.name, tensor[piece.start : piece.start + piece.rows] if name in self._split else tensor)
                for name, tensor in tensors.items()
                for piece in self._pieces(name)
                if piece.file == number
            }
            if wanted:
                with self._opened(number) as (descriptor, layout):
                    read_tensors(descriptor, layout, wanted, file.digests)

    def read_rows(self, wanted: Mapping[str, tuple[int, "Tensor"]]) -> None:
        """Read rows of tensors: by name, the first one, and the memory of so many from there on.

        Hashes are of whole tensors, and not compared: `verify` before, as `newest_intact` does. Raises
        `CheckpointError`.
        """
        from tightfit.training.checkpoint.tensors import read_ranges

        for number in range(len(self._files)):
            parts = [
                (piece.name, max(first, piece.start) - piece.start, _overlap(tensor, first, piece))
                for name, (first, tensor) in wanted.items()
                for piece in self._pieces(name)
                if piece.file == number
            ]
            parts = [part for part in parts if part[2].nbytes]
            if parts:
                with self._opened(number) as (descriptor, layout):
                    places = [(layout.places[name], row, tensor) for name, row, tensor in parts]
                    read_ranges(
                        descriptor,
                        [(p.start + row * (p.spec.nbytes // p.spec.shape[0]), tensor) for p, row, tensor in places],
                    )

    def read(self, name: str) -> "Tensor":
        """A tensor of its own memory on the CPU. Raises `CheckpointError`."""
        import torch

        if name not in self.specs:
            raise CheckpointError(f"{self.path}: has no tensor {shown(name)}")
        spec = self.specs[name]
        tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        self.read_into({name: tensor})
        return tensor

    def read_file(self, name: str) -> bytes:
        """The further file that `save` was given. Raises `CheckpointError`."""
        if name not in self.manifest.files:
            raise CheckpointError(f"{self.path}: has no file {shown(name)}")
        content = self.manifest.files[name]
        with self._of(name), reading.opened(self.path, name) as descriptor:
            _demand_size(descriptor, content.nbytes)
            read = reading.read_bytes(descriptor, 0, content.nbytes)
            if reading.digest_of(read) != content.blake2b:
                raise ValueError("is damaged: its hash is another")
        return read

    @property
    def _files(self) -> tuple[TensorsFile, ...]:
        return (self.manifest.tensors, *self.manifest.shards)

    @property
    def _split(self) -> Mapping[str, TensorSpec]:
        """The tensors of which several files have rows."""
        return self.manifest.shards[0].specs if self.manifest.shards else {}

    def _pieces(self, name: str) -> list[TensorRows]:
        """Where the rows of a tensor are. A tensor without dimensions counts as one row."""
        if name not in self._split:
            tensors = self.manifest.tensors
            return [TensorRows(0, tensors.same_as.get(name, name), 0, (*tensors.specs[name].shape, 1)[0])]
        pieces, start = [], 0
        for number, file in enumerate(self._files):
            rows = file.specs[name].shape[0]
            pieces.append(TensorRows(number, name, start, rows))
            start += rows
        return pieces

    @contextmanager
    def _opened(self, number: int) -> Iterator[tuple[int, Layout]]:
        """A file of tensors, and where they are in it; its first bytes are those that were written."""
        file, name = self._files[number], shard_name(number)
        with self._of(name), reading.opened(self.path, name) as descriptor:
            _demand_size(descriptor, file.nbytes)
            layout = read_layout(descriptor, file.nbytes)
            if Content(len(layout.head), reading.digest_of(layout.head)) != file.head:
                raise ValueError("has a damaged header")
            stored = {each: spec for each, spec in file.specs.items() if each not in file.same_as}
            if {each: place.spec for each, place in layout.places.items()} != stored:
                raise ValueError(f"has other tensors than {MANIFEST} says")
            yield descriptor, layout

    @contextmanager
    def _of(self, name: str) -> Iterator[None]:
        with reading_errors(self.path, name):
            yield


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a folder, its manifest read and checked and nothing else. Raises `CheckpointError`."""
    with reading_errors(path, MANIFEST):
        manifest = parse_manifest(reading.read_small(path, MANIFEST, strict_json.MAX_BYTES))
        if manifest.step != step_of(path.name):
            raise ValueError(f"is of step {manifest.step}, and the folder of another")
    return Checkpoint(path, manifest)


def _overlap(tensor: "Tensor", first: int, piece: TensorRows) -> "Tensor":
    """The rows of a tensor, of which the first has that number in the whole, that are in a piece."""
    return tensor[max(0, piece.start - first) : max(0, piece.start + piece.rows - first)]


def _demand_size(descriptor: int, nbytes: int) -> None:
    if (size := reading.size_of(descriptor)) != nbytes:
        raise ValueError(f"is {size:,} bytes long where {nbytes:,} were written")
