"""Numbers that decide which operators follow, computed on a null card: masks, positions, labels, counts, routes.

Code looks at such numbers: a mask without a zero is dropped, packed sequences get a mask of their own, an expert
without tokens is left out. Where kernels do nothing they are zeros or old memory, so code takes another path, of other
bytes. Here the operators that make them are computed: what is of integers or booleans, what is filled with a number,
and what is made of such tensors alone (masks in floating point).

The bytes stay what they are. A tensor that Python has seen has one holder more, so autograd would copy a gradient that
it could keep, and would not add to it in place. So no kernel is there while autograd's engine runs, but for the time in
which a checkpoint recomputes. The same holds of a storage that Python has seen (`Tensor.untyped_storage`), so those of
floating-point numbers that nobody knows are left alone.
"""

import contextlib
import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from types import CodeType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten

from tightfit.devices.nullcard.references import REFERENCES, Reference
from tightfit.devices.nullcard.values import ComputedValues, NotComputed, card_operators
from tightfit.runtime.internals import backward_is_running

# Operators by their names without overloads, in place or not.
_OF_NUMBERS = "add sub rsub mul div remainder floor_divide minimum maximum max min amax amin abs neg clamp clamp_min "
_OF_NUMBERS += "clamp_max sum prod cumsum cumprod all any count_nonzero eq ne lt le gt ge isin bitwise_and bitwise_or "
_OF_NUMBERS += "bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift logical_and logical_or logical_xor "
_OF_NUMBERS += "logical_not where masked_fill ceil floor round trunc"
_OF_PLACES = "copy arange linspace eye randperm random fill zero tril triu flip roll cat index index_select "
_OF_PLACES += "_index_put_impl index_add gather scatter scatter_add masked_scatter sort searchsorted bucketize nonzero "
_OF_PLACES += "masked_select _unique2 unique_consecutive unique_dim bincount repeat_interleave equal"
# How much memory these take depends on numbers, so the host answers for them only where the numbers are known.
_AS_LARGE_AS_NUMBERS = frozenset({"aten::bincount", "aten::repeat_interleave.Tensor", "aten::equal"})
_OVERWRITE = frozenset({"copy_", "fill_", "zero_", "random_"})  # what was in their operand before does not matter
_MAKE_MASKS = _OVERWRITE | {"masked_fill_", "_index_put_impl_"}  # in place, in floating point too
MOST = 256 << 20  # bytes of a result that is computed: a mask of 16 rows of 4096 x 4096 in one byte each
COPIED = 1 << 20  # bytes: up to here the runtime copies whatever it is told to
WHOLE = (torch.int64, torch.bool)  # ids and masks are copied at any size; packed weights are int32 or shorter


class Known(IntEnum):
    """How far the numbers in some memory are true. A result is known as its least known operand is."""

    NO = 0
    SUPPOSED = 1  # routes and what follows from them; floating-point numbers, which a kernel may have changed since
    FILLED = 2  # with one number, and maybe written by kernels that nobody saw. What is computed of it is true
    TRUE = 3


def _in_turn(places: torch.Tensor, operand: torch.Tensor, dim: int | None) -> torch.Tensor:
    size = operand.shape[dim] if dim is not None and operand.dim() else operand.numel()
    return torch.arange(places.numel()).view(places.shape) % max(1, size)


def _topk(results: Any, **named: Any) -> Any:
    values, places = results
    return values, _in_turn(places, named["self"], named["dim"])


def _argmax(results: Any, **named: Any) -> Any:
    return _in_turn(results, named["self"], named["dim"])


def _histc(results: Any, **named: Any) -> Any:
    return torch.full_like(results, named["self"].numel() // named["bins"])


def _finite(results: Any, **named: Any) -> Any:
    named["found_inf"].zero_()
    return results


# Decided by floating-point numbers, so supposed: experts get tokens in turn, and no gradient overflows.
_SUPPOSED: Mapping[str, Reference] = {
    "aten::topk": _topk,
    "aten::argmax": _argmax,
    "aten::histc": _histc,
    "aten::_amp_foreach_non_finite_check_and_unscale_": _finite,
}
_COMPUTED = frozenset([*_OF_NUMBERS.split(), *_OF_PLACES.split()])


class DecidingValues(ComputedValues):
    """Mutable: the memory whose numbers are known, by its address, and how many of autograd's engines run."""

    def __init__(self, on_read: Callable[[], None]) -> None:
        super().__init__()

        def filled(results: Any, **named: Any) -> Any:
            value = named.get("value", 0)
            if value != 0 or not results.is_contiguous():
                return results.fill_(value)
            self.runtime.library.card_fill(results.data_ptr(), 0, 1, results.nbytes, None)
            return results

        self.references = {**REFERENCES, **_SUPPOSED, "aten::fill_.Scalar": filled, "aten::zero_": filled}
        self.on_read = on_read
        self._known: dict[int, tuple[StorageWeakRef, int, Known]] = {}  # with the bytes of each
        self._entries = 1024  # beyond which those whose memory is gone are dropped
        self._read: dict[str, tuple[int, frozenset[str]]] = {}
        self._engines = 0
        self._switching = threading.RLock()

    def names(self) -> set[str]:
        return {n for n in card_operators() if _base(n).removesuffix("_") in _COMPUTED} | _SUPPOSED.keys()

    # The engine

    def open(self) -> None:
        self._switch(0)

    def close(self) -> None:
        self.remove()

    @contextlib.contextmanager
    def engine(self) -> Iterator[None]:
        """For the time of a backward."""
        self._switch(1)
        try:
            yield
        finally:
            self._switch(-1)

    def recompute_begins(self) -> int:
        """Returns what `recompute_ends` takes."""
        with self._switching:
            engines = self._engines
            self._switch(-engines)
        return engines

    def recompute_ends(self, engines: int) -> None:
        self._switch(engines)

    def _switch(self, engines: int) -> None:
        with self._switching:
            self._engines += engines
            if self._engines > 0:
                self.remove()
            elif not self._libraries:
                self.register()

    # Computing

    def compute(self, name: str, operator: Any, args: tuple, kwargs: dict, results: Any, seed: int | None) -> None:
        found = _on_card(results)
        level = self._level(name, operator, args, kwargs, found)
        answer = None if level else _of_finite_numbers(name, args)
        if answer is not None and results.nbytes <= MOST:
            level = Known.SUPPOSED
            fill = torch.ops.aten.fill_.Scalar
            super().compute("aten::fill_.Scalar", fill, (results, answer), {}, results, None)
        elif level:
            try:
                super().compute(name, operator, args, kwargs, results, seed)
            except (NotComputed, RuntimeError, IndexError):
                level = None  # places that no kernel has made; what no CPU computes. A line that reads it is noted
        if not level and not _base(name).endswith("_"):
            self._clear(found)
        for tensor in found:
            self._note(tensor, level or Known.NO)

    def _clear(self, results: list[torch.Tensor]) -> None:
        """Zeros in place of what lay in memory before: counts and flags that are read are the same in every run."""
        for tensor in results:
            if _is_of_integers(tensor) and tensor.nbytes <= COPIED and tensor.is_contiguous():
                self.runtime.library.card_fill(tensor.data_ptr(), 0, 1, tensor.nbytes, None)

    def _level(self, name: str, operator: Any, args: tuple, kwargs: dict, results: list[torch.Tensor]) -> Known | None:
        """How far the results will be known. They are not computed for `NO` and None."""
        base, of_integers = _base(name), all(map(_is_of_integers, results))
        fills = base == "zero_" or name == "aten::fill_.Scalar"
        if fills and not of_integers and _may_become_a_gradient():
            return None
        if fills and _is_zero(args) and results[0].is_contiguous():  # takes no memory of the host
            return Known.FILLED if of_integers else Known.SUPPOSED
        if sum(tensor.nbytes for tensor in results) > MOST:
            return None
        if fills:  # what is not a number marks memory that nobody has written
            is_number = base == "zero_" or args[1] == args[1]
            return Known.FILLED if of_integers else Known.SUPPOSED if is_number else None
        if name in _SUPPOSED:
            return Known.SUPPOSED
        known = self._least(self._operands(name, operator, args, kwargs))
        if of_integers:
            return Known.TRUE if known >= Known.FILLED else known
        in_place = base.endswith("_") and base not in _MAKE_MASKS
        return Known.SUPPOSED if known and not in_place else None

    def _operands(self, name: str, operator: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        """The card's tensors that a call reads."""
        if name not in self._read:
            written = frozenset(a.name for a in operator._schema.arguments if a.kwarg_only and a.is_out)
            self._read[name] = int(_base(name) in _OVERWRITE), written
        begin, written = self._read[name]
        return _on_card((args[begin:], [value for key, value in kwargs.items() if key not in written]))

    def copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        whole = target.dtype in WHOLE and target.nbytes <= MOST
        if whole:
            super().compute("aten::copy_", torch.ops.aten.copy_.default, (target, source), {}, target, None)
        if target.is_cuda:
            level = Known.TRUE if _is_of_integers(target) else Known.SUPPOSED
            self._note(target, level if whole or target.nbytes <= COPIED else Known.NO)

    def answers(self, name: str, on_card: list[torch.Tensor]) -> bool:
        if name in _AS_LARGE_AS_NUMBERS and not self._least(on_card):
            return False
        return sum(tensor.nbytes for tensor in on_card) <= MOST

    def answered(self, operator: Any, args: tuple, kwargs: dict, on_card: list[torch.Tensor]) -> Any:
        known = self._least(on_card)
        if known < Known.FILLED:
            self.on_read()
        results = super().answered(operator, args, kwargs, on_card)
        for tensor in _on_card(results):
            self._note(tensor, Known.TRUE if known >= Known.FILLED else known)
        return results

    # What is known

    def is_true(self, address: int) -> bool:
        """True if the number that lies on the card at an address is one that a card would have there."""
        return any(
            level is Known.TRUE and begin <= address < begin + size and not reference.expired()
            for begin, (reference, size, level) in list(self._known.items())  # blocks that are gone may lie there too
        )

    def _least(self, tensors: list[torch.Tensor]) -> Known:
        return min(map(self._known_of, tensors), default=Known.TRUE)

    def _known_of(self, tensor: torch.Tensor) -> Known:
        found = self._known.get(_begin(tensor))
        return Known.NO if found is None or found[0].cdata != tensor.untyped_storage()._cdata else found[2]

    def _note(self, tensor: torch.Tensor, level: Known) -> None:
        if tensor.layout != torch.strided:
            return
        if not level:
            self._known.pop(_begin(tensor), None)
            return
        storage = tensor.untyped_storage()
        self._known[_begin(tensor)] = StorageWeakRef(storage), storage.nbytes(), level
        if len(self._known) > self._entries:
            self._known = {begin: entry for begin, entry in self._known.items() if not entry[0].expired()}
            self._entries = max(1024, 2 * len(self._known))


def _base(name: str) -> str:
    return name.removeprefix("aten::").partition(".")[0]


def _on_card(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor) and value.is_cuda]


def _is_of_integers(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _of_finite_numbers(name: str, args: tuple) -> bool | None:
    """The result of a comparison of `isnan`, `isinf` or `isfinite` where all numbers are finite; None for others."""
    base, _, overload = name.removeprefix("aten::").partition(".")
    if base not in ("eq", "ne") or not args[0].is_floating_point():
        return None
    if overload == "Scalar":
        return base == "ne" if abs(args[1]) == math.inf else None
    own, other = args[:2]
    is_itself = overload == "Tensor" and own.data_ptr() == other.data_ptr() and own.shape == other.shape
    return base == "eq" if is_itself else None


def _may_become_a_gradient() -> bool:
    """True if the forward of an `autograd.Function` runs, which may make gradients (losses over a head in chunks)."""
    if torch.is_grad_enabled():
        return False
    frame = sys._getframe(1)
    while frame is not None and not _is_forward_of_a_function(frame.f_code):
        frame = frame.f_back
    return frame is not None


# By the address of a code, with the code. Since PyTorch 2.14 `Function.apply` is no Python code: no frame shows it.
_forwards: dict[int, tuple[CodeType, bool]] = {}


def _is_forward_of_a_function(code: CodeType) -> bool:
    if code.co_name != "forward":  # the usual case, for each frame of each operator without gradients
        return False
    if id(code) not in _forwards:
        kinds = [torch.autograd.Function]
        for kind in kinds:
            kinds += kind.__subclasses__()
        found = any(getattr(inspect.unwrap(kind.forward), "__code__", None) is code for kind in kinds)
        _forwards[id(code)] = code, found
    return _forwards[id(code)][1]


def _is_zero(args: tuple) -> bool:
    return len(args) < 2 or args[1] == 0


def _begin(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage, 0 for none.

    The storage itself is left alone where that is enough: one that Python has seen has a holder more, and autograd then
    adds nothing to it in place.
    """
    if tensor.layout != torch.strided:
        return 0
    offset = int(tensor.storage_offset()) * tensor.element_size()
    return tensor.data_ptr() - offset if tensor.data_ptr() else 0


class _Engine(torch._C._ImperativeEngine):
    """Autograd's, beside which no kernel of `values` is there. Mutable."""

    values: DecidingValues

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        with self.values.engine():
            return super().run_backward(*args, **kwargs)


@contextlib.contextmanager
def true_decisions(on_read: Callable[[], None] = lambda: None) -> Iterator[DecidingValues]:
    """Within it, what decides which operators follow is true on a null card, in every thread.

    Args:
        on_read: called where the size of a result depends on numbers that are not known.

    Raises:
        TightfitError: this process has no null card.
    """
    values = DecidingValues(on_read)
    engine, guard = torch.autograd.Variable._execution_engine, torch.enable_grad
    begin, end = guard.__enter__, guard.__exit__
    recomputes: dict[int, int] = {}

    def begins(self: Any) -> None:
        begin(self)
        if backward_is_running():  # gradients are wanted within a backward: a checkpoint recomputes
            recomputes[id(self)] = values.recompute_begins()

    def ends(self: Any, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        if id(self) in recomputes:
            values.recompute_ends(recomputes.pop(id(self)))
        end(self, exc_type, exc_value, traceback)

    beside = _Engine()
    beside.values = values
    values.open()
    torch.autograd.Variable._execution_engine = beside
    guard.__enter__, guard.__exit__ = begins, ends
    try:
        yield values
    finally:
        guard.__enter__, guard.__exit__ = begin, end
        torch.autograd.Variable._execution_engine = engine
        values.close()
