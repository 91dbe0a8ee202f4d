"""Work shared with forks: real processes, which end, fail and are killed."""

import os
import signal

import pytest

from made_up_devices import even
from tightfit import TokenBatch
from tightfit.errors import ModelError
from tightfit.planner.asked import Asked
from tightfit.recipes import api
from tightfit.recipes.choices import Wanted
from tightfit.runtime import forked
from tightfit.runtime.forked import processes_for, shared_out
from tiny import decoder

# The runner's own threads do not matter to these forks, which touch none of their locks.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="forks are used on Linux only"),
]


def test_each_part_is_done_in_a_process_of_its_own_and_its_lines_are_shown_here():
    here = os.getpid()
    lines = []

    def work(part, notice):
        notice(f"part {part}")
        return part, os.getpid()

    results = shared_out(work, ["a", "b", "c"], lines.append)
    assert [part for part, _ in results] == ["a", "b", "c"]
    processes = [process for _, process in results]
    assert processes[0] == here
    assert len(set(processes)) == 3
    assert sorted(lines) == ["part a", "part b", "part c"]
    assert shared_out(work, [], lines.append) == []


def test_an_error_of_a_fork_is_raised_here():
    def work(part, notice):
        if part:
            raise ModelError("no such layer")
        return part

    with pytest.raises(ModelError, match="no such layer"):
        shared_out(work, [0, 1], print)


def test_what_a_killed_fork_leaves_is_done_here():
    here = os.getpid()

    def work(part, notice):
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return part * 2

    assert shared_out(work, [1, 2], print) == [2, 4]


def test_forks_end_with_the_work_that_was_interrupted_here(monkeypatch):
    here = os.getpid()
    children = []

    def work(part, notice):
        if os.getpid() != here:
            signal.pause()
        raise KeyboardInterrupt

    made = forked._Fork.end
    monkeypatch.setattr(forked._Fork, "end", lambda fork: (made(fork), children.append(fork.process.exitcode)))
    with pytest.raises(KeyboardInterrupt):
        shared_out(work, [1, 2, 3], print)
    assert children == [-signal.SIGKILL] * 2


def test_a_process_with_threads_is_not_forked(monkeypatch):
    monkeypatch.setattr(forked.os, "sched_getaffinity", lambda pid: range(64))
    monkeypatch.setattr(forked.torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(forked.threading, "active_count", lambda: 1)
    assert processes_for(3) == 3
    assert processes_for(0) == 1
    assert processes_for(100) == forked.MOST
    monkeypatch.setattr(forked.threading, "active_count", lambda: 2)
    assert processes_for(3) == 1


@pytest.mark.slow  # two searches
def test_forks_find_the_sizes_that_one_process_finds(monkeypatch):
    def sizes(processes):
        asked = Asked(model=decoder(hidden_size=32, num_layers=2), batch=TokenBatch(2, 32, 600), device=even())
        shares = []
        monkeypatch.setattr(api, "processes_for", lambda parts: processes)
        monkeypatch.setattr(
            api, "shared_out", lambda work, parts, notice: shares.extend(parts) or shared_out(work, parts, notice)
        )
        found = api.recipes_of(asked, "1000KiB", Wanted(optimizer="adamw_fused"), processes=processes)
        assert len(shares) == processes
        return [(outcome.name, outcome.longest_sequence, outcome.largest_batch) for outcome in found]

    assert sizes(2) == sizes(1)
