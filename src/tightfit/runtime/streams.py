"""Streams and events of a CUDA device: the few operations that parallel copies need.

Work on one stream runs in order. Only events order work of different streams: after `wait(stream, event)`, new work on
`stream` runs after everything that was on the other stream when `mark` made the event. Tests replace this class by one
that records and checks the order.
"""

from typing import Any

import torch


class CudaStreams:
    """The streams of one CUDA device. Only `finish` makes the host wait."""

    def __init__(self, device: torch.device):
        self.device = device

    def new(self) -> Any:
        """A new stream."""
        return torch.cuda.Stream(self.device)

    def current(self) -> Any:
        """The computing stream of this thread."""
        return torch.cuda.current_stream(self.device)

    def mark(self, stream: Any) -> Any:
        """An event after all work that is on the stream now."""
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Make new work on the stream run after the event."""
        stream.wait_event(event)

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on the stream. The host does not wait if its side is pinned."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def finish(self, event: Any) -> None:
        """Make the host wait for the event."""
        event.synchronize()
