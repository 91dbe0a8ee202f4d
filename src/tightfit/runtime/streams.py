"""Streams and events of a CUDA device, as few of their verbs as copies beside the computation need.

Work on one stream runs in order; between streams nothing is ordered but by an event: what a stream is given after it
`waits` runs after everything that was on the other stream at the `mark`.
"""

from typing import Any

import torch


class CudaStreams:
    """The streams of one CUDA device. Nothing here makes the host wait but `finish`."""

    def __init__(self, device: torch.device):
        self.device = device

    def new(self) -> Any:
        """A stream of its own."""
        return torch.cuda.Stream(self.device)

    def current(self) -> Any:
        """The stream that computes, in this thread."""
        return torch.cuda.current_stream(self.device)

    def mark(self, stream: Any) -> Any:
        """An event after all that is on the stream now."""
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """What comes on the stream from now on runs after the event."""
        stream.wait_event(event)

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on the stream; the host does not wait where its side is pinned."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def finish(self, event: Any) -> None:
        """Make the host wait for the event."""
        event.synchronize()
