"""The house is built as `docs/architecture.md` says: who may import whom."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "tightfit"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@cache
def places():
    """The rows of the table "The house", in their order."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    table = text.split("## The house")[1].split("\n## ")[0]
    return re.findall(r"^\| `([\w.]+)` \|", table, re.MULTILINE)


@cache
def place_of(module):
    """The row that a module such as `config.schema` belongs to: the one with the longest name that it starts with."""
    return max((p for p in places() if f"{module}.".startswith(f"{p}.")), key=len, default=None)


def module_of(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


@cache
def nodes_of(path):
    return tuple(ast.walk(ast.parse(path.read_text("utf-8"))))


@cache
def imported(path):
    """The modules of this package that a file imports anywhere in it, each without the package's own name."""
    return tuple(_imported(path))


def _imported(path):
    for node in nodes_of(path):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name.removeprefix("tightfit.") for name in names if name.startswith("tightfit."))


@cache
def public_names():
    """What `from tightfit import ...` gives: no module, and so in no row."""
    import tightfit

    return set(tightfit.__all__)


def test_the_table_names_every_package_and_file_and_nothing_else():
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    assert {place.split(".")[0] for place in places()} == parts


@pytest.mark.keeps("configuration-page-table-permitted")
def test_a_module_imports_only_what_stands_above_it():
    order = {place: rank for rank, place in enumerate(places())}
    below = [
        f"{module_of(path)} imports {name}"
        for path in FILES
        for name in imported(path)
        if name not in public_names() and order[place_of(name)] > order[place_of(module_of(path))]
    ]
    assert not below, f"these stand below them in docs/architecture.md: {below}"


def test_no_file_imports_itself_by_way_of_others():
    """Imports anywhere in a file count, lazy ones and those for types too."""
    files = {module_of(path): path for path in [*FILES, PACKAGE / "__init__.py"]}
    reads = {
        module: {part for name in imported(path) if (part := _file_of(name, files)) not in (None, module)}
        for module, path in files.items()
    }
    left = dict(reads)
    while True:
        free = {module for module, names in left.items() if not names & left.keys()}
        if not free:
            break
        left = {module: names for module, names in left.items() if module not in free}
    circles = {module: sorted(names & left.keys()) for module, names in left.items()}
    assert not circles, f"these import each other, or what does: {circles}"


def test_no_module_of_ours_is_imported_by_a_name_in_text():
    """Such an import would not be seen by the tests above."""
    named = [
        f"{module_of(path)}, line {node.lineno}"
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module"
        for given in [*node.args, *(keyword.value for keyword in node.keywords)]
        if isinstance(given, ast.Constant) and str(given.value).startswith("tightfit")
    ]
    assert not named, named


def _file_of(name, files):
    """The file that an imported name is, or lies in; for what `tightfit` itself gives, that one."""
    if name in files:
        return name
    parent = name.rpartition(".")[0]
    return parent if parent in files else module_of(PACKAGE / "__init__.py")


# Public functions, those that are to come too: `tightfit.trace` would be a room of that name as soon as anything of it
# is imported, since Python makes a subpackage an attribute of its parent.
FUNCTIONS = {"train", "trace", "fit", "plan", "verify", "distil", "prune", "quantise", "estimate"}


def test_only_a_training_seeds_the_cards():
    """`torch.manual_seed` seeds every card too, those that the process will use later among them."""
    seeding = [
        f"{module_of(path)}, line {node.lineno}"
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.manual_seed"
    ]
    assert [line.partition(",")[0] for line in seeding] == ["training.random_states"], seeding


def test_no_room_and_no_module_has_the_name_of_a_public_function():
    names = {part for path in FILES for part in module_of(path).split(".")}
    assert not names & FUNCTIONS
    assert not {module_of(path).split(".")[0] for path in FILES} & public_names()


def test_no_two_files_of_tests_share_a_name():
    """A process that imports both refuses the second; which processes do depends on how the tests are shared out."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert [name for name in names if names.count(name) > 1] == []


def test_every_docstring_names_its_subject():
    """As CONTRIBUTING asks: none begins with What, Whether or Who."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [
        (path.name, ast.get_docstring(node) or "")
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, documented)
    ]
    assert len(texts) > 1000
    assert [(name, text) for name, text in texts if re.match(r"(What|Whether|Who)\b", text)] == []


def test_only_the_command_line_prints_and_exits():
    for path in FILES:
        if place_of(module_of(path)) == "cli":
            continue
        for node in nodes_of(path):
            called = node.func if isinstance(node, ast.Call) else None
            name = called.id if isinstance(called, ast.Name) else None
            assert name not in ("print", "exit", "SystemExit"), f"{path}, line {called.lineno}"
