import pytest

from tightfit.devices import quiet
from tightfit.devices.quiet import LoadObserver, Observation, ProcessorTimes, is_quiet_now


@pytest.mark.parametrize(
    ("observation", "disturbed"),
    [
        (Observation(others=0.0, cores=2, threads=2), False),
        (Observation(others=0.1, cores=2, threads=2, spread=1.05), False),
        (Observation(others=0.9, cores=2, threads=2), True),
        (Observation(others=0.9, cores=2, threads=1), False),  # there was a core for it
        (Observation(others=1.4, cores=2, threads=1), True),
        (Observation(others=6.0, cores=64, threads=32), False),
        (Observation(others=0.0, cores=2, threads=2, spread=1.4), True),
    ],
)
def test_others_disturb_where_they_leave_too_few_cores_or_calls_take_longer_than_their_least(observation, disturbed):
    assert bool(observation.disturbed_by) == disturbed


def test_what_disturbed_is_said_in_words():
    words = Observation(others=1.5, cores=2, threads=1, spread=1.4).disturbed_by
    assert words == "other processes kept 1.5 of 2 cores busy and a repeated product took 40% longer than its least"


def test_what_this_process_computes_itself_is_not_counted_as_others():
    began = ProcessorTimes(wall=0.0, all_busy=100.0, own=10.0)
    assert ProcessorTimes(wall=10.0, all_busy=120.0, own=30.0).others_since(began) == 0.0
    assert ProcessorTimes(wall=10.0, all_busy=125.0, own=15.0).others_since(began) == 2.0


def test_a_watch_compares_the_median_of_its_probe_with_its_least():
    watch = LoadObserver(lambda: None, threads=1)
    watch.sample()
    assert len(watch.seconds) == quiet.SAMPLES
    watch.seconds[:] = [1.0, 1.0, 2.0, 2.0, 2.0]
    assert watch.observe().spread == 2.0


@pytest.mark.parametrize(("busy", "expected"), [(0.0, True), (0.4, False)])
def test_a_glance_sees_whether_others_are_at_work(monkeypatch, busy, expected):
    moments = iter([ProcessorTimes(0.0, 0.0, 0.0), ProcessorTimes(0.2, busy, 0.0)])
    monkeypatch.setattr(quiet.ProcessorTimes, "now", classmethod(lambda cls: next(moments)))
    monkeypatch.setattr(quiet, "GLANCE", 0.0)
    monkeypatch.setattr(quiet.os, "cpu_count", lambda: 2)
    assert is_quiet_now(threads=2) is expected
