"""The names that `import tightfit` gives: the same to a program, to a type checker, and to `python -m`."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import tightfit
from command_line import tightfit as run


def test_a_type_checker_reads_every_name_from_where_a_program_gets_it():
    tree = ast.parse(Path(tightfit.__file__).read_text("utf-8"))
    block = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    imports = [(node.module, alias) for node in block.body for alias in node.names]
    assert all(alias.asname is None for _, alias in imports)
    assert {alias.name: module for module, alias in imports} == tightfit._HOMES


def test_all_lists_each_name_once_and_can_be_read_without_running_it():
    tree = ast.parse(Path(tightfit.__file__).read_text("utf-8"))
    (listed,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__")
    assert sorted(ast.literal_eval(listed)) == sorted([*tightfit._HOMES, "__version__"])


def test_every_public_name_is_loaded_from_its_home():
    for name, home in tightfit._HOMES.items():
        assert getattr(tightfit, name) is getattr(importlib.import_module(home), name)


@pytest.mark.slow  # an interpreter of its own
def test_python_m_tightfit_is_the_command():
    # In a process of its own: that is what it is about.
    asked = ["--version"], ["estimate", "--model", "nosuch", "--seq-len", "8"]
    for arguments in asked:
        command = [sys.executable, "-m", "tightfit", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        expected = run(*arguments)
        assert (done.returncode, done.stdout, done.stderr) == (expected.code, expected.out, expected.err)


def test_importing_the_file_of_python_m_runs_no_command():
    importlib.import_module("tightfit.__main__")
