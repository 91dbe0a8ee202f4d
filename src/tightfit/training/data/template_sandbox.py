"""Where chat templates run: Jinja's sandbox, with the names and settings that `transformers` gives them.

Templates are programs of strangers. One thing differs from `transformers`: `strftime_now` gives a fixed date, so that
the same conversations give the same tokens tomorrow.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, ClassVar

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tightfit.errors import DataError

FIXED_DATE = datetime(2024, 7, 26)  # what Llama 3's own templates write where they have no clock


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`: writes what is inside, and notes where it is."""

    tags: ClassVar[set[str]] = {"generation"}

    def __init__(self, environment: Any):
        super().__init__(environment)
        environment.extend(tracking=self.tracking)
        self._blocks: list[str] | None = None
        self._spans: list[tuple[int, int]] = []

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Callable[[], str]) -> str:
        written = caller()
        if self._blocks is not None:
            begin = sum(map(len, self._blocks))
            self._spans.append((begin, begin + len(written)))
        return written

    @contextmanager
    def tracking(self, blocks: list[str], spans: list[tuple[int, int]]) -> Iterator[None]:
        self._blocks, self._spans = blocks, spans
        try:
            yield
        finally:
            self._blocks = None


class _Namespace(Namespace):
    """Without names that lead into the interpreter."""

    def __init__(*args: Any, **kwargs: Any):
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


class _Dict:
    """`dict(...)` in a template, without the class's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace attribute {name!r} begins with an underscore: rename it")


def compile_template(text: str, source: str) -> Template:
    """A template whose environment's `tracking(blocks, spans)` notes what `{% generation %}` marks in a rendering.

    Raises `DataError`, by the name of its file, where the text is no template.
    """
    try:
        return _environment().from_string(text)
    except (TemplateError, RecursionError) as error:
        said = " ".join(str(error).split())
        raise DataError(f"{source}: the chat template is not valid Jinja: {said}: mend it") from None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda pattern: FIXED_DATE.strftime(pattern)
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
