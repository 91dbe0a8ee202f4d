"""The version of the package, which comes from git's newest tag when the package is built or installed."""

import functools

UNKNOWN = "0+unknown"  # of sources that are on the path and were never installed


@functools.cache
def package_version() -> str:
    """The version of the installed package. It is read when needed: `importlib.metadata` is slow."""
    from importlib import metadata

    try:
        return metadata.version("tightfit")
    except metadata.PackageNotFoundError:
        return UNKNOWN
