"""Packages of others, imported without the compiler and without words about kernels that nobody asked for."""

import ast
import logging
import sys
from pathlib import Path

import pytest
import torch

import tightfit
from tightfit.runtime.light_imports import CPU_KERNELS, NO_KERNEL, light_import

PACKAGE = f"""
import logging
import torch

logging.getLogger({CPU_KERNELS!r}).warning("{NO_KERNEL} from kernels-community: %s", "no module")
logging.getLogger({CPU_KERNELS!r}).warning("the library is broken")

@torch.compile
def twice(x):
    return 2 * x
"""


def test_a_package_is_imported_without_the_compiler_and_the_missing_kernel(tmp_path, monkeypatch, caplog):
    (tmp_path / "marks_a_function.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **settings: compiled.append(function) or function)
    compile_now = torch.compile
    module = light_import("marks_a_function")
    assert caplog.messages == ["the library is broken"]
    assert torch.compile is compile_now
    assert compiled == []
    assert module.twice(3) == 6
    assert len(compiled) == 1
    logging.getLogger(CPU_KERNELS).warning(NO_KERNEL)
    assert caplog.messages[1:] == [NO_KERNEL]  # a word of another import stays
    del sys.modules["marks_a_function"]


def test_a_package_that_is_not_there_raises_as_an_import_does():
    with pytest.raises(ImportError, match="no_such_package_here"):
        light_import("no_such_package_here")
    assert not logging.getLogger(CPU_KERNELS).filters


SOURCES = Path(tightfit.__file__).parent
EXTRAS = {"transformers", "peft", "accelerate", "datasets", "torchao", "bitsandbytes", "plotly", "matplotlib", "gradio"}


def _unguarded(tree):
    """Imports of packages that extras bring, outside of `try ... except ImportError` and of what type checkers read."""
    for node in ast.iter_child_nodes(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else names
        yield from ((node.lineno, name) for name in names if name.partition(".")[0] in EXTRAS)
        guards = isinstance(node, ast.Try) and any("ImportError" in ast.unparse(h.type or h) for h in node.handlers)
        if not guards and not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield from _unguarded(node)


def test_every_import_of_a_package_that_an_extra_brings_says_which_one_is_missing():
    found = {
        f"{path.relative_to(SOURCES)}:{line} {name}"
        for path in SOURCES.rglob("*.py")
        if path.relative_to(SOURCES).parts[0] != "integrations"  # these are imported by who has the package
        for line, name in _unguarded(ast.parse(path.read_text("utf-8")))
    }
    assert not found
    assert list(_unguarded(ast.parse("import transformers"))), "the subject"
