"""Out-of-memory messages, as the allocators of several releases write them."""

import pytest
import torch

from tightfit.memory.failure import parse_out_of_memory

MIB, GIB = 2**20, 2**30
# c10/cuda/CUDACachingAllocator.cpp, torch 2.11 and 2.13
CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.15 GiB of which 1.50 GiB is free."
    " Process 77 has 10.00 GiB memory in use. Including non-PyTorch memory, this process has 67.65 GiB memory in use. "
    "60.00 GiB allowed; Of the allocated memory 65.00 GiB is allocated by PyTorch, with 12.00 MiB allocated in private "
    "pools (e.g., CUDA Graphs), and 1.25 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory"
    " is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
# torch 2.0 and before
OLDER = (
    "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 10.76 GiB total capacity; 9.58 GiB already allocated; "
    "25.38 MiB free; 9.61 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting "
    "max_split_size_mb to avoid fragmentation."
)
# aten/src/ATen/mps/MPSAllocator.mm
MPS = (
    "MPS backend out of memory (MPS allocated: 8.00 GB, other allocations: 1.00 GB, max allowed: 9.07 GB). "
    "Tried to allocate 256.00 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0"
)


def test_every_figure_of_cudas_message_is_read():
    said = parse_out_of_memory(CUDA)
    assert (said.device, said.requested_bytes) == ("cuda:1", 2 * GIB)
    assert said.capacity_bytes == int(79.15 * GIB)
    assert said.free_bytes == int(1.5 * GIB)
    assert said.process_bytes == int(67.65 * GIB)
    assert said.allocated_bytes == 65 * GIB
    assert said.unallocated_bytes == int(1.25 * GIB)
    assert said.limit_bytes == 60 * GIB
    assert said.missing_bytes == 0  # 1.5 free and 1.25 idle would do, in one piece
    assert "expandable_segments" not in said.message


def test_the_older_form_is_read_too():
    said = parse_out_of_memory(OLDER)
    assert (said.device, said.requested_bytes, said.capacity_bytes) == ("cuda:0", 20 * MIB, int(10.76 * GIB))
    assert said.allocated_bytes == int(9.58 * GIB)
    assert said.free_bytes == int(25.38 * MIB)
    assert said.unallocated_bytes == int(9.61 * GIB) - int(9.58 * GIB)


def test_the_cpus_own_error_is_read():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(10**15)
    said = parse_out_of_memory(str(raised.value))
    assert (said.device, said.requested_bytes) == ("cpu", 4 * 10**15)


def test_the_error_of_mps_is_read():
    said = parse_out_of_memory(MPS)
    assert (said.device, said.requested_bytes, said.limit_bytes) == ("mps", 256 * 10**6, 9_070_000_000)
    assert said.free_bytes == 70_000_000


def test_of_a_log_the_last_error_counts():
    log = f"step 1\n{OLDER}\ncaught it, going on\nstep 2\n[rank1]: torch.OutOfMemoryError: {CUDA}\nbye"
    assert parse_out_of_memory(log).device == "cuda:1"


def test_a_message_that_a_terminal_wrapped_is_read():
    words, lines = CUDA.split(), []
    while words:
        lines.append(" ".join(words[:16]))
        words = words[16:]
    assert parse_out_of_memory("\n".join(lines)) == parse_out_of_memory(CUDA)


@pytest.mark.parametrize("text", ["", "RuntimeError: shapes do not match", "out of memory"])
def test_anything_else_is_nothing(text):
    assert parse_out_of_memory(text) is None
