"""Observes the functions of PyTorch that a block calls from Python."""

from typing import Any, Protocol

from torch import nn
from torch.overrides import TorchFunctionMode

from tightfit.levers.recompute.exposure import NOTICES
from tightfit.levers.recompute.functions import KNOWN, is_plain_view
from tightfit.levers.recompute.learner import Learner
from tightfit.levers.recompute.programs import PROGRAMS, Call, Program, learn, state_before
from tightfit.levers.recompute.values import RecordingScope
from tightfit.runtime.activity import now
from tightfit.runtime.internals import is_alone, put_back_mode, saves_by, take_away_mode, transforms_are_active

# These modules call `torch.overrides.has_torch_function`, and use other kernels if a function mode is active. They do
# not expose memory, so a block that contains one runs without the observer.
TAKES_ANOTHER_PATH = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


class Recording(Protocol):
    """A recorder, which is a dispatch mode, as the function observer knows it."""

    region: str
    scope: RecordingScope
    call: Call | None
    learner: Learner | None
    hooks: tuple[Any, Any]

    def decide(self, program: Program) -> bool | None:
        """Whether the program's results are recorded or kept, or None if that differs by operator."""
        ...

    def count(self, program: Program) -> None:
        """Count the program's operators as run."""
        ...


class FunctionObserver(TorchFunctionMode):
    """Observes one call of one block.

    It notices memory that is handed to code outside of PyTorch. And it takes the recorder's dispatch mode away from
    functions whose operators are known, and writes their records itself. Other modes see all operators, and so does the
    recorder where others watch.
    """

    def __init__(self, recorder: Recording):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        is_pure = KNOWN.get(func)
        if is_pure is None:
            notice = NOTICES.get(func)
            if notice is not None:
                notice(self.recorder.region, args[0])
            return func(*args, **kwargs)
        recorder = self.recorder
        if recorder.learner is not None or now.on_save is not None or not is_alone(recorder) or transforms_are_active():
            return func(*args, **kwargs)
        if not is_pure:
            if not is_plain_view(args) or (kwargs and not is_plain_view((None, *kwargs.values()))):
                return func(*args, **kwargs)
            try:
                take_away_mode()
                return func(*args, **kwargs)
            finally:
                put_back_mode(recorder)  # an interrupt may have come before it was taken away
        call = Call.of(func, args, kwargs)
        program = None if call is None else PROGRAMS.get(call.key, call)
        # Hooks of others on saved tensors may run operators, which the recorder has to see.
        if program is None or call is None or not saves_by(recorder.hooks):
            return func(*args, **kwargs)
        if isinstance(program, Call):
            return self.learn(call, func, args, kwargs)
        recorded = recorder.decide(program)
        if recorded is None:
            return func(*args, **kwargs)
        try:
            take_away_mode()
            if not recorded or not program.steps:
                recorder.count(program)
                return func(*args, **kwargs)
            values = call.values()
            if values is not None:
                recorder.count(program)
                return self.run(call, program, values, func, args, kwargs)
        finally:
            put_back_mode(recorder)
        return func(*args, **kwargs)

    def learn(self, call: Call, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a function under the dispatch mode, and learn its program."""
        self.recorder.learner = learner = Learner(call)
        try:
            results = func(*args, **kwargs)
        finally:
            self.recorder.learner = None
        learn(call, learner.program(results))
        return results

    def run(
        self, call: Call, program: Program, values: list[Any], func: Any, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Run a function without the dispatch mode, and write its program's records."""
        recorder = self.recorder
        state = state_before(call, kwargs) if program.draws else None
        recorder.call = call
        try:
            results = func(*args, **kwargs)
        except BaseException:
            call.hold_saved()
            raise
        finally:
            recorder.call = None
        call.note(program, values, state, results, recorder.scope)
        return results
