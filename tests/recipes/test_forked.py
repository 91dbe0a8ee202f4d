"""Work shared with forks: real processes, which end, fail and are killed."""

import multiprocessing
import os
import select
import signal
import threading
import time

import pytest

from made_up_devices import even
from tightfit import TokenBatch
from tightfit.errors import ModelError
from tightfit.planner.request import Request
from tightfit.recipes import api, shares
from tightfit.recipes.choices import Wanted, recipes_for
from tightfit.recipes.records import Recipe
from tightfit.recipes.search import RecipeSearch
from tightfit.recipes.whole_step import PartTracer
from tightfit.runtime import forked
from tightfit.runtime.forked import Crew, processes_for, shared_out
from tiny import decoder

# The runner's own threads do not matter to these forks, which touch none of their locks.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="forks are used on Linux only"),
]


def test_each_part_is_done_in_a_process_of_its_own_and_its_lines_are_shown_here():
    here = os.getpid()
    lines = []

    done = [os.pipe() for _ in "abc"]

    def work(part, notice):
        notice(f"part {part}")
        os.write(done["abc".index(part)][1], b"x")
        for read, _ in done:  # each process holds its part until every part is held
            select.select([read], [], [])
        return part, os.getpid()

    results = shared_out(work, ["a", "b", "c"], lines.append, 3)
    assert [part for part, _ in results] == ["a", "b", "c"]
    processes = {process for _, process in results}
    assert len(processes) == 3
    assert here in processes
    assert sorted(lines) == ["part a", "part b", "part c"]
    assert shared_out(work, [], lines.append, 3) == []


def test_a_process_takes_the_next_part_when_it_has_done_one():
    assert shared_out(lambda part, notice: 2 * part, list(range(20)), print, 2) == list(range(0, 40, 2))
    assert shared_out(lambda part, notice: os.getpid(), [1, 2], print, 1) == [os.getpid()] * 2


def test_an_error_of_a_fork_is_raised_here():
    here = os.getpid()

    def work(part, notice):
        if os.getpid() != here:
            raise ModelError("no such layer")
        time.sleep(0.3)

    with pytest.raises(ModelError, match="no such layer"):
        shared_out(work, [0, 1], print, 2)


def test_what_a_killed_fork_leaves_is_done_here():
    here = os.getpid()

    def work(part, notice):
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.3)  # so that the fork takes a part
        return part * 2

    assert shared_out(work, [1, 2], print, 2) == [2, 4]


def test_forks_end_with_the_work_that_was_interrupted_here(monkeypatch):
    here = os.getpid()
    children = []

    def work(part, notice):
        if os.getpid() != here:
            signal.pause()
        time.sleep(0.3)
        raise KeyboardInterrupt

    made = forked._Fork.end
    monkeypatch.setattr(forked._Fork, "end", lambda fork: (made(fork), children.append(fork.process.exitcode)))
    with pytest.raises(KeyboardInterrupt):
        shared_out(work, [1, 2, 3], print, 3)
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


def test_a_worker_of_a_pool_is_not_forked(monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # the runner of the tests has threads
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    assert processes_for(4) == 2
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(processes_for, [4]) == 1


def test_a_process_keeps_what_it_has_made_from_one_question_to_the_next():
    kept = []

    def work(part, notice):
        kept.append(part)
        if len(kept) == 1:
            time.sleep(0.3)  # so that each process takes a part
        notice(f"{part} of {len(kept)}")
        return os.getpid(), list(kept)

    lines = []
    with Crew(work, 2, lines.append) as crew:
        shared = crew.share(["a", "b"])
        assert sorted(process for process, _ in shared) == [0, 1]
        answers = crew.ask({0: "c", 1: "d"})
        assert {number: found[0] for number, found in answers.items()} == {p: r[0] for p, r in shared}
        assert [len(found[1]) for found in answers.values()] == [2, 2]
        assert [number for number, _ in crew.share(["e"])] in ([0], [1])
    assert sorted(lines)[:4] == ["a of 1", "b of 1", "c of 2", "d of 2"]


def test_what_a_killed_fork_was_asked_is_done_here_and_so_is_all_that_follows():
    here = os.getpid()

    def work(part, notice):
        if part == "end" and os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return part, os.getpid() == here

    with Crew(work, 2, print) as crew:
        assert crew.ask({1: "all well"}) == {1: ("all well", False)}
        assert crew.ask({0: "end", 1: "end"}) == {0: ("end", True), 1: ("end", True)}
        assert crew.ask({1: "again"}) == {1: ("again", True)}
        assert crew.share(["a", "b", "c"]) == [(0, (part, True)) for part in "abc"]


def test_recipes_of_a_process_that_was_ended_are_searched_anew(monkeypatch):
    asked = Request.of(model=decoder(hidden_size=32, num_layers=2), batch=TokenBatch(2, 32, 600), device=even())
    search = RecipeSearch(asked, "1000KiB")
    search.notice = (lines := []).append
    recipes = recipes_for(even(), Wanted(optimizer="adamw_fused"), may_adapt=False, clips=False)
    with shares.Shares(search, recipes, 1) as here:
        rows = [row for row in here.rows() if row.outcome.fits]
        known = {row.recipe: row.outcome.peak_bytes for row in rows}
        here.crew.work.__self__.found.clear()  # as if another process had found them
        counted = len(lines)
        confirmed = here.confirmed(rows)
    assert lines[0].startswith(f"1 of {len(recipes)} recipes; ")
    assert lines[counted] == "running the step of what fits as a whole"  # the last count does not stay for minutes
    assert known == {recipe: row.outcome.peak_bytes for recipe, row in confirmed.items()}


def test_rows_that_arithmetic_excludes_run_nothing_dry(monkeypatch):
    monkeypatch.setattr(PartTracer, "part", lambda *levers, **how: pytest.fail("a step was run dry"))
    asked = Request.of(model=decoder(hidden_size=32, num_layers=2), batch=TokenBatch(2, 32, 600), device=even())
    recipes = [Recipe(optimizer="adamw_fused"), Recipe(dtype="bf16", optimizer="adamw_fused")]
    with shares.Shares(RecipeSearch(asked, "100KiB"), recipes, 1) as here:
        assert [row.outcome.fits for row in here.rows()] == [False, False]


@pytest.mark.slow  # two searches
def test_sizes_of_recipes_of_one_part_are_shared_too(monkeypatch):
    asked = Request.of(model=decoder(hidden_size=32, num_layers=2), batch=TokenBatch(2, 32, 600), device=even())
    asked_for = []
    shared = shares.shared_out
    monkeypatch.setattr(shares, "processes_for", lambda parts: 1 if parts == 1 else 2)
    monkeypatch.setattr(
        shares,
        "shared_out",
        lambda work, parts, notice, count: asked_for.append(count) or shared(work, parts, notice, 1),
    )
    search = RecipeSearch(asked, "1300KiB")
    recipes = [Recipe(optimizer="adamw_fused"), Recipe(optimizer="adamw_fused", step_in_backward=True)]
    with shares.Shares(search, recipes, 2) as here:
        assert (len(here.parts), here.crew.forks) == (1, [])
        here.sizes([row for row in here.rows() if row.outcome.fits], lambda row: False)
    assert asked_for == [2]


@pytest.mark.slow  # two searches
def test_forks_find_what_one_process_finds(monkeypatch):
    def sizes(processes):
        asked = Request.of(model=decoder(hidden_size=32, num_layers=2), batch=TokenBatch(2, 32, 600), device=even())
        monkeypatch.setattr(shares, "processes_for", lambda parts: processes)
        found = api.recipes_of(asked, "1000KiB", Wanted(optimizer="adamw_fused"), processes=processes)
        return [(o.name, o.peak_bytes, o.step_seconds, o.longest_sequence, o.largest_batch) for o in found]

    assert sizes(2) == sizes(1)
