"""Offload: what autograd would hold from forward to backward lies on disk or in host memory meanwhile."""

from tightfit.levers.offload.lever import AppliedOffload, offload, positive_bytes
from tightfit.levers.offload.store import HostStore, OffloadSettings

__all__ = ["AppliedOffload", "HostStore", "OffloadSettings", "offload", "positive_bytes"]
