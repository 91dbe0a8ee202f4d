"""True values on a null card: after each of CUDA's operators, the CPU's kernel runs on tensors over the same memory.

Device memory of a null card is host memory, so a CPU tensor can alias it. Every operator that PyTorch registers for
CUDA gets a kernel one step above it in the dispatcher. That kernel calls CUDA's own, which allocates as on a card and
computes nothing, and then fills the results. Nothing else changes: autograd, autocast, dispatch modes and the allocator
are above or below that step. On a card that works late (`Card.late`), the filling is itself work of the current stream,
so what was never waited for is a wrong number.

Random numbers are the CPU's, drawn from a seed made of the CUDA generator's seed and position before the call. A replay
from the same position draws the same numbers, as on a card; the numbers are others than a card's.
"""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from tightfit.devices.nullcard.references import REFERENCES, Reference, by_name, mixed
from tightfit.errors import TightfitError
from tightfit.runtime.simulation import Simulation

_KEY = torch._C.DispatchKey.BackendSelect  # always there, below dispatch modes, and above CUDA
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_BELOW = torch._C._dispatch_keyset_full_after(_KEY)

# Their results' sizes, or their answers, depend on numbers that CUDA's kernels read where no kernel has written.
_ANSWERED = frozenset(
    f"aten::{name}"
    for name in (
        "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
        "bincount", "repeat_interleave.Tensor", "histc", "equal", "_coalesce",
    )
)  # fmt: skip
# Nothing of these is computed: they make memory, change a tensor's view of it, or are copies of the runtime's.
_NOT_COMPUTED = frozenset(
    f"aten::{name}"
    for name in (
        "_local_scalar_dense", "as_strided", "empty_quantized", "is_pinned", "_pin_memory", "record_stream", "resize_",
        "set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "unfold", "view",
        "view.dtype", "view_as_real", "view_as_complex", "_reshape_alias", "is_set_to",
    )
)  # fmt: skip
_DRAWS_WITHOUT_A_GENERATOR = frozenset(
    f"aten::{name}"
    for name in (
        "native_dropout", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
)  # fmt: skip
# `torch.ops` takes numbers in the places of their tensors, as `torch` does (`should_allow_numbers_as_tensors` in
# csrc/utils/python_arg_parser.cpp); of others, only `torch` does.
_TAKE_NUMBERS = frozenset({"add", "sub", "mul", "div", "divide", "multiply", "subtract", "true_divide", "floor_divide"})
_COPY = "aten::copy_"
# Those whose CPU kernels compute what their CUDA kernels do. Of a package that is imported later, nothing is computed.
_NAMESPACES = ("aten", "bitsandbytes")

_state = threading.local()


class NotComputed(TightfitError):
    """An operator has no reference on the CPU, so its true values are not known on a null card."""


class _Runtime:
    """The null card's own functions, through ctypes."""

    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
            self.library.card_unmodelled_calls.restype = ctypes.c_long
        except (OSError, AttributeError) as error:
            raise TightfitError(
                "true values need a null card: start the process with "
                "python -m tightfit.devices.nullcard rtx4090 -- python ..."
            ) from error
        self.library.card_host_work.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        self.library.card_wait_stream.argtypes = (ctypes.c_void_p,)
        pieces = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p)
        self.library.card_fill.argtypes = pieces


class ComputedValues:
    """Mutable: the operators that were computed, work that waits, and an error of work that ran late."""

    def __init__(self, late: bool = False) -> None:
        self.references: Mapping[str, Reference] = REFERENCES
        self.runtime = _Runtime()
        self.late = late
        self.computed: dict[str, int] = {}
        self._waiting: dict[int, Callable[[], None]] = {}
        self._number = 0
        self._error: BaseException | None = None
        self._called_back = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._call)
        self._kernels: dict[str, Callable[..., Any]] = {}
        self._libraries: dict[str, torch.library.Library] = {}

    def open(self) -> None:
        """Give every operator of CUDA's its kernel, and let NCCL's stub carry large messages too."""
        self.runtime.library.card_set_values(1)
        Simulation.card_computes = True
        self.register()

    def close(self) -> None:
        """Take all kernels away. Raises the error of work that ran late."""
        self.runtime.library.card_wait_device()
        self.runtime.library.card_set_values(0)
        Simulation.card_computes = False
        self.remove()
        self.raise_late()

    def names(self) -> set[str]:
        """The operators that get a kernel."""
        return card_operators()

    def register(self) -> None:
        """Give the operators their kernels."""
        if not self._kernels:
            taken = set(torch._C._dispatch_get_registrations_for_dispatch_key("BackendSelect"))
            for name in sorted(self.names() - taken - _NOT_COMPUTED):
                namespace, short = name.split("::")
                if namespace in _NAMESPACES:
                    self._kernels[name] = self._kernel(name, _overload(namespace, short))
        self._libraries = {namespace: torch.library.Library(namespace, "IMPL") for namespace in _NAMESPACES}
        for name, kernel in self._kernels.items():
            namespace, short = name.split("::")
            self._libraries[namespace].impl(short, kernel, "BackendSelect", with_keyset=True)

    def remove(self) -> None:
        """Take the kernels away."""
        for library in self._libraries.values():
            library._destroy()
        self._libraries.clear()

    def raise_late(self) -> None:
        """Raise the error of work that ran late, once."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _kernel(self, name: str, operator: Any) -> Callable[..., Any]:
        tensors = [i for i, a in enumerate(operator._schema.arguments) if str(a.type) in ("Tensor", "Optional[Tensor]")]
        takes_numbers = operator._schema.name.removeprefix("aten::").rstrip("_") in _TAKE_NUMBERS
        draws = name in _DRAWS_WITHOUT_A_GENERATOR or any(a.name == "generator" for a in operator._schema.arguments)

        numbers, of_tensors = _of_tensors(operator)

        def own(keyset: Any, args: tuple, kwargs: dict) -> Any:
            args = _without_numbers(args, tensors)
            other = next((a for a in args if isinstance(a, torch.Tensor)), None)
            if not numbers or other is None:  # as of `linspace`, which has numbers alone
                return operator.redispatch(keyset & _BELOW, *args, **kwargs)
            return of_tensors.redispatch(keyset & _BELOW, *_without_numbers(args, numbers, other.device), **kwargs)

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            inside = getattr(_state, "inside", False)
            on_card = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor) and t.is_cuda]
            if not on_card:
                return own(keyset, args, kwargs)
            if name in _ANSWERED and name not in self.references and self.answers(name, on_card):
                return self.answered(operator, args, kwargs, on_card)
            if inside:
                return own(keyset, args, kwargs)
            self.raise_late()
            if name == _COPY and not (args[0].is_cuda and args[1].is_cuda):
                results = own(keyset, args, kwargs)  # between the two the runtime copies, and casts are operators
                self.copied(args[0], args[1])
                return results
            seed = _seed(kwargs.get("generator"), on_card[0].device) if draws else None
            _state.inside = True
            try:
                results = own(keyset, args, kwargs)
            finally:
                _state.inside = False
            if not takes_numbers:
                args = _without_numbers(args, tensors)
            self.compute(name, operator, args, kwargs, results, seed)
            return results

        return kernel

    def compute(self, name: str, operator: Any, args: tuple, kwargs: dict, results: Any, seed: int | None) -> None:
        """Fill the results of a call, of which CUDA's own kernel has made the memory."""
        work = _Work(name, operator, args, kwargs, results, seed, self.references.get(name))
        self._give(lambda: work.run(self.computed))

    def copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """The runtime has copied between host and card."""

    def answers(self, name: str, on_card: list[torch.Tensor]) -> bool:
        """True if an operator whose result's size depends on numbers is computed by the host alone."""
        return True

    def answered(self, operator: Any, args: tuple, kwargs: dict, on_card: list[torch.Tensor]) -> Any:
        """The host's result, on the card."""
        device = on_card[0].device
        self.runtime.library.card_wait_stream(torch.cuda.current_stream(device).cuda_stream)
        self.raise_late()
        args, kwargs = tree_map(_on_host, (args, kwargs))
        found = operator(*args, **kwargs)
        return tree_map(lambda t: t.to(device) if isinstance(t, torch.Tensor) else t, found)

    def _give(self, work: Callable[[], None]) -> None:
        """Do some work in the order of the current stream's."""
        if not self.late:
            work()
            return
        self._number += 1
        self._waiting[self._number] = work
        stream = torch.cuda.current_stream().cuda_stream
        self.runtime.library.card_host_work(ctypes.cast(self._called_back, ctypes.c_void_p), self._number, stream)

    def _call(self, number: int) -> None:
        work = self._waiting.pop(number)
        try:
            with _disable_current_modes():
                work()
        except BaseException as error:  # a callback from C has nobody to raise to
            self._error = self._error or error


class _Work:
    """The work of one operator: CPU tensors over the card's memory, which it does not keep alive."""

    def __init__(
        self,
        name: str,
        operator: Any,
        args: tuple,
        kwargs: dict,
        results: Any,
        seed: int | None,
        reference: Reference | None,
    ) -> None:
        self.name, self.operator, self.seed, self.reference = name, operator, seed, reference
        with torch.inference_mode(False):  # a tensor made in inference mode could not be written into outside of it
            self.args, self.kwargs = tree_map(_on_host, (args, kwargs))
            self.results = tree_map(_on_host, results)

    def run(self, computed: dict[str, int]) -> None:
        computed[self.name] = computed.get(self.name, 0) + 1
        inside, _state.inside = getattr(_state, "inside", False), True
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._fill()
        finally:
            _state.inside = inside

    def _fill(self) -> None:
        reference = self.reference
        # What surrounds the user's code (autocast for CPUs, a default device) changes nothing of a kernel.
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST), torch._C.DisableTorchFunction(), _seeded(self.seed):
            if reference is not None:
                found = reference(self.results, **by_name(self.operator, self.args, self.kwargs))
            else:
                found = self._cpu(self.args, self.kwargs)
        for result, true in zip(tree_flatten(self.results)[0], tree_flatten(found)[0], strict=True):
            both = isinstance(result, torch.Tensor) and isinstance(true, torch.Tensor)
            if both and result.shape != true.shape:
                raise NotComputed(
                    f"{self.name} returns {list(result.shape)} on a card and {list(true.shape)} on the CPU: its true "
                    "values on a null card are not known"
                )
            if both and result.data_ptr() != true.data_ptr():
                result.copy_(true)

    def _cpu(self, args: tuple, kwargs: dict) -> Any:
        try:
            return self.operator(*args, **kwargs)
        except NotImplementedError as error:
            if "not implemented for" in str(error):  # a dtype: computed in fp32 and rounded once, as CUDA's kernels do
                return self._wider(args, kwargs)
            raise NotComputed(
                f"{self.name} has no kernel on the CPU: its true values on a null card are not known"
            ) from error
        except RuntimeError as error:
            if "not implemented for" in str(error):
                return self._wider(args, kwargs)
            raise

    def _wider(self, args: tuple, kwargs: dict) -> Any:
        half = (torch.float16, torch.bfloat16)
        wide: list[tuple[torch.Tensor, torch.Tensor]] = []

        def widened(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.dtype not in half:
                return torch.float32 if value in half else value
            wide.append((value, value.float()))
            return wide[-1][1]

        args, kwargs = tree_map(widened, (args, kwargs))
        found = self.operator(*args, **kwargs)
        if not self.operator._schema.is_mutable:
            return found
        for narrow, computed in wide:
            narrow.copy_(computed)
        return self.results


def _on_host(value: Any) -> Any:
    """A CPU tensor over the memory of a CUDA tensor; the CPU for the card; anything else as it is."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, torch.Generator):
        return None if value.device.type == "cuda" else value
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return value
    if value.layout == torch.sparse_coo:
        indices, numbers = _on_host(value._indices()), _on_host(value._values())
        return torch.sparse_coo_tensor(
            indices, numbers, value.shape, is_coalesced=value.is_coalesced(), check_invariants=False
        )
    if value.layout != torch.strided:
        raise NotComputed(f"a tensor of layout {value.layout}: its true values on a null card are not known")
    storage = value.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    memory = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    found = torch.empty(0, dtype=value.dtype).set_(flat, value.storage_offset(), value.shape, value.stride())
    if value.is_conj():
        found = found.conj()
    return torch.ops.aten._neg_view(found) if value.is_neg() else found


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of a null card's tensor, without a copy and without waiting for its streams."""
    return _on_host(tensor.detach())


def _of_tensors(operator: Any) -> tuple[list[int], Any]:
    """The places of an operand that is a number, and the overload that takes a tensor there: of `pow.Scalar`, `pow`.

    CUDA's own code would make a tensor of the number on the card and call that overload, whose kernel here PyTorch
    could not call: a number's tensor becomes a number again on its way to Python, which is refused of one on a card
    (`toPyObject` in pybind_utils.cpp).
    """
    arguments = operator._schema.arguments
    numbers = [i for i, a in enumerate(arguments) if str(a.type) == "number" and (i == 0 or a.name == "self")]
    wanted = ["Tensor" if i in numbers else str(a.type) for i, a in enumerate(arguments)]
    for name in operator.overloadpacket.overloads() if numbers else ():
        other = getattr(operator.overloadpacket, name)
        if [str(a.type) for a in other._schema.arguments] == wanted:
            return numbers, other
    return [], operator


def _without_numbers(args: tuple, tensors: list[int], device: torch.device | str = "cpu") -> tuple:
    """Numbers in the places of tensors become tensors of the dtype that they would be promoted to."""
    if not any(i < len(args) and isinstance(args[i], int | float | complex) for i in tensors):
        return args
    other = next(value for value in args if isinstance(value, torch.Tensor))
    return tuple(
        torch.scalar_tensor(value, dtype=torch.result_type(other, value), device=device)
        if i in tensors and isinstance(value, int | float | complex)
        else value
        for i, value in enumerate(args)
    )


def _seed(generator: torch.Generator | None, device: torch.device) -> int:
    """A seed for the CPU from where the CUDA generator stands."""
    if torch.cuda.is_current_stream_capturing():  # a graph's position is known when it runs
        return mixed(0, 0)
    if generator is None or generator.device.type != "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
    seed, offset = generator.get_state().view(torch.int64).tolist()
    return mixed(seed, offset)


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    if seed is None:
        yield
        return
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def _overload(namespace: str, name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


def card_operators() -> set[str]:
    """The operators of which CUDA has kernels of its own."""
    return set(torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")) | _ANSWERED | {_COPY}


@contextlib.contextmanager
def true_values(late: bool = False) -> Iterator[ComputedValues]:
    """Within it, operators on a null card have true results, in every thread.

    A tensor that Python has seen has one holder more, so autograd adds to no gradient in place and peaks are higher
    than on a card. `deciding.true_decisions` computes what decides control flow alone.

    Args:
        late: whether the card works late, so that results are work of the current stream too.

    Raises:
        NotComputed: an operator has no reference on the CPU; named.
        TightfitError: this process has no null card.
    """
    values = ComputedValues(late)
    values.open()
    try:
        yield values
    finally:
        values.close()
