"""Addresses without memory, and the handler that ends a process with one line if it reads or writes there.

The processor stops a kernel that touches such an address in the middle of its work. The kernel cannot continue, and no
exception can be raised from there. So the handler prints the operator and the line, and ends the process.
"""

import atexit
import ctypes
import functools
import linecache
import os
import platform
import re
import signal
import struct
import sys
import threading
import time
from types import FrameType
from typing import Any

from tightfit.errors import TraceError

# x86-64: bits 47 (56, with five levels of page tables) to 63 of a valid address are equal (Intel SDM, volume 1,
# 3.3.7.1, on canonical addresses). AArch64: the highest byte may be ignored; the bits between it and the 48 or 52
# translated bits are zero in a program's addresses (Linux, Documentation/arch/arm64/memory.rst,
# tagged-address-abi.rst). x86-64 refuses an address for bit 62, AArch64 for bit 54.
FIRST_ADDRESS = (1 << 62) | (1 << 54)
LAST_ADDRESS = FIRST_ADDRESS + (1 << 54) - 1
_PROCESSORS = ("x86_64", "aarch64")

_UNTAGGED = (1 << 56) - 1
_SI_KERNEL = 0x80  # asm-generic/siginfo.h: x86-64 reports this, without the address, for a non-canonical address
_SA_SIGINFO = 4  # asm-generic/signal-defs.h
_PATIENCE = 1.0  # seconds that a kernel's worker thread waits for the thread that called the kernel and knows its name
_Handler: Any = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """`struct sigaction` of Linux's C libraries (glibc, musl)."""

    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * (128 // ctypes.sizeof(ctypes.c_ulong))),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


class Faults:
    """Mutable, one instance: the process's handler of SIGSEGV, and the handler that it replaced."""

    def __init__(self) -> None:
        self.operator: str | None = None  # the operator that a dry run computes now
        self.watched = False
        self._libc: Any = None
        self._before = _Action()
        self._handler = _Handler(self._handle)
        self._address = ctypes.cast(self._handler, ctypes.c_void_p).value
        self._telling = threading.Lock()

    def watch(self) -> bool:
        """Install the handler if it is not installed. False if the system does not support it."""
        if not _is_possible():
            return False
        if self._libc is None:
            self._libc = ctypes.CDLL(None)
            atexit.register(self._leave)
            self._native_operator()  # the first backtrace of a process loads a library, which a handler must not do
        current = _Action()
        self._libc.sigaction(signal.SIGSEGV, None, ctypes.byref(current))
        if current.handler == self._address:
            return True
        self._before = current
        ours = _Action(handler=self._address, flags=_SA_SIGINFO)
        self.watched = self._libc.sigaction(signal.SIGSEGV, ctypes.byref(ours), None) == 0
        return self.watched

    def _leave(self) -> None:
        current = _Action()
        self._libc.sigaction(signal.SIGSEGV, None, ctypes.byref(current))
        if current.handler == self._address:
            self._libc.sigaction(signal.SIGSEGV, ctypes.byref(self._before), None)
        self.watched = False

    def _handle(self, number: int, information: int, context: int) -> None:
        if not _is_ours(information):
            self._leave()  # the same instruction faults again, and the previous handler reports it
            return
        if self._caller() is None:
            # An OpenMP thread has no Python frame. The thread that called the kernel faults too, and knows the line.
            time.sleep(_PATIENCE)
        self._telling.acquire()  # and never released: one line is enough
        try:
            line = self.line()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        except BaseException as error:
            line = f"memory that a dry run left out was read or written ({error!r})"
        os.write(2, f"error: {line}\n".encode(errors="replace"))
        os._exit(TraceError.exit_code)

    def line(self) -> str:
        """The error's line: the operator that touched an address without memory, and where it was called."""
        name = self.operator or self._native_operator()
        frame = self._caller() or sys._current_frames().get(threading.main_thread().ident or 0)
        return (
            f"{name or 'code outside of PyTorch'} reads or writes a tensor that has a shape but no memory"
            f"{_place(frame)}: a model built dry, or a result that a dry run did not compute, has no numbers"
        )

    def _native_operator(self) -> str | None:
        """The PyTorch operator that this thread runs, from the names of the native functions on its stack."""
        if not hasattr(self._libc, "backtrace"):  # musl has none
            return None
        addresses = (ctypes.c_void_p * 200)()
        count = self._libc.backtrace(addresses, len(addresses))
        self._libc.backtrace_symbols.restype = ctypes.POINTER(ctypes.c_char_p)
        symbols = self._libc.backtrace_symbols(addresses, count)
        for index in range(count):
            found = re.search(rb"N2at4_ops(\d+)(\w+)", symbols[index] or b"")
            if found:
                return f"aten.{found[2][: int(found[1])].decode()}"
        return None

    def _caller(self) -> FrameType | None:
        """The innermost Python frame of this thread outside of this file; None in a kernel's worker thread."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        return frame


faults = Faults()


@functools.cache
def _is_possible() -> bool:
    return sys.platform == "linux" and platform.machine() in _PROCESSORS and struct.calcsize("P") == 8


def _is_ours(information: int) -> bool:
    """Whether a `siginfo_t` is of a fault at one of these addresses."""
    code, address = struct.unpack_from("=8xi4xQ", ctypes.string_at(information, 24))
    untagged = FIRST_ADDRESS & _UNTAGGED <= address & _UNTAGGED <= LAST_ADDRESS & _UNTAGGED
    return untagged or (code == _SI_KERNEL and platform.machine() == "x86_64")


_NOT_THE_USERS = ("torch", "tightfit", "numpy", "transformers", "ctypes")


def _place(frame: FrameType | None) -> str:
    """File and line of the innermost frame outside of the libraries, with its text."""
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _NOT_THE_USERS:
        frame = frame.f_back
    if frame is None:
        return ""
    file, number = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, number).strip()
    return f", at {file}:{number}{f' ({text})' if text else ''}"
