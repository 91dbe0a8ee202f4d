"""Errors as objects."""

import inspect
import pickle

import pytest

from tightfit import errors

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.TightfitError)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_reaches_another_process_whole(kind):
    error = kind("what, where", 7) if kind is errors.CannotFit else kind("what, where")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == "what, where"
    assert vars(copy) == vars(error)
