"""Tensors written and read without a copy of them: straight from and into their memory.

What lies in one piece on the CPU needs no memory at all. Anything else (on a card, strided, conjugated) goes piece by
piece through one staging buffer of at most `STAGING_BYTES`. Nothing here tracks gradients.
"""

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tightfit.errors import OutputError
from tightfit.training.checkpoint import reading
from tightfit.training.checkpoint.files import Files
from tightfit.training.checkpoint.layout import DTYPES, Layout, TensorSpec, check_name, lay_out, shown
from tightfit.training.checkpoint.manifest import Content, TensorsFile
from tightfit.training.checkpoint.parallel import at_once, workers

STAGING_BYTES = 16 << 20
_PIECE_BYTES = 4 << 20  # written and hashed while it is in the processor's cache


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """Raises `OutputError` for a tensor that is not plain memory of a dtype that the format has."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    is_plain = tensor.layout == torch.strided and tensor.device.type != "meta"
    if dtype not in DTYPES or not is_plain or is_traceable_wrapper_subclass(tensor):
        kind = f"{type(tensor).__name__} of {tensor.dtype}, {tensor.layout}, on {tensor.device}"
        raise OutputError(
            f"the tensor {shown(name)} ({kind}) cannot be saved: give the plain tensors that it is made of"
        )
    return TensorSpec(dtype, tuple(tensor.shape))


def save_peak_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of host memory that saving or loading these tensors allocates beside them: the staging buffer, or none.

    Hashing a checkpoint before it is loaded takes `reading.CHUNK_BYTES` more, past PyTorch's allocator.
    """
    return max([0, *(min(tensor.nbytes, STAGING_BYTES) for tensor in tensors.values() if _is_staged(tensor))])


def file_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the file that saving these tensors makes. Raises `OutputError` where one cannot be saved."""
    return _layout(checked_specs(tensors), shared_memory(tensors)).nbytes


def copy_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of host memory that the copies for saving in the background take: each tensor once, however often named."""
    same_as = shared_memory(tensors)
    return sum(tensor.nbytes for name, tensor in tensors.items() if name not in same_as)


def shared_memory(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names whose tensors are the very memory of another's, as tied weights are, and that other name."""
    first: dict[tuple, str] = {}
    same_as = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        if tensor.nbytes == 0:
            continue  # it lies nowhere
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(),
               tensor.is_neg())  # fmt: skip
        if first.setdefault(key, name) != name:
            same_as[name] = first[key]
    return same_as


@torch.no_grad()
def write_tensors(files: Files, path: Path, tensors: Mapping[str, Tensor]) -> TensorsFile:
    """Write them into one file, on its disk when this returns. Tied ones are stored once.

    Raises `OutputError` before anything is written where one cannot be saved, `OSError` where the file cannot.
    """
    specs = checked_specs(tensors)
    same_as = shared_memory(tensors)
    layout = _layout(specs, same_as)
    staging = _Staging(tensors.values())
    digests: dict[str, Future] = {}
    descriptor = files.create(path)
    try:
        with workers(layout.nbytes) as submit:
            files.write_all(descriptor, layout.head)
            for name in layout.places:
                if not _is_staged(tensors[name]):
                    digests[name] = submit(reading.digest_of, memory_of(tensors[name]))
                    files.write_all(descriptor, memory_of(tensors[name]))
                    continue
                digest = reading.new_digest()
                for piece in staging.contents(tensors[name]):
                    digest.update(piece)
                    files.write_all(descriptor, piece)
                digests[name] = at_once(digest.hexdigest)
            hashes = {name: digest.result() for name, digest in digests.items()}
        files.sync(descriptor)
    finally:
        files.close(descriptor)
    head = Content(len(layout.head), reading.digest_of(layout.head))
    return TensorsFile(layout.nbytes, head, specs, hashes, same_as)


@torch.no_grad()
def read_tensors(
    descriptor: int,
    layout: Layout,
    tensors: Mapping[str, tuple[str, Tensor]],
    digests: Mapping[str, str] | None,
) -> None:
    """Read into the memory of tensors: `tensors` has a name in the file and what is to go where, by a name for errors.

    Their specs are those of the file. Raises `ValueError` where bytes do not match their hash (if hashes are given),
    `OSError`.
    """
    staging = _Staging(tensor for _, tensor in tensors.values())
    found: dict[str, Future] = {}
    with workers(sum(tensor.nbytes for _, tensor in tensors.values())) as submit:
        for name, (stored, tensor) in tensors.items():
            run = at_once if _is_staged(tensor) else submit  # there is one staging buffer
            start = layout.places[stored].start
            found[name] = run(_read, descriptor, start, staging.filled(tensor), digests is not None)
        hashes = {name: digest.result() for name, digest in found.items()}
    for name, (stored, tensor) in tensors.items():
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)  # autograd has not seen the write
        if digests is not None and hashes[name] != digests[stored]:
            raise ValueError(f"holds the tensor {shown(name)} damaged")


@torch.no_grad()
def read_ranges(descriptor: int, ranges: Sequence[tuple[int, Tensor]]) -> None:
    """Fill tensors with a file's bytes from given places on, without hashes. Raises `ValueError` and `OSError`."""
    staging = _Staging(tensor for _, tensor in ranges)
    for start, tensor in ranges:
        _read(descriptor, start, staging.filled(tensor), False)
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _read(descriptor: int, start: int, pieces: Iterator[memoryview], is_hashed: bool) -> str:
    """Fill pieces of memory with the file's bytes from `start` on; the hash of all of them, or nothing."""
    digest = reading.new_digest()
    for piece in pieces:
        reading.read_into(descriptor, start, piece)
        start += len(piece)
        if is_hashed:
            digest.update(piece)
    return digest.hexdigest()


def checked_specs(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """Dtype and shape of each by its name. Raises `OutputError` where one cannot be saved."""
    return {_writable(name): spec_of(name, tensors[name]) for name in sorted(tensors)}


def copy_into(target: Tensor, source: Tensor) -> None:
    """Without the buffer through which PyTorch transposes matrices on the CPU (`_copy_same_type_transpose_`)."""
    target.unsqueeze(0).copy_(source.unsqueeze(0))


def _writable(name: str) -> str:
    try:
        return check_name(name)
    except ValueError as error:
        raise OutputError(f"a checkpoint {error}: a name is a text on one line of at most 1000 characters") from None


def _layout(specs: Mapping[str, TensorSpec], same_as: Mapping[str, str]) -> Layout:
    """The file of the tensors but for those that are the same as others, which its metadata name.

    `safetensors.torch.save_model` does so too.
    """
    return lay_out({name: spec for name, spec in specs.items() if name not in same_as}, {**same_as, "format": "pt"})


def is_written_once(tensor: Tensor) -> bool:
    """True if no two elements are the same memory, as those of an expanded tensor are."""
    return all(stride != 0 or size <= 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _is_staged(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg()


class _Staging:
    """Mutable: tensors as pieces of plain memory, through one buffer where they are not."""

    def __init__(self, tensors: Iterable[Tensor]):
        self._nbytes = save_peak_bytes({str(i): tensor for i, tensor in enumerate(tensors)})
        self._buffer: Tensor | None = None

    def contents(self, tensor: Tensor) -> Iterator[memoryview]:
        """The bytes of a tensor that is staged, in the order of its elements; each piece is used before the next."""
        for block in self._blocks(tensor):
            staged = self._like(block)
            copy_into(staged, block)
            yield memory_of(staged)

    def filled(self, tensor: Tensor) -> Iterator[memoryview]:
        """Pieces of memory to write the tensor's bytes to, in the order of its elements: each before the next."""
        if not _is_staged(tensor):
            yield from _pieces(tensor)
            return
        for block in self._blocks(tensor):
            staged = self._like(block)
            yield memory_of(staged)
            block.copy_(staged)

    def _like(self, block: Tensor) -> Tensor:
        """The buffer's first bytes as a tensor of the block's dtype and shape."""
        if self._buffer is None:
            self._buffer = torch.empty(self._nbytes, dtype=torch.uint8)
        return self._buffer[: block.nbytes].view(block.dtype).view(block.shape)

    def _blocks(self, tensor: Tensor) -> Iterator[Tensor]:
        """Parts of a tensor in the order of its elements, each of at most the buffer's bytes."""
        if tensor.nbytes <= self._nbytes:
            yield tensor
            return
        rows = self._nbytes // tensor[0].nbytes
        for part in tensor.split(max(rows, 1)):
            yield from [part] if rows else self._blocks(part[0])


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    memory = memory_of(tensor)
    for start in range(0, len(memory), _PIECE_BYTES):
        yield memory[start : start + _PIECE_BYTES]


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, where they lie: valid as long as the tensor is there."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
