"""Parses out-of-memory errors: the requested bytes, and the allocator's figures of the device."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tightfit.units import parse_bytes

_AMOUNT = r"([0-9.]+ ?(?:[KMGT]i?B|bytes|B))"


@dataclass(frozen=True)
class OutOfMemory:
    """The figures in an out-of-memory error, in bytes; None if the message does not contain them, or contains what
    cannot be.

    `unallocated_bytes` are reserved from the device and not in use by a tensor. Many of them mean fragmentation.
    """

    device: str  # "cuda:0", "cpu", "mps"
    requested_bytes: int | None
    message: str
    capacity_bytes: int | None = None
    free_bytes: int | None = None
    process_bytes: int | None = None  # all memory of this process on the device, PyTorch's or not
    allocated_bytes: int | None = None
    unallocated_bytes: int | None = None
    limit_bytes: int | None = None  # a limit that the user set

    @property
    def missing_bytes(self) -> int | None:
        """The bytes that were missing, if all free memory had been in one piece."""
        if self.free_bytes is None or self.requested_bytes is None:
            return None
        return max(0, self.requested_bytes - self.free_bytes - (self.unallocated_bytes or 0))


Reader = Callable[[re.Match[str]], OutOfMemory]


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error says that memory ran out, on whichever device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and parse_out_of_memory(str(error)) is not None


def parse_out_of_memory(text: str) -> OutOfMemory | None:
    """The last out-of-memory error in a text, which may be a message or a whole log. None if there is none."""
    found = _last(text, _MESSAGES)
    return None if found is None else found[1]


def find_in_log(text: str) -> tuple[int, OutOfMemory] | None:
    """The last out-of-memory error in a log, and where it begins; else the last sign that the system ended a process
    for want of memory.
    """
    return _last(text, _MESSAGES) or _last(text, ((_ENDED, _ended),))


def _last(text: str, readers: Sequence[tuple[re.Pattern[str], Reader]]) -> tuple[int, OutOfMemory] | None:
    found = [(match.start(), match, read) for pattern, read in readers for match in pattern.finditer(text)]
    if not found:
        return None
    start, match, read = max(found, key=lambda each: each[0])
    return start, read(match)


# c10/cuda/CUDACachingAllocator.cpp, `OutOfMemoryError`; XPU's allocator has the same words.
_GPU = re.compile(rf"(CUDA|XPU|HIP) out of memory\.\s+Tried to allocate\s+{_AMOUNT}")
_LAST_FIGURE = re.compile(r"unallocated|in total by PyTorch\)?")  # the second one up to PyTorch 2.0
_WRAPPED_LINES = 9  # the most lines that one message fills on a terminal
# c10/core/impl/alloc_cpu.cpp, `alloc_cpu`; the second form is that of Windows.
_CPU = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory): you tried to allocate ([0-9]+) bytes[^\n]*"
)
# aten/src/ATen/mps/MPSAllocator.mm
_MPS = re.compile(
    rf"MPS backend out of memory \(MPS allocated: {_AMOUNT}, other allocations: {_AMOUNT}, max allowed: {_AMOUNT}\)\. "
    rf"Tried to allocate {_AMOUNT}[^\n]*"
)


# Errors without figures: the runtime's own, and those of libraries that could not allocate their workspace. None of
# them spoils the process: the next call can succeed.
_LIBRARY = re.compile(
    r"[^\n]*(?:(?:CUDA|HIP)(?: driver)? error: out of memory|(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED"
    r"|cudaErrorMemoryAllocation|Cuda failure (?:2 )?'out of memory'|Error out of memory at line \d+)[^\n]*"
)
_ARRAY = re.compile(rf"Unable to allocate {_AMOUNT} for an array with shape[^\n]*")  # numpy's
# What Linux, Slurm and PyTorch's DataLoader write of a process that was ended for its memory, and what shells (sh, bash
# in a script, zsh, a job of bash's) and launchers write of any that SIGKILL ended. A shell's word may stand behind a
# progress bar, whose line has no end.
_ENDED = re.compile(
    r"[^\n]*(?:Out of memory: Killed process|oom-kill event|oom_kill event|OOM Killed|OOMKilled"
    r"|DataLoader worker \(pid.*?\) is killed by signal: Killed|exitcode\s*: -9 |died with <Signals\.SIGKILL"
    r"|(?:exit status|exit code|exitcode|return code)\s*[:=]?\s*(?:137|-9)\b|terminated by signal SIGKILL"
    r"|line \d+: +\d+ Killed\b|\[\d+\]\s*[+-]?\s+(?:\d+ )?[Kk]illed\b)[^\n]*"
    r"|(?:^|(?<=\]))Killed\s*$",
    re.MULTILINE,
)


def _gpu(match: re.Match[str]) -> OutOfMemory:
    text = _whole_message(match)

    def amount(*patterns: str) -> int | None:
        for pattern in patterns:
            found = re.search(pattern.replace("AMOUNT", _AMOUNT), text)
            if found:
                return _bytes(found.group(1))
        return None

    index = re.search(r"GPU (\d+)", text)
    reserved = amount("AMOUNT reserved in total by PyTorch")
    allocated = amount("memory AMOUNT is allocated by PyTorch", "AMOUNT already allocated")
    # In a container the driver names no process: 0 bytes, or a difference below zero as 16 EiB.
    process = amount("this process has AMOUNT memory in use")
    capacity = amount("total capac(?:i)?ty of AMOUNT", "AMOUNT total capacity")  # `capacty` up to PyTorch 2.1
    kind = "xpu" if match.group(1) == "XPU" else "cuda"
    # The second pattern of each, and `reserved`, are of PyTorch up to 2.0.
    return OutOfMemory(
        device=f"{kind}:{index.group(1)}" if index else kind,
        requested_bytes=_bytes(match.group(2)),
        message=text,
        capacity_bytes=capacity,
        free_bytes=amount("of which AMOUNT is free", "AMOUNT free"),
        process_bytes=process if (allocated or 0) <= (process or -1) <= (capacity or 0) else None,
        allocated_bytes=allocated,
        unallocated_bytes=amount("AMOUNT is reserved by PyTorch but unallocated")
        if reserved is None or allocated is None
        else reserved - allocated,
        limit_bytes=amount("AMOUNT allowed"),
    )


def _of_a_library(match: re.Match[str]) -> OutOfMemory:
    return OutOfMemory("cuda", None, " ".join(match.group().split()))


def _of_an_array(match: re.Match[str]) -> OutOfMemory:
    return OutOfMemory("cpu", _bytes(match.group(1)), match.group())


def _ended(match: re.Match[str]) -> OutOfMemory:
    return OutOfMemory("cpu", None, " ".join(match.group().split()))


def _cpu(match: re.Match[str]) -> OutOfMemory:
    return OutOfMemory("cpu", int(match.group(1)), match.group())


def _mps(match: re.Match[str]) -> OutOfMemory:
    allocated, others, limit, requested = (_bytes(amount) for amount in match.groups())
    return OutOfMemory(
        "mps",
        requested,
        match.group(),
        process_bytes=allocated + others,
        allocated_bytes=allocated,
        limit_bytes=limit,
        free_bytes=max(0, limit - allocated - others),
    )


def _bytes(text: str) -> int:
    return parse_bytes(text.replace("bytes", "B"))


def _whole_message(match: re.Match[str]) -> str:
    """The message up to its last figure, without the advice after it. A terminal may have wrapped it."""
    lines: list[str] = []
    for line in match.string[match.start() :].splitlines()[:_WRAPPED_LINES]:
        if lines and (not line.strip() or "out of memory" in line):
            break
        lines.append(line)
        last = _LAST_FIGURE.search(line)
        if last is not None:
            lines[-1] = line[: last.end()]
            return " ".join(" ".join(lines).split())
    return lines[0].strip()


_MESSAGES: tuple[tuple[re.Pattern[str], Reader], ...] = (
    (_GPU, _gpu), (_CPU, _cpu), (_MPS, _mps), (_ARRAY, _of_an_array), (_LIBRARY, _of_a_library)
)  # fmt: skip
