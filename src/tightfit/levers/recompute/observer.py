"""Observes the functions of PyTorch that a block calls from Python."""

from typing import Any, Protocol

from torch import nn
from torch.overrides import TorchFunctionMode

from tightfit.levers.recompute.block_programs import FunctionCall
from tightfit.levers.recompute.draft import Draft
from tightfit.levers.recompute.exposure import NOTICES
from tightfit.levers.recompute.functions import KNOWN, QUESTIONS, UNCHANGED, is_plain_view
from tightfit.levers.recompute.learner import Learner
from tightfit.levers.recompute.programs import PROGRAMS, Call, Program, learn, state_before
from tightfit.levers.recompute.repeat import Repeat
from tightfit.levers.recompute.values import RecordingScope
from tightfit.runtime.activity import now
from tightfit.runtime.internals import (
    dual_numbers_are_active,
    is_alone,
    put_back_mode,
    saves_by,
    take_away_mode,
    transforms_are_active,
)

# These modules call `torch.overrides.has_torch_function`, and use other kernels if a function mode is active. They do
# not expose memory, so a block that contains one runs without the observer.
TAKES_ANOTHER_PATH = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


class Recording(Protocol):
    """A recorder, which is a dispatch mode, as the function observer knows it."""

    region: str
    scope: RecordingScope
    call: Call | Repeat | None
    learner: Learner | None
    repeat: Repeat | None
    draft: Draft | None
    hooks: tuple[Any, Any]
    ran: list[Any] | None

    def decide(self, program: Program) -> bool | None:
        """Whether the program's results are recorded or kept, or None if that differs by operator."""
        ...

    def count(self, program: Program) -> None:
        """Count the program's operators as run."""
        ...

    def interrupt(self) -> None:
        """The block does what a program of it cannot say."""
        ...

    def show(self) -> None:
        """The block shows its memory to code outside of PyTorch."""
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
        if kwargs is None:
            kwargs = {}
        recorder = self.recorder
        run = recorder.repeat
        # Hooks of others on saved tensors may run operators, which the recorder has to see.
        if run is not None and is_alone(recorder) and saves_by(recorder.hooks):
            try:
                take_away_mode()  # first, so that it does not see the aliases of what the block reads
                again = run.next(func, args, kwargs)
                if again is not None:
                    return self.repeat(run, again, func, args, kwargs)
            finally:
                put_back_mode(recorder)
        is_pure = KNOWN.get(func)
        if is_pure is None:
            if func not in QUESTIONS:
                recorder.interrupt()
                notice = NOTICES.get(func)
                if notice is not None:
                    recorder.show()
                    notice(recorder.region, args[0])
            return func(*args, **kwargs)
        is_unchanged = UNCHANGED.get(func)
        if is_unchanged is not None and is_unchanged(args, kwargs):
            return func(*args, **kwargs)  # the dispatch mode is not in its way, as no operator runs
        if run is not None:
            recorder.interrupt()
        if recorder.learner is not None or now.on_save is not None or not is_alone(recorder):
            return func(*args, **kwargs)
        if transforms_are_active() or dual_numbers_are_active():  # then autograd saves more than it did
            return func(*args, **kwargs)
        return self.pure(func, args, kwargs) if is_pure else self.view(func, args, kwargs)

    def pure(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a pure function, without the dispatch mode if its program is known."""
        recorder = self.recorder
        call = Call.of(func, args, kwargs)
        program = None if call is None else PROGRAMS.get(call.key, call)
        if program is None or call is None or not saves_by(recorder.hooks):
            return func(*args, **kwargs)
        if isinstance(program, Call):
            return self.learn(call, func, args, kwargs)
        if recorder.ran is not None:
            return func(*args, **kwargs)
        recorded = recorder.decide(program)
        if recorded is None:
            return func(*args, **kwargs)
        recorded = recorded and bool(program.steps)
        draft = recorder.draft
        noted = None if draft is None else draft.before(args, kwargs)
        try:
            take_away_mode()
            if recorded and not call.begin(program):
                put_back_mode(recorder)  # which has to decide about an argument, and counts the operators itself
                return func(*args, **kwargs)
            recorder.count(program)
            results = self.run(call, program, func, args, kwargs) if recorded else func(*args, **kwargs)
        finally:
            put_back_mode(recorder)  # an interrupt may have come before it was taken away
        if draft is not None and noted is not None:
            draft.after(func, noted, kwargs, results, program=program, is_recorded=recorded)
        return results

    def view(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a function that gives a view without the dispatch mode."""
        recorder = self.recorder
        if not is_plain_view(args) or (kwargs and not is_plain_view((None, *kwargs.values()))):
            return func(*args, **kwargs)
        draft = recorder.draft
        noted = None if draft is None else draft.before(args, kwargs)
        try:
            take_away_mode()
            results = func(*args, **kwargs)
        finally:
            put_back_mode(recorder)
        if draft is not None and noted is not None:
            draft.after(func, noted, kwargs, results)
        return results

    def repeat(self, run: Repeat, call: FunctionCall, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a function that an earlier run of the block called, too. The dispatch mode is away."""
        recorder = self.recorder
        if call.program is not None:
            recorder.count(call.program)
        recorder.call = run
        try:
            results = func(*args, **kwargs)
        finally:
            recorder.call = None
        run.note(call, results)
        return results

    def learn(self, call: Call, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a function under the dispatch mode, and learn its program."""
        self.recorder.learner = learner = Learner(call)
        try:
            results = func(*args, **kwargs)
        finally:
            self.recorder.learner = None
        learn(call, learner.program(results))
        return results

    def run(self, call: Call, program: Program, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a function without the dispatch mode, and write its program's records."""
        recorder = self.recorder
        state = state_before(call, kwargs) if program.draws else None
        recorder.call = call
        try:
            results = func(*args, **kwargs)
        except BaseException:
            call.fail()
            raise
        finally:
            recorder.call = None
        call.note(program, state, results, recorder.scope)
        return results
