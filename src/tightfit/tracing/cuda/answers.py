"""Answers the questions of Python code about CUDA as the simulated device would.

Code of users and of packages with their own kernels asks whether its tensors are on CUDA (`x.is_cuda`,
`x.device.type == "cuda"`), and what the device can do (`torch.cuda.get_device_capability`). The tensors of a dry run
are on the CPU, so the true answers would choose other code than the device runs.

The libraries in `_TRUE_ANSWERS` get the true answers, except for modules with models. What they do on CUDA is simulated
below their code: their operators' kernels are replaced (`composites.py`, `autocast.py`), or the results do not depend
on the answer. Some keep an answer for the whole process.
"""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

import torch

from tightfit.runtime.simulation import simulation
from tightfit.tracing.cuda.attention import AttentionCall, Capability, efficient_takes, flash_takes
from tightfit.tracing.cuda.replacements import Replacements

_TRUE_ANSWERS = frozenset(
    {"torch", "tightfit", "triton", "transformers", "accelerate", "peft", "bitsandbytes", "torchao", "lightning"}
    | {"lightning_fabric", "pytorch_lightning", "deepspeed", "numpy"}
)
# Most bytes of shared memory of a block: CUDA C++ Programming Guide, table "Technical Specifications per Compute
# Capability".
_SHARED_KIB = {(7, 0): 96, (7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227}
_NEWEST_SHARED_KIB, _LEAST_SHARED_KIB = 99, 48  # (12, 0) and (12, 1); before (7, 0)
# Most threads of a multiprocessor, in the same table; 2048 elsewhere.
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
# Modules of these libraries in which models choose between operators by their tensors' device.
_OF_MODELS = ("tightfit.models.", "transformers.models.", "transformers.integrations.moe")
_MAPPED = "cuda"


class DeviceProperties(Protocol):
    """The properties of a device that Python code may ask for."""

    @property
    def capability(self) -> tuple[int, int]: ...
    @property
    def multiprocessors(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def memory_bytes(self) -> int: ...


def simulated_card() -> DeviceProperties | None:
    """The device that this thread simulates, if any."""
    return simulation.card if simulation.of_cuda else None


def shared_memory(capability: tuple[int, int]) -> int:
    """Most bytes of shared memory of a block."""
    known = _SHARED_KIB.get(capability)
    return 1024 * (known or (_NEWEST_SHARED_KIB if capability >= (7, 0) else _LEAST_SHARED_KIB))


def properties_of(card: DeviceProperties) -> SimpleNamespace:
    """The result of `torch.cuda.get_device_properties` for a device."""
    major, minor = card.capability
    shared = shared_memory(card.capability)
    return SimpleNamespace(
        name=card.name, gcnArchName=card.name, major=major, minor=minor, total_memory=card.memory_bytes, warp_size=32,
        multi_processor_count=card.multiprocessors, shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=shared, shared_memory_per_multiprocessor=shared + 1024,
        max_threads_per_multi_processor=_THREADS.get(card.capability, 2048), max_threads_per_block=1024,
        regs_per_multiprocessor=65536, is_integrated=False, is_multi_gpu_board=False,
    )  # fmt: skip


# The device of a tensor


class _DeviceKind(str):
    """The text "cpu" for PyTorch's C++ code, which reads the characters; equal to "cuda" for Python code."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _DeviceKind) or other == _MAPPED

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(_MAPPED)

    def __contains__(self, part: str) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return part in _MAPPED

    def startswith(self, *args: Any) -> bool:
        return _MAPPED.startswith(*args)

    def __repr__(self) -> str:
        return repr(_MAPPED)


class SimulatedDevice(str):
    """The device of a CPU tensor that simulates one on CUDA.

    PyTorch takes a text wherever it takes a device. This one's characters are "cpu", so new tensors are where the dry
    run's are. Its attributes are those of `torch.device("cuda", 0)`. It is equal to both, because a model may compare
    it with a device that it stored before.
    """

    __slots__ = ()
    index = 0  # pyright: ignore[reportAssignmentType] - in place of the method of texts

    @property
    def type(self) -> str:
        return _KIND

    def __eq__(self, other: object) -> bool:
        if isinstance(other, torch.device):
            return other.type == "cpu" or (other.type == "cuda" and other.index in (None, 0))
        return isinstance(other, SimulatedDevice) or other in ("cpu", "cuda", "cuda:0")

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(torch.device("cuda", 0))

    def __repr__(self) -> str:
        return "device(type='cuda', index=0)"


_KIND = _DeviceKind("cpu")
_DEVICE = SimulatedDevice("cpu")


def _simulated_card_asked(depth: int = 2) -> DeviceProperties | None:
    """The simulated device if the code that asks gets its answers; None if it gets the true ones."""
    card = simulated_card()
    if card is None:
        return None
    name = sys._getframe(depth).f_globals.get("__name__", "")
    is_true = name.partition(".")[0] in _TRUE_ANSWERS and not name.startswith(_OF_MODELS)
    return None if is_true else card


def _replace_in_tensors(tensor: Any, replacements: Replacements) -> None:
    device = tensor.device  # the descriptor
    get_device, to_cuda = tensor.get_device, tensor.cuda

    def true_device(self: torch.Tensor) -> torch.device:
        # PyTorch would tell a subclass that its attribute of this name is read, which is the replacement: no function
        # that the subclass knows. Deferred logits materialised when a model asked for their device.
        with torch._C.DisableTorchFunctionSubclass():
            return device.__get__(self)

    def simulated_device(self: torch.Tensor) -> Any:
        true = true_device(self)
        return _DEVICE if true.type == "cpu" and _simulated_card_asked() is not None else true

    def simulated_is_cuda(self: torch.Tensor) -> bool:
        true = true_device(self)
        return true.type == "cuda" or (true.type == "cpu" and _simulated_card_asked() is not None)

    def simulated_get_device(self: torch.Tensor) -> int:
        return 0 if true_device(self).type == "cpu" and _simulated_card_asked() is not None else get_device(self)

    def simulated_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if _simulated_card_asked() is not None else to_cuda(self, *args, **kwargs)

    replacements.replace(tensor, "device", property(simulated_device))
    replacements.replace(tensor, "is_cuda", property(simulated_is_cuda))
    replacements.replace(tensor, "get_device", simulated_get_device)
    replacements.replace(tensor, "cuda", simulated_cuda)


# Questions about the device


_ANSWERS: dict[str, Callable[..., Any]] = {
    "is_available": lambda card: True,
    "is_initialized": lambda card: True,
    "device_count": lambda card: 1,
    "current_device": lambda card: 0,
    "get_device_capability": lambda card, device=None: card.capability,
    "get_device_properties": lambda card, device=None: properties_of(card),
    "get_device_name": lambda card, device=None: card.name,
    "is_bf16_supported": lambda card, including_emulation=True: including_emulation or card.capability >= (8, 0),
    "set_device": lambda card, device: None,
    "synchronize": lambda card, device=None: None,
}


def _answering(original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    def answered(*args: Any, **kwargs: Any) -> Any:
        card = _simulated_card_asked()
        return original(*args, **kwargs) if card is None else answer(card, *args, **kwargs)

    _constant_to_dynamo(answered)
    return answered


def _constant_to_dynamo(*functions: Any) -> None:
    """Let a compiled block call functions while it is traced, as it does with the originals: no graph break."""
    for function in functions:
        function._dynamo_marked_constant = True  # what `torch._dynamo.assume_constant_result` sets


def _replace_switch(switch: Any, replacements: Replacements) -> None:
    """Let `with torch.cuda.device(...)` switch to no device. It stays the class that PyTorch asks for by isinstance."""
    begin: Any = switch.__init__
    enter, leave = switch.__enter__, switch.__exit__

    def simulated_begin(self: Any, device: Any) -> None:
        if _simulated_card_asked() is None:
            begin(self, device)
        else:
            self.idx, self.prev_idx = -1, -1  # none

    replacements.replace(switch, "__init__", simulated_begin)
    replacements.replace(switch, "__enter__", lambda self: None if self.idx < 0 else enter(self))
    replacements.replace(switch, "__exit__", lambda self, *error: False if self.idx < 0 else leave(self, *error))


# Autocast for CUDA. The step's autocast region is that of the CPU, with CUDA's lists (`autocast.py`).


def _of_simulated_device(device_type: str) -> str:
    if device_type != "cuda" or not simulation.of_cuda:
        return device_type
    # dynamo notes the state of both devices, and puts each back.
    return device_type if sys._getframe(2).f_globals.get("__name__") == _DYNAMO else "cpu"


_DYNAMO = "torch._dynamo.output_graph"


def _replace_in_autocast(replacements: Replacements) -> None:
    enabled, dtype_of, setup = torch.is_autocast_enabled, torch.get_autocast_dtype, torch.autocast.__init__

    def is_autocast_enabled(device_type: str = "cuda") -> bool:
        return enabled(_of_simulated_device(device_type))

    def get_autocast_dtype(device_type: str) -> torch.dtype:
        # The dtype of a region that is open; else CUDA's default, which is not the CPU's.
        simulated = _of_simulated_device(device_type)
        return dtype_of(simulated if enabled(simulated) else device_type)

    def get_autocast_gpu_dtype() -> torch.dtype:
        return get_autocast_dtype("cuda")

    def begin(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        simulated = _of_simulated_device(device_type)
        if simulated != device_type and dtype is None:
            dtype = get_autocast_dtype(device_type)
        setup(self, simulated, dtype, enabled, cache_enabled)

    _constant_to_dynamo(is_autocast_enabled, get_autocast_dtype, get_autocast_gpu_dtype)
    replacements.replace(torch, "is_autocast_enabled", is_autocast_enabled)
    replacements.replace(torch, "get_autocast_dtype", get_autocast_dtype)
    replacements.replace(torch, "get_autocast_gpu_dtype", get_autocast_gpu_dtype)
    replacements.replace(torch.autocast, "__init__", begin)


# Kernels of attention, for code that calls one by its own choice


def replace_in_backends(module: ModuleType, replacements: Replacements) -> None:
    """Replace what Python code asks about kernels of attention. `module` is `torch.backends.cuda`."""
    for name, takes in {"can_use_flash_attention": flash_takes, "can_use_efficient_attention": efficient_takes}.items():
        replacements.replace(module, name, _taken(getattr(module, name), takes))


def _taken(original: Callable[..., bool], takes: Callable[[AttentionCall, Capability], bool]) -> Callable[..., bool]:
    def taken(params: Any, debug: bool = False) -> bool:
        card = simulated_card()
        if card is None:
            return original(params, debug)
        call = AttentionCall(
            params.query,
            params.key,
            params.value,
            params.attn_mask,
            params.dropout,
            params.is_causal,
            params.enable_gqa,
        )
        return takes(call, card.capability)

    return taken


def replace_in_torch(module: ModuleType, replacements: Replacements) -> None:
    """Replace what Python code asks about CUDA. `module` is `torch.cuda`."""
    _replace_in_tensors(torch.Tensor, replacements)
    for name, answer in _ANSWERS.items():
        replacements.replace(module, name, _answering(getattr(module, name), answer))
    _replace_switch(module.device, replacements)
    _replace_in_autocast(replacements)
