"""What to say where a guest is not installed."""

from tightfit.errors import InputError


def missing(package: str, install: str) -> InputError:
    """One line: what is missing, and the command that brings it."""
    return InputError(f"{package} is not installed: pip install '{install}'")
