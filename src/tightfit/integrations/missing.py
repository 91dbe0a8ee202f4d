"""The error for a library that is not installed."""

from tightfit.errors import InputError


def missing_package(package: str, install: str) -> InputError:
    """An error with the missing package and the command that installs it."""
    return InputError(f"{package} is not installed: pip install '{install}'")
