"""Watches one process of a command that runs on null cards, and writes what it found to a file.

The phases and steps are those of the monitor (`Stage`), found by PyTorch's global hooks. Peaks are PyTorch's own: its
counters are read and reset at each change of phase, behind the back of the script, whose own reading of them stays what
it would be. What the peak is made of comes from the allocator's history.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import linecache
import os
import sys
import threading
import weakref
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from tightfit.memory.failure import is_out_of_memory
from tightfit.memory.frames import Frame, is_torchs, users_frame
from tightfit.optim.by_name import state_tensors
from tightfit.runtime.internals import current_node
from tightfit.runtime.nested import tensors_in
from tightfit.tracing.record import Category, Phase
from tightfit.training.monitoring.cards.history import OURS, History, UsedMemory, place_of
from tightfit.training.monitoring.cards.records import RankOfRun, ReadValue, RefusedBytes, RunSettings, StepOfRun
from tightfit.training.monitoring.script import Discovery
from tightfit.training.monitoring.stage import Stage

EVENTS = 2_000_000  # of the allocator that are kept
POINTS = 600  # of the curve
STEPS = 1000  # that are kept
LABELLED = 50  # steps of which gradients and inputs are noted
BEFORE = "before the first step"

# PyTorch's own functions, kept before `Watched` puts others in their place: a script's reading of peaks stays right.
_read_statistics = torch._C._cuda_memoryStats if hasattr(torch._C, "_cuda_memoryStats") else None
_reset_peaks = torch._C._cuda_resetPeakMemoryStats if hasattr(torch._C, "_cuda_resetPeakMemoryStats") else None


def watch_this_process() -> None:
    """Begin to watch. Ends the process where its PyTorch is another one than tightfit's."""
    settings = RunSettings.read()
    if settings is None:
        return
    if torch.__version__ != settings.torch:
        sys.stderr.write(
            f"error: {sys.executable} has PyTorch {torch.__version__}, and tightfit has "
            f"{settings.torch}: run tightfit in the environment of the script\n"
        )
        sys.stderr.flush()
        os._exit(2)
    Watched(settings).begin()


class Peaks:
    """The allocator's peaks by card, for two readers who each reset them: the watch and the script. Mutable."""

    def __init__(self) -> None:
        self.mine: dict[int, dict[str, Any]] = {}
        self.scripts: dict[int, dict[str, Any]] = {}

    def absorb(self, card: int) -> dict[str, Any]:
        """Read a card's counters, and begin a new span."""
        assert _read_statistics is not None
        assert _reset_peaks is not None
        found = _read_statistics(card)
        for kept in (self.mine, self.scripts):
            kept[card] = _merged(found, kept[card]) if card in kept else found
        _reset_peaks(card)
        return found

    def of_span(self, card: int) -> dict[str, Any]:
        """The counters since the last call, with the highest points of that time."""
        self.absorb(card)
        return self.mine.pop(card)

    def read_by_script(self, card: int) -> dict[str, Any]:
        assert _read_statistics is not None
        found = _read_statistics(card)
        return _merged(found, self.scripts[card]) if card in self.scripts else found

    def reset_by_script(self, card: int) -> None:
        self.absorb(card)
        del self.scripts[card]


def _merged(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Counters, with the higher peak of two spans."""
    found = {}
    for key, value in now.items():
        if isinstance(value, Mapping):
            found[key] = _merged(value, before.get(key, {}))
        else:
            found[key] = max(value, before.get(key, 0)) if key == "peak" else value
    return found


class Watched:
    """A process while it runs. Mutable."""

    def __init__(self, settings: RunSettings):
        self.settings = settings
        self.pid = os.getpid()
        self.peaks = Peaks()
        self.traced_step = 0  # what `Discovery` asks of a monitor
        self.stage = Stage(self._phase_ends, self._inputs, self._optimizer_begins, self._step_ends, has_optimizer=True)
        # A script that lets go of its model, to try again with less or to train another, has its memory back.
        self.model: weakref.ref[nn.Module] | None = None
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.names: tuple[dict[str, None], dict[str, None]] = ({}, {})  # of models and of optimizers, in their order
        self.paths: dict[int, str] = {}
        self.running: list[str] = []  # paths of the modules whose forward runs
        self.steps: dict[int, list[StepOfRun]] = {}  # by card
        self.spans: dict[int, list[tuple[int, int]]] = {}  # by card, the allocations of each step: (after, until]
        self.phases: dict[int, dict[str, tuple[int, int]]] = {}  # of the running step: (allocated, reserved) by phase
        self.outside: dict[int, tuple[int, int]] = {}  # what was highest outside of whole steps
        self.marks: dict[int, list[tuple[int, str]]] = {}  # by card: phases, and the last allocation before each
        self.begun: dict[int, int] = {}  # the allocation's number where the running step began
        # By card and address: the allocation's number at which it was seen, and what it was then
        self.labels: dict[int, dict[int, list[tuple[int, Category]]]] = {}
        self.refused: RefusedBytes | None = None
        self.caught: dict[int, list[RefusedBytes]] = {}  # by card: those after which the script went on
        self.reads: dict[Frame, int] = {}
        self.host_peak = 0
        self.count = 0  # steps that have ended
        self.ended = False
        self._refused_on = self._refused_after = -1
        self._values = contextlib.ExitStack()
        self._resident: Any = lambda: 0

    # Beginning and end

    def begin(self) -> None:
        if not torch.backends.cuda.is_built():
            return
        torch._C._cuda_memoryStats = self.peaks.read_by_script
        torch._C._cuda_resetPeakMemoryStats = self.peaks.reset_by_script
        torch.cuda._lazy_call(self._cuda_begins)
        atexit.register(self.finish)
        self._excepthook, sys.excepthook = sys.excepthook, self._script_fails
        # Whichever comes first: DDP and FSDP wrap a model that was found by its first call with gradients.
        self._discovery = Discovery(self, None)  # pyright: ignore[reportArgumentType]
        self._discovery.__enter__()
        register_optimizer_step_post_hook(self._optimizer_ends)

    def _cuda_begins(self) -> None:
        """CUDA is in use from here on in this process."""
        torch.cuda.memory._record_memory_history("all", "alloc", "python", EVENTS)
        attach: Any = vars(torch._C)["_cuda_attach_out_of_memory_observer"]
        attach(self._out_of_memory)
        if self.settings.here:
            return
        library = ctypes.CDLL("libcuda.so.1")
        if self.settings.values:
            from tightfit.devices.nullcard.values import true_values

            self._values.enter_context(true_values())
        else:
            from tightfit.devices.nullcard.deciding import true_decisions

            self._deciding = self._values.enter_context(true_decisions(self._note_read))
            self._reader = ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_size_t)(self._numbers_are_read)
            library.card_on_read(self._reader)
        library.card_resident.restype = ctypes.c_size_t
        self._resident = library.card_resident

    def finish(self, stopped: bool = False) -> None:
        """Write what was found."""
        if self.ended or os.getpid() != self.pid or not torch.cuda.is_initialized():
            return
        self.ended = True
        self.stage.ends()
        self._sample_host()
        for card in self._cards():
            if self.model is not None:
                self._keep_phase(card, self.stage.phase)
            for peaks in self.phases.pop(card, {}).values():  # of a step that did not end, or behind the last one
                self._keep_outside(card, peaks)
            self._keep_outside(card, self._peaks(card))
        self._write(stopped)

    def _cards(self) -> list[int]:
        if not torch.cuda.is_initialized() or _read_statistics is None:
            return []
        found = [(card, _read_statistics(card)) for card in range(torch.cuda.device_count())]
        return [card for card, s in found if (s and s["reserved_bytes"]["all"]["peak"]) or card in self.begun]

    # What `Discovery` asks of a monitor

    def add_resident(self, tensors: Any) -> None:
        """Nothing is traced here."""

    def add_model(self, model: nn.Module) -> None:
        self.model = weakref.ref(model, self._model_is_gone)
        self.names[0][type(model).__name__] = None
        self.paths = {id(module): path or type(model).__name__ for path, module in model.named_modules()}
        self.stage.follow_model(model)
        for module in model.modules():
            module.register_forward_pre_hook(self._module_begins)
            module.register_forward_hook(self._module_ends, always_call=True)

    def start(self) -> None:
        """A model was called with gradients: the first, or the next after one that is gone."""
        self.running = []
        for card in self._cards():
            if card not in self.begun:
                self._keep_outside(card, self._peaks(card))
                self.begun[card] = _allocations(card)
            self.marks.setdefault(card, []).append((_allocations(card), str(Phase.FORWARD)))
        self._label(self._weights(), Category.PARAMETER)

    def _model_is_gone(self, reference: Any) -> None:
        """Look for the next model, unless a module's forward runs: that of a part would be taken for a model's."""
        if not self.ended and not any(frame.name == "_call_impl" for frame in _running()):
            self._discovery.look()

    def enter_call(self, model: nn.Module, args: tuple) -> None:
        self.stage.forward_begins(model, args, {})

    # Phases and steps

    def _module_begins(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # the compiler reads hooks too
            return
        path = self.paths.get(id(module))
        self.running.append(path or (self.running[-1] if self.running else ""))
        _tell_allocator(self.running[-1])

    def _module_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self.running:
            self.running.pop()
        _tell_allocator(self.running[-1] if self.running else "")

    def _phase_ends(self, old: Phase, new: Phase) -> None:
        for card in self._cards():
            self._keep_phase(card, old)
            self.marks.setdefault(card, []).append((_allocations(card), str(new)))
        if old is Phase.BACKWARD:
            self._label_gradients()

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers.add(optimizer)
        self.names[1][type(optimizer).__name__] = None
        if self.model is not None and self.model() is None:
            self._discovery.look()
        self._label([p for group in optimizer.param_groups for p in group["params"]], Category.PARAMETER)
        self._label_gradients()

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        if self.model is not None and self.count < LABELLED:
            self._label(state_tensors(optimizer), Category.OPTIMIZER_STATE)

    def _inputs(self, args: tuple, kwargs: dict) -> None:
        self._label(tensors_in((args, kwargs)), Category.INPUT)

    def _weights(self) -> list[torch.Tensor]:
        model = None if self.model is None else self.model()
        return [] if model is None else [*model.parameters(), *model.buffers()]

    def _label_gradients(self) -> None:
        found = [p.grad for o in self.optimizers for group in o.param_groups for p in group["params"]]
        found += [tensor.grad for tensor in self._weights() if tensor.is_leaf]
        self._label([gradient for gradient in found if gradient is not None], Category.GRADIENT)

    def _label(self, tensors: Any, category: Category) -> None:
        if self.count >= LABELLED:
            return
        numbers: dict[int, int] = {}
        for storage in (storage for tensor in tensors for storage in _storages(tensor)):
            if storage.device.type == "cuda" and storage.data_ptr():
                card = storage.device.index
                if card not in numbers:
                    numbers[card] = _allocations(card)
                labels = self.labels.setdefault(card, {}).setdefault(storage.data_ptr(), [])
                labels.append((numbers[card], category))

    def _peaks(self, card: int) -> tuple[int, int]:
        """The highest allocated and reserved bytes since the last call."""
        found = self.peaks.of_span(card)
        return found["allocated_bytes"]["all"]["peak"], found["reserved_bytes"]["all"]["peak"]

    def _keep_phase(self, card: int, phase: Phase) -> None:
        phases = self.phases.setdefault(card, {})
        phases[str(phase)] = _higher(phases.get(str(phase), (0, 0)), self._peaks(card))

    def _keep_outside(self, card: int, peaks: tuple[int, int]) -> None:
        self.outside[card] = _higher(self.outside.get(card, (0, 0)), peaks)

    def _keep_step(self, card: int) -> None:
        phases = self.phases.pop(card, {})
        if not phases:
            return
        phase = max(phases, key=lambda name: phases[name][0])
        reserved = max(size for _, size in phases.values())
        highest = {name: size for name, (size, _) in phases.items() if size}
        self.steps.setdefault(card, []).append(StepOfRun(phases[phase][0], reserved, phase, "", highest))
        number = _allocations(card)
        self.spans.setdefault(card, []).append((self.begun.get(card, 0), number))
        self.begun[card] = number
        for kept in (self.steps[card], self.spans[card]):
            del kept[:-STEPS]

    def _step_ends(self) -> None:
        self._sample_host()
        for card in self._cards():
            self._keep_phase(card, self.stage.phase)
            self._keep_step(card)
        self.count += 1
        if not self.ended and self.count == self.settings.steps:
            self.finish(stopped=True)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(0)  # the script's own end would save, evaluate and wait for others

    # What is noted on the way

    def _out_of_memory(self, card: int, asked: int, limit: int, free: int) -> None:
        if self.refused is not None:
            self.caught.setdefault(self._refused_on, []).append(self.refused)
        backward = current_node() is not None or self.stage.phase is Phase.BACKWARD
        phase = str(Phase.BACKWARD if backward else self.stage.phase) if self.model else BEFORE
        call = users_frame(_running())
        at = "" if call is None else str(call)
        self.refused = RefusedBytes(asked, at, self.count + 1 if self.model else 0, phase)
        self._refused_on, self._refused_after = card, self.count

    def _script_fails(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if self.refused is not None and is_out_of_memory(error):
            self.refused = replace(self.refused, message=" ".join(str(error).split()))
        self._excepthook(kind, error, trace)

    def _numbers_are_read(self, size: int, source: int) -> None:
        if not self._deciding.is_true(source):
            self._note_read()

    def _note_read(self) -> None:
        if not self.ended:
            # Of a library's code its own line says more than the script's, which calls it.
            call = next((frame for frame in _running() if not is_torchs(frame)), None)
            if call is not None:
                self.reads[call] = self.reads.get(call, 0) + 1

    def _sample_host(self) -> None:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        sizes = dict(line.split(":", 1) for line in status.splitlines() if line.startswith(("VmHWM", "VmRSS")))
        highest = max(int(text.split()[0]) << 10 for text in sizes.values())
        self.host_peak = max(self.host_peak, highest - int(self._resident()))

    # Writing

    def _write(self, stopped: bool) -> None:
        rank = int(os.environ.get("RANK", 0))
        cards = self._cards()
        snapshot = torch.cuda.memory._snapshot() if cards else {}
        if self.settings.snapshot is not None and cards:
            path = Path(self.settings.snapshot)
            path = path if rank == 0 else path.with_name(f"{path.stem}-rank{rank}{path.suffix}")
            torch.cuda.memory._dump_snapshot(str(path))
        for card in cards:
            found = self._of_card(snapshot, card, rank, stopped)
            path = Path(self.settings.folder) / f"{rank:05d}-{self.pid}-{card}.json"
            beside = path.with_suffix(".part")
            beside.write_text(json.dumps(asdict(found)), encoding="utf-8")
            os.replace(beside, path)

    def _of_card(self, snapshot: Mapping[str, Any], card: int, rank: int, stopped: bool) -> RankOfRun:
        history = History.of(snapshot, card, _allocations(card))
        steps = self.steps.get(card, [])
        found = history.highest(self.spans.get(card, []))
        places = ["" if at is None else _place(history.events[at]) for at in found]
        steps = [replace(step, at=place) for step, place in zip(steps, places, strict=True)]
        outside = self.outside.get(card, (0, 0))
        peak = max(outside[0], *(step.peak_bytes for step in steps), 0)
        (at,) = history.highest([(-1, history.last)])
        by_category, by_module, by_line = self._shares(card, [] if at is None else history.in_use(at), peak)
        return RankOfRun(
            rank=rank,
            card=card,
            peak_bytes=peak,
            reserved_bytes=max(outside[1], *(step.reserved_bytes for step in steps), 0),
            host_peak_bytes=self.host_peak,
            outside_bytes=outside[0],
            steps=tuple(steps),
            by_category=by_category,
            by_module=by_module,
            by_line=by_line,
            out_of_memory=self._refusal(card),
            caught=self._caught(card),
            read_values=tuple(
                ReadValue(str(call), linecache.getline(call.filename, call.line).strip(), count)
                for call, count in sorted(self.reads.items(), key=lambda item: -item[1])
            ),
            curve=tuple(history.curve(POINTS)),
            model=" and ".join(self.names[0]),
            optimizer=" and ".join(self.names[1]) or None,
            stopped=stopped,
        )

    def _refusal(self, card: int) -> RefusedBytes | None:
        """The last want of memory, unless a step has ended since: a script may try again with less."""
        if self.refused is None or self._refused_on != card or self.count > self._refused_after:
            return None
        return self.refused

    def _caught(self, card: int) -> tuple[RefusedBytes, ...]:
        """The wants of memory after which the script went on."""
        found = self.caught.get(card, [])
        if self.refused is not None and self._refused_on == card and self._refusal(card) is None:
            return (*found, self.refused)
        return tuple(found)

    def _shares(
        self, card: int, blocks: Sequence[UsedMemory], peak: int
    ) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """The bytes in use at the peak by category, by module and by the user's line. Each adds up to the peak."""
        held: dict[int, Category] = {}
        weights = self._weights()
        weights += [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Parameter)]  # of other models
        states = [tensor for optimizer in self.optimizers for tensor in state_tensors(optimizer)]
        for tensors, category in ((states, Category.OPTIMIZER_STATE), (weights, Category.PARAMETER)):
            held |= {s.data_ptr(): category for t in tensors for s in _storages(t) if s.device.index == card}
        found: tuple[dict[str, int], dict[str, int], dict[str, int]] = ({}, {}, {})
        for block in blocks:
            keys = (self._category(card, block, held), block.module, place_of(block.frames))
            for shares, key in zip(found, keys, strict=True):
                shares[key] = shares.get(key, 0) + block.bytes
        rest = peak - sum(block.bytes for block in blocks)
        for shares in found if rest > 0 else ():
            shares["rounding of blocks"] = rest
        by_category, by_module, by_line = (dict(sorted(f.items(), key=lambda item: -item[1])) for f in found)
        return by_category, by_module, by_line

    def _category(self, card: int, block: UsedMemory, held: Mapping[int, Category]) -> str:
        if block.address in held and block.until is None:
            return str(held[block.address])
        labels = self.labels.get(card, {}).get(block.address, ())
        at = bisect_left(labels, block.number, key=lambda label: label[0])
        # The first time that it was seen after its allocation, not what lay there after it.
        if at < len(labels) and (block.until is None or labels[at][0] <= block.until):
            return str(labels[at][1])
        marks = self.marks.get(card, ())
        at = bisect_left(marks, block.number, key=lambda mark: mark[0]) - 1
        if at < 0:
            return BEFORE if block.frames else str(Category.WORKSPACE)
        in_forward = marks[at][1] == Phase.FORWARD or block.module
        return str(Category.ACTIVATION if in_forward and block.frames else Category.WORKSPACE)


def _higher(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), max(one[1], other[1])


def _allocations(card: int) -> int:
    """How many allocations a card has seen."""
    assert _read_statistics is not None
    statistics = _read_statistics(card)
    return statistics["allocation"]["all"]["allocated"] if statistics else 0


def _storages(tensor: torch.Tensor) -> list[Any]:
    """The memory of a tensor: that of its local part where it is distributed, of its parts where it is a subclass."""
    local: Any = getattr(tensor, "_local_tensor", tensor)
    if hasattr(local, "__tensor_flatten__"):
        names, _ = local.__tensor_flatten__()
        return [storage for name in names for storage in _storages(getattr(local, name))]
    try:
        return [local.untyped_storage()]
    except (NotImplementedError, RuntimeError):  # no memory of its own: meta tensors, some subclasses
        return []


def _tell_allocator(path: str) -> None:
    """Note the running module with the allocations that follow."""
    note = getattr(torch._C, "_cuda_setMemoryMetadata", None)  # PyTorch 2.11 has none
    if note is not None:
        note(path)


def _running() -> list[Frame]:
    """The calls that run now, innermost first: of this thread, and behind them of the main one. None is ours."""
    found = []
    begins: list[FrameType | None] = [sys._getframe(1)]
    main = threading.main_thread()
    # In the main thread its frame would be this call's own: a cycle that holds the locals of all callers.
    if threading.current_thread() is not main:
        begins.append(sys._current_frames().get(main.ident or 0))
    for frame in begins:
        while frame is not None:
            code = frame.f_code
            if code.co_filename != __file__ and not code.co_filename.startswith(OURS):
                found.append(Frame(code.co_filename, frame.f_lineno, code.co_name))
            frame = frame.f_back
    return found


def _place(event: Mapping[str, Any]) -> str:
    return place_of(event.get("frames") or ()) or str(event.get("user_metadata") or "")
