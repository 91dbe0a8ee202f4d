"""MiniMind's trainers under a plan, played by a stand-in of ours that has their habits."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from command_line import tightfit
from tightfit.errors import BudgetError, CannotFit, InputError, LeverError, ModelError
from tightfit.integrations.minimind import MemoryFlags, check_unwrapped, run_minimind
from tightfit.integrations.minimind.report import against_prediction, describe_run
from tightfit.planner.levers import CompiledBlocks
from tightfit.training.monitoring.script import profile_script

ROOT = Path(__file__).resolve().parents[2]
TRAINER = Path(__file__).parent / "minimind_stand_in" / "trainer"
PRETRAIN = TRAINER / "train_pretrain.py"
SCRIPTS = ("pretrain", "lora", "dpo", "distillation")


@pytest.fixture(autouse=True)
def own_modules(monkeypatch):
    """Each script imports its checkout's modules itself, as in a process of its own."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("model", "trainer_utils")]:
        del sys.modules[name]


@pytest.fixture
def alone(monkeypatch, capsys):
    """What a script prints when it runs without tightfit."""

    def run(script, *arguments):
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
        capsys.readouterr()
        runpy.run_path(str(script), run_name="__main__")
        return capsys.readouterr().out

    return run


def under(script, *arguments, **flags):
    run = run_minimind(script, arguments, MemoryFlags(**flags))
    assert run.error is None
    return run


@pytest.mark.keeps("trainer-script-minimind-kind")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("moe", [0, pytest.param(1, marks=pytest.mark.slow)])  # a plan for experts has five routings
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_trainer_within_a_budget_computes_the_same_losses_and_weights(script, moe, alone, capsys):
    path, arguments = TRAINER / f"train_{script}.py", ("--use_moe", str(moe), "--accumulation_steps", "2")
    expected = alone(path, *arguments)
    run = under(path, *arguments, memory_budget="0.7x")
    assert capsys.readouterr().out == expected
    assert expected.count("\n") == 5  # four losses to the last bit, and the weights
    # How many tokens each expert gets moves the peak a little. A plan knows five ways.
    assert run.record.peak_bytes <= run.plan.budget_bytes * (1.01 if moe else 1)
    assert any("the peak depends on it" in line for line in run.plan.assumptions) == bool(moe)
    assert run.plan.micro_batches == 2


@pytest.mark.keeps("half-plain-peak-twenty-steps")
@pytest.mark.slow  # twenty steps twice; three steps of each script are compared below
@pytest.mark.parametrize("moe", [0, 1])
def test_at_half_the_plain_peak_twenty_steps_are_identical_and_the_peak_is_within_the_budget(moe, alone, capsys):
    arguments = ("--use_moe", str(moe), "--steps", "20", "--batch_size", "8")
    expected = alone(PRETRAIN, *arguments)
    run = under(PRETRAIN, *arguments, memory_budget="0.5x")
    assert capsys.readouterr().out == expected
    assert expected.count("\n") == 21  # the losses, and the weights
    assert run.record.steps == 20
    assert run.record.peak_bytes <= run.plan.budget_bytes == run.plan.plain_peak_bytes // 2


@pytest.mark.keeps("plan-covers-own-step")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("script", "moe"), [(script, 0) for script in ("pretrain", "lora", "dpo")])
def test_the_predicted_peaks_are_those_of_the_scripts_own_step(script, moe):
    """The loss is the script's, and so are the logits that it holds on to and the models beside the trained one."""
    path, arguments = TRAINER / f"train_{script}.py", ("--accumulation_steps", "2")
    plain = profile_script(path, arguments).watch.record()
    run = under(path, *arguments, memory_budget="0.7x")
    assert run.plan.plain_peak_bytes == pytest.approx(plain.peak_bytes, rel=0.002)
    assert run.plan.peak_bytes == pytest.approx(run.record.peak_bytes, rel=0.002)


@pytest.mark.keeps("checkpoint-run-resumes-counted")
@pytest.mark.slow  # a training of another project's script
def test_the_checkpoint_that_a_run_goes_on_from_is_one_with_the_states(tmp_path, alone):
    """The script holds on to it: its states are the optimizer's, its half weights lie beside the model's."""
    alone(PRETRAIN, "--save_to", str(tmp_path / "resume.pth"))
    resumed = ("--resume_from", str(tmp_path / "resume.pth"))
    plain = profile_script(PRETRAIN, resumed).watch.record()
    run = under(PRETRAIN, *resumed, memory_budget="0.7x")
    halves = torch.load(tmp_path / "resume.pth")["model"].values()
    assert run.plan.plain_peak_bytes == pytest.approx(plain.peak_bytes + sum(h.nbytes for h in halves), rel=0.001)
    assert run.plan.peak_bytes == pytest.approx(run.record.peak_bytes, rel=0.001)


# Slow: two processes of a script without a plan, and two with one.
@pytest.mark.keeps("torchrun-two-ranks-compute")
@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--memory_budget", "0.7x"), ("--use_checkpoint",)], ids=str)
def test_two_ranks_under_torchrun_train_what_they_train_without_flags(flags):
    own = (PRETRAIN, "--accumulation_steps", "2")
    plain, planned = torchrun(*own), torchrun("-m", "tightfit", "minimind", *own, *flags)
    assert (plain.returncode, planned.returncode) == (0, 0), planned.stderr
    assert planned.stdout == plain.stdout
    assert plain.stdout.count("\n") == 5  # four losses of rank 0 to the last bit, and the weights
    said = " ".join(planned.stderr.split())
    assert said.count("MiniMindForCausalLM, ") == 1
    assert "2 ranks in DDP, this is rank 0;" in said
    assert "DDP's buckets are in the predicted peaks" in said


@pytest.mark.keeps("torchrun-two-ranks-compute")
@pytest.mark.slow  # two processes
def test_a_budget_that_no_rank_can_keep_is_one_line_of_one_rank():
    ended = torchrun("-m", "tightfit", "minimind", PRETRAIN, "--memory_budget", "0.1x")
    assert (ended.returncode, ended.stdout) == (1, "")  # torchrun's own code for a failed rank
    assert ended.stderr.count("error: ") == ended.stderr.count("cannot fit: the least is") == 1
    assert "exitcode  : 3" in ended.stderr


def torchrun(*words):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *map(str, words)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.keeps("checkpoint-run-resumes-counted")
def test_as_predicted_is_said_only_where_it_is():
    assert against_prediction(1_000_900, 1_000_000) == "as predicted"
    assert against_prediction(890 << 10, 1 << 20) == "13.1% less than the 1.00 MiB predicted"
    assert against_prediction(1_002_000, 1_000_000) == "0.2% more than the 976.56 KiB predicted"


@pytest.mark.keeps("trainer-script-minimind-kind")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("flags", [{}, {"segments": 2}, {"ffn_only": True}], ids=str)
@pytest.mark.parametrize("moe", [0, 1])
def test_blocks_recompute_by_rule_with_the_same_losses_and_weights(flags, moe, alone, capsys):
    arguments = ("--use_moe", str(moe))
    expected = alone(PRETRAIN, *arguments)
    run = under(PRETRAIN, *arguments, use_checkpoint=True, **flags)
    assert capsys.readouterr().out == expected
    assert run.record.peak_bytes < 0.9 * run.plan.plain_peak_bytes
    assert all(choice.action == "recompute" for choice in run.plan.choices)
    assert sum(choice.joined for choice in run.plan.choices) == (4 if "segments" in flags else 0)
    assert all(choice.path.endswith(".mlp") for choice in run.plan.choices) == ("ffn_only" in flags)


@pytest.mark.slow  # an interpreter for each script
def test_the_flags_stand_among_the_scripts_own(alone):
    expected = alone(PRETRAIN, "--steps", "3", "--use_moe", "1")
    outcome = tightfit("minimind", PRETRAIN, "--steps", 3, "--memory_budget", "0.7x", "--use_moe", 1)
    assert (outcome.code, outcome.out) == (0, expected)
    assert "MiniMindForCausalLM, " in outcome.err
    assert "% of the plain one" in outcome.err
    assert "step 2, recorded operator by operator" in " ".join(outcome.err.split())


@pytest.mark.keeps("step-cannot-planned-refused")
@pytest.mark.slow  # the least is searched
def test_a_budget_below_the_least_is_refused_before_a_step_is_computed():
    outcome = tightfit("minimind", PRETRAIN, "--memory_budget", "0.1x")
    assert (outcome.code, outcome.out) == (CannotFit.exit_code, "")
    assert "cannot fit: the least is" in outcome.error


@pytest.mark.keeps("step-cannot-planned-refused")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "--use_checkpoint and --memory_budget are both missing"),
        (("--use_checkpoint", "--memory_budget", "1GiB"), "exclude each other"),
        (("--memory_budget", "much"), "'much' is not an amount of memory"),
        (("--memory_budget", "1GiB", "--segments", "2"), "--segments goes with --use_checkpoint"),
        (("--use_checkpoint", "--segments", "0"), "--segments 0 is less than 1"),
        (("--use_checkpoint", "--segments", "2", "--ffn_only"), "give one of them"),
        (("--use_checkpoint", "--segments", "7"), "--segments 7 is out of range: the model has 6 blocks"),
    ],
)
def test_flags_that_cannot_be_followed_are_refused_before_a_step_is_computed(flags, said):
    outcome = tightfit("minimind", PRETRAIN, *flags)
    assert (outcome.code, outcome.out) == (2, "")
    assert said in outcome.error


# A checkout of its own says the peak of its third step by the allocator's record.
MEASURED = """

def batches(args, own=batches):
    import gc
    import sys

    from tightfit.memory.allocator import collector_off, recorded_rise, storage_bytes

    for number, given in enumerate(own(args), start=1):
        if number != 3:
            yield given
            continue
        gc.collect()
        with collector_off():
            things = gc.get_objects()
            optimizer = next(each for each in things if issubclass(type(each), torch.optim.Optimizer))
            held = [p for group in optimizer.param_groups for p in group["params"]]
            held += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
            modules = [each for each in things if issubclass(type(each), torch.nn.Module)]
            mine = [each for each in modules if any(parameter is held[0] for parameter in each.parameters())]
            held += [buffer for each in mine for buffer in each.buffers()]
            del things, modules, mine
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
            ) as profile:
                yield given
        print(f"peak={storage_bytes([*held, *given]) + recorded_rise(profile).highest}", file=sys.stderr)
"""
COMPILED = ("--use_compile", "1")
OF_THE_COMPILER = (  # within PyTorch's compiler
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
)


def compiling(test):
    for mark in OF_THE_COMPILER:
        test = mark(test)
    return test


@pytest.fixture
def measured(tmp_path):
    """`train_pretrain.py` of a checkout that measures its third step."""
    shutil.copytree(TRAINER.parent, tmp_path / "checkout", ignore=shutil.ignore_patterns("__pycache__"))
    utils = tmp_path / "checkout" / "trainer" / "trainer_utils.py"
    utils.write_text(utils.read_text("utf-8") + MEASURED, "utf-8")
    return utils.parent / PRETRAIN.name


def losses(text):
    return [float.fromhex(line.split()[1]) for line in text.splitlines() if line[0].isdigit()]


def peaks(text):
    return [int(line.removeprefix("peak=")) for line in text.splitlines() if line.startswith("peak=")]


@pytest.mark.keeps("minimind-use-compile-1")
@compiling
@pytest.mark.slow  # compiles C++ for some ten seconds
@pytest.mark.parametrize("budget", ["0.6x", "2x"])
def test_a_model_that_the_script_compiles_has_its_blocks_compiled_by_the_plan(
    budget, measured, alone, capsys, tmp_path
):
    expected = losses(alone(measured))
    saved = tmp_path / "saved.pth"
    run = under(measured, *COMPILED, "--save_to", str(saved), memory_budget=budget)
    said = capsys.readouterr()
    assert losses(said.out) == pytest.approx(expected, rel=1e-4)
    assert run.plan.lever(CompiledBlocks) is not None
    assert peaks(said.err) == [pytest.approx(run.plan.peak_bytes, abs=64)]  # counters of steps
    assert run.plan.peak_bytes <= run.plan.budget_bytes
    assert run.plan.peak_bytes < run.plan.plain_peak_bytes
    keys = list(torch.load(saved)["model"])
    assert keys
    assert all(key.startswith("_orig_mod.") for key in keys), "as the script saves a compiled model without a plan"
    text = describe_run(run)
    assert "the plan has compiled its blocks instead" in text
    assert "predicted)" not in text, "resident memory of a process is compared with nothing"


@pytest.mark.keeps("minimind-use-compile-1")
@pytest.mark.slow  # two processes that compile
def test_two_ranks_compile_blocks_under_one_plan(measured):
    plain = torchrun(PRETRAIN)
    ended = torchrun("-m", "tightfit", "minimind", measured, *COMPILED, "--memory_budget", "0.7x")
    assert (plain.returncode, ended.returncode) == (0, 0), ended.stderr
    assert losses(ended.stdout) == pytest.approx(losses(plain.stdout), rel=1e-4)
    said = " ".join(ended.stderr.split())
    assert "2 ranks in DDP, this is rank 0;" in said
    assert "the plan has compiled its blocks instead" in said
    planned = float(re.search(r"planned peak ([0-9.]+) MiB", said)[1])
    # Each rank's buckets hold a number for each of the model's, and stay where they are between steps. Gloo's own
    # memory comes and goes with its threads: up to 1% here.
    buckets = 4 * sum(p.numel() for p in MiniMind().parameters())
    assert [(peak + buckets) / 2**20 for peak in peaks(ended.stderr)] == [pytest.approx(planned, rel=0.02)] * 2


def MiniMind():
    sys.path.insert(0, str(TRAINER.parent))
    from model.model_minimind import MiniMindForCausalLM

    return MiniMindForCausalLM()


@pytest.mark.keeps("minimind-use-compile-1")
@compiling
@pytest.mark.slow  # the compiler looks at the blocks
def test_experts_that_cannot_be_compiled_run_within_the_budget_as_eager_code_and_it_is_said(capsys):
    run = under(PRETRAIN, *COMPILED, "--use_moe", "1", memory_budget="0.7x")
    assert run.plan.lever(CompiledBlocks) is None
    assert run.record.peak_bytes <= run.plan.budget_bytes
    assert "runs as eager code: cannot be compiled under a plan: Data-dependent" in " ".join(describe_run(run).split())


@pytest.mark.keeps("minimind-use-compile-1")
@compiling
def test_blocks_by_rule_and_a_compiled_model_are_refused_in_one_line():
    outcome = tightfit("minimind", PRETRAIN, *COMPILED, "--use_checkpoint")
    assert outcome.code == 2
    assert "--use_checkpoint recomputes blocks as eager code, and the script compiles the model" in outcome.error
    assert torch.compile.__module__ == "torch", "the script's end gives it back"


def test_a_model_that_is_compiled_otherwise_is_refused():
    compiled = torch.nn.Module()
    compiled._orig_mod = torch.nn.Linear(2, 2)  # what `torch.compile` wraps: to call it here would load the compiler
    with pytest.raises(ModelError, match="the model is compiled, and not by"):
        check_unwrapped(compiled)


def test_one_process_for_several_devices_is_refused():
    with pytest.raises(ModelError, match="the model is wrapped in DataParallel: start one process for each device"):
        check_unwrapped(torch.nn.DataParallel(torch.nn.Linear(2, 2)))


def test_a_script_that_is_none_of_minimind_is_refused(tmp_path):
    elsewhere = Path(shutil.copy(PRETRAIN, tmp_path))
    assert "no such script" in tightfit("minimind", tmp_path / "none.py", "--use_checkpoint").error
    assert "not a script of a MiniMind checkout" in tightfit("minimind", elsewhere, "--use_checkpoint").error


def written(folder, lines):
    """A script in a checkout of its own."""
    shutil.copytree(TRAINER.parent / "model", folder / "model", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "trainer").mkdir()
    script = folder / "trainer" / "train_other.py"
    script.write_text("import torch\nfrom torch import nn\n" + lines, encoding="utf-8")
    return script


def test_a_script_that_trains_nothing_is_told(tmp_path):
    script = written(tmp_path, "print('evaluated')")
    assert "ended without having trained a model" in tightfit("minimind", script, "--use_checkpoint").error


NO_BLOCKS = "model = nn.Linear(2, 2)\no = torch.optim.SGD(model.parameters())\nmodel(torch.ones(1, 2)).sum().backward()"
NO_BACKWARD = "model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2)) for _ in range(2)])\nmodel(torch.ones(1, 2))"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (NO_BLOCKS, "Linear has no repeated blocks"),
        (NO_BACKWARD, "train_other.py:4: no backward() follows the model's call"),
        (NO_BACKWARD + ".sum().backward()", "no optimizer holds its parameters"),
    ],
)
def test_a_step_that_cannot_be_planned_for_is_told_with_its_line(lines, said, tmp_path):
    script = written(tmp_path, lines)
    with pytest.raises(ModelError, match=re.escape(said)):
        run_minimind(script, (), MemoryFlags(use_checkpoint=True))


@pytest.mark.keeps("step-cannot-planned-refused")
def test_a_script_cannot_swallow_a_refusal(tmp_path):
    lines = "\n".join(f"    {line}" for line in NO_BLOCKS.splitlines())
    script = written(tmp_path, f"try:\n{lines}\nexcept Exception:\n    pass")
    with pytest.raises(ModelError, match="no repeated blocks"):
        run_minimind(script, (), MemoryFlags(use_checkpoint=True))


def test_flags_are_checked_where_they_are_made():
    for error, flags in [(InputError, {}), (BudgetError, {"memory_budget": "0x"})]:
        with pytest.raises(error):
            MemoryFlags(**flags)
    with pytest.raises(LeverError):
        run_minimind(PRETRAIN, (), MemoryFlags(use_checkpoint=True, segments=9))
