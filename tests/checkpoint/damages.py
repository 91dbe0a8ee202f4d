"""Ways in which a stored checkpoint gets damaged, one at a time and by a seed."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path


def _bits(chance: random.Random, content: bytes, other: bytes) -> bytes:
    damaged = bytearray(content)
    for _ in range(chance.choice([1, 1, 1, 2, 8])):
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    return bytes(damaged)


def _cut(chance: random.Random, content: bytes, other: bytes) -> bytes:
    return content[: chance.randrange(len(content))]


def _longer(chance: random.Random, content: bytes, other: bytes) -> bytes:
    return content + chance.randbytes(chance.randint(1, 100))


def _blank(chance: random.Random, content: bytes, other: bytes) -> bytes:
    start = chance.randrange(len(content))
    return content[:start] + bytes(len(content[start : start + 64])) + content[start + 64 :]


def _moved(chance: random.Random, content: bytes, other: bytes) -> bytes:
    """Two ranges of a file exchanged."""
    size = chance.randint(1, len(content) // 2)
    first = chance.randrange(len(content) - 2 * size + 1)
    second = chance.randrange(first + size, len(content) - size + 1)
    parts = content[:first], content[first : first + size], content[first + size : second]
    return parts[0] + content[second : second + size] + parts[2] + parts[1] + content[second + size :]


def _swapped(chance: random.Random, content: bytes, other: bytes) -> bytes:
    """The file of the same name of another checkpoint."""
    return other


def _half_swapped(chance: random.Random, content: bytes, other: bytes) -> bytes:
    start = chance.randrange(len(content))
    return content[:start] + other[start:]


CHANGES: list[Callable[[random.Random, bytes, bytes], bytes]] = [
    _bits, _bits, _bits, _cut, _longer, _blank, _moved, _swapped, _half_swapped,
]  # fmt: skip


def damage(chance: random.Random, step: Path, other: Path) -> tuple[str, Callable[[], None]]:
    """Damage one checkpoint; another lends its files. What was done, and how to undo it."""
    path = chance.choice(sorted(step.iterdir()))
    content, kind = path.read_bytes(), chance.randrange(len(CHANGES) + 3)
    if kind == len(CHANGES):
        path.unlink()
        return f"{path.name} is missing", lambda: path.write_bytes(content) and None
    if kind == len(CHANGES) + 1:
        away = shutil.move(path, step.parent / "away")
        path.symlink_to(away)
        return f"{path.name} is a link", lambda: Path(away).replace(path) and None
    if kind == len(CHANGES) + 2:
        renamed = step.rename(step.with_name("step-00000099"))
        return "the step is another", lambda: renamed.rename(step) and None
    damaged = content
    while damaged == content:
        damaged = chance.choice(CHANGES)(chance, content, (other / path.name).read_bytes())
    path.write_bytes(damaged)
    return f"{path.name}: {content!r} to {damaged!r}", lambda: path.write_bytes(content) and None
