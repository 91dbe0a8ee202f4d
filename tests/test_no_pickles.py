"""Nothing that can run code is read: no pickle anywhere, and code is run only where it is the user's own."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "tightfit"
FILES = sorted(PACKAGE.rglob("*.py"))

BANNED = {"torch.load", "torch.save", "torch.serialization.load", "torch.serialization.save", "torch.jit.load",
          "numpy.load", "np.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all"}  # fmt: skip
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "joblib", "marshal"}
RUNS = {"eval", "exec", "__import__"}

SIGNS = {name.rpartition(".")[2] for name in BANNED} | MODULES | RUNS  # a file without any of them need not be parsed

# Each with its reason.
ALLOWED = {
    ("memory/snapshot.py", "pickle"): "CUDA's memory snapshots are pickles; its unpickler knows plain containers only",
    ("levers/captured/program.py", "exec"): "calls of operators that it has just written, with names of its own",
    ("tracing/compiled_code.py", "exec"): "code that inductor has just made from the user's model, in a dry run",
    ("integrations/minimind/running_step.py", "exec"): "a step of the user's own script, which runs anyway",
    ("integrations/minimind/step_source.py", "eval"): "an expression of the user's own script, which runs anyway",
}


def uses(source: str) -> set[str]:
    """What is banned in a file, by the names that are written there."""
    found = set()
    if not any(name in source for name in SIGNS):
        return found
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module.split(".")[0]} & MODULES
            found |= {f"{node.module}.{alias.name}" for alias in node.names} & BANNED
        elif isinstance(node, ast.Attribute):
            found |= {ast.unparse(node)} & BANNED
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found |= {node.func.id} & RUNS
    return found


@pytest.mark.keeps("file-tightfit-reads-pickle")
def test_no_file_reads_a_pickle_or_runs_code():
    found = {(str(path.relative_to(PACKAGE)), use) for path in FILES for use in uses(path.read_text("utf-8"))}

    assert found == set(ALLOWED)


def test_each_kind_of_use_is_noticed():
    source = "import torch, pickle\nfrom torch import load\nfrom dill import loads\nx = torch.save\neval('1')\nm.eval()"

    assert uses(source) == {"pickle", "torch.load", "torch.save", "dill", "eval"}
