"""Reads CUDA memory snapshots without trusting them: reserved and idle bytes, and the holders of the peak.

`torch.cuda.memory._snapshot` documents the structure (Snapshot, Segment, Block, TraceEntry, Frame). `_dump_snapshot`
writes it as a pickle. Nothing in a file is executed: only pickles of plain containers are accepted.
"""

import io
import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.errors import InputError
from tightfit.memory.frames import Frame, phase_of, users_frame

HOLDERS = 12  # the number of places in a report
_USED = ("active_allocated", "active_awaiting_free", "active_pending_free")  # the last one is of PyTorch before 2.1


@dataclass(frozen=True)
class HoldingLine:
    """Memory that one line of code held at the peak, in `count` allocations. `phase` is None without frames."""

    bytes: int
    count: int
    where: str
    phase: str | None


@dataclass(frozen=True)
class RefusedAllocation:
    """An out-of-memory event of the trace."""

    requested_bytes: int
    free_bytes: int | None  # on the device, as CUDA reported it
    where: str
    phase: str | None


@dataclass(frozen=True)
class Snapshot:
    """The figures of a snapshot, in bytes.

    `inactive_split_bytes` are idle in segments of which another part is in use, so the allocator cannot return them.
    The peak is that of the recorded allocations before rounding (without a history, the moment of the snapshot).
    """

    segments: int
    reserved_bytes: int
    allocated_bytes: int
    inactive_bytes: int
    inactive_split_bytes: int
    largest_free_bytes: int
    events: int
    peak_bytes: int
    holders: tuple[HoldingLine, ...]  # at the peak, the largest first
    phases: Mapping[str, int]  # bytes at the peak, by the phase in which they were allocated
    refused: tuple[RefusedAllocation, ...]


class _PlainUnpickler(pickle.Unpickler):
    """Accepts dicts, lists, tuples, strings and numbers. Every class or function is looked up here, and refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise _CodeInPickle(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise _CodeInPickle("a persistent object")


class _CodeInPickle(Exception):
    """A pickle contains more than plain containers."""


def read_snapshot(path: Path) -> Snapshot:
    """The figures of a snapshot file, pickle or JSON. Raises `InputError` if it is no snapshot, or contains code."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: the snapshot cannot be read: {error.strerror}") from error
    try:
        raw = json.loads(content) if content.lstrip()[:1] in (b"{", b"[") else _unpickled(content)
        return snapshot_of(raw)
    except _CodeInPickle as error:
        raise InputError(
            f"{path}: refused, because the pickle refers to {error} and a memory snapshot contains plain containers "
            "only. No code of the pickle was run."
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, EOFError, pickle.UnpicklingError) as error:
        raise InputError(
            f"{path}: not a CUDA memory snapshot, as torch.cuda.memory._dump_snapshot writes it "
            f"({type(error).__name__}: {error})"
        ) from error


def is_pickle(head: bytes) -> bool:
    """True if a file begins like a pickle of protocol 2 or newer."""
    return head[:1] == b"\x80"


def is_snapshot(raw: Any) -> bool:
    """True if something looks like the result of `torch.cuda.memory._snapshot()`."""
    return isinstance(raw, Mapping) and isinstance(raw.get("segments"), list)


def _unpickled(content: bytes) -> Any:
    return _PlainUnpickler(io.BytesIO(content)).load()


def snapshot_of(raw: Any) -> Snapshot:
    """The figures of a result of `torch.cuda.memory._snapshot()`. Raises `ValueError` for anything else."""
    if not is_snapshot(raw):
        raise ValueError(f"a {type(raw).__name__} without a list of segments")
    segments = raw["segments"]
    blocks = [block for segment in segments for block in segment["blocks"]]
    idle = [block["size"] for block in blocks if block["state"] not in _USED]
    used = [block for block in blocks if block["state"] in _USED]
    traces = [trace for trace in raw.get("device_traces", []) if trace]
    # The snapshot has one trace per device. The longest is the one of the device that trained.
    history = max(traces, key=len, default=[])
    peak = _peak(history, [block for segment in _with_addresses(segments) for block in segment if _is_used(block)])
    return Snapshot(
        segments=len(segments),
        reserved_bytes=sum(segment["total_size"] for segment in segments),
        allocated_bytes=sum(block["size"] for block in used),
        inactive_bytes=sum(idle),
        inactive_split_bytes=sum(_split(segment["blocks"]) for segment in segments),
        largest_free_bytes=max(idle, default=0),
        events=len(history),
        peak_bytes=peak.bytes,
        holders=_holders(peak.allocations)[:HOLDERS],
        phases=_by_phase(peak.allocations, peak.bytes),
        refused=tuple(_refused(event) for event in history if event["action"] == "oom"),
    )


def _is_used(block: Mapping[str, Any]) -> bool:
    return block["state"] in _USED


def _split(blocks: Sequence[Mapping[str, Any]]) -> int:
    """Idle bytes of a segment that is in use elsewhere."""
    return sum(b["size"] for b in blocks if not _is_used(b)) if any(map(_is_used, blocks)) else 0


def _with_addresses(segments: Iterable[Mapping[str, Any]]) -> Iterable[list[dict[str, Any]]]:
    """The blocks of each segment with their addresses, which older releases do not store."""
    for segment in segments:
        address, blocks = segment["address"], []
        for block in segment["blocks"]:
            blocks.append({"address": address, **block})
            address += block["size"]
        yield blocks


@dataclass(frozen=True)
class _Allocation:
    bytes: int
    frames: tuple[Frame, ...]  # innermost first


@dataclass(frozen=True)
class _Peak:
    bytes: int
    allocations: tuple[_Allocation, ...]  # the individually recorded ones


def _peak(history: Sequence[Mapping[str, Any]], final: Sequence[Mapping[str, Any]]) -> _Peak:
    """The highest level of the recorded history, which ends with the blocks in `final`.

    The bytes before the history began follow from its end: the bytes in use then, less those allocated, plus those
    freed.
    """
    held = sum(_requested(block) for block in final)
    before = held - sum(_change(event) for event in history)
    level, highest, at = before, before, -1
    for index, event in enumerate(history):
        level += _change(event)
        if level > highest:
            highest, at = level, index
    live: dict[int, _Allocation] = {}
    # The allocator hands out a freed address again, so only the events up to the peak are replayed.
    for event in history[: at + 1]:
        if event["action"] == "alloc":
            live[event["addr"]] = _Allocation(event["size"], _frames(event))
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
    # Blocks that no event allocated are older than the history, so they were in use at the peak too.
    recorded = {event["addr"] for event in history if event["action"] == "alloc"}
    older = [_Allocation(_requested(b), _frames(b)) for b in final if b["address"] not in recorded]
    return _Peak(highest, (*live.values(), *older))


def _change(event: Mapping[str, Any]) -> int:
    # A block whose free was only requested stays in use until other streams are done with it, so it still counts.
    return event["size"] if event["action"] == "alloc" else -event["size"] if event["action"] == "free_completed" else 0


def _requested(block: Mapping[str, Any]) -> int:
    return block.get("requested_size", block["size"])


def _frames(holder: Mapping[str, Any]) -> tuple[Frame, ...]:
    return tuple(Frame(f["filename"], f["line"], f["name"]) for f in holder.get("frames") or ())


def _holders(allocations: Iterable[_Allocation]) -> tuple[HoldingLine, ...]:
    groups: dict[tuple[str, str | None], list[int]] = {}
    for allocation in allocations:
        groups.setdefault((_place(allocation.frames), phase_of(allocation.frames)), []).append(allocation.bytes)
    holders = (HoldingLine(sum(sizes), len(sizes), where, phase) for (where, phase), sizes in groups.items())
    return tuple(sorted(holders, key=lambda holder: -holder.bytes))


def _place(frames: Sequence[Frame]) -> str:
    own = users_frame(frames) or next(iter(frames), None)
    return "no frames were recorded" if own is None else str(own)


def _by_phase(allocations: Iterable[_Allocation], total: int) -> dict[str, int]:
    phases: dict[str, int] = {}
    for allocation in allocations:
        phase = phase_of(allocation.frames) or "not recorded"
        phases[phase] = phases.get(phase, 0) + allocation.bytes
    rest = total - sum(phases.values())
    if rest > 0:
        phases["not recorded"] = phases.get("not recorded", 0) + rest
    return phases


def _refused(event: Mapping[str, Any]) -> RefusedAllocation:
    frames = _frames(event)
    return RefusedAllocation(event["size"], event.get("device_free"), _place(frames), phase_of(frames))
