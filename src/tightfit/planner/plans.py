"""A plan: the levers that keep a training step within a budget, their predicted cost, and the rejected alternatives."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.errors import InputError
from tightfit.planner.curves import Curve
from tightfit.planner.levers import lever_from_dict
from tightfit.planner.outcome import PlanRecord
from tightfit.planner.records import BlockChoice, DeviceRoom, HostMemory, PlannedProgram, Rejected, StepFigures

if TYPE_CHECKING:
    from torch import nn

    from tightfit.planner.apply import AppliedPlan

FORMAT = 7
EARLIER_FORMATS = (4, 5)  # of version 0.1.0
_WITHOUT_OPERANDS = 6  # its choices name operators without their operands, and it has no programs
# Fields that plans of one process had not, before there were plans of several ranks.
OF_RANKS = (
    "world_size", "nodes", "parallel", "reshard_after_forward", "rank_peak_bytes", "communicator_bytes", "ddp",
    "sharded_blocks", "sharded_apart", "reduces_once", "shards_on_host", "host_bytes",
)  # fmt: skip


class Plan(PlanRecord):
    """A plan that can be applied, printed, drawn, written and read."""

    curve: Curve | None

    def apply(self, model: "nn.Module") -> "AppliedPlan":
        """Apply the plan's levers to the model. The handle's `undo()`, or leaving a `with` block, removes them again.

        Raises `LeverError` if the model is not the one that was planned.
        """
        from tightfit.planner.apply import apply_plan

        return apply_plan(self, model)

    def shard(self, model: "nn.Module", mesh: Any = None) -> "nn.Module":
        """Shard the model in place with FSDP2, over the ranks of `mesh` (None: all), as the plan was made for it, with
        mixed precision for `bf16`. HSDP wants the ranks of a node in a row, as torchrun numbers them. Apply the plan
        before or after. Returns the model.

        Where the plan exchanges gradients once, `model.no_sync()` is a context for all micro-batches but the last.
        Raises `InputError` for a plan that is not of FSDP2, or of another number of ranks.
        """
        from tightfit.planner.apply import shard_as_planned

        return shard_as_planned(self, model, mesh)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON. `peak_bytes` and `step_seconds` come first, for people who read only these."""
        figures = {
            "peak_bytes": self.peak_bytes,
            "step_seconds": self.step_seconds,
            "host_seconds": self.planned.host_seconds,
            "device_seconds": self.planned.device_seconds,
            "plain_peak_bytes": self.plain_peak_bytes,
        }
        levers = [lever.to_dict() for lever in self.levers]
        own = {"levers": levers, "micro_batches": self.micro_batches, "hash": self.hash, "ddp": dict(self.ddp)}
        own |= {"host_peak_bytes": self.host_peak_bytes, "host_by_category": self.host_by_category}
        return {"format": FORMAT, **figures, **asdict(self), **own}

    def to_json(self, path: str | Path) -> None:
        """Write the plan to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def to_html(self, path: str | Path) -> None:
        """Write the plan as one self-contained HTML file. Raises `InputError` if plotly is not installed."""
        from tightfit.planner.report.plan_page import plan_page

        Path(path).write_text(plan_page(self), encoding="utf-8")

    def to_png(self, path: str | Path) -> None:
        """Draw the memory of the step, plain and planned, and the curve if there is one. Raises `InputError` if
        matplotlib is not installed.
        """
        from tightfit.planner.report.picture import memory_picture

        curve = self.curve
        picture = memory_picture(
            self.plain,
            None if self.planned == self.plain else self.planned,
            budget_bytes=self.budget_bytes,
            micro_batches=self.micro_batches,
            points=() if curve is None else curve.points,
            recipes=() if curve is None else curve.recipes,
        )
        Path(path).write_bytes(picture)

    @classmethod
    def from_json(cls, path: str | Path) -> "Plan":
        """Read a plan that `to_json` wrote. Raises `InputError` if the file is not a plan."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise InputError(f"{path}: the plan cannot be read: {error.strerror}") from error
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path}: not a plan that this version of tightfit wrote ({error})") from error

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "Plan":
        if not isinstance(raw, Mapping):
            raise ValueError(f"a {type(raw).__name__}, wanted a mapping")
        if raw.get("format") not in (*EARLIER_FORMATS, _WITHOUT_OPERANDS, FORMAT):
            raise ValueError(f"format {raw.get('format')!r}, wanted {FORMAT}")
        raw = _brought_up(raw) if raw["format"] in EARLIER_FORMATS else raw
        absent = (*OF_RANKS, "programs", "host")
        fields = {name: raw[name] for name in cls.__dataclass_fields__ if name in raw or name not in absent}
        choices = tuple(
            BlockChoice(
                **{
                    **c,
                    "kept": tuple(map(tuple, c["kept"])),
                    "kept_modules": tuple(c["kept_modules"]),
                    "offloaded": tuple(map(tuple, c["offloaded"])),
                    "offloaded_modules": tuple(c["offloaded_modules"]),
                }
            )
            for c in raw["choices"]
        )
        fields |= {
            "planned": StepFigures.from_dict(raw["planned"]),
            "plain": StepFigures.from_dict(raw["plain"]),
            "choices": choices,
            "levers": tuple(lever_from_dict(lever) for lever in raw["levers"]),
            "room": None if raw["room"] is None else DeviceRoom(**raw["room"]),
            "rejected": tuple(Rejected(**r) for r in raw["rejected"]),
            "assumptions": tuple(raw["assumptions"]),
            "rank_peak_bytes": tuple(raw.get("rank_peak_bytes", ())),
            "ddp": tuple(raw.get("ddp", {}).items()),
            "sharded_blocks": tuple(raw.get("sharded_blocks", ())),
            "sharded_apart": tuple(raw.get("sharded_apart", ())),
            "programs": tuple(
                PlannedProgram(
                    tuple(program["paths"]), tuple((name, of, size) for name, of, size in program["operators"])
                )
                for program in raw.get("programs", ())
            ),
            "curve": None if raw["curve"] is None else Curve.from_dict(raw["curve"]),
            "host": HostMemory(**raw.get("host", {})),
        }
        return cls(**fields)

    def __str__(self) -> str:
        from tightfit.planner.report.plan_tables import describe_plan

        return describe_plan(self)


def _brought_up(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A plan of version 0.1.0, which had a field for each lever, in the present format."""
    choices, levers = raw["choices"], []
    if any(choice["action"] in ("recompute", "operators") for choice in choices):
        levers.append({"name": "recompute"})
    if raw["micro_batches"] > 1:
        levers.append({"name": "micro_batch", "count": raw["micro_batches"]})
    named = {"chunked_loss": "chunked_loss", "tile": "tiled", "offload": "offload"}
    levers += [{"name": name, **raw[field]} for name, field in named.items() if raw[field] is not None]
    shares = [(choice["path"], choice["share"]) for choice in choices if choice["share"] is not None]
    if shares:
        levers.append({"name": "compile", "shares": shares})
    return {**raw, "levers": levers, "weights": raw.get("weights", ""), "room": raw.get("room")}
