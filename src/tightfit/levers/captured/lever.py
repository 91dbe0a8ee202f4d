"""The lever by hand: `capture(model, "layers.*")`."""

import functools
import gc
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from tightfit.errors import CompileError, LeverError
from tightfit.levers.activity import activity, simulators
from tightfit.levers.captured.graph import CapturedGraph
from tightfit.levers.captured.observers import observers
from tightfit.levers.compiled import own_forward
from tightfit.levers.handle import Applied
from tightfit.levers.recompute.lever import install, matching_modules
from tightfit.levers.recompute.policy import KEEP_ALL, Policy
from tightfit.levers.recompute.region import FrugalForward, RecordedForward
from tightfit.levers.recompute.saved import hooks_around
from tightfit.memory.allocator import collector_off
from tightfit.runtime.compilers import demand_compiler, device_of
from tightfit.runtime.internals import (
    autocast_is_active,
    compiled_function_in,
    compiler_is_disabled,
    dispatch_is_watched,
    drop_logs_of_limits,
    fake_mode_is_active,
    ignore_hooks_around_selective_checkpoints,
    ignore_questions_for_gradients,
    operator_switches,
    recording_failures,
    recording_settings,
    without_dynamo,
)
from tightfit.runtime.module_paths import module_at
from tightfit.runtime.nested import tensors_in
from tightfit.runtime.outside import outside
from tightfit.runtime.simulation import simulation

MOST_SHAPES = 8  # shapes of inputs for which blocks of one kind are captured, as in PyTorch's compiler
MOST_CAPTURES = 3 * MOST_SHAPES  # of one block: in training and not, with gradients of its input and without


def capture(model: nn.Module, pattern: str, *, policy: Policy = KEEP_ALL, compiled: bool = False) -> Applied:
    """Record every module whose path matches a glob (`"layers.*"`) once, and run it as two straight programs.

    A program calls the same ATen operators as eager code, without autograd's node for each, so results are bit-equal
    and small steps are faster. Each kind of block is captured when it first runs with gradients, and again for another
    shape. `policy` says which operators' outputs are kept for backward and which are recomputed; the default keeps what
    eager code keeps. A block that cannot be captured whole runs as without this lever, and a warning says so once.
    Gradients of gradients are not supported.

    With `compiled`, PyTorch's compiler writes the programs: what is recomputed is fused with what reads it. Results are
    then exact to rounding, and each shape takes the compiler some ten seconds. What is drawn at random is kept.

    Returns a handle whose `undo()` restores the model exactly. Raises `LeverError` if nothing matches, if the policy
    offloads, or if another lever or package has replaced a block's forward; `DeviceError` if `compiled` blocks find no
    C++ compiler, on a card no Triton.

    Example:
        >>> import tightfit, torch
        >>> blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(4)]
        >>> model = torch.nn.Sequential(*blocks)
        >>> x = torch.randn(64, 8)
        >>> plain = torch.autograd.grad(model(x).sum(), model[0][0].weight)[0]
        >>> with tightfit.capture(model, "*"):
        ...     captured = torch.autograd.grad(model(x).sum(), model[0][0].weight)[0]
        >>> torch.equal(plain, captured)
        True
    """
    paths = matching_modules(model, pattern)
    return capture_paths(model, dict.fromkeys(paths, policy), fused=paths if compiled else ())


def capture_paths(
    model: nn.Module, policies: Mapping[str, Policy], *, fused: Collection[str] = (), is_built: bool = True
) -> Applied:
    """Capture the modules at these paths, each with its policy. Programs of `fused` ones are PyTorch's compiler's, for
    this machine's device if they are built.
    """
    if fused and is_built:
        demand_compiler("compile compiles blocks", device_of(model))
    shared = shared_parameters(model, [module_at(model, path) for path in policies])
    ignore_hooks_around_selective_checkpoints()
    ignore_questions_for_gradients()
    group = Group()
    for path, policy in policies.items():
        replaced = module_at(model, path).__dict__.get("forward")
        if replaced is not None and not isinstance(replaced, FrugalForward):
            raise LeverError(f"{path}: its forward was replaced on this instance, so it shares no code with its kind")
        if policy.offloads:
            raise LeverError(f"{path}: a captured block keeps or recomputes values: use offload for others")
    forwards = []
    for path, policy in policies.items():
        block = module_at(model, path)
        shares = not shared.isdisjoint(block.parameters())
        forwards.append(CapturedForward(block, path, policy, group, shares=shares, fused=path in fused))
        function = None if path in fused else compiled_function_in(block)
        if function is not None:  # dynamo would record its operators, which round otherwise than its own code
            forwards[-1].refused = f"they call {function}, which PyTorch compiles"
        if path in fused:
            group.fused.setdefault(type(block), {})[policy] = None
    return install(forwards)


def shared_parameters(model: nn.Module, blocks: Sequence[nn.Module]) -> set[nn.Parameter]:
    """The parameters that several blocks have, or a block and another part of the model."""
    owners: dict[nn.Parameter, int] = {}
    inside = {id(module) for block in blocks for module in block.modules()}
    for block in blocks:
        for parameter in set(block.parameters()):
            owners[parameter] = owners.get(parameter, 0) + 1
    for module in model.modules():
        if id(module) not in inside:
            for parameter in module.parameters(recurse=False):
                owners[parameter] = owners.get(parameter, 0) + 1
    return {parameter for parameter, count in owners.items() if count > 1}


_UNCAPTURED = "run without being captured"


class Group:
    """The state that the blocks of one call of `capture` share. It is copied and pickled with them."""

    def __init__(self, *, quiet: bool = False):
        self.quiet = quiet  # nobody asked for captured blocks: why one is not captured is no warning
        self.shapes: dict[type[nn.Module], set[Any]] = {}  # for which a capture began here
        self.fused: dict[type[nn.Module], dict[Policy, None]] = {}  # the policies of compiled blocks, in their order
        self.told: set[str] = set()
        self.paths: dict[type[nn.Module], set[str]] = {}  # of the blocks of a kind
        self.recorded: dict[Any, set[str]] = {}  # by kind and shapes: the blocks for which a capture began

    def is_full(self, kind: type[nn.Module]) -> bool:
        """True if no further shape is captured for blocks of a kind."""
        return len(self.shapes.get(kind, ())) >= MOST_SHAPES

    def tell(self, path: str, kind: type[nn.Module], reason: str, what: str = _UNCAPTURED) -> None:
        """Warn that blocks of a kind are not captured, once for each reason."""
        if self.quiet and what == _UNCAPTURED:
            return
        text = f"blocks of {kind.__name__} {what}: {reason}"
        # A dry run has no user to warn: a plan says which blocks are not captured, and a training warns by itself.
        if text not in self.told and not outside.depth:
            self.told.add(text)
            warnings.warn(f"{path}: {text}", stacklevel=4)


class PendingCapture(threading.local):
    """The capture that this thread may begin."""

    forward: "CapturedForward | None" = None  # the block that runs
    shapes: Any = ()  # of its arguments
    settled: bool = False  # dynamo has our settings
    recorded: bool = False  # there is a program for this call


_pending = PendingCapture()
# By kind, in this process: a graph stays for further calls of `capture`, such as a training's after its plan's.
_captured_shapes: weakref.WeakKeyDictionary[type[nn.Module], set[Any]] = weakref.WeakKeyDictionary()


# By kind, in this process: paths of blocks with a function of their own. Blocks that know their number (`layer_idx`)
# are recorded each for itself, and dynamo would compare a call with the records of all others first.
_apart: weakref.WeakKeyDictionary[type[nn.Module], set[str]] = weakref.WeakKeyDictionary()
MOST_TOGETHER = 2  # records of one kind and shape: the first block's input may need no gradient


def is_trying() -> bool:
    """True if a block runs for which no capture is expected to begin, with dynamo's own limits."""
    return _pending.forward is not None and not _pending.settled


class SettingsAreMissing(Exception):
    """A capture begins in a call that was expected to need none."""


class ServesOthers(Exception):
    """The graph was captured under another policy, and cannot be divided again."""


class CapturedForward(FrugalForward):
    """Runs a block as the programs of its class.

    `shares` says that other parts of the model have parameters of this block.
    """

    does = "captured"

    def __init__(
        self,
        module: nn.Module,
        path: str,
        policy: Policy,
        group: Group,
        *,
        shares: bool = False,
        fused: bool = False,
    ):
        super().__init__(module, path)
        self.fused = fused
        self.policy = policy
        self.group = group
        self.shares = shares
        self.captures = 0
        self.shares_graphs = True  # with blocks of its kind that have other policies
        self.refused: str | None = None  # why it runs without being captured, if it was tried
        group.paths.setdefault(type(module), set()).add(path)
        self._recorded: RecordedForward | None = None
        self._last: weakref.ref[Any] | None = None  # the node of the last call under autocast

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_last": None, "_recorded": None}

    @without_dynamo  # of a user who compiles the model: a captured block has its own
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.steps_aside or fake_mode_is_active():
            return self.original(*args, **kwargs)
        if self.refused is not None:
            self.tell(self.refused)
            return self.stand_in(args, kwargs)
        under_autocast = autocast_is_active()
        if under_autocast and self.shares:
            self.tell("other parts of the model have their weights under autocast")
            return self.stand_in(args, kwargs)
        if under_autocast and any(tensor.requires_grad and tensor.is_leaf for tensor in tensors_in((args, kwargs))):
            return self.stand_in(args, kwargs)  # autocast casts a leaf once for all of its readers
        if hooks_around() is not None:
            return self.stand_in(args, kwargs)  # a program saves no tensor that eager code would
        player = simulators.captured
        if player is None and dispatch_is_watched():
            player = observers()
            if player is None or self.fused:
                # Dynamo leaves code alone under a dispatch mode, and no mode sees what compiled code allocates.
                return self.stand_in(args, kwargs)
        kind = type(self.module)
        if self.group.is_full(kind) and shapes_of((args, kwargs)) not in _captured_shapes.get(kind, ()):
            reason = f"their inputs have more than {MOST_SHAPES} shapes, of which the first {MOST_SHAPES} are captured"
            self.group.tell(self.path, kind, reason)
            return self.stand_in(args, kwargs)
        with self.moving_no_state(), nullcontext() if player is None else simulated_by(player):
            reason, outputs = self.attempt(args, kwargs, settled=not self.captures)
            if reason == ServesOthers.__name__:
                self.shares_graphs = False
                reason, outputs = self.attempt(args, kwargs, settled=True)
            if reason == SettingsAreMissing.__name__:
                reason, outputs = self.attempt(args, kwargs, settled=True)
        if reason is None:
            if under_autocast:
                self.note_open_call(outputs)
            return outputs
        outputs = self.stand_in(args, kwargs)  # first, since wrong code raises its own error here
        self.tell(reason)
        return outputs

    def tell(self, reason: str) -> None:
        """Run without being captured from now on, and say why."""
        self.refused = reason
        if activity.on_refused_capture is not None:
            activity.on_refused_capture(self.path, reason)  # a dry run restores what its step changes, this forward too
        self.group.tell(self.path, type(self.module), reason)

    def attempt(self, args: tuple, kwargs: dict, *, settled: bool) -> tuple[str | None, Any]:
        """The reason why the block cannot be captured, if any, and its outputs otherwise.

        Dynamo gets our settings with `settled`. That takes as long as some ten operators, so it happens only if a
        capture begins.
        """
        outer = _pending.forward, _pending.shapes, _pending.settled, _pending.recorded
        captures = self.captures
        # Dynamo's record of a call is a cycle that holds its arguments, such as a cache. It is freed while it is young.
        collector = collector_off() if settled else nullcontext()
        try:
            policy = None if self.shares_graphs else self.policy
            kind = type(self.module)
            place = self.path if self.path in _apart.get(kind, ()) else None
            captured = captured_forward(kind, policy, operator_switches(), simulation.card, place)
            _pending.forward, _pending.shapes, _pending.settled = self, (args, kwargs), settled
            _pending.recorded = False
            with collector, recording_settings() if settled else nullcontext():
                outputs = captured(self.module, *args, **kwargs)
            self.captures = max(self.captures, 1)  # another block of its kind may have been captured for it
            return None, outputs
        except ServesOthers:
            return ServesOthers.__name__, None
        except Exception as error:
            if not isinstance(error, (CompileError, *recording_failures())) and (not settled or _pending.recorded):
                raise  # of the program
            # Of code that dynamo runs while it records, such as a question about a size that depends on data, or wrong
            # code, which raises its own error again when it runs as it is written.
            reason = reason_of(error, settled=settled)
            # Its frames hold the block's inputs, which would count as memory.
            traceback.clear_frames(error.__traceback__)
            return reason, None
        finally:
            _pending.forward, _pending.shapes, _pending.settled, _pending.recorded = outer
            if self.captures != captures:
                gc.collect(2 if self.fused else 0)  # while code is written for it, that record grows old

    def note_open_call(self, outputs: Any) -> None:
        """Warn if an earlier call under autocast waits for its backward, which may be that of this one too."""
        node = None if self._last is None else self._last()
        if node is not None and waits_for_backward(node):
            self.group.tell(
                self.path,
                type(self.module),
                "two calls before one backward: within one autocast, the gradients of their weights are added in fp32, "
                "not in 16 bits as by eager code",
                what="may round differently",
            )
        made = next((tensor.grad_fn for tensor in tensors_in(outputs) if tensor.grad_fn is not None), None)
        self._last = None if made is None else weakref.ref(made)

    def note_capture(self, arguments: Any) -> None:
        """Count a capture that begins. Raises `CompileError` for the first one too many."""
        kind, shapes = type(self.module), shapes_of(arguments)
        self.group.shapes.setdefault(kind, set()).add(shapes)
        _captured_shapes.setdefault(kind, set()).add(shapes)
        recorded = self.group.recorded.setdefault((kind, shapes), set())
        recorded.add(self.path)
        if len(recorded) > MOST_TOGETHER:
            _apart.setdefault(kind, set()).update(self.group.paths[kind] - recorded)
        self.captures += 1
        if self.captures > MOST_CAPTURES:
            raise CompileError("their code depends on a number that changes from call to call")

    def stand_in(self, args: tuple, kwargs: dict) -> Any:
        """The block as eager code, by the recorder if the policy recomputes."""
        if self.policy == KEEP_ALL:
            return self.original(*args, **kwargs)
        if self._recorded is None:
            self._recorded = RecordedForward(self.module, self.path, self.policy)
            self._recorded.previous = self.previous
        return self._recorded(*args, **kwargs)


@functools.cache
def captured_forward(
    kind: type[nn.Module], policy: Policy | None, switches: tuple, card: Any, place: str | None
) -> Callable[..., Any]:
    """The captured `forward` of a class of modules under one policy, or under any (None) whose graphs can be shared.

    Under other `switches` of the process, or where CPU tensors simulate those of a `card`, the same code calls other
    operators, and dynamo does not compare them all. The block at a `place` has a function of its own.
    """
    if compiler_is_disabled():
        raise CompileError("PyTorch's compiler, which records them, is switched off (TORCHDYNAMO_DISABLE)")
    drop_logs_of_limits(is_trying)

    def record(graph: Any, inputs: Sequence[Any]) -> Any:
        block = _pending.forward
        if not _pending.settled or block is None:
            raise SettingsAreMissing
        block.note_capture(_pending.shapes)
        found = CapturedGraph(block.policy, graph, inputs)

        def run(*arguments: Any) -> Any:
            forward = _pending.forward
            assert forward is not None, "captured blocks run by their forwards"
            function = found.functions.get((forward.policy, forward.fused))
            if function is None:
                if simulators.captured is not None and forward.fused:
                    found.prepare(forward.group.fused.get(kind, ()))
                function = found.function(forward.policy, fused=forward.fused)
                if function is None:
                    raise ServesOthers
            _pending.recorded = True  # what fails from here on is the program
            if simulators.captured is not None:
                # AOTAutograd's wrapper writes new contents of buffers after the program.
                return simulators.captured.run(lambda given: function(*given), list(arguments))
            return function(*arguments)

        return run

    return torch.compile(own_forward(kind, "captured"), backend=record, fullgraph=True)


@contextmanager
def simulated_by(player: Any) -> Iterator[None]:
    """A context outside of a dry run or of observers, which `player` activates again for programs."""
    outer, simulators.captured = simulators.captured, player
    try:
        with player.outside():
            yield
    finally:
        simulators.captured = outer


def shapes_of(arguments: Any) -> tuple:
    """Shapes and dtypes of the tensors among a block's arguments."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(arguments))


def waits_for_backward(node: Any) -> bool:
    """True if autograd still holds what the backward of a block needs."""
    waits = getattr(node, "waits", None)
    if waits is not None:
        return waits  # to ask a node of ours for freed tensors would take as long as ten operators
    try:
        return bool(node.saved_tensors)
    except RuntimeError:  # freed by a backward
        return False


def reason_of(error: Exception, *, settled: bool) -> str:
    """Why a block cannot be captured, in a few words."""
    inner = getattr(error, "inner_exception", error)
    if not settled and (isinstance(inner, SettingsAreMissing) or type(error).__name__ == "FailOnRecompileLimitHit"):
        return SettingsAreMissing.__name__
    return next(iter(str(inner).strip().splitlines()), type(inner).__name__).strip()
