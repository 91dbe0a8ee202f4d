"""Functions that a simulated card replaces, and who keeps them."""

import importlib
import sys
import types
from typing import Any

import pytest

from tightfit.tracing.cuda import replacements
from tightfit.tracing.cuda.replacements import Replacements


@pytest.fixture
def late(tmp_path, monkeypatch):
    """The name of a module that is imported late, and keeps a function as dynamo does."""
    (tmp_path / "made_up_dynamo.py").write_text("from made_up_torch import answer\nKEPT = answer\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(replacements, "DYNAMO", "made_up_dynamo")
    torch: Any = types.ModuleType("made_up_torch")
    torch.answer = lambda: "real"
    monkeypatch.setitem(sys.modules, "made_up_torch", torch)
    yield torch
    sys.modules.pop("made_up_dynamo", None)


def replaced(with_what):
    return Replacements({"made_up_torch": lambda module, all_: all_.replace(module, "answer", lambda: with_what)})


def test_dynamo_keeps_the_original_functions_though_it_is_imported_in_a_dry_run(late):
    with replaced("outer").active(), replaced("inner").active():
        made_up_dynamo: Any = importlib.import_module("made_up_dynamo")
        assert late.answer() == "inner"
        assert made_up_dynamo.KEPT() == "real"
    assert late.answer() == "real"
    assert made_up_dynamo.__loader__ is made_up_dynamo.__spec__.loader
    assert not isinstance(made_up_dynamo.__loader__, replacements._Loader)
