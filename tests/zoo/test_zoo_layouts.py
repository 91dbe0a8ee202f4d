"""Where the zoo's operators lay their results out: each call of its steps once more in other layouts and dtypes.

What a dry run says of the results' sizes and strides is compared with the operator itself. As a command over every
class: `python -m pytest -n 2 -m slow tests/zoo/test_zoo_layouts.py`.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny_causal_lms import classes, tiny_batch, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from tightfit.runtime.operators import traits_of
from tightfit.tracing.shapes import TensorShape, inputs_and_key, result_shapes

pytestmark = pytest.mark.keeps("dry-run-lays-results")


def _turned(x: torch.Tensor, *order: int) -> torch.Tensor:
    back = [order.index(at) for at in range(x.dim())]
    return x.permute(order).contiguous().permute(back)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.Tensor.contiguous,
    "transposed": lambda x: x.mT.contiguous().mT,
    "turned round": lambda x: _turned(x, *reversed(range(x.dim()))),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x,
    "expanded": lambda x: x[:1].expand_as(x),
    "sliced": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
}
DTYPES = (torch.float32, torch.bfloat16)
SIZED_BY_DATA = torch.Tag.dynamic_output_shape
OPERANDS = {"all": slice(None), "the first": slice(1), "all but the first": slice(1, None)}


def _kind(argument: Any) -> Any:
    """What tells calls apart whose results may lie otherwise: dimensions and which of them are 1, not their sizes."""
    if isinstance(argument, torch.Tensor):
        return (argument.dtype, *(size == 1 for size in argument.shape))
    return argument if isinstance(argument, bool) else type(argument)


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0


class InOtherLayouts(TorchDispatchMode):
    """Runs each new call in every layout and dtype beside the call itself. Mutable: what was compared, and differs."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[Any] = set()
        self.compared: Counter[str] = Counter()
        self.differing: list[tuple[str, str, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        traits = traits_of(func)
        if not (traits.is_view or traits.returns_written or func._schema.is_mutable or SIZED_BY_DATA in func.tags):
            for name, (others, options) in self._variants(func, args, kwargs):
                self._compare(func, name, others, options)
        return func(*args, **kwargs)

    def _variants(self, func: Any, args: tuple, kwargs: dict) -> Iterator[tuple[str, Any]]:
        flat, tree = tree_flatten((args, kwargs))
        places = [at for at, x in enumerate(flat) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        deep = [at for at in places if flat[at].dim() > 1 and flat[at].numel()]
        kind = (func, *map(_kind, flat))
        if kind in self.known:
            return
        self.known.add(kind)
        for dtype, layout, operands in itertools.product(DTYPES, LAYOUTS, OPERANDS if len(deep) > 1 else ["all"]):
            other = [dtype if isinstance(x, torch.dtype) and x.is_floating_point else x for x in flat]
            for at in places:
                other[at] = flat[at].to(dtype, copy=True)
            for at in deep[OPERANDS[operands]]:
                other[at] = LAYOUTS[layout](other[at])
            yield f"{layout} {dtype}, {operands}", tree_unflatten(other, tree)

    def _compare(self, func: Any, name: str, args: tuple, kwargs: dict) -> None:
        try:
            out = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError, IndexError, ValueError):
            return  # the operator itself refuses these operands
        real = [x for x in tree_flatten(out)[0] if isinstance(x, torch.Tensor)]
        if not real:
            return  # a number that the model reads: nothing is laid out
        _, key = inputs_and_key(func, args, kwargs)
        predicted = result_shapes(func, args, kwargs, key, _is_number)
        found = tree_flatten(predicted, lambda x: isinstance(x, TensorShape))[0]
        shapes = [x for x in found if isinstance(x, TensorShape)]
        self.compared[str(func)] += 1
        for one, other in zip(shapes, real, strict=True):
            same = one.shape == tuple(other.shape) and one.dtype == other.dtype
            moved = any(a != b for n, a, b in zip(one.shape, one.stride, other.stride(), strict=True) if n > 1)
            if not same or (moved and other.numel() > 1):
                self.differing.append((str(func), name, one, TensorShape.of(other)))


def compared(name: str) -> InOtherLayouts:
    model, batch = tiny_model(name), tiny_batch(name)
    with InOtherLayouts() as found:
        model(**batch).loss.backward()
    return found


@pytest.mark.parametrize("name", ["BartForCausalLM"])
def test_results_of_a_language_models_operators_lie_as_a_dry_run_says(name):
    found = compared(name)
    assert sum(found.compared.values()) > 500
    assert found.differing == []


@pytest.mark.slow  # every class of transformers: a quarter of an hour
@pytest.mark.parametrize("name", classes())
def test_results_of_every_classs_operators_lie_as_a_dry_run_says(name):
    try:
        tiny_model(name)(**tiny_batch(name))
    except Exception as error:  # the zoo's own test counts them
        pytest.skip(f"{name} does not run: {error}")
    assert compared(name).differing == []
