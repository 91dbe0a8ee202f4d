"""The lever stream, applied by hand: `stream(model, "layers.*")`."""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tightfit.errors import LeverError
from tightfit.levers.handle import Applied
from tightfit.levers.recompute.lever import install, matching_modules
from tightfit.levers.recompute.region import STREAMED, FrugalForward
from tightfit.levers.recompute.saved import pack, unpack
from tightfit.levers.recompute.values import has_plain_storage, present
from tightfit.levers.stream.ring import Ring
from tightfit.levers.stream.tiers import in_pages
from tightfit.memory.allocator import memory_of, scales_of
from tightfit.runtime.internals import backward_is_running, innermost_saved_tensor_hooks, is_fake, without_dynamo
from tightfit.runtime.module_paths import module_at, named_modules, tensors_of
from tightfit.runtime.nested import tensors_in

PINNED = "pinned"  # as a tier
SMALLEST_BYTES = 512  # CUDA's allocator gives no less memory than this to a tensor
_MOST_NAMED = 3


def stream(
    model: nn.Module,
    pattern: str,
    *,
    ahead: int = 1,
    tier: str | Path | None = None,
    device: torch.device | str | None = None,
    trained: bool = False,
) -> Applied:
    """Keep the frozen weights of every module whose path matches a glob off the device, except while they are used.

    They live in pinned host memory (CUDA), or in a file (a CPU, and CUDA with a folder as `tier`). In forward each
    block's weights are copied to the device before the block runs, and in backward again, the last block first: at most
    `ahead` + 1 blocks are there at a time (CPU: one). Copies change no bit. Trained weights of these blocks, such as
    adapters, stay on the device, and so do buffers, and weights that other blocks or other parts of the model share.
    Between steps a weight is a tensor in host memory: `state_dict`, copies and writes see its true numbers.

    With `trained`, trained weights of the blocks go too. Their optimizer must update weights on the host: on CUDA
    `OffloadedAdamW`, which also moves each gradient there as soon as it is made; on a CPU any. Where the weights are in
    a file, `OffloadedAdamW` has their gradients and states there too: training then takes less of the host's memory
    than the weights.

    Args:
        model: The module whose blocks are streamed.
        pattern: A glob over module paths, such as `"layers.*"`.
        ahead: How many blocks are on their way to the device while one runs. On a CPU the system reads them ahead into
            its file cache.
        tier: On a CPU the folder of the file; None: the system's folder for temporary files. The file has no name, so
            nobody can remove it, and the system frees it when the process ends. On CUDA None or `"pinned"`: pinned host
            memory; a folder: a file there too, which a thread reads through 64 MiB of pinned buffers, so that weights
            may be larger than the host's memory.
        device: The device on which the blocks run, if they are not there yet; the rest of the model is moved there.
            None: the device of the blocks.
        trained: Whether trained weights are streamed too.

    Returns:
        A handle whose `undo()` brings all weights back and restores the model exactly.

    Raises:
        LeverError: Nothing matches, the blocks have no frozen weights, a block is streamed or captured already, the
            model is offloaded by another library, sharded or without memory, or the host has no room.
        OutputError: The folder cannot be used.

    Example:
        >>> import tightfit, torch
        >>> blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)]
        >>> model = torch.nn.Sequential(*blocks, torch.nn.Linear(64, 1))
        >>> for block in model[:4]:
        ...     _ = block.requires_grad_(False)
        >>> with tightfit.stream(model, "[0-3]"):
        ...     model(torch.randn(8, 64)).sum().backward()
        >>> model[4].weight.grad is not None
        True
    """
    if ahead < 0:
        raise LeverError(f"stream: ahead={ahead} is below zero: give the blocks that come before they are used")
    paths = matching_modules(model, pattern)
    refuse_absent(model, paths)
    where = torch.device(device) if device is not None else device_of(model, paths)
    if where.type not in ("cpu", "cuda"):
        raise LeverError(f"stream: the blocks are on {where}: stream works on cpu and cuda, so move the model there")
    if where.type == "cpu" and tier == PINNED:
        raise LeverError("stream: pinned memory is of CUDA devices: leave tier out, or give the folder of a file")
    folder = None if tier == PINNED else tier
    applied = install_streams(model, paths, ahead=ahead, tier=folder, device=where, trained=trained)
    try:
        settle(model, None if device is None else where)
    except BaseException:  # a full disk, Ctrl-C: the weights come back
        applied.undo()
        raise
    return applied


def settle(model: nn.Module, device: torch.device | None = None) -> None:
    """Move the weights of streamed blocks to the host now. With a `device`, the blocks run there, and the rest of the
    model moves there.
    """
    for ring in rings_on(model):
        if device is not None and ring.window is None:
            ring.device = device
        if device is not None:
            move_rest(model, ring, device)
        is_first = ring.window is None
        ring.settled()
        if is_first and ring.device.type == "cuda":
            # Moving took memory for three blocks, or for all, in segments that do not suit the step.
            torch.cuda.empty_cache()


class AppliedStream(Applied):
    """Streamed weights in force on a model. `ring` says where they are."""

    def __init__(self, applied: Applied, ring: Ring):
        super().__init__([applied])
        self.ring = ring


def rings_on(model: nn.Module) -> list[Ring]:
    """The rings of a model's streamed blocks."""
    found = (forward for module in model.modules() for forward in _chain(module.__dict__.get("forward")))
    return list({id(each.ring): each.ring for each in found if isinstance(each, StreamedForward)}.values())


def _chain(forward: Any) -> Iterator[FrugalForward]:
    """The forwards of levers on one module, the outermost first."""
    while isinstance(forward, FrugalForward):
        yield forward
        forward = forward.previous


def install_streams(
    model: nn.Module,
    paths: Sequence[str],
    *,
    ahead: int = 1,
    tier: str | Path | None = None,
    device: torch.device | None = None,
    trained: bool = False,
) -> AppliedStream:
    """Give the modules at these paths forwards that stream their weights. None is moved before the first use.

    `device` None is the device of the blocks.
    """
    blocks = streamable_weights(model, paths, trained=trained)
    refuse_trained(model, paths, blocks)
    ring = Ring(device or device_of(model, paths), ahead, tier, trained)
    forwards = []
    for number, (path, tensors) in enumerate(zip(paths, blocks, strict=True)):
        ring.add(number, tensors)
        forwards.append(StreamedForward(module_at(model, path), path, ring, number))
    return AppliedStream(install(forwards), ring)


def streamed_bytes(model: nn.Module, paths: Iterable[str], *, trained: bool = False) -> int:
    """Bytes on the host, in pinned memory or in a file, of the weights of these blocks: each storage in whole pages."""
    return sum(map(bytes_on_host, streamable_weights(model, list(paths), trained=trained)))


def bytes_on_host(weights: Iterable[torch.Tensor]) -> int:
    """The same of one block's weights."""
    storages = [tensor.untyped_storage() for tensor in weights]
    return sum({storage._cdata: in_pages(storage.nbytes()) for storage in storages}.values())


def streamable_weights(model: nn.Module, paths: Sequence[str], *, trained: bool = False) -> list[list[torch.Tensor]]:
    """The tensors of each block that are streamed: frozen, unless `trained`, and over memory that nothing else in the
    model has.
    """
    found = [_large(module_at(model, path), trained) for path in paths]
    streamed = {id(tensor) for block in found for tensor in block}
    others = [t for _, module in named_modules(model) for held in tensors_of(module) for t in _parts_of(held)]
    taken = {_storage(tensor) for tensor in others if id(tensor) not in streamed and _has_storage(tensor)}
    users = Counter(storage for block in found for storage in {_storage(tensor) for tensor in block})
    return [[t for t in block if users[_storage(t)] == 1 and _storage(t) not in taken] for block in found]


def _large(block: nn.Module, trained: bool) -> list[torch.Tensor]:
    chosen = [parameter for parameter in block.parameters() if trained or not parameter.requires_grad]
    parts = {id(part): part for parameter in chosen for part in _parts_of(parameter)}
    return [t for t in parts.values() if _has_storage(t) and t.untyped_storage().nbytes() >= SMALLEST_BYTES]


def _has_storage(tensor: torch.Tensor) -> bool:
    """True if a storage of its own describes the tensor; codes of bitsandbytes are a class of parameters over one."""
    return has_plain_storage(tensor) or hasattr(tensor, "quant_state")


def _parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors of a tensor: of a quantised weight, codes and scales."""
    return [*memory_of(tensor), *scales_of(tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


# Refusals


def device_of(model: nn.Module, paths: Sequence[str]) -> torch.device:
    """The device of the blocks' weights."""
    first = next((parameter for path in paths for parameter in module_at(model, path).parameters()), None)
    return torch.device("cpu") if first is None else first.device


def refuse_trained(model: nn.Module, paths: Sequence[str], blocks: Sequence[Sequence[torch.Tensor]]) -> None:
    """Raise `LeverError` for a block without frozen weights of its own."""
    for path, tensors in zip(paths, blocks, strict=True):
        if tensors:
            continue
        trained = [name for name, p in module_at(model, path).named_parameters() if p.requires_grad]
        if not trained:
            raise LeverError(f"stream: {path} has no weights of its own: leave it out of the pattern")
        more = f" and {len(trained) - _MOST_NAMED} more" if len(trained) > _MOST_NAMED else ""
        raise LeverError(
            f"stream: all weights of {path} are trained ({', '.join(trained[:_MOST_NAMED])}{more}), and only frozen "
            "ones are streamed by themselves: give trained=True, train adapters, or freeze it (requires_grad_(False))"
        )


def refuse_absent(model: nn.Module, paths: Sequence[str]) -> None:
    """Raise `LeverError` for weights that are not in this process's memory, or that another library moves."""
    places = set(map(str, getattr(model, "hf_device_map", {}).values()))
    hooked = next((path for path in paths for m in module_at(model, path).modules() if hasattr(m, "_hf_hook")), None)
    if hooked is not None or "disk" in places or ("cpu" in places and len(places) > 1):
        where = "hf_device_map" if hooked is None else hooked
        raise LeverError(
            f"stream: accelerate offloads this model ({where}): load it without device_map, and stream it then"
        )
    for path in paths:
        for name, parameter in module_at(model, path).named_parameters():
            if parameter.is_meta or is_fake(parameter):
                raise LeverError(f"stream: {path}.{name} has no memory (meta, or fake): load the weights first")
            if hasattr(parameter, "device_mesh"):
                raise LeverError(
                    f"stream: {path}.{name} is a DTensor: FSDP and tensor parallel move their shards themselves: "
                    "stream a model that is not sharded"
                )


def move_rest(model: nn.Module, ring: Ring, device: torch.device) -> None:
    """Move everything but the streamed weights to a device."""
    streamed = {id(tensor) for block in ring.blocks.values() for tensor in block.tensors}
    for _, module in named_modules(model):
        for held in tensors_of(module):
            for tensor in _parts_of(held):
                if id(tensor) not in streamed:
                    tensor.data = tensor.data.to(device)


# The forward of a streamed block


class StreamedForward(FrugalForward):
    """Runs a block with its weights on the device."""

    does = STREAMED

    def __init__(self, module: nn.Module, path: str, ring: Ring, place: int):
        super().__init__(module, path)
        self.ring, self.place = ring, place

    @without_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.removed:
            return self.original(*args, **kwargs)
        block = self.ring.blocks.get(self.place)
        if block is not None and block.is_trained and not self.ring.trained:
            raise LeverError(
                f"{self.path} is streamed, and a weight of it that was frozen is trained now: undo() the stream first"
            )
        if self.ring.device.type == "cpu" and any(tensor.is_cuda for tensor in tensors_in((args, kwargs))):
            raise LeverError(
                f"{self.path} is streamed on the CPU and gets tensors of a card: move the model there first, or "
                'give stream device="cuda"'
            )
        back = backward_is_running()  # a checkpoint runs the block again
        with self.ring.running(self.place, back=back, again=not torch.is_grad_enabled()):
            outputs = self._observed(*args, **kwargs)
        if torch.is_grad_enabled():
            # Code that keeps weights without autograd's saved tensors (bitsandbytes) needs them in backward too. The
            # hook holds the ring, which may outlive the model like the graph.
            needed = partial(_before_backward, self.ring, self.place)
            for node in {tensor.grad_fn for tensor in tensors_in(outputs)}:
                if node is not None:
                    node.register_prehook(needed)
        return outputs

    def _observed(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, and have its weights on the device before backward reads what is saved in it."""
        if self.steps_aside:
            return self.original(*args, **kwargs)
        # Those of a checkpoint or an offload around this block, which would not be called for the block otherwise.
        outer = innermost_saved_tensor_hooks()
        save, load = outer or (pack, unpack)
        with torch.autograd.graph.saved_tensors_hooks(save, partial(_loaded, self.ring, self.place, load)):
            return self.original(*args, **kwargs)

    def remove(self) -> None:
        super().remove()
        self.ring.release(self.place)

    def __deepcopy__(self, memo: dict[int, Any]) -> "StreamedForward":
        # The copies of one model's blocks share a ring, as the blocks do. A copy of one block has a ring of its own.
        key = id(self.ring)
        if key not in memo:
            memo[key] = Ring(self.ring.device, self.ring.ahead, self.ring.folder, self.ring.trained)
        twin = StreamedForward.__new__(StreamedForward)
        memo[id(self)] = twin
        ring = memo[key]
        place = len(ring.blocks)
        block = self.ring.blocks.get(self.place)
        ring.add(place, copy.deepcopy(block.tensors if block is not None else [], memo))
        state = {name: value for name, value in self.__getstate__().items() if name not in ("ring", "place")}
        twin.__setstate__({**copy.deepcopy(state, memo), "ring": ring, "place": place})
        return twin


def _before_backward(ring: Ring, place: int, gradients: Any) -> None:
    ring.use(place, back=True)


def _loaded(ring: Ring, place: int, load: Callable[[Any], Any], saved: Any) -> Any:
    value = load(saved)
    ring.use(place, back=True)
    return present(value)
