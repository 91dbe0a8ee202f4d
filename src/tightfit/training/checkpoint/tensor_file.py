"""A safetensors file, whoever wrote it: what it holds, read into the memory of tensors that are there."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.errors import CheckpointError
from tightfit.training.checkpoint import reading
from tightfit.training.checkpoint.layout import LENGTH_BYTES, Layout, TensorSpec, header_bytes, parse_layout, shown

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TensorFile:
    """A file whose header has been read and checked, and its tensors not."""

    path: Path
    layout: Layout

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Dtype and shape of each tensor by its name."""
        return {name: place.spec for name, place in self.layout.places.items()}

    def read_into(self, tensors: Mapping[str, "Tensor"]) -> None:
        """Read into the memory of these tensors, by name. Raises `CheckpointError`, before anything is read where a
        tensor is not in the file or has another dtype or shape.
        """
        from tightfit.training.checkpoint.tensors import read_tensors

        demand_specs(self.path, self.specs, tensors)
        with reading_errors(self.path.parent, self.path.name), reading.opened(self.path.parent, self.path.name) as file:
            read_tensors(file, self.layout, {name: (name, tensor) for name, tensor in tensors.items()}, digests=None)


def open_tensor_file(path: str | Path) -> TensorFile:
    """Raises `CheckpointError` for what is no safetensors file."""
    path = Path(path)
    with reading_errors(path.parent, path.name), reading.opened(path.parent, path.name) as file:
        return TensorFile(path, read_layout(file, reading.size_of(file)))


def read_layout(descriptor: int, file_bytes: int) -> Layout:
    """Of an open file of that size. Raises `ValueError`."""
    first = reading.read_bytes(descriptor, 0, min(LENGTH_BYTES, file_bytes))
    return parse_layout(reading.read_bytes(descriptor, 0, LENGTH_BYTES + header_bytes(first, file_bytes)), file_bytes)


def demand_specs(path: Path, specs: Mapping[str, TensorSpec], tensors: Mapping[str, "Tensor"]) -> None:
    """Raises `CheckpointError` unless each tensor is there with its dtype and shape, and can be read into."""
    from tightfit.training.checkpoint.tensors import is_written_once, spec_of

    for name, tensor in tensors.items():
        if name not in specs:
            raise CheckpointError(f"{path}: has no tensor {shown(name)}: it is of another model or optimizer")
        if (spec := spec_of(name, tensor)) != specs[name]:
            raise CheckpointError(
                f"{path}: the tensor {shown(name)} is {specs[name]}, to be read into one that is {spec}: it is of "
                "another model or optimizer"
            )
        if not is_written_once(tensor):
            raise CheckpointError(f"{path}: the tensor {shown(name)} cannot be read into an expanded one: clone it")


@contextmanager
def reading_errors(folder: Path, name: str) -> Iterator[None]:
    """A context that raises errors of a file as a `CheckpointError` of one line."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: {name} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{folder}: {name} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{folder}: {name} {error}") from error
