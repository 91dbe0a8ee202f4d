"""Offload is bit-equal to the plain run on every trap that recompute is tried with."""

import functools
import importlib
import zlib
from dataclasses import dataclass

import pytest
from trap_cases import CASES

from exactness import assert_bit_equal, run
from tightfit.levers.handle import Applied
from tightfit.levers.offload import HostShelf, OffloadSettings, offload
from tightfit.levers.recompute import Decision, OperatorKey, Policy
from tightfit.levers.recompute.lever import apply_policies, matching_modules

for cases in ("trap_state", "trap_memory", "trap_modules"):
    importlib.import_module(cases)  # registers its blocks


@dataclass(frozen=True)
class RandomThirds(Policy):
    """Keeps, recomputes or offloads each operator of a block, otherwise for each seed."""

    seed: int = 0

    def decide(self, key: OperatorKey) -> Decision:
        return list(Decision)[zlib.crc32(f"{self.seed} {key.name} {key.occurrence}".encode()) % 3]


def thirds(seed, joined, model):
    shelf = HostShelf(OffloadSettings(smallest_bytes=1))
    paths = matching_modules(model, "layers.*")
    policy = RandomThirds(seed=seed, offloads_inputs=not joined)
    return apply_policies(model, dict.fromkeys(paths, policy), shelf=shelf, joined=paths[:-1] if joined else ())


def nothing_fits(model):
    """Every lease is refused: all values stay where they are."""
    shelf = HostShelf(OffloadSettings(smallest_bytes=1))
    shelf.kept_bytes = 1  # it has been said
    shelf.open("cpu").store.budget_bytes = 0
    policy = RandomThirds(seed=3, offloads_inputs=True)
    return apply_policies(model, dict.fromkeys(matching_modules(model, "layers.*"), policy), shelf=shelf)


def whole_and_parts(model):
    inner = [path for path, _ in model.named_modules() if path.startswith("layers.") and path.count(".") == 2]
    shelf = HostShelf(OffloadSettings(smallest_bytes=1))
    parts = apply_policies(model, {path: RandomThirds(seed=4) for path in inner}, shelf=shelf)
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


def step(name, levers=None):
    case = CASES[name]
    return run(*case.build(), case.loss, backward=case.backward, levers=levers)


@functools.cache
def plain_step(name):
    return step(name)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_offload_leaves_everything_bit_equal(name, way):
    assert_bit_equal(plain_step(name), step(name, WAYS[way]))
