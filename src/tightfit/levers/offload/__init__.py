"""Offload: what autograd would hold from forward to backward lies on disk or in host memory meanwhile."""

from tightfit.levers.offload.lever import AppliedOffload, offload, positive_bytes
from tightfit.levers.offload.shelf import HostShelf, OffloadSettings

__all__ = ["AppliedOffload", "HostShelf", "OffloadSettings", "offload", "positive_bytes"]
