"""A saved model's weights in another dtype, where the host has no room for all of them: in a file, one after the other.

What is read in its stored dtype is a map of its file and takes no memory. `transformers` converts all weights before it
returns any of them, so a model larger than the host's memory would end there, whatever streams later.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from tightfit.errors import ModelError
from tightfit.memory.disk import DiskStore, let_go
from tightfit.units import format_bytes

PAGE = 1 << 16  # a multiple of the pages of every system


def finds_no_room(folder: str, stored: torch.dtype, dtype: torch.dtype) -> bool:
    """True if the weights in a folder of safetensors, stored in one dtype, have no room on the host in another."""
    if stored == dtype:
        return False
    nbytes = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    return nbytes * dtype.itemsize // stored.itemsize > free_host_bytes()


def free_host_bytes() -> int:
    """Bytes of the host's memory that weights may take."""
    return psutil.virtual_memory().available


def loaded_in_file(load: Callable[..., Any], new: Callable[..., Any], stored: torch.dtype, dtype: torch.dtype) -> Any:
    """The model that `load(dtype=)` reads, in `dtype`, with what is converted in an unnamed temporary file.

    `new(dtype=)` makes such a model with new weights. Its dtypes count: some weights stay as they are in any dtype.
    """
    model = load(dtype=stored)
    with torch.device("meta"):
        twin = new(dtype=dtype)
    wanted = {name: tensor.dtype for name, tensor in _tensors(twin)}
    store = DiskStore(user="model.path")
    for name, tensor in _tensors(model):
        if tensor.is_floating_point() and wanted.get(name, tensor.dtype) != tensor.dtype:
            _convert(store, name, tensor, wanted[name])
    model.config.dtype = dtype
    return model


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(itertools.chain(model.named_parameters(), model.named_buffers()))


def _convert(store: DiskStore, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    nbytes = tensor.numel() * dtype.itemsize
    extent = store.allocate(-(-nbytes // PAGE) * PAGE)
    if extent is None:
        raise ModelError(
            f"{name} has no room in {store.folder}, where weights go that the host's memory cannot hold "
            f"({format_bytes(nbytes)}): free space there, or set TMPDIR to a folder on another disk"
        )
    pages = store.mapped(extent)
    target = torch.frombuffer(pages, dtype=dtype)[: tensor.numel()].view(tensor.shape)
    target.copy_(tensor)
    tensor.data = target
    let_go(target.data_ptr(), extent.nbytes)
