"""Stream: frozen weights live in host memory or in a file, and are on the device while their block needs them."""

from tightfit.levers.stream.lever import install_streams, rings_on, settle, stream, streamable_weights, streamed_bytes

__all__ = ["install_streams", "rings_on", "settle", "stream", "streamable_weights", "streamed_bytes"]
