"""Installs a wheel alone into an empty environment, in an empty folder, and runs what a reader types first.

    python tools/try_wheel.py dist/tightfit-0.2.0-py3-none-any.whl [--extras]

`--extras` only resolves the wheel with each of its extras, and installs nothing.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "examples" / "quickstart.yaml"  # which the README's reader has from the repository
EXTRAS = "hf,lowbit"  # of a model by name, and of its recipes in 4 and 8 bits
COMMANDS = (
    ("tightfit", "--version"),
    ("tightfit", "fit", "--model", "llama-3.1-8b", "--device", "rtx3060-12", "--seq-len", "2048"),
    ("tightfit", "train", QUICKSTART.name, "training.max_steps=12"),
    ("tightfit", "explore", "--help"),
    ("tightfit", "doctor", "--report"),
)


def extras_of(wheel: Path) -> list[str]:
    """The extras that a wheel has."""
    with zipfile.ZipFile(wheel) as file:
        name = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        return re.findall(r"^Provides-Extra: (.+)$", file.read(name).decode(), re.MULTILINE)


def run(*command: str | Path, **options: object) -> None:
    print("$", *command, flush=True)
    subprocess.run(command, check=True, **options)  # type: ignore[call-overload]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--extras", action="store_true", help="resolve each extra")
    options = parser.parse_args()
    wheel = options.wheel.resolve()
    with tempfile.TemporaryDirectory() as folder:
        home, work = Path(folder, "venv"), Path(folder, "work")
        venv.create(home, with_pip=True)
        python = home / "bin" / "python"
        if options.extras:
            for extra in extras_of(wheel):
                run(python, "-m", "pip", "install", "--quiet", "--dry-run", f"{wheel}[{extra}]")
            return
        run(python, "-m", "pip", "install", "--quiet", f"{wheel}[{EXTRAS}]")
        work.mkdir()
        shutil.copy(QUICKSTART, work)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        kept |= {
            "PATH": f"{python.parent}:{kept['PATH']}",
            "XDG_CACHE_HOME": str(work / "cache"),
            "HF_HUB_OFFLINE": "1",
        }
        for command in COMMANDS:
            run(*command, cwd=work, env=kept)
        print(f"{wheel.name}: works in an empty environment of Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
