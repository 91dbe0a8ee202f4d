"""The lever `offload`: saved activations move to a file or to pinned host memory, bit for bit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from tightfit.planner.levers.base import (
    BlockKind,
    BlockLever,
    Choice,
    Exactness,
    PlainStep,
    Role,
    Suggestion,
    refusal_without_link,
    register,
)
from tightfit.planner.levers.recompute import Recompute
from tightfit.units import format_bytes

if TYPE_CHECKING:
    from tightfit.devices.spec import DeviceSpec
    from tightfit.levers.offload import HostStore
    from tightfit.levers.recompute import Policy
    from tightfit.planner.records import BlockChoice

OPTIONS_PER_KIND = 6


@register
@dataclass(frozen=True)
class Offload(BlockLever):
    """Where a plan offloads to. The plan's `choices` say which values.

    - `folder`: the folder of the file (None: the system's folder for temporary files).
    - `host`: values go to pinned host memory instead, from a CUDA device.
    - `budget_bytes`: the limit (None: half of what is free). `smallest_bytes`: smaller storages are not offloaded.
    - `bytes`: how many bytes are offloaded at the same time.
    """

    folder: str | None
    budget_bytes: int | None
    smallest_bytes: int
    bytes: int
    host: bool = False

    name = "offload"
    title = "offload"
    summary = "saved activations move to a size-limited unlinked file (CPU) or pinned host memory (CUDA)"
    exactness = Exactness.EXACT
    role = Role.INSIDE_BLOCKS
    on_request = True
    needs_blocks = True

    @classmethod
    def settings(cls, step: PlainStep) -> Sequence[Self]:
        """Empty: the bytes are known only once the choices inside blocks are solved."""
        return []

    @classmethod
    def refusal(cls, device: "DeviceSpec") -> str | None:
        return refusal_without_link(cls.name, device)

    @classmethod
    def options(cls, block: BlockKind, allowed: frozenset[str]) -> Sequence[Choice]:
        """Each keep set of a block, offloaded together with the block's inputs.

        Without the lever recompute, only the set that replays nothing.
        """
        from tightfit.levers.recompute import Policy

        choices = []
        for each in block.keep_sets(OPTIONS_PER_KIND):
            stays = block.pinned(each.kept)  # the next block holds these outputs anyway, or routing needs them
            policy = Policy(block.keys(stays), offloaded=block.keys(each.kept - stays), offloads_inputs=True)
            choices.append(Choice(policy, each.replay_seconds))
        return choices if Recompute.name in allowed else choices[:1]

    @classmethod
    def frugal_policy(cls, allowed: frozenset[str]) -> "Policy":
        from tightfit.levers.offload.lever import INPUTS_ONLY
        from tightfit.levers.recompute import OFFLOAD_ALL

        return INPUTS_ONLY if Recompute.name in allowed else OFFLOAD_ALL

    def offload_store(self) -> "HostStore":
        """An offload store with enough room for the plan.

        Raises `LeverError` if there is less room, and `OutputError` if the folder cannot be used.
        """
        from tightfit.levers.offload.store import OffloadSettings, store_with_room

        settings = OffloadSettings(self.folder, self.budget_bytes, self.smallest_bytes)
        return store_with_room(settings, self.bytes, on_host=self.host)

    def taken_out(self, choices: "Sequence[BlockChoice]") -> "tuple[BlockChoice, ...]":
        kept_in_memory = [
            replace(
                choice, kept=choice.kept + choice.offloaded, offloaded=(), offloaded_modules=(), offloads_inputs=False
            )
            for choice in choices
        ]
        return tuple(kept_in_memory)

    def sentence(self, choices: "Sequence[BlockChoice]") -> str:
        count = sum(choice.action == "offload" for choice in choices)
        file = f"a file in {self.folder or 'the folder for temporary files'}"
        where = "pinned host memory" if self.host else file
        if not self.bytes:
            smallest = format_bytes(self.smallest_bytes)
            return f"{count} of {len(choices)} blocks would offload to {where}, and hold nothing of {smallest} or more."
        return f"{count} of {len(choices)} blocks offload {format_bytes(self.bytes)} to {where}."

    @classmethod
    def suggestions(cls, step: PlainStep) -> Sequence[Suggestion]:
        """Offload everything that every block would hold."""
        if not step.blocks:
            return []
        from tightfit.levers.recompute import OFFLOAD_ALL
        from tightfit.runtime.module_paths import globs_of

        python = "; ".join(f'tightfit.offload(model, "{glob}")' for glob in globs_of(step.blocks))
        yaml = f"memory: {{budget: BUDGET, levers: [{cls.name}]}}"
        return [Suggestion(f"offload all {len(step.blocks)} blocks", python, yaml, inside=OFFLOAD_ALL)]
