"""Ctrl-C ends the command line with one exit code and no traceback, whenever it comes."""

import signal
import threading

import pytest

from tightfit.cli import main


@pytest.fixture(autouse=True)
def handler():
    """Python's own at the start, whoever runs the tests; and put back."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_ctrl_c(**_):
    signal.raise_signal(signal.SIGINT)


def press_ctrl_c_during_an_import_that_swallows_it(**_):
    try:
        press_ctrl_c()
    except KeyboardInterrupt:
        raise ImportError("cannot load module more than once per process") from None


@pytest.mark.keeps("ctrl-c-ends-command")
@pytest.mark.parametrize("command", [press_ctrl_c, press_ctrl_c_during_an_import_that_swallows_it])
def test_ctrl_c_ends_with_130(monkeypatch, command):
    monkeypatch.setattr("tightfit.cli.app.app", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_an_error_without_ctrl_c_is_not_hidden(monkeypatch):
    def broken(**_):
        raise ImportError("a package is broken")

    monkeypatch.setattr("tightfit.cli.app.app", broken)
    with pytest.raises(ImportError, match="a package is broken"):
        main()


def test_where_ctrl_c_is_to_be_ignored_it_stays_ignored(monkeypatch):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    monkeypatch.setattr("tightfit.cli.app.app", press_ctrl_c)
    main()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.keeps("after-signal-real-process")
@pytest.mark.slow  # PyTorch's compiler is imported
def test_the_end_does_not_wait_for_kernels_that_the_compiler_has_not_begun(monkeypatch):
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    with config.patch(compile_threads=2):  # monkeypatch leaves the setting hidden from all that compiles later
        AsyncCompile.pool.cache_clear()
        begun, may_end = threading.Barrier(3), threading.Event()
        kernels = []

        def kernel():
            begun.wait(60)
            return may_end.wait(60)

        def compiles(**_):
            kernels.extend(AsyncCompile.submit(kernel) for _ in range(3))
            begun.wait(60)
            press_ctrl_c()

        monkeypatch.setattr("tightfit.cli.app.app", compiles)
        with pytest.raises(SystemExit) as ended:
            main()
        may_end.set()
        assert (ended.value.code, [kernel.cancelled() for kernel in kernels]) == (130, [False, False, True])
        assert [kernel.result() for kernel in kernels[:2]] == [True, True]
        assert AsyncCompile.submit(int).result() == 0
    AsyncCompile.pool.cache_clear()
