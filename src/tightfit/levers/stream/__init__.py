"""Stream: weights of blocks live in host memory or in a file, and are on the device while their block runs."""

from tightfit.levers.stream.lever import (
    bytes_on_host,
    install_streams,
    rings_on,
    settle,
    stream,
    streamable_weights,
    streamed_bytes,
)

__all__ = [
    "bytes_on_host",
    "install_streams",
    "rings_on",
    "settle",
    "stream",
    "streamable_weights",
    "streamed_bytes",
]
