"""The messages that the ranks of FSDP2 exchange in the forward and backward of a step, counted as it is sent.

Each rank sends the same messages in the same order: gathered weights and reduced gradients of whole units, whose sizes
no batch changes. So the count of a rank that was stopped in the middle says what the others still wait for, and any
forward and backward of the same modules sends it, however few tokens it has: what was sent already is left out.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from tightfit.errors import RecoveryError
from tightfit.runtime.internals import groups_of_state, reset_fsdp2, send_messages_by, states_of_fsdp2


class _Message(NamedTuple):
    kind: str
    given: int  # numbers of the tensor that goes out
    received: int
    dtype: Any


class SentMessages:
    """Mutable: the messages of one step, as this rank has sent them, and those of the last whole step for each number
    of micro-batches. Made when the model is in shards.
    """

    def __init__(self, model: nn.Module):
        self._states = states_of_fsdp2(model.modules())
        self._whole: dict[int, list[_Message]] = {}
        self._count = 0
        self._sent: list[_Message] = []
        self._known: list[_Message] | None = None  # of a step that is sent again: what it has to send
        self._place: int | None = None  # in the forward and backward that run; None between two steps
        self._is_sending = False
        for state in self._states:
            for group in groups_of_state(state):
                send_messages_by(group, self._send)

    @property
    def is_torn(self) -> bool:
        """True if an error came out of a message itself, of which nobody knows whether the others have it."""
        return self._is_sending

    def forget(self) -> None:
        """Another plan is in force, under which a step may send others."""
        self._whole.clear()

    def begin(self, micro_batches: int) -> None:
        """A step begins: nothing of it is sent."""
        self._count, self._sent, self._known, self._place = micro_batches, [], None, 0

    def begin_again(self) -> None:
        """After an error: FSDP2 is as before the step, and what was sent in it is not sent again."""
        reset_fsdp2(self._states)
        self._known = [*self._sent, *self._whole.get(self._count, [])[len(self._sent) :]]
        self._place = 0

    def end(self) -> None:
        """Forward and backward have ended. Raises `RecoveryError` where they sent less than is known of the step."""
        assert self._place is not None, "a step has begun"
        if self._known is None:
            self._whole[self._count] = self._sent
        elif self._place < len(self._known):
            raise _differs(self._place)
        self._place = None

    def _send(self, kind: str, own: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        if self._place is None:
            return own(**arguments)
        given, received = arguments["input_tensor"], arguments["output_tensor"]
        message, place = _Message(kind, given.numel(), received.numel(), given.dtype), self._place
        if self._known is not None and place < len(self._known) and message != self._known[place]:
            raise _differs(place)
        if place < len(self._sent):
            received.zero_()  # any numbers would do, but for those that are none
            work = None
        else:
            self._is_sending = True
            work = own(**arguments)
            self._is_sending = False
            self._sent.append(message)
        self._place = place + 1
        return work


def _differs(place: int) -> RecoveryError:
    return RecoveryError(
        f"a rank is out of memory, and message {place + 1} of its step is another one for few tokens, so the "
        "rest cannot be sent: go on with --resume and a lower memory.budget"
    )
