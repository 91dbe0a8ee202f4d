"""What importing costs: asked of a fresh interpreter each time."""

import json
import subprocess
import sys

import pytest

from command_line import tightfit
from tightfit.cli.light import IDLE

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
        "for args in (['--help'], ['plan', '--help'], ['train', '--help'], ['--version']):\n"
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


@pytest.mark.parametrize("model", ["mm26", "smollm2-135m", "gpt2"])
def test_an_estimate_at_the_command_line_loads_no_compiler_and_nothing_for_many_devices(model):
    ask = ("estimate", "--model", model, "--seq-len", "64", "--device", "rtx4090", "--json")
    out, err, modules = loaded_by(*ask)
    assert not modules & {*UNUSED, *UNUSED_OF_DISTRIBUTED}
    assert not any(text in err for text in IDLE.values())
    assert json.loads(out) == json.loads(tightfit(*ask).out)


def test_a_plan_at_the_command_line_loads_no_compiler_and_is_the_same():
    ask = ("plan", "--model", "smollm2-135m", "--seq-len", "512", "--batch-size", "8", "--device", "rtx4090", "--json")
    out, _, modules = loaded_by(*ask, "--budget", "0.9x")
    assert not modules & {*UNUSED, *UNUSED_OF_DISTRIBUTED}
    assert json.loads(out) == json.loads(tightfit(*ask, "--budget", "0.9x").out)


def test_what_was_left_out_is_the_real_thing_where_it_is_used_and_afterwards():
    code = (
        "import json, sys\n"
        "import torch\n"
        "from tightfit.deferred import deferred\n"
        "with deferred():\n"
        "    from torch.distributed.tensor import DTensor, Shard\n"
        "    from torch.fx.experimental.symbolic_shapes import guard_or_false, sym_eq\n"
        "    import torch._dynamo\n"
        "    marked = torch._dynamo.disable(lambda x: x + 1)\n"
        "    split = Shard(1)\n"
        "    early = isinstance(torch.ones(1), DTensor), guard_or_false(True), sym_eq((1, 2), (1, 3)), marked(1)\n"
        "    before = 'sympy' in sys.modules and hasattr(sys.modules['sympy'], '__file__')\n"
        "    dim = split.dim\n"
        "from torch.distributed import tensor\n"
        "real = [isinstance(torch.ones(1), DTensor), hasattr(torch._dynamo, '__file__'), hasattr(tensor, '__file__')]\n"
        "compiled = torch.compile(lambda x: marked(x) * 2, backend='eager')(torch.ones(1)).item()\n"
        "print(json.dumps([early, before, dim, real, compiled]))"
    )
    assert fresh(code) == [[False, True, False, 2], False, 1, [False, True, True], 4.0]
