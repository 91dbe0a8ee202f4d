"""For all tests."""

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Kineto reads this when the first profile of a process starts, and writes lines for all later ones: whichever test
# profiles first decides.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

# Test processes side by side share the cores: threads that wait for a core that another process has only burn time.
_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _PROCESSES > 1:
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // _PROCESSES))

# A shell without job control starts what it runs in the background with SIGINT ignored, nohup with SIGHUP. Tests that
# send them need the default.
if threading.current_thread() is threading.main_thread():
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Tables and lines fit the terminal: what the suite reads must not depend on the one in which it runs.
os.environ["COLUMNS"] = "100"

# Tests of CUDA's path run by themselves, on a null card (`make test-card`) or a real one (`make test-real-card`).
_ON_CARD = Path(__file__).parent / "card"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
collect_ignore: list[str] = []

_YEAR = 365 * 24 * 3600
_MANY_MODULES = 100
_freeze_count = gc.get_freeze_count
_frozen_at = 0  # modules imported when the collector was last told to leave alone what there is


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--calibration", default="even", metavar="NAME",
        help="what the suite takes for this machine's CPU: even, slow-products, slow-memory or busy-hour",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Hide the machine's cards from all tests but those of CUDA's path: without a device the present one is taken, and
    the CPU is the subject of the others. The processes that share the work inherit what is hidden.
    """
    if not hasattr(config, "workerinput"):
        paths = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
        if not {"TIGHTFIT_NULLCARD", "TIGHTFIT_REAL_CARD"} & {*os.environ} or not all(
            path.is_relative_to(_ON_CARD) for path in paths
        ):
            os.environ[_VISIBLE] = ""
    if os.environ.get(_VISIBLE) == "":
        collect_ignore.append(str(_ON_CARD))


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test that is marked `sampled(count)`, all but `count` are slow.

    Which ones stay depends on the names of the test and its cases only.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, all_cases in cases.items():
        mark = all_cases[0].get_closest_marker("sampled")
        assert mark is not None
        (count,) = mark.args
        kept = random.Random(name).sample(all_cases, min(count, len(all_cases)))
        for item in all_cases:
            if item not in kept:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """No collections while the test modules are imported: hardly anything of that is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Take what imports have made out of the collector's sight: it outlives the tests.

    Every measured peak begins with a full collection, which otherwise walks through the millions of objects of torch,
    transformers and the tests' own modules: a third of the time of levers and ops. What a test makes is collected as
    ever.
    """
    global _frozen_at
    if len(sys.modules) >= _frozen_at + _MANY_MODULES:
        gc.collect()
        gc.freeze()
        gc.get_freeze_count = _some  # it walks through all of them: 56 ms at each dry run, which asks for none or some
        _frozen_at = len(sys.modules)


def _some() -> int:
    return 1


def pytest_unconfigure() -> None:
    """What was frozen is taken apart as ever: packages complain at the end of a process where it is not."""
    gc.unfreeze()
    gc.get_freeze_count = _freeze_count


@pytest.fixture(scope="session", autouse=True)
def present_cpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """The CPU that is present has made-up figures, here and in processes that a test starts."""
    from made_up_devices import CALIBRATIONS, DISK
    from tightfit.devices import present
    from tightfit.memory.disk import DiskStore
    from tightfit.planner import request as planning

    name = request.config.getoption("calibration")
    if name not in CALIBRATIONS:
        raise pytest.UsageError(f"--calibration {name!r} is not known: take one of {', '.join(CALIBRATIONS)}")
    spec, measure, rough = CALIBRATIONS[name](), present.calibrate, present.rough

    def disk_rates(folder: str | Path | None = None):
        DiskStore(folder)  # a folder that cannot be used is refused as ever
        return DISK

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIGHTFIT_CACHE", str(tmp_path_factory.mktemp("calibrations")))
        patch.setattr(present, "calibrate", lambda kind: spec if kind == "cpu" else measure(kind))
        patch.setattr(present, "rough", lambda kind: spec if kind == "cpu" else rough(kind))
        patch.setattr(planning, "disk_rates", disk_rates)
        present.measure("cpu")
        later = time.time() + _YEAR  # figures of a busy hour are never so old that they are measured again
        os.utime(present.cache_path("cpu"), (later, later))
        yield spec
