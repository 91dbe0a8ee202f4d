"""torch.distributed: a process group that sends nothing, and works that are done."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch


def finished_work(results: Sequence[torch.Tensor]) -> Any:
    """The `Work` of a collective that has ended with these results, as an operator returns it."""
    # Not PyTorch's `FakeWork`: its future has no value, and DDP reads the reduced bucket from there.
    future: Any = torch.futures.Future()
    future.set_result(list(results))
    library: Any = torch._C
    return library._distributed_c10d._create_work_from_future(future).boxed()


def run_kernel(operator: Any, key: str, args: tuple, kwargs: dict) -> Any:
    """Run an operator's own kernel for a dispatch key, past all modes. What it calls comes to the modes again."""
    return operator.redispatch(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)), *args, **kwargs)


def group_named(name: str) -> Any:
    """The process group of a name (`ProcessGroup.group_name`), as operators name it in their arguments."""
    library: Any = torch._C
    return library._distributed_c10d._resolve_process_group(name)


def wait_longer(group: Any, seconds: float) -> None:
    """Have a process group's messages wait so long, where it was made with another time-out."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timedelta(seconds=seconds), group)


@contextmanager
def fake_process_group(rank: int, size: int) -> Iterator[None]:
    """A context in which this process is one rank of a default process group of `size` that sends nothing.

    A default process group that is there already is put aside meanwhile.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    shown = sys.excepthook  # which is replaced by one that names the rank before each line, and never put back
    with process_groups_aside():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        try:
            yield
        finally:
            dist.destroy_process_group()
            sys.excepthook = shown


@contextmanager
def process_groups_aside() -> Iterator[None]:
    """A context in which PyTorch knows no process group. Those that it knew keep their connections, and are known again
    afterwards.
    """
    import torch.distributed.distributed_c10d as c10d

    world: Any = c10d._world
    default, count, comms = world.default_pg, world.group_count, list(getattr(world, "comms", ()))
    if default is None:
        yield
        return
    library: Any = torch._C
    known = _tables_of(world)
    held = [dict(table) for table in known]
    names = dict(world.pg_names)
    _forget(world)
    try:
        yield
    finally:
        _forget(world)
        for table, content in zip(known, held, strict=True):
            table.update(content)
        for group, name in names.items():
            library._distributed_c10d._register_process_group(name, group)
        c10d._update_default_pg(default)
        world.group_count = count
        if comms:
            world.comms.extend(comms)


def _tables_of(world: Any) -> tuple[Any, ...]:
    return (
        world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag,
        world.tags_to_pg, world.pg_coalesce_state,
    )  # fmt: skip


def _forget(world: Any) -> None:
    """Have PyTorch know no process group, and close none."""
    import torch.distributed.distributed_c10d as c10d

    c10d._update_default_pg(None)
    for table in _tables_of(world):
        table.clear()
    getattr(world, "comms", []).clear()
    library: Any = torch._C
    library._distributed_c10d._unregister_all_process_groups()
    world.group_count = 0


_forgotten: list[Any] = []


def forget_process_groups() -> None:
    """In a fork: the process groups of its parent are the parent's. Their threads are not here, so nothing is closed,
    and they are held for as long as the fork lives, since their destructors wait for these threads.
    """
    import torch.distributed.distributed_c10d as c10d

    world: Any = c10d._world
    _forgotten.extend([*world.pg_map, c10d.GroupMember.WORLD])
    _forget(world)


def default_group() -> Any:
    """The default process group of this process; None where there is none."""
    import torch.distributed as dist

    return dist.group.WORLD if process_group_exists() else None


def store_of_default_group() -> Any:
    """The key-value store over which the ranks of the default process group have met."""
    import torch.distributed.distributed_c10d as c10d

    return c10d._get_default_store()


def process_group_exists() -> bool:
    """True if this process is part of a distributed run."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


@contextmanager
def sizes_of_storages_by(resize: Any, size: Any) -> Iterator[None]:
    """A context in which `resize(storage, nbytes)` is asked before a storage is resized, and `size(storage)` before it
    says its bytes. PyTorch's own answer counts where the first returns False, the second None.
    """
    kind: Any = torch.UntypedStorage
    own_resize, own_nbytes = kind.resize_, kind.nbytes

    def resize_(self: Any, nbytes: int) -> Any:
        return self if resize(self, nbytes) else own_resize(self, nbytes)

    def nbytes(self: Any) -> int:
        simulated = size(self)
        return own_nbytes(self) if simulated is None else simulated

    kind.resize_, kind.nbytes = resize_, nbytes
    try:
        yield
    finally:
        # Both are inherited: without these attributes, the class has its base's again.
        del kind.resize_, kind.nbytes
