"""One checkpoint in its folder: verified, and read into the memory of tensors that are there."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.checkpoint import reading, strict_json
from tightfit.checkpoint.layout import Layout, TensorSpec, shown
from tightfit.checkpoint.manifest import MANIFEST, TENSORS, Content, Manifest, parse_manifest
from tightfit.checkpoint.names import step_of
from tightfit.checkpoint.parallel import workers
from tightfit.checkpoint.tensor_file import demand_specs, read_layout, reading_errors
from tightfit.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor


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
        """What `save` was given, tuples as lists."""
        return self.manifest.record

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Dtype and shape of each tensor by its name, those too that share another's memory."""
        return self.manifest.tensors.specs

    @property
    def digests(self) -> Mapping[str, str]:
        """The hash of each tensor's bytes: equal tensors of two checkpoints have equal ones."""
        tensors = self.manifest.tensors
        return {name: tensors.digests[tensors.same_as.get(name, name)] for name in tensors.specs}

    @property
    def nbytes(self) -> int:
        """Bytes of its files, but for the manifest."""
        return self.manifest.tensors.nbytes + sum(file.nbytes for file in self.manifest.files.values())

    def check_sizes(self) -> None:
        """Every file is there and has its size. Raises `CheckpointError`."""
        for name, content in self.manifest.files.items():
            with self._of(name), reading.opened(self.path, name) as descriptor:
                _demand_size(descriptor, content.nbytes)
        with self._of(TENSORS), reading.opened(self.path, TENSORS) as descriptor:
            _demand_size(descriptor, self.manifest.tensors.nbytes)

    def verify(self) -> None:
        """Every byte is as it was written. Raises `CheckpointError`."""
        self.check_sizes()
        for name, content in self.manifest.files.items():
            with self._of(name), reading.opened(self.path, name) as descriptor:
                if reading.digest_of_range(descriptor, 0, content.nbytes) != content.blake2b:
                    raise ValueError("is damaged: its hash is another")
        with self._of(TENSORS), reading.opened(self.path, TENSORS) as descriptor:
            places = self._layout(descriptor).places
            with workers(self.manifest.tensors.nbytes) as submit:
                digests = {
                    name: submit(reading.digest_of_range, descriptor, place.start, place.spec.nbytes)
                    for name, place in places.items()
                }
                for name, digest in digests.items():
                    if digest.result() != self.manifest.tensors.digests[name]:
                        raise ValueError(f"holds the tensor {shown(name)} damaged")

    def read_into(self, tensors: Mapping[str, "Tensor"]) -> None:
        """Read into the memory of these tensors, by name; it may hold others.

        The bytes go straight where they belong, and are hashed as they arrive. Raises `CheckpointError` before
        anything is read where a tensor is not in it or has another dtype or shape. Where bytes turn out to be damaged
        it raises that too, and the tensors are then to be given up: `verify` before, as `newest_intact` does.
        """
        from tightfit.checkpoint.tensors import read_tensors

        demand_specs(self.path, self.specs, tensors)
        same_as = self.manifest.tensors.same_as
        wanted = {name: (same_as.get(name, name), tensor) for name, tensor in tensors.items()}
        with self._of(TENSORS), reading.opened(self.path, TENSORS) as descriptor:
            _demand_size(descriptor, self.manifest.tensors.nbytes)
            read_tensors(descriptor, self._layout(descriptor), wanted, self.manifest.tensors.digests)

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
        """What `save` was given as a further file. Raises `CheckpointError`."""
        if name not in self.manifest.files:
            raise CheckpointError(f"{self.path}: has no file {shown(name)}")
        content = self.manifest.files[name]
        with self._of(name), reading.opened(self.path, name) as descriptor:
            _demand_size(descriptor, content.nbytes)
            read = reading.read_bytes(descriptor, 0, content.nbytes)
            if reading.digest_of(read) != content.blake2b:
                raise ValueError("is damaged: its hash is another")
        return read

    def _layout(self, descriptor: int) -> Layout:
        """Where the tensors are in their file; its first bytes are those that were written."""
        tensors = self.manifest.tensors
        layout = read_layout(descriptor, tensors.nbytes)
        if Content(len(layout.head), reading.digest_of(layout.head)) != tensors.head:
            raise ValueError("has a damaged header")
        stored = {name: spec for name, spec in tensors.specs.items() if name not in tensors.same_as}
        if {name: place.spec for name, place in layout.places.items()} != stored:
            raise ValueError(f"has other tensors than {MANIFEST} says")
        return layout

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


def _demand_size(descriptor: int, nbytes: int) -> None:
    if (size := reading.size_of(descriptor)) != nbytes:
        raise ValueError(f"is {size:,} bytes long where {nbytes:,} were written")
