"""The ranks that train together, as the training sees them: one process alone, or several.

Control goes through gloo and the CPU, whatever the device: a rank that is lost is noticed there before anything is
handed to a card. Gradients go through NCCL on CUDA. Between two collectives a rank may do what it likes, and take its
time: nothing depends on how another one computes its share.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit.errors import PeerFailed, RankError, TightfitError
from tightfit.ranks.processes.board import Board, store_under
from tightfit.ranks.processes.ending import leave_others
from tightfit.ranks.processes.launch import Launch
from tightfit.runtime.internals import wait_longer

# Gradients below this size are added up together, in one buffer of at most `BUFFER` bytes: a collective of 16 kB costs
# as much as one of 1 MiB. Larger ones are added up where they lie.
SMALL, BUFFER = 256 << 10, 1 << 20
PATIENCE_SECONDS = 7 * 24 * 3600
_SHORTEST_NAP, _LONGEST_NAP = 1e-4, 5e-3  # seconds between two looks at a collective that runs


class Ranks:
    """This process alone. What several have to agree on is agreed, what they exchange is there."""

    rank, size = 0, 1
    waited_seconds = 0.0

    @property
    def is_several(self) -> bool:
        return self.size > 1

    @property
    def is_first(self) -> bool:
        """True if this rank writes files and speaks."""
        return self.rank == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None: ...

    def share(self, count: int) -> range:
        """Which of `count` things in their order are this rank's: even parts, the longer ones last."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def largest_share(self, count: int) -> int:
        """The things of the rank that has most."""
        return -(-count // self.size)

    def found_by_first(self, work: Callable[[], bytes]) -> bytes:
        """The result of `work` on rank 0, for all: it runs nowhere else."""
        return work()

    @contextmanager
    def first_goes_ahead(self) -> Iterator[None]:
        """Rank 0 runs what is inside before the others do: they find its caches."""
        yield

    def demand_same(self, facts: Mapping[str, str]) -> None:
        """Raise `RankError` where something differs between ranks that would make them train different things."""

    def most(self, number: int) -> int:
        """The largest of all ranks' numbers."""
        return number

    def any(self, is_so: bool) -> bool:
        return bool(self.most(int(is_so)))

    def flags(self, flags: Sequence[int]) -> list[int]:
        """The largest of all ranks' numbers, place by place."""
        return list(flags)

    def total(self, values: Sequence[float]) -> list[float]:
        """The sums of all ranks' values, place by place, in fp64."""
        return list(values)

    def gathered(self, content: bytes) -> list[bytes]:
        """The contents of all ranks, in their order."""
        return [content]

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks."""

    @contextmanager
    def talking(self) -> Iterator[None]:
        """Inside, PyTorch's own code exchanges messages with the other ranks."""
        yield


ALONE = Ranks()


class SeveralRanks(Ranks):
    """This process among several. Mutable: `waited_seconds`, which were spent waiting for others.

    A context manager: what ends it with an error tells the other ranks, so that they end too. Every method is called by
    all ranks in the same order, and raises `PeerFailed` where another rank has said that it fails, `RankError` where
    one is lost, or silent for longer than the time-out.
    """

    def __init__(self, launch: Launch, *, timeout_seconds: int, on_cuda: bool):
        self.rank, self.size, self.launch = launch.rank, launch.size, launch
        self.waited_seconds = 0.0
        self._timeout = timeout_seconds
        self.backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
        self.device_type = "cuda" if on_cuda else "cpu"
        self._board = Board(launch, timeout_seconds)
        with self._watched():
            self._board.exchanged("here", b"1")  # a rank that fails before this one begins says so there
            dist.init_process_group(
                self.backend,
                store=store_under("group", self._board.store),
                rank=launch.rank,
                world_size=launch.size,
                timeout=timedelta(seconds=timeout_seconds),
            )
            # Rank 0 may take hours over data and a plan. One that is killed closes its connections all the same, but
            # before the group is made it has none.
            self._patient: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
            wait_longer(self._patient, PATIENCE_SECONDS)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            with self._watched():
                self.most(0)  # else the launcher's store may be gone before the last one has read it
            dist.destroy_process_group()
        elif not isinstance(error, PeerFailed):
            line, code = _said_of(error)
            with suppress(RuntimeError):  # where the store is gone too, the others see closed connections
                self._board.fail(line, code)
            if isinstance(error, SystemExit):
                raise RankError(
                    f"rank {self.rank} was ended by a signal, which torchrun sends when another rank is lost: go on "
                    "with --resume",
                    code,
                ) from error

    # What rank 0 finds for all

    def found_by_first(self, work: Callable[[], bytes]) -> bytes:
        content = work() if self.is_first else b""
        size = torch.tensor([len(content)])
        self._wait(lambda: dist.broadcast(size, 0, group=self._patient, async_op=True), patient=True)
        if self.is_first:
            values = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)
        else:
            values = torch.empty(max(int(size), 1), dtype=torch.uint8)
        self._wait(lambda: dist.broadcast(values, 0, async_op=True))
        return values[: int(size)].numpy().tobytes()

    @contextmanager
    def first_goes_ahead(self) -> Iterator[None]:
        if not self.is_first:
            self.found_by_first(lambda: b"")
        yield
        if self.is_first:
            self.found_by_first(lambda: b"")

    def demand_same(self, facts: Mapping[str, str]) -> None:
        with self._watched():
            for what, fact in facts.items():
                others = self._board.exchanged(f"same/{what}", hashlib.sha256(fact.encode()).digest())
                different = [rank for rank, other in enumerate(others) if other != others[0]]
                if different:
                    raise RankError(
                        f"rank {different[0]} has another {what} than rank 0: start all ranks with one command, on the "
                        "same files and the same output.folder"
                    )

    # Collectives

    def most(self, number: int) -> int:
        return self.flags([number])[0]

    def flags(self, flags: Sequence[int]) -> list[int]:
        values = torch.tensor(flags, dtype=torch.int64)
        self._wait(lambda: dist.all_reduce(values, dist.ReduceOp.MAX, async_op=True))
        return values.tolist()

    def total(self, values: Sequence[float]) -> list[float]:
        sums = torch.tensor(values, dtype=torch.float64)
        self._wait(lambda: dist.all_reduce(sums, async_op=True))
        return sums.tolist()

    def gathered(self, content: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._wait(lambda: dist.all_gather(sizes, torch.tensor([len(content)]), async_op=True))
        longest = max(int(size) for size in sizes)
        padded = torch.frombuffer(bytearray(content.ljust(max(longest, 1), b"\0")), dtype=torch.uint8)
        found = [torch.empty_like(padded) for _ in range(self.size)]
        self._wait(lambda: dist.all_gather(found, padded, async_op=True))
        return [part[: int(size)].numpy().tobytes() for part, size in zip(found, sizes, strict=True)]

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        small: list[Tensor] = []
        for tensor in tensors:
            if tensor.nbytes > SMALL or not tensor.is_contiguous():
                self._add_up_large(tensor)
                continue
            if small and (tensor.dtype != small[0].dtype or sum(t.nbytes for t in small) + tensor.nbytes > BUFFER):
                self._add_up_small(small)
                small = []
            small.append(tensor)
        if small:
            self._add_up_small(small)

    def _add_up_large(self, tensor: Tensor) -> None:
        dense = tensor if tensor.is_contiguous() else tensor.contiguous()
        self._wait(lambda: dist.all_reduce(dense, async_op=True))
        if dense is not tensor:
            tensor.copy_(dense)

    def _add_up_small(self, tensors: list[Tensor]) -> None:
        joined = torch.cat([tensor.view(-1) for tensor in tensors])
        self._wait(lambda: dist.all_reduce(joined, async_op=True))
        parts = joined.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))

    @contextmanager
    def talking(self) -> Iterator[None]:
        """Errors of messages are raised as those of `_wait` are. A rank that waits here sees no signal: the backends'
        own time-out ends it, or the end of a process that it waits for.
        """
        try:
            yield
        except Exception as error:
            if not (isinstance(error, RuntimeError) and _is_of_messages(error)):
                leave_others(error)
                raise
            with self._watched():
                raise

    def _wait(self, begin: Callable[[], Any], *, patient: bool = False) -> None:
        """Run a collective to its end. A rank that waits sees signals, and what others say of a failure."""
        begun, nap = time.monotonic(), _SHORTEST_NAP
        with self._watched():
            work = begin()
            while not work.is_completed():
                if time.monotonic() - begun > (PATIENCE_SECONDS if patient else self._timeout):
                    raise TimeoutError
                self._board.look()
                time.sleep(nap)
                nap = min(nap * 1.5, _LONGEST_NAP)
            work.wait()
        self.waited_seconds += time.monotonic() - begun

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, TimeoutError) as error:  # those of torch.distributed are RuntimeErrors
            with suppress(RuntimeError):  # the store is gone with its rank
                self._board.look(now=True)
            raise RankError(
                f"rank {self.rank} has lost another rank, or waited {self._timeout} seconds for it "
                "(training.rank_timeout): end what is left, and go on with --resume"
            ) from error


def _is_of_messages(error: RuntimeError) -> bool:
    """True if an error is one of torch.distributed. Gloo's are plain ones, which name a file of its own."""
    words = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)


def _said_of(error: BaseException) -> tuple[str, int]:
    """An error in one line, and the exit code of a command that it ends."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return "a signal came", error.code
    line = " ".join(str(error).split()) or type(error).__name__
    return line, error.exit_code if isinstance(error, TightfitError) else 1
