"""Hashing on several cores: a hash takes longer than writing or reading the bytes that it is of."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

_WORTH_BYTES = 8 << 20  # below that threads take longer to start than a hash takes
_MOST_THREADS = 8  # more than any disk feeds


@contextmanager
def workers(nbytes: int) -> Iterator[Callable[..., Future]]:
    """`submit(call, *arguments)` for work on so many bytes in all: beside the caller, or at once where it is little.

    What has not begun when the block ends with an error does not begin any more.
    """
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    if nbytes < _WORTH_BYTES or threads == 1:
        yield at_once
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="tightfit-hash")
    try:
        yield pool.submit
    finally:
        pool.shutdown(cancel_futures=True)


def at_once(call: Callable[..., Any], *arguments: Any) -> Future:
    """The call done already. Raises what it raises."""
    done: Future = Future()
    done.set_result(call(*arguments))
    return done
