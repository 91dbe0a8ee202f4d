"""How a training is spread over processes. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast, get_args

from tightfit.errors import InputError

Parallel = Literal["ddp", "fsdp2", "hsdp", "tp", "cp"]
SHARDED = frozenset({"fsdp2", "hsdp", "cp"})  # in which FSDP2 shards the weights
IN_WORDS = {
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "hsdp": "HSDP (FSDP2 within each node)",
    "tp": "tensor parallel",
    "cp": "context parallel",
}
LARGEST = 1 << 14  # ranks of one process group; the list of their peaks is as long


# Arguments of DistributedDataParallel that change no byte of a step, and may stand beside those that do.
_BYTELESS = ("device_ids", "output_device", "dim", "init_sync", "check_reduction")
_RENAMED = {"forward_sync_buffers": "broadcast_buffers"}  # in torch 2.13; the old name still works, with a warning


@dataclass(frozen=True)
class DDPSettings:
    """The arguments of `DistributedDataParallel` that change what a step allocates, with PyTorch's defaults.

    `no_sync` is the loop's: whether it adds up gradients in the last of several micro-batches only.
    """

    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = False
    broadcast_buffers: bool = True
    find_unused_parameters: bool = False
    static_graph: bool = False
    no_sync: bool = True

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "DDPSettings":
        """The settings among a user's arguments. Raises `InputError` for an argument that no rank is simulated with."""
        if not isinstance(given, Mapping):
            raise InputError(f"ddp is a {type(given).__name__}, wanted a dict of arguments of DistributedDataParallel")
        known = {each.name for each in fields(cls)}
        given = {_RENAMED.get(name, name): value for name, value in given.items() if value is not None}
        unknown = [name for name in given if name not in known and name not in _BYTELESS]
        if unknown:
            raise InputError(
                f"ddp has {unknown[0]!r}, with which no rank is predicted: leave it out, or train without a plan; "
                f"known are {', '.join(sorted(known))}"
            )
        cap = given.get("bucket_cap_mb", 1)
        if isinstance(cap, bool) or not isinstance(cap, int | float) or not cap > 0:
            raise InputError(f"ddp has bucket_cap_mb {cap!r}, wanted a number above zero, or None")
        for name in known - {"bucket_cap_mb"}:
            if not isinstance(given.get(name, False), bool):
                raise InputError(f"ddp has {name} {given[name]!r}, wanted True or False")
        return cls(**{name: value for name, value in given.items() if name in known})

    @property
    def own(self) -> dict[str, Any]:
        """The settings that are not the defaults."""
        return {each.name: v for each in fields(self) if (v := getattr(self, each.name)) != each.default}

    @property
    def splits_no_batch(self) -> bool:
        """True if several micro-batches fail: the first backward of a static graph has to send its gradients."""
        return self.static_graph and self.no_sync

    @property
    def reads_outputs(self) -> bool:
        """True if DDP copies what the model returns, in the first step at least."""
        return self.find_unused_parameters or self.static_graph


def world_of(
    size: int | None,
    nodes: int | None,
    parallel: str | None,
    ddp: Mapping[str, Any] | None = None,
    shards: "Shards | None" = None,
) -> "World | None":
    """The world that these arguments name; None for one process. Raises `InputError`."""
    if ddp is not None and parallel != "ddp":
        raise InputError("ddp has the arguments of DistributedDataParallel: give parallel='ddp' too, or leave it out")
    if size is None:
        given = [name for name, value in (("nodes", nodes), ("parallel", parallel)) if value is not None]
        if given:
            raise InputError(
                f"{given[0]} is given without world_size: say how many ranks there are, or, in a script under "
                "torchrun, call init_process_group first"
            )
        return None
    settings = DDPSettings() if ddp is None else DDPSettings.of(ddp)
    keeps = Sharding(False if shards is not None and shards.keeps_all else None)
    engine = cast(Parallel, parallel or "fsdp2")
    return World(size, engine, 1 if nodes is None else nodes, keeps, settings, shards=shards)


@dataclass(frozen=True)
class Unit:
    """A call of `fully_shard`: the paths of its modules, its arguments, and the names of the parameters that it took.

    `policy` is PyTorch's `MixedPrecisionPolicy`, `copies` how many groups of ranks hold all of its weights (HSDP).
    """

    paths: tuple[str, ...]
    policy: Any
    reshard_after_forward: bool | None
    parameters: tuple[str, ...]
    copies: int = 1


@dataclass(frozen=True)
class Shards:
    """How somebody else has sharded a model with FSDP2: the calls, inner modules first.

    `no_sync` is the loop's: whether it exchanges gradients in the last of several micro-batches only.
    """

    units: tuple[Unit, ...]
    no_sync: bool = False

    @property
    def copies(self) -> int:
        """How many times the ranks hold all weights."""
        return max((unit.copies for unit in self.units), default=1)

    @property
    def keeps_all(self) -> bool:
        """True if no unit frees its gathered weights after forward. FSDP2's own default is that the root keeps them."""
        return not any(
            unit.paths != ("",) if unit.reshard_after_forward is None else unit.reshard_after_forward
            for unit in self.units
        )


@dataclass(frozen=True)
class Sharding:
    """The choices of a plan about FSDP2, which shards each block by itself. The defaults are FSDP2's own.

    `reshard_after_forward`: whether gathered weights are freed; None: those of blocks are, those of the root are not.
    `apart`: paths of the modules beside the blocks that are sharded by themselves, and not with all that is left.
    `reduces_once`: whether gradients are exchanged in the last of several micro-batches only. `on_host`: whether
    shards, their gradients and the optimizer's states are in the host's memory, where the update runs.
    """

    reshard_after_forward: bool | None = None
    apart: tuple[str, ...] = ()
    reduces_once: bool = False
    on_host: bool = False


@dataclass(frozen=True)
class World:
    """The processes of one training, each with a device of its own, and the engine that joins them."""

    size: int
    parallel: Parallel = "fsdp2"
    nodes: int = 1
    sharding: Sharding = field(default_factory=Sharding)
    ddp: DDPSettings = field(default_factory=DDPSettings)
    keeps_units: bool = False  # whether a plan leaves alone what is apart: the model is sharded already
    shards: Shards | None = None  # of FSDP2: how a running model is sharded; None: as this package shards

    def __post_init__(self) -> None:
        """Raise `InputError` for what no training can have."""
        for name, count in (("world_size", self.size), ("nodes", self.nodes)):
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise InputError(f"{name} is {count!r}, wanted an integer of at least 1")
        if self.size > LARGEST:
            raise InputError(f"world_size is {self.size}, wanted at most {LARGEST}")
        if self.parallel not in get_args(Parallel):
            raise InputError(f"parallel {self.parallel!r} is not known: choose {' or '.join(get_args(Parallel))}")
        if self.size % self.nodes:
            raise InputError(f"{self.size} ranks cannot be spread evenly over {self.nodes} nodes: change one of them")
        if self.parallel == "hsdp" and not 1 < self.nodes < self.size:
            raise InputError(
                f"hsdp shards the weights within each node and copies them on every one, and {self.size} ranks are on "
                f"{self.nodes}: give the number of nodes, at least 2 with 2 ranks each, or take parallel='fsdp2'"
            )

    @property
    def is_sharded(self) -> bool:
        """True if FSDP2 shards the weights."""
        return self.parallel in SHARDED

    @property
    def copies(self) -> int:
        """How many times the ranks hold all weights, where these are sharded."""
        return self.nodes if self.parallel == "hsdp" else 1

    @property
    def shards_of_each(self) -> int:
        """The ranks that hold one copy of the sharded weights together."""
        return self.size // self.copies

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The ranks along each dimension of their mesh: copies of all weights, then the shards of each."""
        return (self.size,) if self.copies == 1 else (self.copies, self.shards_of_each)


# NCCL allocates past PyTorch: with 8 H100 some 10 MiB for each of up to 32 channels and each of 2 to 4 connections
# (github.com/NVIDIA/nccl/issues/1685, where 1.06 GB are in use before the first all-to-all; 1.6 GB in issues/864). The
# number of ranks moves it little, says issues/986. Nobody publishes a rule, so this is a round figure.
_COMMUNICATOR = 1 << 30


def communicator_bytes(world: World) -> int:
    """Bytes that NCCL is assumed to take of each card: for one communicator, and with copies for that of each group."""
    return _COMMUNICATOR * (1 if world.copies == 1 else 2) if world.size > 1 else 0
