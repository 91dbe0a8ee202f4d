"""The folder of what is measured or made once for a machine; without torch."""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """The folder of the cache: `TIGHTFIT_CACHE`, else `tightfit` in this system's folder for users' caches."""
    if chosen := os.environ.get("TIGHTFIT_CACHE"):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "tightfit"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tightfit"
