"""The lever `stream`: weights of blocks live on the host, and are on the device while their block runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from tightfit.planner.levers.base import Exactness, Lever, PlainStep, Role, Suggestion, refusal_without_link, register
from tightfit.units import format_bytes

if TYPE_CHECKING:
    from torch import nn

    from tightfit.devices.spec import DeviceSpec
    from tightfit.levers.handle import Applied
    from tightfit.planner.records import BlockChoice


@register
@dataclass(frozen=True)
class Stream(Lever):
    """The blocks at `paths` are streamed, `ahead` of them on their way while one runs.

    `bytes` of weights are in a file in `folder`; None: in pinned host memory, or on a CPU in a file in the folder for
    temporary files. `trained`: those that are trained too, which the optimizer updates there.
    """

    paths: tuple[str, ...]
    ahead: int
    bytes: int
    trained: bool = False
    folder: str | None = None

    name = "stream"
    title = "stream"
    summary = "weights of blocks live in pinned host memory or a file, and come while they are used"
    exactness = Exactness.EXACT
    role = Role.WEIGHTS
    on_request = True
    needs_blocks = True

    @classmethod
    def settings(cls, step: PlainStep) -> Sequence[Self]:
        """From one block to all, spread evenly: then a copy has the time of several blocks."""
        from tightfit.levers.stream import bytes_on_host, streamable_weights

        trained = step.updates_on_host
        found = streamable_weights(step.model, step.blocks, trained=trained) if step.blocks else []
        # What two blocks share goes with neither, so the bytes of several are a sum.
        sizes = {path: bytes_on_host(weights) for path, weights in zip(step.blocks, found, strict=True) if weights}
        trained = trained and any(weight.requires_grad for weights in found for weight in weights)
        chosen = [tuple(spread(list(sizes), count)) for count in range(1, len(sizes) + 1)]
        return [cls(each, 1, sum(map(sizes.__getitem__, each)), trained, step.folder) for each in chosen]

    @classmethod
    def of(
        cls,
        model: "nn.Module",
        paths: Sequence[str],
        ahead: int = 1,
        *,
        trained: bool = False,
        folder: str | None = None,
    ) -> Self:
        """The setting for these blocks of a model."""
        from tightfit.levers.stream import streamed_bytes

        return cls(tuple(paths), ahead, streamed_bytes(model, paths, trained=trained), trained, folder)

    @classmethod
    def why_not(cls, step: PlainStep) -> str | None:
        if cls.settings(step):
            return None
        return "no block has frozen weights of its own: train adapters, or update on the host (offloaded_adamw_fused)"

    @classmethod
    def refusal(cls, device: "DeviceSpec") -> str | None:
        return refusal_without_link(cls.name, device)

    def apply(self, model: "nn.Module") -> "Applied":
        """Nothing is moved before the first forward, or before `settle` of `levers/stream`."""
        from tightfit.levers.stream import install_streams

        return install_streams(model, self.paths, ahead=self.ahead, tier=self.folder, trained=self.trained)

    def sentence(self, choices: "Sequence[BlockChoice]") -> str:
        return (
            f"{len(self.paths)} of {len(choices)} blocks stream {format_bytes(self.bytes)} of "
            f"{'weights' if self.trained else 'frozen weights'} from "
            f"{'the host' if self.folder is None else f'a file in {self.folder}'}."
        )

    @classmethod
    def suggestions(cls, step: PlainStep) -> Sequence[Suggestion]:
        """All blocks whose weights may leave."""
        from tightfit.runtime.module_paths import globs_of

        found = cls.settings(step)[-1:]
        python = [
            "; ".join(
                f'tightfit.stream(model, "{glob}"{", trained=True" if setting.trained else ""})'
                for glob in globs_of(setting.paths)
            )
            for setting in found
        ]
        yaml = f"memory: {{budget: BUDGET, levers: [{cls.name}]}}"
        return [Suggestion(str(each), line, yaml, lever=each) for each, line in zip(found, python, strict=True)]

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        return cls(tuple(raw["paths"]), raw["ahead"], raw["bytes"], raw.get("trained", False), raw.get("folder"))

    def __str__(self) -> str:
        return f"{len(self.paths)} blocks streamed" if len(self.paths) != 1 else "1 block streamed"


def spread(paths: Sequence[str], count: int) -> list[str]:
    """`count` of the paths, evenly spaced; the last one is not among them unless all are."""
    return [paths[number * len(paths) // count] for number in range(count)]
