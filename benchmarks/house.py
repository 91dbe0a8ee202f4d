"""Counts what a newcomer has to keep in the head: lines, files, rooms, classes, names that mean two things.

    python -m benchmarks.house [--commit COMMIT ...] [--output benchmarks/results/house.json]
    python -m benchmarks.house --since COMMIT

Each commit's sources are read from git; without `--commit`, those of the working tree. Nothing is imported or run. With
`--since`: by room, the lines of files that came since, by how much files grew that were there (under another name too),
and the lines of files that went.
"""

import argparse
import ast
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "src/tightfit"

# Rooms that know no configuration files and no models by name, and depend on torch, numpy, psutil and rich alone.
CORE = ("step", "runtime", "tracing", "devices", "levers", "planner", "verification", "memory", "optim", "ops", "ranks")
CORE_FORMERLY = ("any_code", "nullcard", "processes", "weights")
ANYWHERE = ("errors", "units", "version", "names")

# Records that describe a step to be asked about, searches, records of one operator's call, as the rebuild's notes name
# them. A name that is gone counts no more.
STEPS = {
    "Request",
    "PlainStep",
    "StepSettings",
    "GuestStep",
    "PlanSettings",
    "RunningRequest",
    "Goal",
    "Wanted",
}
STEPS |= {"Question", "PageQuestion", "Subject", "RecipeSubject"}
SEARCHES = {"Selection", "Search", "VariantSearch", "WaySearch", "_SizeSearch", "Sizes", "SizesOfRanks", "Finder"}
SEARCHES |= {"RanksFinder", "RanksSearch", "RecipeSearch"}
CALLS = {"Operation", "ProgramOperation", "Step", "BlockStep", "ReplayedStep"}  # of `levers`: `step.Step` is none
HEADLESS = re.compile(r"(What|Whether|Who)\b")


def count(root: Path) -> dict[str, Any]:
    """The figures of the sources under `root`."""
    package = root / PACKAGE
    files = {path: path.read_text("utf-8") for path in sorted(package.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in files.items()}
    classes = [
        (path, node.name) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    docstrings = [ast.get_docstring(node) or "" for tree in trees.values() for node in ast.walk(tree)
                  if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]  # fmt: skip
    names = Counter(name for _, name in classes)
    in_rooms = Counter((_room(path, package), name) for path, name in classes)
    rooms = {path.parent.name for path in package.glob("*/__init__.py")}
    return {
        "lines": sum(len(text.splitlines()) for text in files.values()),
        "files": len(files),
        "files_below_60_lines": sum(len(text.splitlines()) < 60 for text in files.values()),
        "rooms": len(rooms),
        "classes": len(classes),
        "class_names_that_repeat": sum(times > 1 for times in names.values()),
        "class_names_that_repeat_in_a_room": sum(times > 1 for times in in_rooms.values()),
        "records_of_a_step": sum(name in names for name in STEPS),
        "searches": sum(name in names for name in SEARCHES),
        "records_of_a_call": len(CALLS & {name for path, name in classes if _room(path, package) == "levers"}),
        "docstrings_without_a_subject": sum(bool(HEADLESS.match(text)) for text in docstrings),
        "imports_from_core_to_products": len(list(_upwards(trees, package))),
        "imports_by_string": sum(text.count("import_module(\"tightfit.") for text in files.values()),
    }  # fmt: skip


def _room(path: Path, package: Path) -> str:
    return path.relative_to(package).parts[0]


def _upwards(trees: dict[Path, ast.Module], package: Path) -> Iterator[str]:
    core = {*CORE, *CORE_FORMERLY}
    for path, tree in trees.items():
        room = _room(path, package).removesuffix(".py")
        if room not in core:
            continue
        for node in ast.walk(tree):
            module = node.module if isinstance(node, ast.ImportFrom) and node.module else ""
            target = module.removeprefix("tightfit.").split(".")[0] if module.startswith("tightfit.") else None
            if target is not None and target not in {*core, *ANYWHERE}:
                yield f"{path}: {module}"


def of_commit(commit: str) -> dict[str, Any]:
    """The figures of a commit of this repository."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", commit, PACKAGE], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        return count(Path(folder))


def growth(since: str) -> dict[str, Counter[str]]:
    """Lines by room since a commit: of new files, by which files grew that were there, and of files that went."""
    asked = ["git", "diff", "--numstat", "--summary", "-M50%", "-l0", "-z", since, "HEAD", "--", f"{PACKAGE}/*.py"]
    told = subprocess.run(asked, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    summary = told.rpartition("\0")[2]
    came, went = (set(re.findall(rf"^ {what} mode \d+ (.+)$", summary, re.M)) for what in ("create", "delete"))
    found: dict[str, Counter[str]] = {kind: Counter() for kind in ("new files", "grown files", "files that went")}
    fields = iter(told.removesuffix(summary).split("\0"))
    for row in fields:
        if row:
            added, removed, path = row.split("\t")
            path = path or (next(fields), next(fields))[1]  # of a renamed file: both names follow
            kind = "new files" if path in came else "files that went" if path in went else "grown files"
            found[kind][Path(path).relative_to(PACKAGE).parts[0]] += int(added) - int(removed)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", nargs="*", default=[])
    parser.add_argument("--since")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    if asked.since:
        grown = growth(asked.since)
        rooms = sorted({room for lines in grown.values() for room in lines})
        print(f"{'':20}", *(f"{kind:>16}" for kind in grown))
        for room in rooms:
            print(f"{room:20}", *(f"{lines[room]:>+16}" for lines in grown.values()))
        print(f"{'all':20}", *(f"{lines.total():>+16}" for lines in grown.values()))
        return
    figures = {commit: of_commit(commit) for commit in asked.commit} or {"working tree": count(ROOT)}
    for name in next(iter(figures.values())):
        print(f"{name:36}", *(f"{each[name]:>10}" for each in figures.values()))
    if asked.output:
        asked.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
