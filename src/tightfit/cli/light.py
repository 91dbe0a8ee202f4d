"""What a command that only asks may leave out, and the lines of other packages that nobody asked for."""

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tightfit.cli.question import Question

# Loggers of other packages, and how a message begins or goes on that says nothing to whoever runs a command: torchao
# cannot load extensions for cards that are not here, and uses a name that PyTorch will drop.
IDLE = {
    "torchao": "Failed to load ",
    "torch.utils._pytree": "is an Enum subclass and is now natively supported",
}
_alone: list[bool] = []  # not empty where this process was started to run one command


def this_process_is_ours() -> None:
    """Called by the entry point: nothing runs here after the command."""
    _alone.append(True)


def answering(question: Question) -> AbstractContextManager[Any]:
    """For a question that is answered by dry runs: packages that those do not need are left out (`deferred`). Not where
    the user's own code is imported, nor where a plan may compile; nor in a process that others go on with.
    """
    own_code = question.model is not None and ":" in question.model
    if not _alone or own_code or "compile" in (question.levers or "") or question.config is not None:
        return nullcontext()
    from tightfit.deferred import deferred

    return deferred()


def leave_out_idle_lines() -> None:
    """Drop the messages of `IDLE` and no others."""
    for name, text in IDLE.items():
        logger = logging.getLogger(name)
        if not any(isinstance(known, _Without) for known in logger.filters):
            logger.addFilter(_Without(text))


class _Without(logging.Filter):
    """Lets everything through but messages with a text in them."""

    def __init__(self, text: str):
        super().__init__()
        self.text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return self.text not in record.getMessage()
