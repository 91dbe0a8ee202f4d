"""A checkpoint that all ranks of FSDP2 write together: each its own rows, in a file of its own, and rank 0 the rest.

PyTorch's `distributed.checkpoint` keeps its index as a pickle and sends pickles between ranks, so it is not used. Here
a rank says what it has written in JSON, and the transaction is that of one process: rank 0 gives the folder its name
when every file is on its disk.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tightfit.errors import OutputError
from tightfit.memory.disk import unwritable
from tightfit.planner.wrapped import is_distributed
from tightfit.ranks.processes.ranks import Ranks
from tightfit.ranks.shards import rows_of_shard
from tightfit.training.checkpoint.files import FILES, Files
from tightfit.training.checkpoint.manifest import TensorsFile, parse_tensors, shard_name, tensors_section
from tightfit.training.checkpoint.names import name_of
from tightfit.training.checkpoint.store import Checkpoints
from tightfit.training.checkpoint.tensors import write_tensors


class ShardedCheckpoints(Checkpoints):
    """Mutable: the folder of a run's checkpoints, into which all ranks save. They call each method together."""

    def __init__(self, folder: str | Path, ranks: Ranks, files: Files = FILES):
        super().__init__(folder, files)
        self._ranks = ranks

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        record: Mapping[str, Any],
        files: Mapping[str, bytes] | None = None,
        *,
        others: Any = None,
    ) -> Path:
        """Raises `OutputError` on every rank where one of them cannot write."""
        assert others is None, "they are the other ranks"
        exchange = _Exchange(self._ranks)
        rows = {name: rows_of_shard(tensor).memory for name, tensor in tensors.items() if is_distributed(tensor)}
        if self._ranks.is_first:
            plain = {name: tensor for name, tensor in tensors.items() if not is_distributed(tensor)}
            return exchange.end(lambda: super(ShardedCheckpoints, self).save(
                step, plain | rows, record, files, others=exchange
            ))  # fmt: skip
        exchange.follow(lambda part: write_tensors(self._files, part, rows))
        return self.folder / name_of(step)

    def prune(self, *arguments: Any, **options: Any) -> tuple[Path, ...]:
        return super().prune(*arguments, **options) if self._ranks.is_first else ()


class _Exchange:
    """The messages of the ranks about one checkpoint: where to write, which files were written, how it ended.

    Every rank goes through these three on every road, so none waits for another that has failed.
    """

    def __init__(self, ranks: Ranks):
        self._ranks, self.count = ranks, ranks.size - 1
        self._said = 0  # how many of the three are behind

    # Rank 0

    def begin(self, part: Path) -> None:
        self._ranks.found_by_first(lambda: str(part).encode())
        self._said = 1

    def written(self) -> tuple[TensorsFile, ...]:
        found = [json.loads(each) for each in self._ranks.gathered(b"{}")[1:]]
        self._said = 2
        for rank, each in enumerate(found, 1):
            if "error" in each:
                raise OutputError(f"rank {rank}: {each['error']}")
        return tuple(parse_tensors(each, shard_name(rank)) for rank, each in enumerate(found, 1))

    def end(self, save: Callable[[], Path]) -> Path:
        line = ""
        try:
            return save()
        except OutputError as error:
            line = str(error)
            raise
        finally:
            if line or self._said == 2:
                if self._said == 0:
                    self._ranks.found_by_first(lambda: b"")
                elif self._said == 1:
                    self._ranks.gathered(b"{}")
                self._ranks.found_by_first(lambda: line.encode())

    # The others

    def follow(self, write: Callable[[Path], TensorsFile]) -> None:
        part = self._ranks.found_by_first(lambda: b"").decode()
        if part:
            path = Path(part) / shard_name(self._ranks.rank)
            try:
                said = tensors_section(write(path), path.name)
            except OSError as error:
                said = {"error": str(unwritable(path, error))}
            except OutputError as error:
                said = {"error": str(error)}
            self._ranks.gathered(json.dumps(said).encode())
        line = self._ranks.found_by_first(lambda: b"").decode()
        if line:
            raise OutputError(line)
