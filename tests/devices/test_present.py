import os
import sys
from dataclasses import replace

import pytest
import torch

from tightfit.devices import present as module
from tightfit.devices.machine import fingerprint
from tightfit.devices.present import (
    LOOKED_AGAIN_AFTER,
    cache_folder,
    cache_path,
    lookup,
    lookup_present,
    measure,
    present,
)
from tightfit.errors import DeviceError


@pytest.fixture
def measured(monkeypatch, tmp_path, spec):
    """Calibration replaced by one that counts how often it is asked."""
    asked = []

    def calibrate(kind):
        asked.append(kind)
        return spec

    monkeypatch.setattr(module, "calibrate", calibrate)
    monkeypatch.setattr(module, "rough", lambda kind: replace(spec, scaled_from="another CPU"))
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))
    return asked


def test_the_device_is_measured_once_and_then_remembered(measured, spec):
    notices = []
    assert present("cpu", notices.append, measured=True) == spec
    assert present("cpu", notices.append, measured=True) == spec
    assert present("cpu", notices.append) == spec
    assert measured == ["cpu"]
    assert len(notices) == 1


def test_at_first_use_nothing_is_measured_and_the_figures_are_said_to_be_rough(measured):
    notices = []
    first = present("cpu", notices.append)
    assert measured == []
    assert first.scaled_from
    assert present("cpu", notices.append) == first  # kept: the next answer has the same seconds
    assert len(notices) == 2
    assert all("rough" in line and "tightfit calibrate" in line for line in notices)


def test_what_runs_something_measures_a_device_with_rough_figures(measured, spec):
    assert present("cpu").scaled_from
    assert lookup_present("cpu") == spec
    assert present("cpu") == spec
    assert measured == ["cpu"]


def test_a_card_of_the_list_is_no_reason_to_look_at_the_cpu(measured, monkeypatch):
    monkeypatch.delattr(module, "rough")
    assert lookup("rtx3060").name == "RTX 3060 12GB"
    assert measured == []


@pytest.mark.parametrize("damage", ["", "{", '{"name": "half"}'])
def test_a_damaged_cache_is_measured_anew_and_said_so(measured, spec, damage):
    present("cpu", measured=True)
    (path,) = cache_folder().iterdir()
    path.write_text(damage)
    notices = []
    assert present("cpu", notices.append, measured=True) == spec
    assert measured == ["cpu", "cpu"]
    assert "taking new figures" in notices[0]
    assert present("cpu") == spec
    assert len(measured) == 2


@pytest.mark.parametrize("measures", [True, False])
def test_nothing_but_the_finished_file_is_left_in_the_cache(measured, measures):
    present("cpu", measured=measures)
    assert [path.suffix for path in cache_folder().iterdir()] == [".json"]


@pytest.mark.parametrize("measures", [True, False])
def test_a_cache_that_cannot_be_written_costs_a_notice_and_nothing_else(
    measured, spec, monkeypatch, tmp_path, measures
):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "file"))
    notices = []
    found = present("cpu", notices.append, measured=measures)
    assert (found == spec) is measures
    assert any("could not be kept" in notice for notice in notices)


@pytest.fixture
def busy(measured, monkeypatch, spec):
    """The device was measured while the machine was busy, a while ago."""
    disturbed = replace(spec, disturbed_by="other processes kept 1.5 of 2 cores busy")
    monkeypatch.setattr(module, "calibrate", lambda kind: disturbed)
    notices = []
    assert measure("cpu", notices.append) == disturbed
    assert "the machine was busy (other processes kept 1.5 of 2 cores busy)" in notices[-1]
    _age(cache_path("cpu"))
    monkeypatch.setattr(module, "calibrate", lambda kind: spec)
    return disturbed


def _age(path):
    then = path.stat().st_mtime - 2 * LOOKED_AGAIN_AFTER
    os.utime(path, (then, then))


@pytest.mark.keeps("measurements-busy-machine-marked")
def test_what_was_measured_on_a_busy_machine_is_measured_again_when_it_is_quiet(busy, spec, monkeypatch):
    monkeypatch.setattr(module, "is_quiet_now", lambda threads: True)
    notices = []
    assert present("cpu", measured=False).disturbed_by  # an estimate does not wait for it
    assert present("cpu", notices.append, measured=True) == spec
    assert "measuring again" in notices[0]
    monkeypatch.delattr(module, "is_quiet_now")  # and then it is not looked at any more
    assert present("cpu") == spec


@pytest.mark.keeps("measurements-busy-machine-marked")
def test_on_a_machine_that_is_still_busy_the_rough_figures_stay_and_it_is_said(busy, monkeypatch):
    glances = []
    monkeypatch.setattr(module, "is_quiet_now", lambda threads: glances.append(threads))
    notices = []
    assert present("cpu", notices.append, measured=True) == busy
    assert notices == ["predicted seconds are rough: while round was measured, " + busy.disturbed_by]
    assert present("cpu", measured=True) == busy
    assert len(glances) == 1  # one look a minute is enough
    _age(cache_path("cpu"))
    assert present("cpu", measured=True) == busy
    assert len(glances) == 2


def test_measuring_again_can_be_asked_for(measured, spec):
    present("cpu", measured=True)
    assert measure("cpu") == spec
    assert measured == ["cpu", "cpu"]


def test_other_threads_are_another_device():
    before = fingerprint("cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert fingerprint("cpu") != before
    finally:
        torch.set_num_threads(threads)
    assert fingerprint("cpu") == before


def test_the_cache_follows_the_users_settings(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("TIGHTFIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "tightfit"
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"


@pytest.mark.parametrize("name", ["cpu", "CPU", "cpu:0", torch.device("cpu")])
def test_the_cpu_is_found_under_its_names(measured, spec, name):
    assert lookup(name, measured=True) == spec


def test_without_a_name_the_best_device_present_is_taken(measured, spec):
    assert lookup(measured=True) == spec
    assert measured == ["cuda" if torch.cuda.is_available() else "cpu"]


def test_an_unknown_device_is_answered_with_the_nearest_name(measured):
    with pytest.raises(DeviceError, match=r"'cudda' is not known: did you mean cuda\?"):
        lookup("cudda")
    with pytest.raises(DeviceError, match="did you mean cpu or cuda"):
        lookup("zx81")


def test_an_absent_gpu_is_said_so(measured, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="finds no CUDA device"):
        lookup("cuda")
