"""What makes a question start quickly: the same answers, and the same end of the process."""

import functools
import json
import subprocess
import sys

import pytest
import torch

from tightfit.cli.transformers_index import hasten
from tightfit.runtime.operators import traits_of
from tightfit.tracing.dry_run import DryRun
from tightfit.tracing.ledger import Ledger
from tightfit.tracing.modules import ModuleTracker

ASK = ("estimate", "--model", "cpu26", "--seq-len", "64", "--device", "rtx4090", "--json")


TEARDOWN = (  # its finaliser runs where Python takes modules apart, and only there
    "import os\nclass Last:\n    def __del__(self, write=os.write): write(2, b'taken apart')\nlast = Last()\n"
)
ANSWERED = (  # a command that has answered at once
    "from tightfit.cli import app, light\n"
    "light._answered.append(True)\n"
    "def answer(prog_name):\n"
    "    print('an answer')\n"
    "    sys.exit(int(sys.argv[1]) if sys.argv[1:] else 0)\n"
    "app.app = answer\n"
)


def command(before, *arguments, **options):
    """A process that does `before`, then runs the command as a shell would."""
    code = f"import sys\n{before}\nfrom tightfit.cli import main\nmain()"
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run([sys.executable, "-c", code, *arguments], text=True, **options)


@pytest.mark.slow  # an interpreter of its own
def test_after_an_answer_the_process_ends_without_taking_itself_apart():
    done = command(TEARDOWN, *ASK)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["peak_bytes"] > 0
    help_page = command(TEARDOWN, "--help")
    assert (help_page.returncode, help_page.stderr) == (0, "taken apart")


def test_a_command_that_fails_behind_its_answer_ends_as_ever():
    failed = command(TEARDOWN + ANSWERED, "3")
    assert (failed.returncode, failed.stderr) == (3, "taken apart")


def test_what_was_registered_for_the_end_still_runs():
    done = command(TEARDOWN + ANSWERED + "import atexit; atexit.register(lambda: sys.stderr.write('at the end'))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "an answer\n", "at the end")


def test_a_thread_at_work_is_waited_for():
    at_work = (
        "import threading\n"
        "def work():\n"
        "    threading.main_thread().join()\n"
        "    sys.stderr.write('done')\n"
        "threading.Thread(target=work).start()\n"
    )
    done = command(ANSWERED + at_work)
    assert (done.returncode, done.stderr) == (0, "done")


def test_an_answer_that_finds_no_room_is_no_success():
    with open("/dev/full", "w") as full:
        assert command(ANSWERED, stdout=full).returncode != 0


@pytest.mark.slow  # two interpreters
def test_what_transformers_reads_of_its_own_files_is_the_same():
    # In processes of their own: it is read when `transformers` is imported.
    code = (
        "import contextlib, hashlib, os, sys\n"
        "from tightfit.cli.transformers_index import read_once\n"
        "with read_once() if sys.argv[1] == 'once' else contextlib.nullcontext():\n"
        "    import transformers.models\n"
        "from transformers.utils import import_utils\n"
        "folder = os.path.dirname(transformers.models.__file__)\n"
        "found = import_utils.define_import_structure(folder)\n"
        "known = sorted((sorted(k), sorted((kk, sorted(vv)) for kk, vv in v.items())) for k, v in found.items())\n"
        "print(hashlib.sha256(repr((known, sorted(dir(transformers)))).encode()).hexdigest(), len(repr(known)))\n"
        "print(import_utils.create_import_structure_from_path.cache_info())"
    )
    run = functools.partial(subprocess.run, capture_output=True, text=True, check=True)
    once, twice = (run([sys.executable, "-c", code, how]).stdout.splitlines() for how in ("once", "twice"))
    assert once[0] == twice[0]
    assert "maxsize=None" in once[1]
    assert "maxsize=128" in twice[1]  # where it is larger, nothing is left to hasten


@pytest.mark.parametrize(
    "content",
    ["", "x = 1\n", '__all__ = ["A", "B"]\n', 'x = 1\n__all__ = [\n    "A",\n    "B",\n]\n', 'y = "__all__"\n',
     '__all__ = ["A"]\nx = 1\n__all__ = ["B"]\n', 'x = 1\r\n__all__ = ["A"]\r\n', 'x = 1\x0c__all__ = ["A"]', "\n"],
)  # fmt: skip
def test_the_exported_names_of_a_file_are_the_same(content):
    from transformers.utils import import_utils

    class Reader:
        fetch__all__ = staticmethod(import_utils.fetch__all__)

    hasten(Reader)
    assert Reader.fetch__all__(content) == import_utils.fetch__all__(content)


def test_what_a_dry_run_computes_wakes_no_other_thread():
    model = torch.nn.Linear(1, 1)
    dry = DryRun(Ledger(), ModuleTracker(model))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        computed = dry.compute(traits_of(torch.ops.aten.ones.default), lambda *_: torch.get_num_threads(), (), {})
        assert (computed, torch.get_num_threads()) == (1, 3)
    finally:
        torch.set_num_threads(before)
