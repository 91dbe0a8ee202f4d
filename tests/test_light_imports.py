"""Packages of others, imported without the compiler and without words about kernels that nobody asked for."""

import logging
import sys

import pytest
import torch

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
