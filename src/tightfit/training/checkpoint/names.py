"""The names in a folder of checkpoints: checkpoints by their step, and what the next save removes."""

import re
import secrets

PART = ".part-"  # being written, or being removed: never anything that is needed
OLD = ".old-"  # replaced by another checkpoint of the same step, and as good until that one is in its place
_STEP = re.compile(r"(?:\.old-)?step-(\d{8,})(?:-[0-9a-f]{8})?", re.ASCII)


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def part_name(name: str) -> str:
    return f"{PART}{name}-{secrets.token_hex(4)}"


def old_name(step: int) -> str:
    return f"{OLD}{name_of(step)}-{secrets.token_hex(4)}"


def step_of(name: str) -> int | None:
    """The step of the checkpoint in a folder of that name; None where it is no checkpoint's."""
    match = _STEP.fullmatch(name)
    if match is None or is_old(name) != (match.end(1) < len(name)) or len(name) > 40:
        return None
    step = int(match[1])
    return step if name_of(step) in name else None  # one name for each step: no further zeros before it


def is_old(name: str) -> bool:
    return name.startswith(OLD)
