"""Code of the user's own, or of a package, by the name `module:path`."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

from tightfit.errors import InputError
from tightfit.runtime.internals import no_modes


def object_named(
    name: str, key: str, is_wanted: Callable[[Any], bool], wanted: str, error: type[InputError] = InputError
) -> Any:
    """The object that `module:path` names, from the working folder or from what is installed.

    Args:
        name: `module:path`, the path with dots.
        key: The setting that has this name, for the line of an error.
        is_wanted: Says whether an object is of the right kind.
        wanted: That kind in words, after "name".
        error: The class of the error.

    Raises:
        InputError: As `error`: the module cannot be imported, or the object is not there or of another kind.

    Example:
        >>> object_named("math:sqrt", "--function", callable, "a function")(4.0)
        2.0
    """
    module_name, _, path = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        with no_modes():  # tables that a package makes when it is imported are not the step's
            found: Any = importlib.import_module(module_name)
    except Exception as problem:  # importing runs code that is not ours
        raise error(
            f"{key} {name}: the module {module_name!r} cannot be imported ({type(problem).__name__}: {problem}): "
            "install it, or run in the folder that holds it"
        ) from problem
    for part in path.split("."):
        found = getattr(found, part, None)
    if not is_wanted(found):
        what = "is not there" if found is None else f"is a {type(found).__name__}"
        raise error(f"{key} {name}: {path} {what} in {module_name}: name {wanted}")
    return found
