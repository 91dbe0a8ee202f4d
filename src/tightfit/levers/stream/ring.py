"""The streamed blocks of a model: where the weights of each are now, and the moves between host and device.

A weight's tensor is the model's own parameter. While its block is on the device, the parameter is over memory there; at
other times it is over the bytes on the host, so that `state_dict`, copies and writes between steps find true numbers.
What autograd saves is over the storage on the device. That storage is emptied when the block leaves and filled when it
comes back, as FSDP2 does with gathered parameters: a saved weight keeps no memory, and is there again in backward.
"""

import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from tightfit.errors import LeverError
from tightfit.levers.activity import offload, simulators
from tightfit.levers.recompute.values import Geometry, fetch_by
from tightfit.levers.stream.tiers import FileTier, FileToCard, PinnedTier, Tier, flat_over
from tightfit.levers.stream.window import Window
from tightfit.memory.allocator import rest
from tightfit.optim.host_gradient import HostGradient
from tightfit.optim.link import forget_streamed, is_streamed, note_streamed
from tightfit.runtime.internals import counting_alias
from tightfit.runtime.simulation import file_memory, simulation


class StreamedTensor(NamedTuple):
    """A tensor of a weight, and what its data is on the device and on the host."""

    tensor: torch.Tensor
    there: torch.Tensor
    home: torch.Tensor

    def is_as_left(self) -> bool:
        """True if nobody gave the tensor other memory."""
        storage = self.tensor.untyped_storage()._cdata
        return storage in (self.there.untyped_storage()._cdata, self.home.untyped_storage()._cdata)


class Weight:
    """Mutable: one storage of weights. `kept` is its bytes on the host, `storage` its memory on the device."""

    def __init__(self, tensors: Sequence[torch.Tensor], tier: Tier, device: torch.device):
        content = tensors[0].untyped_storage()
        self.nbytes = content.nbytes()
        self.kept = tier.keep(content)
        is_ours = tensors[0].device == device and content.resizable()
        self.storage = content if is_ours else torch.UntypedStorage(self.nbytes, device=device)
        with torch.no_grad(), offload():
            if not is_ours:
                self.storage.copy_(content)
            flat = flat_over(self.storage, self.nbytes)
            self.places = [
                StreamedTensor(
                    tensor,
                    counting_alias(tensor) if is_ours else Geometry.of(tensor).over(flat),
                    Geometry.of(tensor).over(self.kept.bytes),
                )
                for tensor in tensors
            ]
            for place in self.places:
                place.tensor.data = place.there
        self.read_at = self.version

    @property
    def version(self) -> int:
        """How often the tensors were written."""
        return sum(place.tensor._version for place in self.places)

    @property
    def is_as_left(self) -> bool:
        return all(place.is_as_left() for place in self.places)

    def put(self, *, there: bool) -> None:
        """Let the tensors be over the memory on the device, or over the bytes on the host."""
        for place in self.places:
            if place.is_as_left():
                place.tensor.data = place.there if there else place.home

    def empty(self) -> bool:
        """Free the memory on the device. False if somebody has it for good, and the next copy goes to other memory."""
        if self.storage.resizable():
            self.storage.resize_(0)
            return True
        # `numpy` has shown it to code that PyTorch does not know. What is saved over it stays right within a step.
        self.storage = torch.UntypedStorage(self.nbytes, device=self.storage.device)
        with torch.no_grad(), offload():
            flat = flat_over(self.storage, self.nbytes)
            self.places = [place._replace(there=Geometry.of(place.home).over(flat)) for place in self.places]
        self.storage.resize_(0)
        return False

    def write_back(self) -> None:
        """Copy the bytes on the device to the host, if somebody wrote into them since they came."""
        if self.version != self.read_at:
            with torch.no_grad(), offload():
                self.kept.bytes.copy_(flat_over(self.storage, self.nbytes))
            self.read_at = self.version
            rest(self.kept.bytes)


class StreamedBlock:
    """Mutable: one block's weights. `weights` is None before they have been moved for the first time."""

    def __init__(self, ring: "Ring", number: int, tensors: Iterable[torch.Tensor]):
        self._ring = weakref.ref(ring)
        self.number = number
        self.tensors = list(tensors)
        self.weights: list[Weight] | None = None
        self.arrival: Any = None  # a copy that nothing has waited for
        self.brought: Any = None  # the last copy

    def sizes(self) -> list[tuple[torch.Tensor, int]]:
        """A tensor over each storage, and the bytes that it takes on the device."""
        if self.weights is not None:
            return [(weight.places[0].tensor, weight.nbytes) for weight in self.weights]
        return [(tensors[0], tensors[0].untyped_storage().nbytes()) for tensors in self.groups()]

    def groups(self) -> list[list[torch.Tensor]]:
        """The tensors by storage."""
        found: dict[int, list[torch.Tensor]] = {}
        for tensor in self.tensors:
            found.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        return list(found.values())

    @property
    def is_trained(self) -> bool:
        """True if somebody has begun to train a weight that was frozen."""
        return any(tensor.requires_grad for tensor in self.tensors)

    def needed(self) -> None:
        """Something reads the block's weights in backward."""
        ring = self._ring()
        if ring is not None:
            ring.use(self.number, back=True)


class Ring:
    """Mutable: the streamed blocks of a model, which share the room of `ahead` + 1 blocks on a device.

    On a CPU there is room for one: the blocks ahead are read into the system's file cache.
    """

    def __init__(self, device: torch.device, ahead: int, folder: str | Path | None, trained: bool = False):
        self.device, self.ahead, self.folder, self.trained = device, ahead, folder, trained
        self.blocks: dict[int, StreamedBlock] = {}
        self.lock = threading.RLock()
        self.window: Window | None = None
        self._tier: Tier | None = None
        if trained:
            for hook in (
                register_optimizer_step_pre_hook(refuse_update),
                register_optimizer_step_post_hook(note_updates),
            ):
                weakref.finalize(self, hook.remove)

    def add(self, number: int, tensors: Iterable[torch.Tensor]) -> None:
        """Add a block. Its weights stay where they are until the ring is first used."""
        block = self.blocks[number] = StreamedBlock(self, number, tensors)
        if self.trained:
            for tensor in block.tensors:
                note_streamed(tensor, self)

    def room(self, *, on_cuda: bool) -> int:
        return self.ahead + 1 if on_cuda else 1

    def use(self, number: int, *, back: bool) -> None:
        """Have a block's weights on the device, for everything that backward computes from here on."""
        window = self.window if simulators.weights is None else self._present_window()
        if window is not None and window.current == number:
            return
        with self.lock:
            if number in self.blocks:
                self._present_window().use(number, back=back)

    @contextmanager
    def running(self, number: int, *, back: bool, again: bool) -> Iterator[None]:
        """A context for the forward of a block, whose weights are on the device."""
        with self.lock:
            if simulators.weights is None:
                self._settle_again(number)
            window = self._present_window()
            window.running[number] += 1
            window.use(number, back=back, again=again)
        try:
            yield
        finally:
            with self.lock:
                window.running[number] -= 1

    def _present_window(self) -> Window:
        return self.settled() if simulators.weights is None else simulators.weights.window_of(self)

    # Moves

    def settled(self) -> Window:
        """The window, once all weights are on the host and only those of the first blocks on the device."""
        if self.window is None:
            room = self.room(on_cuda=self.device.type == "cuda")
            window = Window(len(self.blocks), room, self.ahead, self)
            for number, block in self.blocks.items():
                if block.weights is None:
                    self._settle(block)
                if number not in window.here:
                    self.drop(number)
            self.window = window
        return self.window

    @property
    def tier(self) -> Tier:
        if self._tier is None:
            if self.device.type == "cpu":
                self._tier = FileTier(self.folder)
            elif self.folder is None:
                self._tier = PinnedTier(self.device)
            else:
                self._tier = FileToCard(self.folder, self.device, written=self.trained)
        return self._tier

    @property
    def is_file(self) -> bool:
        """True on a CPU, and on a card whose weights have a folder."""
        return self.folder is not None or not self.is_of_card

    @property
    def is_of_card(self) -> bool:
        return self.device.type == "cuda" or simulation.of_cuda

    def empty(self, like: torch.Tensor, dtype: torch.dtype, what: str) -> torch.Tensor:
        """Memory in the weights' file, of a tensor's shape."""
        if simulation.is_dry:
            with file_memory():
                return torch.empty_like(like, dtype=dtype, memory_format=torch.preserve_format)
        with self.lock:
            shape = torch.empty_like(like, dtype=dtype, device="meta", memory_format=torch.preserve_format)
            assert isinstance(self.tier, FileTier), "the weights are in a file"
            return self.tier.empty(shape, what)

    def _settle(self, block: StreamedBlock, known: Sequence[Weight] = ()) -> None:
        weights = list(known)
        of_known = {id(place.tensor) for weight in known for place in weight.places}
        for tensors in block.groups():
            if id(tensors[0]) not in of_known:
                weight = Weight(tensors, self.tier, self.device)
                for storage in (weight.storage, weight.kept.bytes.untyped_storage()):
                    fetch_by(storage, block)
                weights.append(weight)
        block.weights = weights

    def _settle_again(self, number: int) -> None:
        """Take over memory that somebody gave a weight since the last use: it was converted, moved or exchanged."""
        block = self.blocks.get(number)
        if self.window is None or block is None or all(weight.is_as_left for weight in block.weights or ()):
            return
        self.window.here.discard(number)
        self.window.current = -1
        self.drop(number)
        self._settle(block, [weight for weight in block.weights or () if weight.is_as_left])
        self.drop(number)

    def bring(self, number: int) -> None:
        block = self.blocks[number]
        weights = block.weights or []
        for weight in weights:
            weight.read_at = weight.version
        block.arrival = block.brought = self.tier.bring([(weight.storage, weight.kept) for weight in weights])
        if block.arrival is None:
            block.arrival = ()  # it is complete, and the tensors are still over the host's bytes

    def arrive(self, number: int) -> None:
        block = self.blocks[number]
        if block.arrival is None:
            return
        if any(weight.version != weight.read_at for weight in block.weights or ()):
            self._wait(block)
            self.bring(number)  # somebody wrote into the bytes on the host while they were copied
        self._wait(block)
        for weight in block.weights or ():
            weight.put(there=True)
        block.arrival = None

    def _wait(self, block: StreamedBlock) -> None:
        if block.arrival:
            self.tier.arrived(block.arrival)

    def save(self, number: int) -> None:
        block = self.blocks[number]
        if block.arrival is None:
            for weight in block.weights or ():
                weight.write_back()

    def drop(self, number: int) -> None:
        self.save(number)
        block = self.blocks[number]
        for weight in block.weights or ():
            weight.put(there=False)
        if block.brought:
            self.tier.leaving(block.brought)
        block.arrival = block.brought = None
        for weight in block.weights or ():
            if not weight.empty():
                fetch_by(weight.storage, block)

    def announce(self, number: int) -> None:
        self.tier.soon([weight.kept for weight in self.blocks[number].weights or ()])

    def leave(self) -> None:
        """Have all blocks leave the device until they are used."""
        with self.lock:
            for number in sorted(self.settled().here):
                self.drop(number)
            self.settled().here.clear()
            self.settled().current = -1

    def release(self, number: int) -> None:
        """Have a block's weights on the device for good, or on the host where the device has no room for them."""
        with self.lock:
            block = self.blocks.get(number)
            for tensor in block.tensors if block is not None else ():
                forget_streamed(tensor)
            if block is None or self.window is None:
                self.blocks.pop(number, None)
                return
            there = self._comes_back(number)
            for weight in block.weights or ():
                weight.put(there=there)
                for storage in (weight.storage, weight.kept.bytes.untyped_storage()):
                    fetch_by(storage, None)
            self.window.here.discard(number)
            self.window.current = -1
            del self.blocks[number]

    def _comes_back(self, number: int) -> bool:
        """Bring a block for good. Returns False where the device has no room: its weights are on the host then."""
        try:
            if number not in self.settled().here:
                self.bring(number)
            self.arrive(number)
        except torch.OutOfMemoryError:  # what the lever was for: nobody loses a trained model by ending it
            self.drop(number)
            warnings.warn(f"stream: {self.device} has no room for all weights: some stay in host memory", stacklevel=2)
            return False
        return True

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        tensors = {number: block.tensors for number, block in self.blocks.items()}
        settings = {"device": self.device, "ahead": self.ahead, "folder": self.folder, "trained": self.trained}
        return {**settings, "tensors": tensors}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["device"], state["ahead"], state["folder"], state["trained"])
        for number, tensors in state["tensors"].items():
            self.add(number, tensors)


_versions = WeakIdKeyDictionary()  # of streamed weights, as an optimizer that steps now found them


def refuse_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise `LeverError` for an optimizer that would update streamed weights on a device where they are not."""
    for weight in _streamed_weights(optimizer):
        gradient = weight.grad
        _versions[weight] = weight._version
        if gradient is None or isinstance(gradient, HostGradient) or gradient.device == weight.device:
            continue
        raise LeverError(
            f"stream: {type(optimizer).__name__} updates weights on {gradient.device}, and streamed ones are on the "
            "host: train them with tightfit.optim.OffloadedAdamW (fraction=1)"
        )


def note_updates(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Count the update of each streamed weight as a write, so that it is brought back to the host.

    PyTorch's fused optimizers, and others' kernels, write weights without counting it.
    """
    for weight in _streamed_weights(optimizer):
        if weight.grad is not None and _versions.pop(weight, None) == weight._version:
            torch.autograd.graph.increment_version(weight)


def _streamed_weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"] if is_streamed(weight)]
