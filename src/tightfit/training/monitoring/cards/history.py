"""Reads the history of PyTorch's allocator backwards: the highest point of a span, and what was in use there.

`torch.cuda.memory._snapshot` gives the blocks in use at its end and the events before it (Snapshot, TraceEntry,
Frame). An event's sizes are those that were asked for, so unsplit remainders of blocks are not among them. Going
backwards needs no beginning: a history that lost its first events is still right about its last ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tightfit.devices import nullcard
from tightfit.memory.frames import Frame, users_frame

OURS = str(Path(nullcard.__file__).parent)
_USED = ("active_allocated", "active_awaiting_free", "active_pending_free")


@dataclass(frozen=True)
class UsedMemory:
    """Memory that was in use: its place, its bytes, its number among the allocations of the process (0: older than the
    history), the calls that asked for it (innermost first), the module that ran, and the number of the last allocation
    before it was freed (None: it never was).
    """

    address: int
    bytes: int
    number: int = 0
    frames: Sequence[Mapping[str, Any]] = ()
    module: str = ""
    until: int | None = None


@dataclass
class History:
    """The events of one card, numbered by the allocations of the process: `last` is the number of the last one."""

    events: Sequence[Mapping[str, Any]]
    final: Sequence[UsedMemory]
    last: int
    _before: list[int] = field(default_factory=list)  # allocations up to and with each event

    @classmethod
    def of(cls, snapshot: Mapping[str, Any], card: int, last: int) -> "History":
        events = [e for e in snapshot["device_traces"][card] if e["action"] in ("alloc", "free_completed")]
        blocks = [
            UsedMemory(block["address"], block.get("requested_size", block["size"]), 0, block.get("frames") or ())
            for segment in snapshot["segments"]
            if segment["device"] == card
            for block in segment["blocks"]
            if block["state"] in _USED
        ]
        return cls(events, blocks, last)

    def levels(self) -> Iterator[tuple[int, int, int]]:
        """Backwards, the bytes in use after each event, with the event's index and its allocation's number."""
        level, number = sum(block.bytes for block in self.final), self.last
        for index in range(len(self.events) - 1, -1, -1):
            event = self.events[index]
            yield index, number, level
            is_allocation = event["action"] == "alloc"
            level += -event["size"] if is_allocation else event["size"]
            number -= is_allocation

    def highest(self, spans: Sequence[tuple[int, int]]) -> list[int | None]:
        """For each span of allocations, `after < number <= until`, the event at its highest point; None: no event.

        Spans are in their order and do not overlap.
        """
        found: list[int | None] = [None] * len(spans)
        best, at = [-1] * len(spans), len(spans) - 1
        for index, number, level in self.levels():
            while at >= 0 and number <= spans[at][0]:
                at -= 1
            if at < 0:
                break
            if number <= spans[at][1] and level >= best[at]:
                best[at], found[at] = level, index
        return found

    def in_use(self, at: int) -> list[UsedMemory]:
        """The blocks in use after an event."""
        live = {block.address: block for block in self.final}
        number = self.last
        for index in range(len(self.events) - 1, at, -1):
            event = self.events[index]
            if event["action"] == "alloc":
                live.pop(event["addr"], None)
                number -= 1
            else:
                live[event["addr"]] = UsedMemory(event["addr"], event["size"], until=number)
        wanted = set(live)
        for index in range(at, -1, -1):  # their own allocations are the last ones of their addresses
            event = self.events[index]
            if event["action"] != "alloc":
                continue
            if event["addr"] in wanted:
                wanted.discard(event["addr"])
                module, until = str(event.get("user_metadata") or ""), live[event["addr"]].until
                live[event["addr"]] = UsedMemory(
                    event["addr"], event["size"], number, event.get("frames") or (), module, until
                )
            number -= 1
        return list(live.values())

    def curve(self, points: int) -> list[int]:
        """The bytes in use over the whole history, thinned to so many points, each the highest of its span."""
        levels = [level for _, _, level in self.levels()][::-1]
        span = max(1, -(-len(levels) // points))
        return [max(levels[start : start + span]) for start in range(0, len(levels), span)]


def place_of(frames: Sequence[Mapping[str, Any]]) -> str:
    """The user's own line, as file:line function; empty where no Python code asked for the memory."""
    calls = [Frame(frame["filename"], frame["line"], frame["name"]) for frame in frames]
    calls = [call for call in calls if not call.filename.startswith(OURS)]  # true values are computed there
    own = users_frame(calls)
    return "" if own is None else str(own)
