"""Stream: frozen weights live in host memory or in a file, and are on the device while their block needs them."""

from tightfit.levers.stream.lever import frozen_weights, install_streams, rings_on, settle, stream, streamed_bytes

__all__ = ["frozen_weights", "install_streams", "rings_on", "settle", "stream", "streamed_bytes"]
