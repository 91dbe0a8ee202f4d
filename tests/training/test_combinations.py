"""Random combinations of levers through `tightfit train`: the losses of the plain training, or a clear refusal."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_training import settings

from command_line import tightfit
from tightfit import names as table
from tightfit.planner.levers.page import exclusions

COMBINATIONS, SEED = 40, 110
# Values that stand twice are drawn twice as often, so that most combinations run.
CHOICES: dict[str, tuple[Any, ...]] = {
    "model.attention": ("sdpa", "sdpa", "chunked"),
    "model.attention_window": (None, None, 24),
    "model.mlp": ("plain", "low_memory"),
    "model.mlp_tile": (None, None, None, 16),
    "model.dropout": (0.0, 0.1),
    "model.attention_dropout": (0.0, 0.0, 0.0, 0.1),
    "training.gradient_accumulation_steps": (1, 1, 2, "auto"),
    "training.optimizer": ("adamw", "offloaded_adamw", "offloaded_adamw:0.5", "adamw_fused", "muon", "sgd"),
    "training.step_in_backward": (False, False, True),
    "training.grad_clip": (None, None, 1.0),
    "training.precision": ("fp32", "fp32", "bf16", "fp16"),
    "memory.budget": (None, "0.85x", "0.7x"),
    "memory.levers": ("exact", "rounding", ["recompute", "offload"], ["chunked_loss", "micro_batch"],
                      ["recompute", "compile"]),
    "memory.compile_blocks": (False, False, False, True),
    "memory.recompute": (None, None, None, None, {}, {"segments": 2}, {"use_reentrant": True},
                         {"segments": 2, "use_reentrant": True}),
}  # fmt: skip
# The first is a question to a plan. No experts are drawn: tests/models/test_mixture.py trains them.
NOT_DRAWN = (table.LARGEST_BATCH_AND_COUNTED_MICRO_BATCHES, table.EXPERTS_AND_TILES)
WAYS = {e for e in exclusions() if e not in NOT_DRAWN}
NO_BUDGET = "training.gradient_accumulation_steps auto takes the largest micro-batch within memory.budget"
Combination = dict[str, Any]


def drawn() -> list[Combination]:
    chance = random.Random(SEED)
    return [{key: chance.choice(values) for key, values in CHOICES.items()} for _ in range(COMBINATIONS)]


def refusals(c: Combination) -> list[str]:
    """What a refusal may say; empty for a combination that is to run."""
    recompute = c["memory.recompute"] or {}
    excluded = {
        table.STEP_IN_BACKWARD_AND_CLIPPING: c["training.step_in_backward"] and c["training.grad_clip"] is not None,
        table.STEP_IN_BACKWARD_AND_SCALER: c["training.step_in_backward"] and c["training.precision"] == "fp16",
        table.BUDGET_AND_RECOMPUTE: c["memory.budget"] is not None and c["memory.recompute"] is not None,
        table.SEGMENTS_AND_REENTRANT: "segments" in recompute and "use_reentrant" in recompute,
        table.BUDGET_AND_COMPILED_BLOCKS: c["memory.budget"] is not None and c["memory.compile_blocks"],
        table.RECOMPUTE_AND_COMPILED_BLOCKS: c["memory.recompute"] is not None and c["memory.compile_blocks"],
        table.WINDOW_AND_DROPOUT: c["model.attention_window"] is not None and c["model.attention_dropout"] > 0,
        table.CHUNKED_ATTENTION_AND_DROPOUT: c["model.attention"] == "chunked" and c["model.attention_dropout"] > 0,
    }
    without_budget = c["training.gradient_accumulation_steps"] == "auto" and c["memory.budget"] is None
    assert excluded.keys() == WAYS
    return [e.reason for e, applies in excluded.items() if applies] + [NO_BUDGET] * without_budget


def plain(c: Combination, micro_batches: int) -> Combination:
    """The same training without a lever, in as many micro-batches."""
    optimizer = c["training.optimizer"]
    return c | {
        "model.mlp": "plain",
        "model.mlp_tile": None,
        "training.gradient_accumulation_steps": micro_batches,
        "training.optimizer": "adamw" if optimizer.startswith("offloaded") else optimizer,
        "training.step_in_backward": False,
        "memory.budget": None,
        "memory.levers": "exact",
        "memory.recompute": None,
        "memory.compile_blocks": False,
    }


def rounds(c: Combination, plan: dict[str, Any] | None) -> bool:
    """Whether a lever of the combination, or of its plan, is exact to rounding only."""
    by_hand = c["model.mlp_tile"] is not None or c["memory.compile_blocks"]
    if plan is None:
        return by_hand
    # Whole, or as a block whose operators the plan has chosen.
    compiled = any(choice["action"] == "compile" or choice["compiled"] for choice in plan["choices"])
    levers = {lever["name"] for lever in plan["levers"]}
    return by_hand or compiled or not levers.isdisjoint({"chunked_loss", "tile"})


class Trainings:
    """Trains tiny models; a training that was run before is not run again."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.base = json.loads(settings(folder, training={"max_steps": 3}).model_dump_json())
        self.losses: dict[str, list[float]] = {}

    def train(self, c: Combination) -> Any:
        overrides = [
            f"{key}={yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}" for key, value in c.items()
        ]
        config = self.folder / "training.yaml"
        config.write_text(yaml.safe_dump(self.base))
        return tightfit("train", config, *overrides, "output.overwrite=true")

    def plan(self) -> dict[str, Any] | None:
        """The plan of the last training."""
        path = self.folder / "run" / "plan.json"
        return json.loads(path.read_text()) if path.exists() else None

    def last_losses(self) -> list[float]:
        lines = (self.folder / "run" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    def plain_losses(self, c: Combination) -> list[float]:
        key = json.dumps(c, sort_keys=True)
        if key not in self.losses:
            assert self.train(c).code == 0
            self.losses[key] = self.last_losses()
        return self.losses[key]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("combinations"))


@pytest.fixture(autouse=True)
def _neither_picture_nor_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.training.pictures.memory_picture", lambda *_, **__: b"")
    for page in ("plan_page", "run_page"):
        monkeypatch.setattr(f"tightfit.training.pictures.{page}", lambda *_, **__: "")
    monkeypatch.setattr("tightfit.training.run.SAMPLE_TOKENS", 1)


def test_the_draw_holds_both_what_runs_and_every_way_to_be_refused():
    said = [refusals(c) for c in drawn()]
    assert sum(not reasons for reasons in said) >= 12
    assert len({reason for reasons in said for reason in reasons}) == len(WAYS) + 1


@pytest.mark.keeps("forty-random-combinations-levers")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo asks it of what it is given
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within PyTorch's compiler
@pytest.mark.slow(reason="forty trainings and their plain counterparts")
@pytest.mark.parametrize("number", range(COMBINATIONS))
def test_levers_together_train_as_none_or_are_refused(number: int, trainings: Trainings):
    combination = drawn()[number]
    may_say = refusals(combination)
    outcome = trainings.train(combination)
    if may_say:
        assert outcome.code == 2
        assert any(reason in outcome.error for reason in may_say)
        return
    if outcome.code == 3:
        assert combination["memory.budget"] is not None
        assert "cannot fit: the least is" in outcome.error
        return
    assert outcome.code == 0, outcome.err
    losses, plan = trainings.last_losses(), trainings.plan()
    asked = combination["training.gradient_accumulation_steps"]
    counterpart = plain(combination, asked if plan is None else plan["micro_batches"])
    expected = trainings.plain_losses(counterpart)
    if rounds(combination, plan):
        assert losses == pytest.approx(expected, rel=1e-4 if combination["training.precision"] == "fp32" else 2e-2)
    else:
        assert losses == expected
