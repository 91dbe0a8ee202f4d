"""Addresses without memory, and the handler that makes a read or a write there an exception.

A kernel that touches such an address cannot be left in the middle of its work. So the handler maps memory under the
address and lets the kernel finish, with numbers that nobody uses. Then Python raises a `TraceError` with the operator
and the line: at once in the main thread, as for Ctrl-C, and at the end of the dry run in another one. Where neither is
possible, the process ends with the same line.
"""

import _thread
import atexit
import ctypes
import functools
import linecache
import mmap
import os
import platform
import re
import signal
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from tightfit.errors import TraceError

# User space ends at 2^47 on x86-64 and at 2^48 on AArch64 (Linux, Documentation/arch/x86/x86_64/mm.rst,
# arm64/memory.rst). Linux places programs at two thirds of it and mappings from its end downwards, and sanitizers keep
# their shadows below 2^44 (compiler-rt, asan_mapping.h). So nothing is mapped in this range, and memory can be.
FIRST_ADDRESS, LAST_ADDRESS = 1 << 45, (1 << 46) + (1 << 43)
# Addresses of what is too large for that range. No memory can be mapped there. x86-64: bits 47 (56, with five levels of
# page tables) to 63 of a valid address are equal (Intel SDM, volume 1, 3.3.7.1, on canonical addresses). AArch64: the
# highest byte may be ignored; the bits between it and the 48 or 52 translated bits are zero in a program's addresses
# (tagged-address-abi.rst). x86-64 refuses an address for bit 62, AArch64 for bit 54.
FIRST_REFUSED = (1 << 62) | (1 << 54)
LAST_REFUSED = FIRST_REFUSED + (1 << 54) - 1
_PROCESSORS = ("x86_64", "aarch64")

_UNTAGGED = (1 << 56) - 1
_SI_KERNEL = 0x80  # asm-generic/siginfo.h: x86-64 reports this, without the address, for a non-canonical address
_SA_SIGINFO = 4  # asm-generic/signal-defs.h
_MAP_NORESERVE, _MAP_FIXED_NOREPLACE = 0x4000, 0x100000  # asm-generic/mman-common.h
_CHUNK = 1 << 21  # bytes mapped at a fault
# Chunks that are mapped at once. A kernel that writes more finds the first ones gone, and they are mapped again. One
# instruction may touch 16 of them (a gather), and each thread runs one instruction.
_CHUNKS = 64
_PATIENCE = 1.0  # seconds that a kernel's worker thread waits for the thread that called the kernel and knows its name
_SIGNALS = (signal.SIGSEGV, signal.SIGBUS)  # x86-64: the latter for a refused address in a register of the stack
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
    """Mutable, one instance: the process's handler of faults, and the handlers that it replaced."""

    def __init__(self) -> None:
        self.operator: str | None = None  # the operator that a dry run computes now
        self.watched = False
        self.seen: str | None = None  # the line of the first fault since the last dry run began
        self._running = 0  # dry runs
        self._thread = 0  # the thread of the last dry run
        self._libc: Any = None
        self._before: dict[int, _Action] = {number: _Action() for number in _SIGNALS}
        self._handler = _Handler(self._handle)
        self._address = ctypes.cast(self._handler, ctypes.c_void_p).value
        self._telling = threading.Lock()
        self._mapping = threading.Lock()
        self._mapped: deque[int] = deque()

    def watch(self) -> bool:
        """Install the handler if it is not installed. False if the system does not support it."""
        if not _is_possible():
            return False
        if self._libc is None:
            self._libc = ctypes.CDLL(None)
            self._libc.mmap.restype = ctypes.c_void_p
            self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
            self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
            atexit.register(self._leave)
            self._native_operator()  # the first backtrace of a process loads a library, which a handler must not do
        self._thread = threading.get_ident()
        self.seen = None
        self.watched = all(map(self._install, _SIGNALS))
        return self.watched

    @contextmanager
    def raised(self) -> Iterator[None]:
        """A context for a dry run. Raises `TraceError` at its end if memory that has none was touched in it, in another
        thread or where somebody caught the exception.
        """
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._unmap()
            line, self.seen = self.seen, None
        if line is not None:
            raise TraceError(line)

    def _install(self, number: int) -> bool:
        current = _Action()
        self._libc.sigaction(number, None, ctypes.byref(current))
        is_ours, is_main = current.handler == self._address, threading.current_thread() is threading.main_thread()
        if is_ours and (not is_main or signal.getsignal(number) == self._raise):
            return True  # only the main thread can have Python raise, and another one may have been here first
        if not is_ours:
            self._before[number] = current
        if is_main:
            signal.signal(number, self._raise)  # for `_handle`, which the system calls
        ours = _Action(handler=self._address, flags=_SA_SIGINFO)
        return self._libc.sigaction(number, ctypes.byref(ours), None) == 0

    def _leave(self) -> None:
        for number in _SIGNALS:
            current = _Action()
            self._libc.sigaction(number, None, ctypes.byref(current))
            if current.handler == self._address:
                self._libc.sigaction(number, ctypes.byref(self._before[number]), None)
        self.watched = False

    def _handle(self, number: int, information: int, context: int) -> None:
        address = _address_of(information)
        if address is None:
            self._leave()  # the same instruction faults again, and the previous handler reports it
            return
        # An OpenMP thread has no Python frame. It works for another thread, which faults too and knows the line.
        is_worker = self._caller() is None
        thread = self._thread if is_worker else threading.get_ident()
        until = time.monotonic() + (_PATIENCE if is_worker else 0.0)
        while self.seen is None and time.monotonic() < until:
            time.sleep(_PATIENCE / 1000)
        if self.seen is None:
            self.seen = self._line()
        if not self._map(address):
            self._end()
        if thread == threading.main_thread().ident and signal.getsignal(number) == self._raise:
            # Have Python call its handler in the main thread, and not before this function has returned. Python looks
            # for signals after a call (of a Python function too, once dynamo has its own way to run frames), and not
            # after an unpacking. So the call is made by one.
            signals: Any = (number,)
            (_,) = map(_thread.interrupt_main, signals)
        elif not self._running:
            self._end()

    def _raise(self, number: int, frame: FrameType | None) -> None:
        """The handler that Python calls in the main thread between two steps of its code, after a fault."""
        while frame is not None:
            if frame.f_code is Faults._handle.__code__:
                return  # the kernel has not ended: the handler ends with another interrupt
            frame = frame.f_back
        self._unmap()
        line = self.seen
        if not self._running:
            self.seen = None
        if line is not None:
            raise TraceError(line)

    def _map(self, address: int) -> bool:
        """Map memory under an address, and none under the address that was touched first. False if it is refused."""
        if not FIRST_ADDRESS <= address <= LAST_ADDRESS:
            return False
        start = address & -_CHUNK
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED_NOREPLACE
        with self._mapping:  # a call of the C library lets another thread run, which may fault at the same address
            found = self._libc.mmap(start, _CHUNK, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
            if found == start:
                self._mapped.append(start)
                if len(self._mapped) > _CHUNKS:
                    self._libc.munmap(self._mapped.popleft(), _CHUNK)
            return found == start or start in self._mapped  # another thread was faster

    def _unmap(self) -> None:
        """Take the memory away again. Nothing may read there without a fault."""
        while self._mapped:
            self._libc.munmap(self._mapped.popleft(), _CHUNK)

    def _end(self) -> None:
        """End the process with one line."""
        self._telling.acquire()  # and never released: one line is enough
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os.write(2, f"error: {self.seen}\n".encode(errors="replace"))
        os._exit(TraceError.exit_code)

    def _line(self) -> str:
        """The error's line: the operator that touched an address without memory, and where it was called."""
        try:
            return self._told()
        except Exception as error:  # the handler must go on
            return f"memory that a dry run left out was read or written ({error!r})"

    def _told(self) -> str:
        name = self.operator or self._native_operator()
        frame = self._caller() or sys._current_frames().get(self._thread)
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


def _address_of(information: int) -> int | None:
    """The address of ours that a `siginfo_t` names; None for a fault at another one."""
    code, address = struct.unpack_from("=8xi4xQ", ctypes.string_at(information, 24))
    address &= _UNTAGGED
    if FIRST_ADDRESS <= address <= LAST_ADDRESS:
        return address
    refused = FIRST_REFUSED & _UNTAGGED <= address <= LAST_REFUSED & _UNTAGGED
    return FIRST_REFUSED if refused or (code == _SI_KERNEL and platform.machine() == "x86_64") else None


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
