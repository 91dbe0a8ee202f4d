"""The ways to offload that every trap is tried with."""

import functools
import zlib
from dataclasses import dataclass

from torch import nn

from tightfit.levers.handle import Applied
from tightfit.levers.offload import HostStore, OffloadSettings, offload
from tightfit.levers.recompute import Decision, OperatorKey, Policy
from tightfit.levers.recompute.lever import apply_policies, matching_modules


@dataclass(frozen=True)
class RandomThirds(Policy):
    """Keeps, recomputes or offloads each operator of a block, otherwise for each seed."""

    seed: int = 0

    def decide(self, key: OperatorKey) -> Decision:
        return list(Decision)[zlib.crc32(f"{self.seed} {key.name} {key.occurrence}".encode()) % 3]


def thirds(seed: int, joined: bool, model: nn.Module) -> Applied:
    """A third of the operators of a block kept, a third recomputed, a third offloaded; in segments or not."""
    offload_store = HostStore(OffloadSettings(smallest_bytes=1))
    paths = matching_modules(model, "layers.*")
    policy = RandomThirds(seed=seed, offloads_inputs=not joined)
    return apply_policies(
        model, dict.fromkeys(paths, policy), offload_store=offload_store, joined=paths[:-1] if joined else ()
    )


def nothing_fits(model: nn.Module) -> Applied:
    """Every lease is refused: all values stay where they are."""
    offload_store = HostStore(OffloadSettings(smallest_bytes=1))
    offload_store.kept_bytes = 1  # it has been said
    offload_store.open("cpu").store.budget_bytes = 0
    policy = RandomThirds(seed=3, offloads_inputs=True)
    return apply_policies(
        model, dict.fromkeys(matching_modules(model, "layers.*"), policy), offload_store=offload_store
    )


def whole_and_parts(model: nn.Module) -> Applied:
    """Blocks and, inside each, its children: one watched region within another."""
    inner = [path for path, _ in model.named_modules() if path.startswith("layers.") and path.count(".") == 2]
    offload_store = HostStore(OffloadSettings(smallest_bytes=1))
    parts = apply_policies(model, {path: RandomThirds(seed=4) for path in inner}, offload_store=offload_store)
    return Applied([parts, offload(model, "layers.*", smallest=1)])


WAYS = {
    "everything": functools.partial(offload, pattern="layers.*", smallest=1),
    "only what blocks are given": functools.partial(offload, pattern="layers.*", smallest=1, recompute=True),
    "a third of the operators 1": functools.partial(thirds, 1, False),
    "a third of the operators 2": functools.partial(thirds, 2, False),
    "a third, in segments": functools.partial(thirds, 5, True),
    "parts within blocks": whole_and_parts,
    "no room for any": nothing_fits,
}
