"""Every public function has an example in its docstring, and it runs; so do the examples of classes."""

import doctest
import importlib
import inspect
from collections.abc import Callable, Iterator

import pytest
import torch

import tightfit
from quick_trainings import leave_out_pictures
from tightfit.memory.settings import VARIABLES
from tightfit.runtime.internals import allocator_settings, set_allocator_settings


def public_functions() -> dict[str, Callable]:
    """Those of `tightfit`, `tightfit.ops` and `tightfit.optim`, by the names that users write."""
    rooms = [tightfit, *(importlib.import_module(f"tightfit.{room}") for room in ("ops", "optim"))]
    named = {f"{room.__name__}.{name}": getattr(room, name) for room in rooms for name in room.__all__}
    return {name: item for name, item in named.items() if inspect.isfunction(item) or ">>>" in (item.__doc__ or "")}


FUNCTIONS = public_functions()


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[None]:
    """Examples are for users, who need put nothing back: settings of the process, temporary folders, random numbers."""
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    leave_out_pictures(monkeypatch)
    before = allocator_settings()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    set_allocator_settings(before)


def example_of(name: str) -> doctest.DocTest:
    """The lines of a function's docstring that begin with `>>>`; nothing else is known to them."""
    text = inspect.getdoc(FUNCTIONS[name])
    assert text is not None, f"{name} has no docstring"
    return doctest.DocTestParser().get_doctest(text, {}, name, None, None)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example_of_a_public_function_runs_and_says_what_comes_out(name):
    if name == "tightfit.set_allocator" and torch.cuda.is_initialized():
        pytest.skip("the allocator is set up before CUDA starts, and an earlier test has started it")
    example = example_of(name)
    assert "\nExample:\n" in example.docstring
    assert any(line.want for line in example.examples)
    assert not any(line.options for line in example.examples), "an example that is not run is none"
    assert name.rpartition(".")[2] in "".join(line.source for line in example.examples)
    said: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert result.attempted
    assert not result.failed, "".join(said)


def test_the_functions_of_the_package_are_all_among_them():
    functions = {name for name in tightfit.__all__ if not name.startswith("_") and name.islower()}
    assert {f"tightfit.{name}" for name in functions} <= set(FUNCTIONS)
    assert {"tightfit.ops.attention", "tightfit.optim.step_in_backward"} <= set(FUNCTIONS)


def test_an_example_that_is_wrong_fails():
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    assert doctest.DocTestRunner(verbose=False).run(wrong, out=lambda text: None).failed == 1
