"""Workers: processes that answer one question each, and are replaced where one is too slow or ends."""

import os
import signal
import socket
import threading
import time

import pytest

from tightfit.cli.explorer.messages import Waited
from tightfit.cli.explorer.workers import Readers, WorkerError, Workers


@pytest.fixture(scope="module")
def workers():
    found = Workers(2, answer="stub_answers:answer")
    yield found
    found.close()


def ask(workers, *question):
    return list(workers.ask(question))


@pytest.mark.keeps("slow-question-page-block")
def test_a_slow_question_does_not_block_another(workers, tmp_path):
    gate = tmp_path / "gate"
    slow = threading.Thread(target=ask, args=(workers, "wait", str(gate)))
    slow.start()
    while workers.idle.qsize() == 2:
        time.sleep(0.01)
    assert ask(workers, "say", "fast") == ["fast"]
    assert slow.is_alive()
    gate.touch()
    slow.join()


def test_a_reader_who_leaves_or_asks_again_frees_the_worker(workers, tmp_path):
    readers, ended = Readers(), []

    def wait(has_left):
        with pytest.raises(WorkerError, match="or nobody waits"):
            list(workers.ask(("wait", str(tmp_path / "no gate")), has_left))
        ended.append(True)

    slow = [threading.Thread(target=wait, args=(readers.asks(reader),)) for reader in ("one", "other", "third")]
    for thread in slow:  # the third waits for a worker
        thread.start()
    asks_again = readers.asks("one")
    readers.leaves("other")
    readers.leaves("third")
    for thread in slow:
        thread.join()
    assert len(ended) == 3
    assert list(workers.ask(("say", "again"), asks_again)) == ["again"]
    assert len(workers.all) == workers.idle.qsize() == 2


@pytest.mark.keeps("slow-question-page-block")
def test_a_question_that_takes_too_long_ends_in_one_line_and_its_worker_is_replaced(workers, monkeypatch):
    monkeypatch.setattr(workers, "seconds", 0)
    with pytest.raises(WorkerError, match="no answer within 0 seconds: ask for a smaller model"):
        ask(workers, "wait", "/there is no such file")
    monkeypatch.undo()
    assert ask(workers, "say", 1) == [1]
    assert len(workers.all) == workers.idle.qsize() == 2


def test_a_process_that_dies_ends_one_answer_and_no_other(workers):
    with pytest.raises(WorkerError, match="the process that computed this answer ended"):
        ask(workers, "die", 0)
    assert ask(workers, "say", "here") == ["here"]
    assert len(workers.all) == workers.idle.qsize() == 2


@pytest.mark.keeps("slow-question-page-block")
def test_a_worker_has_no_network(workers):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        said, _ = ask(workers, "connect", listening.getsockname()[1])
    assert "no network (socket." in said


def test_the_same_question_is_answered_once(workers):
    assert ask(workers, "pid", "same") == ask(workers, "pid", "same")


def test_a_reader_that_leaves_frees_its_worker(workers):
    parts = workers.ask(("pid", "left"))
    next(parts)
    parts.close()
    assert workers.idle.qsize() == 2


def test_ctrl_c_leaves_a_worker_that_starts_alone_and_closing_ends_it(capfd):
    closing = Workers(1, answer="stub_answers:answer")
    (worker,) = closing.all
    os.kill(worker.process.pid, signal.SIGINT)
    assert ask(closing, "say", 1) == [1]
    assert capfd.readouterr().err == ""
    closing.close()
    assert not worker.process.is_alive()
    with pytest.raises(WorkerError, match="closing"):
        ask(closing, "say", "another thing")


def test_a_slow_answer_says_how_long_it_takes_and_is_remembered_without_that(workers, tmp_path):
    gate = tmp_path / "gate"
    parts = []
    for part in workers.ask(("wait", str(gate))):
        parts.append(part)
        if part == Waited(1):
            gate.touch()
    assert parts[0] == Waited(1)
    assert parts[-1] == str(gate)
    assert list(workers.ask(("wait", str(gate)))) == [str(gate)]
