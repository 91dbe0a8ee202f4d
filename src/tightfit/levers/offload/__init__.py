"""Offload: saved activations move to disk or to host memory until backward needs them."""

from tightfit.levers.offload.lever import AppliedOffload, offload, positive_bytes
from tightfit.levers.offload.store import HostStore, OffloadSettings

__all__ = ["AppliedOffload", "HostStore", "OffloadSettings", "offload", "positive_bytes"]
