"""The lever `capture`: blocks run as two straight programs each, recorded once, bit for bit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from tightfit.planner.levers.base import BlockLever, Exactness, PlainStep, Role, Suggestion, register

if TYPE_CHECKING:
    from tightfit.devices.spec import DeviceSpec
    from tightfit.planner.records import BlockChoice


@register
@dataclass(frozen=True)
class CapturedBlocks(BlockLever):
    """The paths of the captured blocks. The plan's `choices` say what each of them keeps and recomputes."""

    paths: tuple[str, ...]

    name = "capture"
    title = "capture"
    summary = "blocks run as programs that were recorded once, with what recompute chose in them"
    exactness = Exactness.EXACT
    role = Role.EXECUTION
    on_request = True
    repaid_beside = "recompute"
    needs_blocks = True

    @classmethod
    def settings(cls, step: PlainStep) -> Sequence[Self]:
        return [cls(step.blocks)] if step.blocks else []

    @classmethod
    def why_not(cls, step: PlainStep) -> str | None:
        return None if step.blocks else "the model has no repeated blocks"

    @classmethod
    def refusal(cls, device: "DeviceSpec") -> str | None:
        if device.captured_seconds is None:
            return (
                f"capture is not available on {device.name}: the time of an operator in a captured block is not "
                "known: calibrate it again, or leave capture out of the levers (recompute is exact too)"
            )
        return None

    def within(self, paths: Sequence[str]) -> "CapturedBlocks":
        known = set(paths)
        return CapturedBlocks(tuple(path for path in self.paths if path in known))

    def captured(self) -> Mapping[str, bool]:
        return dict.fromkeys(self.paths, False)

    def sentence(self, choices: "Sequence[BlockChoice]") -> str:
        return f"{len(self.paths)} of {len(choices)} blocks run as captured programs."

    @classmethod
    def suggestions(cls, step: PlainStep) -> Sequence[Suggestion]:
        """None: it saves time, and next to no memory."""
        return []

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        return cls(tuple(raw["paths"]))

    def __str__(self) -> str:
        return f"{len(self.paths)} blocks captured" if len(self.paths) != 1 else "1 block captured"
