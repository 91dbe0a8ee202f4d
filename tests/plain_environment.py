"""An environment that has what a `pip install` line names and what that requires, and nothing else that is installed
here. It is made of links into this one, so it takes no time and no registry.
"""

import os
import subprocess
import sysconfig
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SOURCES = Path(__file__).resolve().parent.parent / "src"


def required_by(lines):
    """The distributions that requirements need, by name. Those that are not installed here are left out."""
    found, waiting = {}, [Requirement(line) for line in lines]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        extras = wanted.extras | found.get(name, (None, set()))[1]
        if name in found and extras == found[name][1]:
            continue
        try:
            there = distribution(name)
        except ModuleNotFoundError:
            continue
        found[name] = there, extras
        for line in there.requires or ():
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                waiting.append(needed)
    return {name: there for name, (there, _) in found.items()}


def plain_environment(folder: Path, *lines: str) -> Path:
    """The Python of such an environment, made in `folder`."""
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    for name, there in required_by(lines).items():
        if name != "tightfit":
            _link(there, packages)
    (packages / "tightfit.pth").write_text(f"{SOURCES}\n")
    return folder / "bin" / "python"


def _link(there: Distribution, folder: Path) -> None:
    tops = {file.parts[0] for file in there.files or () if file.parts[0] not in ("..", "__pycache__")}
    for top in tops:
        place, link = Path(str(there.locate_file(top))), folder / top
        if place.exists() and not link.exists():
            link.symlink_to(place)


def runs(python: Path, *arguments: object, cwd: Path) -> subprocess.CompletedProcess:
    """That Python with these arguments, and nothing that variables of this process would add."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "COV"))}
    kept["HF_HUB_OFFLINE"] = "1"
    return subprocess.run([python, *map(str, arguments)], env=kept, cwd=cwd, capture_output=True, text=True)
