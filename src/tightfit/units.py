"""Converts bytes, budgets and seconds between text and numbers."""

import re
from typing import Literal

from tightfit.errors import BudgetError

BYTE_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_ANY_BYTES = 2**60  # so large that every share that can be written is at least a byte
_AMOUNT = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z%]*)\s*")


def parse_bytes(text: int | str) -> int:
    """A number of bytes from `"22GiB"`, `"24GB"`, `"512 MB"` or an int. Raises `BudgetError` for other text."""
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise BudgetError(f"{text!r} is not an amount of memory: give an integer, or for example 22GiB or 24GB")
    if isinstance(text, int):
        return text
    match = _AMOUNT.fullmatch(text)
    unit = match.group(2).lower() if match else None
    if match is None or unit not in BYTE_UNITS:
        units = "B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
        raise BudgetError(f"{text!r} is not an amount of memory: write a number and one of {units}, for example 22GiB")
    return int(float(match.group(1)) * BYTE_UNITS[unit])


def parse_budget(text: int | str, *, device_bytes: int | None = None, plain_peak_bytes: int | None = None) -> int:
    """A budget in bytes from `"22GiB"`, an int, `"80%"` (of the device) or `"0.5x"` (of the plain peak).

    Raises `BudgetError` if the text is not a budget, or is relative to an unknown quantity.
    """
    match = _AMOUNT.fullmatch(text) if isinstance(text, str) else None
    unit = match.group(2).lower() if match else None
    if match is not None and unit == "%":
        if device_bytes is None:
            raise BudgetError(f"{text!r} is a share of the device's memory, which is not known here: give bytes")
        share = float(match.group(1)) / 100
        if share > 1:
            raise BudgetError(f"budget {text!r} is more than the device has: 100% is all of it")
        budget = int(share * device_bytes)
    elif match is not None and unit == "x":
        if plain_peak_bytes is None:
            raise BudgetError(f"{text!r} is a share of the plain peak, which is not known here: give bytes")
        budget = int(float(match.group(1)) * plain_peak_bytes)
    else:
        try:
            budget = parse_bytes(text)
        except BudgetError as error:
            raise BudgetError(f"budget {error}, 80% (of the device) or 0.5x (of the plain peak)") from None
    if budget <= 0:
        raise BudgetError(f"budget {text!r} is not above zero")
    return budget


def check_budget(text: int | str) -> None:
    """Raise `BudgetError` for a text that is a budget on no device and for no plain peak."""
    parse_budget(text, device_bytes=_ANY_BYTES, plain_peak_bytes=_ANY_BYTES)


def is_share_of(budget: int | str, unit: Literal["%", "x"]) -> bool:
    """True if a budget is written as per cent of the device (`"%"`) or as a share of the plain peak (`"x"`)."""
    return isinstance(budget, str) and budget.strip().lower().endswith(unit)


def format_bytes(count: int | float) -> str:
    """`23622320128` -> `"22.00 GiB"`, in the binary unit that leaves one to four digits before the point."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def brief_bytes(count: int | float) -> str:
    """Bytes in binary units and few characters, for a progress bar or a narrow column: `238M`, `21.4G`."""
    if count >= 2**30:
        return f"{count / 2**30:.1f}G"
    return f"{count / 2**20:.0f}M" if count >= 10 * 2**20 else f"{count / 2**20:.1f}M"


def format_count(count: int) -> str:
    """A count, such as that of parameters, in a few characters: `"512"`, `"31.5K"`, `"6.5M"`, `"8.03B"`."""
    for unit, size, digits in (("B", 10**9, 2), ("M", 10**6, 1), ("K", 10**3, 1)):
        if count >= size:
            return f"{count / size:.{digits}f}{unit}"
    return str(count)


def format_seconds(seconds: float) -> str:
    """`0.0123` -> `"12.3 ms"`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s"
