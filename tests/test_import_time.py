"""What importing costs: asked of a fresh interpreter each time."""

import json
import subprocess
import sys

import pytest

from command_line import tightfit
from tightfit.runtime.idle_lines import IDLE

HEAVY = ("torch", "numpy", "transformers", "pydantic", "rich", "typer", "matplotlib", "highspy")


def fresh(code):
    """What `code` prints as JSON in an interpreter of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_importing_tightfit_imports_nothing_heavy():
    code = "import json, sys, tightfit; print(json.dumps(sorted(sys.modules)))"
    assert not set(fresh(code)) & set(HEAVY)


def test_the_help_of_every_command_is_shown_without_torch():
    code = (
        "import contextlib, io, json, sys\n"
        "from tightfit.cli.app import app\n"
        "commands = ('plan', 'train', 'score', 'runs')\n"
        "for args in (['--help'], *([name, '--help'] for name in commands), ['--version']):\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "        app(args)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    modules = fresh(code)
    assert "typer" in modules
    assert not {"torch", "numpy", "transformers"} & set(modules)


def test_the_planner_imports_nothing_heavy_beside_torch():
    code = (
        "import json, sys\n"
        "import torch\n"
        "before = set(sys.modules)\n"
        "import tightfit\n"
        "tightfit.plan, tightfit.estimate, tightfit.Plan\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    added = set(fresh(code))
    assert "tightfit.planner.api" in added
    assert not {"transformers", "tokenizers", "pydantic", "rich", "typer", "matplotlib", "plotly"} & added


UNUSED = ("torch._dynamo", "torch._inductor", "sympy", "torchao", "accelerate", "peft", "sklearn")
UNUSED_OF_DISTRIBUTED = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint")


def loaded_by(*arguments):
    """The exit code of a command, what it wrote to stderr, and the modules that it left."""
    code = (
        "import contextlib, io, json, sys\n"
        "from tightfit.cli.entry import main\n"
        f"sys.argv = ['tightfit', *{arguments!r}]\n"
        "out, err = io.StringIO(), io.StringIO()\n"
        "with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as ended:\n"
        "        code = ended.code\n"
        "print(json.dumps([code, out.getvalue(), err.getvalue(), sorted(sys.modules)]))"
    )
    code, out, err, modules = fresh(code)
    assert code == 0, err
    return out, err, set(modules)


@pytest.mark.slow  # an interpreter for each model
@pytest.mark.parametrize("model", ["mm26", "smollm2-135m", "gpt2"])
def test_an_estimate_at_the_command_line_loads_no_compiler_and_nothing_for_many_devices(model):
    ask = ("estimate", "--model", model, "--seq-len", "64", "--device", "rtx4090", "--json")
    out, err, modules = loaded_by(*ask)
    assert not modules & {*UNUSED, *UNUSED_OF_DISTRIBUTED}
    assert not any(text in err for text in IDLE.values())
    assert json.loads(out) == json.loads(tightfit(*ask).out)


@pytest.mark.slow  # two interpreters, two plans
def test_a_plan_at_the_command_line_loads_no_compiler_and_is_the_same():
    ask = ("plan", "--model", "smollm2-135m", "--seq-len", "512", "--batch-size", "8", "--device", "rtx4090", "--json")
    out, _, modules = loaded_by(*ask, "--budget", "0.9x")
    assert not modules & {*UNUSED, *UNUSED_OF_DISTRIBUTED}
    assert json.loads(out) == json.loads(tightfit(*ask, "--budget", "0.9x").out)


@pytest.mark.slow  # two interpreters, two plans
def test_a_plan_in_bf16_that_asks_whether_strides_are_dense_loads_no_sympy_and_is_the_same():
    ask = ("plan", "--model", "gpt2", "--batch-size", "8", "--seq-len", "512", "--device", "rtx3080")
    out, _, modules = loaded_by(*ask, "--precision", "bf16", "--budget", "0.8x", "--json")
    assert not modules & {*UNUSED, *UNUSED_OF_DISTRIBUTED}
    assert json.loads(out) == json.loads(tightfit(*ask, "--precision", "bf16", "--budget", "0.8x", "--json").out)


@pytest.mark.slow  # an interpreter that imports everything
def test_what_was_left_out_answers_what_it_knows_and_is_the_real_thing_afterwards():
    code = (
        "import json, sys\n"
        "import torch\n"
        "from tightfit.runtime.deferred import deferred\n"
        "with deferred() as deferral:\n"
        "    from torch.distributed.tensor import DTensor, Shard\n"
        "    from torch.fx.experimental.symbolic_shapes import guard_or_false, sym_eq\n"
        "    import torch._dynamo\n"
        "    marked = torch._dynamo.disable(lambda x: x + 1)\n"
        "    split = Shard(1) or None\n"
        "    known = isinstance(torch.ones(1), DTensor), guard_or_false(True), sym_eq((1, 2), (1, 3)), marked(1)\n"
        "from torch.distributed import tensor\n"
        "real = [hasattr(torch._dynamo, '__file__'), hasattr(tensor, '__file__')]\n"
        "print(json.dumps([known, deferral.gave_way, real]))"
    )
    assert fresh(code) == [[False, True, False, 2], None, [True, True]]


USES = (
    "name()",
    "name.other",
    "name[1]",
    "name + 1",
    "1 - name",
    "-name",
    "name < 1",
    "name == 1",
    "name in {1: 2}.values()",
    "iter(name)",
    "len(name)",
    "bool(name)",
    "int(name)",
    "1 in name",
    "'%s' % name",
    "copy.copy(name)",
    "type('Derived', tuple(types.resolve_bases((name,))), {})",
    "setattr(name, 'other', 1)",
    "free_symbols(object())",
)


@pytest.fixture(scope="module")
def ways():
    """Per use of a stand-in the name that gave way; asked with others' `except Exception` around it."""
    code = (
        "import copy, json, types\n"
        "from tightfit.runtime.deferred import GaveWay, deferred\n"
        "ways = {}\n"
        "with deferred() as deferral:\n"
        "    from sympy import name\n"
        "    from torch.fx.experimental.symbolic_shapes import free_symbols\n"
        f"    for use in {USES!r}:\n"
        "        deferral.gave_way = None\n"
        "        try:\n"
        "            try:\n"
        "                eval(use)\n"
        "            except Exception:\n"
        "                pass\n"
        "        except GaveWay:\n"
        "            ways[use] = deferral.gave_way\n"
        "print(json.dumps(ways))"
    )
    return fresh(code)


@pytest.mark.parametrize("use", USES)
def test_a_stand_in_gives_way_to_whatever_it_does_not_know(use, ways):
    assert ways.get(use, "kept").startswith(("sympy.name", "torch.fx.experimental.symbolic_shapes.free_symbols"))


@pytest.mark.slow  # two interpreters that import everything
@pytest.mark.parametrize(
    "trouble",
    [
        "import sympy; sympy.Integer(1)",  # gives way
        "import sympy; raise TypeError('led there by a stand-in')",
        "import sympy\ntry: sympy.Integer(1)\nexcept BaseException: pass",  # gives way, and somebody swallows it
    ],
)
def test_a_command_starts_again_with_everything_loaded_where_a_stand_in_did_not_do(trouble):
    code = (
        "import os, sys\n"
        "from tightfit.cli import subject\n"
        "from tightfit.cli.entry import main\n"
        "estimate = subject.Subject.estimate\n"
        "def troubled(*args, **kwargs):\n"
        "    if 'TIGHTFIT_ALL_LOADED' not in os.environ:\n"
        f"        exec({trouble!r})\n"
        "    return estimate(*args, **kwargs)\n"
        "subject.Subject.estimate = troubled\n"
        "sys.argv = ['tightfit', 'estimate', '--model', 'cpu26', '--seq-len', '64', '--device', 'rtx4090', '--json']\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    asked = tightfit("estimate", "--model", "cpu26", "--seq-len", "64", "--device", "rtx4090", "--json")
    assert json.loads(done.stdout) == json.loads(asked.out)
    assert done.stderr == ""


def test_a_mistake_is_said_at_once_and_does_not_start_the_command_again(monkeypatch):
    monkeypatch.setattr("os.execv", lambda *args: pytest.fail("started again"))
    monkeypatch.setattr("tightfit.cli.light._alone", [True])
    done = tightfit("estimate", "--model", "cpu26", "--seq-len", "64", "--device", "nosuch")
    assert done.code == 2
    assert "nosuch" in done.err
