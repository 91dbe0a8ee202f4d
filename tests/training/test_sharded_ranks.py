"""A training in several real processes under FSDP2 is the training of one: tokens, means, files, ends."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_trainings import Nursery
from ranks_beside_one import assert_equal, assert_one_line, assert_same, at, corrections, lines, newest
from safetensors.torch import load_file
from tiny_training import settings

from tightfit.training.config import Config

SEED, MOMENTS = 19, 20
SHARDED = "training.parallel=fsdp2"


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as forked:
        yield forked


def training(folder: Path, **sections: dict[str, Any]) -> Config:
    """Rows of unlike length, and one more than ranks can share evenly; matrices whose rows do not divide either."""
    model = {"hidden_size": 18, "num_layers": 2, "num_heads": 3, "head_dim": 6, **sections.get("model", {})}
    data = {"sequence_length": 32, "buckets": True, **sections.get("data", {})}
    steps = {"max_steps": 4, "batch_size": 5, "log_every": 1, **sections.get("training", {})}
    return settings(
        folder, model=model, data=data, training=steps, memory=sections.get("memory", {}),
        checkpoint={"every_steps": 2, **sections.get("checkpoint", {})},
    )  # fmt: skip


def sharded(config: Config, name: str = "together") -> Config:
    """The same training under FSDP2, in another folder."""
    other = at(config, name)
    return other.model_copy(update={"training": other.training.model_copy(update={"parallel": "fsdp2"})})


CASES: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "fifty steps": (4, {"training": {"max_steps": 50, "batch_size": 6}}),
    "fifty steps on two": (2, {"training": {"max_steps": 50, "batch_size": 6}}),
    "a rank without samples": (2, {"training": {"batch_size": 1}}),
    "three ranks without samples": (4, {"training": {"batch_size": 1}}),
    "several micro-batches": (2, {"training": {"batch_size": 8, "gradient_accumulation_steps": 4}}),
    "fewer samples than micro-batches": (4, {"training": {"batch_size": 9, "gradient_accumulation_steps": 3}}),
    "evaluated, the best kept": (
        2, {"training": {"evaluate_every": 2}, "data": {"validation_fraction": 0.2}, "checkpoint": {"keep_best": 1}},
    ),
    "tied weights": (2, {"model": {"tie_word_embeddings": True}}),
    "packed rows": (2, {"data": {"buckets": False, "packing": "best_fit"}}),
    "fused": (2, {"training": {"optimizer": "adamw_fused"}}),
    "sgd": (2, {"training": {"optimizer": "sgd"}}),
}  # fmt: skip


@pytest.mark.keeps("fsdp2-too-ranks-see")
@pytest.mark.slow  # two trainings a case
@pytest.mark.parametrize("case", CASES)
def test_sharded_ranks_train_as_one_process_does(nursery: Nursery, tmp_path: Path, case: str):
    count, sections = CASES[case]
    config = training(tmp_path, **sections)
    assert nursery.train(config).code == 0
    together = sharded(config)
    ended = nursery.train_ranks(together, count)
    assert (ended.codes, ended.said) == ([0] * count, "")
    assert_same(config, together)
    losses = [[line.get("validation_loss") for line in lines(each)] for each in (config, together)]
    for expected, found in zip(*losses, strict=True):
        assert found == (None if expected is None else pytest.approx(expected, rel=1e-4))


@pytest.mark.keeps("run-plan-ranks-auto")
@pytest.mark.slow  # three trainings, of which one is planned for ranks
def test_ranks_run_the_plan_of_ranks(nursery: Nursery, tmp_path: Path):
    config = training(tmp_path, model={"num_layers": 4}, memory={})
    assert nursery.train(config).code == 0
    planned = sharded(training(tmp_path, model={"num_layers": 4}, memory={"budget": "0.85x"}))
    ended = nursery.train_ranks(planned, 2)
    assert (ended.codes, ended.said) == ([0, 0], "")
    assert_same(config, planned)
    plan = json.loads((Path(planned.output.folder) / "plan.json").read_text())
    assert (plan["world_size"], plan["parallel"]) == (2, "fsdp2")
    assert len(plan["rank_peak_bytes"]) == 2


@pytest.mark.keeps("run-plan-ranks-auto")
@pytest.mark.slow  # two trainings
def test_mixed_precision_trains_to_the_loss_of_autocast(nursery: Nursery, tmp_path: Path):
    config = training(tmp_path, training={"max_steps": 30, "precision": "bf16"})
    assert nursery.train(config).code == 0
    together = sharded(config)
    assert nursery.train_ranks(together, 2).codes == [0, 0]
    losses = [[line["loss"] for line in lines(each)] for each in (config, together)]
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=0.02, atol=0.02)
    weights = load_file(Path(together.output.folder) / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


@pytest.mark.keeps("training-goes-2-4")
@pytest.mark.slow  # five trainings
def test_a_training_goes_on_sharded_and_not_and_sees_each_token_once(nursery: Nursery, tmp_path: Path):
    config = training(tmp_path, training={"max_steps": 15, "schedule": "constant"})
    assert nursery.train(config).code == 0
    together = at(config, "together")
    roads = ((3, 2, "fsdp2"), (6, 4, "fsdp2"), (9, 1, "auto"), (12, 3, "fsdp2"), (15, 2, "ddp"))
    for steps, count, parallel in roads:
        ended = nursery.train_ranks(
            together, count, "--resume", f"training.max_steps={steps}", f"training.parallel={parallel}"
        )
        assert ended.codes == [0] * count, ended.said
    found = lines(together)
    assert [line["step"] for line in found] == list(range(1, 16))
    assert_same(config, together)


@pytest.mark.keeps("rank-killed-moment-changes")
@pytest.mark.slow  # two trainings a moment
def test_a_sharded_rank_killed_at_any_moment_changes_nothing_of_the_resumed_training(nursery: Nursery, tmp_path: Path):
    config = sharded(training(tmp_path, model={"dropout": 0.1}, training={"max_steps": 20, "rank_timeout": 30}), "run")
    run = Path(config.output.folder)
    whole = nursery.train_ranks(config, 2)
    assert whole.codes == [0, 0], whole.said
    expected = load_file(run / "model.safetensors")
    tokens = [line["tokens"] for line in lines(config)]
    shutil.rmtree(run)
    chance = random.Random(SEED)
    for moment in range(MOMENTS):
        after = chance.random() * whole.seconds
        ended = nursery.train_ranks(config, 2, kill=moment % 2, after=after)
        if any(ended.codes):
            assert_one_line(ended, moment % 2)
        again = nursery.train_ranks(config, 2, resume=True)
        assert again.codes == [0, 0], again.said
        assert [line["tokens"] for line in lines(config)] == tokens
        found = load_file(run / "model.safetensors")
        assert all(torch.equal(found[name], expected[name]) for name in expected), (moment, after)
        shutil.rmtree(run)


@pytest.mark.keeps("rank-killed-moment-changes")
@pytest.mark.slow  # two trainings for each signal
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_sharded_rank_ends_all_with_a_checkpoint(nursery: Nursery, tmp_path: Path, rank: int):
    config = sharded(training(tmp_path, training={"max_steps": 100_000}, checkpoint={"every_steps": None}), "run")
    ended = nursery.train_ranks(config, 2, kill=rank, by=signal.SIGTERM, after=6.0)
    assert ended.codes == [128 + signal.SIGTERM] * 2, ended.said
    assert ended.said == ""
    made = len(lines(config))
    assert newest(config).step == made
    ended = nursery.train_ranks(config, 2, "--resume", f"training.max_steps={made + 2}")
    assert ended.codes == [0, 0], ended.said
    assert len(lines(config)) == made + 2


OUT_OF_MEMORY = """
import json, os, runpy, sys
from sharded_recovering import FailingGradients
from tightfit.training.sharded.steps import ShardedStepper

own, wanted = ShardedStepper.__post_init__, json.loads(sys.argv[1]).get(os.environ["RANK"], {})


def failing(self):
    own(self)
    FailingGradients(self, {int(call): at for call, at in wanted.items()}).__enter__()


ShardedStepper.__post_init__ = failing
sys.argv = ["tightfit", "train", *sys.argv[2:]]
runpy.run_module("tightfit", run_name="__main__")
"""


OUT_OF_MEMORY_ALONE = """
import json, os, runpy, sys
from contextlib import nullcontext
from injected_out_of_memory import OutOfMemoryAt
from tightfit.training import stepper

own, calls, wanted = stepper.forward_backward, [], json.loads(sys.argv[1]).get(os.environ["RANK"], {})


def failing(*arguments, **options):
    calls.append(1)
    at = wanted.get(str(len(calls)))
    with nullcontext() if at is None else OutOfMemoryAt(at):
        return own(*arguments, **options)


stepper.forward_backward = failing
sys.argv = ["tightfit", "train", *sys.argv[2:]]
runpy.run_module("tightfit", run_name="__main__")
"""


# From the third step on, a rank may have so many bytes more than it has.
LIMITED = """
import json, os, resource, runpy, sys
import psutil
from tightfit.training.sharded import steps

own, calls, limits = steps.forward_backward, [], json.loads(sys.argv[1])


def limited(*arguments, **options):
    calls.append(1)
    if len(calls) == 3 and os.environ["RANK"] in limits:
        most = psutil.Process().memory_info().vms + limits[os.environ["RANK"]]
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    return own(*arguments, **options)


steps.forward_backward = limited
sys.argv = ["tightfit", "train", *sys.argv[2:]]
runpy.run_module("tightfit", run_name="__main__")
"""


def run_out_of_memory(
    config: Config, count: int, at: dict[str, Any], *options: str, script: str = OUT_OF_MEMORY
) -> subprocess.CompletedProcess[str]:
    """`tightfit train` under torchrun, in which forward and backward of a rank fail at an operator, by the number of
    their call; a rank that stands in for itself calls them too. Or another script.
    """
    folder, tests = Path(config.output.folder).parent, Path(__file__).resolve().parents[1]
    (folder / "failing.py").write_text(script)
    (folder / "run.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    paths = [str(tests), str(tests / "training"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [*words, str(folder / "failing.py"), json.dumps(at), str(folder / "run.yaml"), *options],
        capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip


RECOVERED: dict[str, tuple[int, dict[str, dict[int, int]], int, dict[str, Any]]] = {
    "rank 1 in forward of the first step": (2, {"1": {1: 100}}, 1, {}),
    "both in backward of a later step": (2, {"0": {3: 560}, "1": {3: 400}}, 1, {}),
    "again as a stand-in and under the tighter plan": (2, {"1": {2: 250, 3: 300, 5: 500}}, 2, {}),
    "one of three in its second micro-batch": (
        3, {"2": {2: 900}}, 1, {"batch_size": 12, "gradient_accumulation_steps": 6},
    ),
}  # fmt: skip


@pytest.mark.keeps("step-runs-out-memory")
@pytest.mark.slow  # two trainings and a plan for each
@pytest.mark.parametrize("case", RECOVERED)
def test_a_recovered_run_of_ranks_is_the_undisturbed_one(tmp_path: Path, case: str):
    count, at, failures, steps = RECOVERED[case]
    exact = {"levers": ["recompute"]}
    whole = sharded(training(tmp_path, model={"dropout": 0.1}, memory=exact, training={"batch_size": 9, **steps}))
    assert run_out_of_memory(whole, count, {}).returncode == 0
    config = sharded(whole, "failing")
    ended = run_out_of_memory(config, count, at)
    assert ended.returncode == 0, ended.stderr
    assert_equal(config, whole)
    said = [line for line in (ended.stdout + ended.stderr).splitlines() if "is undone on all ranks" in line]
    assert len(said) == failures, said
    assert all(f"rank {rank} is out of memory" in said[0] for rank in at)
    learnt = corrections(config)
    assert learnt["failures"] == failures
    result = json.loads((Path(config.output.folder) / "result.json").read_text())
    assert result["predicted_peak_bytes"] == learnt["bound_bytes"] < result["plain_peak_bytes"]


@pytest.mark.keeps("step-runs-out-memory")
@pytest.mark.slow  # two trainings of longer rows, and plans
@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are enforced on Linux")
def test_ranks_recover_within_a_real_limit_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Else the C library's arenas hold what was freed, and the room depends on their number.
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 16))
    wide = {"hidden_size": 128, "num_layers": 4, "num_heads": 4, "head_dim": 32, "max_position_embeddings": 512}
    steps = {"batch_size": 8, "max_steps": 3}
    sections = {"model": wide, "data": {"sequence_length": 512, "buckets": False}, "training": steps}
    whole = sharded(training(tmp_path, **sections, memory={"levers": ["recompute"]}))
    assert run_out_of_memory(whole, 2, {}).returncode == 0
    config = sharded(whole, "failing")
    ended = run_out_of_memory(config, 2, {"1": 60 << 20}, script=LIMITED)
    assert ended.returncode == 0, ended.stderr
    assert_equal(config, whole)
    assert corrections(config)["failures"] > 0
    assert "step 3: rank 1 is out of memory on cpu (asked for" in ended.stdout + ended.stderr


@pytest.mark.keeps("resumed-run-ranks-begins")
@pytest.mark.slow  # three trainings and a plan
def test_a_resumed_run_of_ranks_goes_on_with_the_tighter_plan(nursery: Nursery, tmp_path: Path):
    sections = {"memory": {"levers": ["recompute"]}, "training": {"schedule": "constant", "max_steps": 6}}
    whole = sharded(training(tmp_path, **sections))
    assert nursery.train_ranks(whole, 2).codes == [0, 0]
    config = sharded(whole, "failing")
    assert run_out_of_memory(config, 2, {"1": {2: 100}}, "training.max_steps=4").returncode == 0
    learnt = corrections(config)
    again = run_out_of_memory(config, 2, {}, "--resume")
    assert again.returncode == 0, again.stderr
    assert_equal(config, whole)
    assert corrections(config) == learnt
    result = json.loads((Path(config.output.folder) / "result.json").read_text())
    assert (result["resumed_from"], result["predicted_peak_bytes"]) == (4, learnt["bound_bytes"])


@pytest.mark.keeps("resumed-run-ranks-begins")
@pytest.mark.slow  # three trainings and a plan
def test_a_rank_that_alone_has_a_tighter_plan_says_so_and_is_resumed_with_it(nursery: Nursery, tmp_path: Path):
    """Under DDP, where each rank recovers by itself."""
    sections = {"memory": {"levers": ["recompute"]}, "training": {"schedule": "constant", "max_steps": 6}}
    whole = training(tmp_path, **sections)
    assert nursery.train_ranks(whole, 2).codes == [0, 0]
    config = at(whole, "failing")
    ended = run_out_of_memory(config, 2, {"1": {2: 100}}, "training.max_steps=4", script=OUT_OF_MEMORY_ALONE)
    assert ended.returncode == 0, ended.stderr
    said = [line for line in (ended.stdout + ended.stderr).splitlines() if "runs again with a tighter plan" in line]
    assert len(said) == 1, said
    assert "rank 1: step 2: out of memory" in said[0]
    of_first, learnt = (corrections(config, rank) for rank in range(2))
    assert (of_first["failures"], of_first["plan"]) == (0, None)
    assert learnt["failures"] == 1
    again = run_out_of_memory(config, 2, {}, "--resume", script=OUT_OF_MEMORY_ALONE)
    assert again.returncode == 0, again.stderr
    assert_equal(config, whole)
    assert [corrections(config, rank) for rank in range(2)] == [of_first, learnt]


def assert_one_error(ended: subprocess.CompletedProcess[str], line: str) -> None:
    """Of one rank, and its exit code of all."""
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, ended.stderr
    assert re.match(f"error: {line}", errors[0]), errors[0]
    assert ended.stderr.count("Traceback (most recent call last)") == 1  # torchrun's own
    codes = re.findall(r"^  exitcode  : (\S+)", ended.stderr, flags=re.MULTILINE)  # in torchrun's report
    assert codes, ended.stderr
    assert set(codes) == {"3"}, ended.stderr


@pytest.mark.keeps("out-memory-recovered-memory")
@pytest.mark.slow  # two processes for each
@pytest.mark.parametrize(
    ("ranks", "calls", "recover", "line"),
    [
        ("1", [3], False, "step 3: rank 1 is out of memory on cpu .*, and the step is not repeated: memory.recover is"),
        (
            "01",
            [3],
            False,
            "step 3: rank . is out of memory on cpu .*, and the step is not repeated: memory.recover is",
        ),
        (
            "1",
            range(3, 30),
            True,
            "step 3: rank 1 is out of memory .*: there is no room for the messages that the othe",
        ),
    ],
)
def test_out_of_memory_that_is_not_recovered_from_is_one_line_of_one_rank_at_once(
    tmp_path: Path, ranks: str, calls: Any, recover: bool, line: str
):
    config = sharded(training(tmp_path, training={"max_steps": 20}, memory={"recover": recover}))
    begun = time.monotonic()
    ended = run_out_of_memory(config, 2, {rank: dict.fromkeys(calls, 100) for rank in ranks})
    assert_one_error(ended, line)
    assert "go on with --resume and a lower memory.budget" in ended.stderr
    assert [line["step"] for line in lines(config)] == [1, 2]
    assert time.monotonic() - begun < config.training.rank_timeout


@pytest.mark.keeps("resumed-run-ranks-begins")
@pytest.mark.slow  # three trainings, and plans
def test_where_ranks_have_no_tighter_plan_the_steps_before_are_in_a_checkpoint(nursery: Nursery, tmp_path: Path):
    sections = {"memory": {"levers": ["recompute"]}, "checkpoint": {"every_steps": 100}}  # none but the last step's
    whole = sharded(training(tmp_path, **sections))
    assert nursery.train_ranks(whole, 2).codes == [0, 0]
    config = sharded(whole, "failing")
    every_attempt = dict.fromkeys(range(3, 60, 2), 100)  # the calls between them stand in
    ended = run_out_of_memory(config, 2, {"1": every_attempt})
    assert_one_error(
        ended, "step 3: rank 1: out of memory on cpu .*, and no tighter plan is left: tried at a predicted"
    )
    assert "step 2 is in a checkpoint: go on with --resume and other memory.*" in ended.stdout + ended.stderr
    assert [line["step"] for line in lines(config)] == [1, 2]
    again = run_out_of_memory(config, 2, {}, "--resume")
    assert again.returncode == 0, again.stderr
    assert_equal(config, whole)


@pytest.mark.keeps("fsdp2-train-line-rank")
@pytest.mark.slow  # a process for each
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("training.precision=fp16",), "precision is fp16"),
        (("training.optimizer=flash_adamw",), "flash_adamw does not step shards"),
        (("training.step_in_backward=true", "training.grad_clip=null"), "before the gradients of 2 ranks"),
        (("memory.verify=true", "memory.budget=1GiB"), "memory.verify compares whole models"),
        (("checkpoint.in_background=true",), "checkpoint.in_background is of one process"),
    ],
)
def test_what_shards_do_not_do_is_one_line_of_one_rank(
    nursery: Nursery, tmp_path: Path, words: tuple[str, ...], line: str
):
    ended = nursery.train_ranks(training(tmp_path), 2, SHARDED, *words)
    assert ended.codes == [2, 2]
    assert ended.said.count("\n") == 1, ended.said
    assert line in ended.said


@pytest.mark.keeps("fsdp2-train-line-rank")
@pytest.mark.slow  # two plans for ranks
@pytest.mark.parametrize(
    ("memory", "code", "line"),
    [
        ({"budget": "1KiB", "levers": ["micro_batch"]}, 3, "1.00 KiB"),
        ({"budget": "1GiB", "levers": ["offload"]}, 2, "memory.levers names offload"),
    ],
)
def test_a_plan_that_cannot_be_made_is_one_line_of_one_rank(
    nursery: Nursery, tmp_path: Path, memory: dict[str, Any], code: int, line: str
):
    ended = nursery.train_ranks(sharded(training(tmp_path, memory=memory)), 2)
    assert ended.codes == [code, code]
    assert ended.said.count("\n") == 1, ended.said
    assert line in ended.said


@pytest.mark.keeps("run-plan-ranks-auto")
@pytest.mark.slow  # two trainings, and two plans
def test_auto_takes_shards_where_a_budget_has_no_room_for_the_whole_model(nursery: Nursery, tmp_path: Path):
    wide = {"hidden_size": 64, "num_heads": 4, "num_layers": 4}
    config = training(tmp_path, model=wide)
    assert nursery.train(config).code == 0
    states = 16 * sum(tensor.numel() for tensor in load_file(Path(config.output.folder) / "model.safetensors").values())
    planned = at(training(tmp_path, model=wide, memory={"budget": round(0.9 * states)}), "together")
    ended = nursery.train_ranks(planned, 4)
    assert (ended.codes, ended.said) == ([0] * 4, "")
    assert_same(config, planned)
    assert json.loads((Path(planned.output.folder) / "plan.json").read_text())["parallel"] == "fsdp2"
