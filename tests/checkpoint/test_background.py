"""Saving while the training goes on: what is saved is what was there when it was asked for, and no error is lost."""

import threading
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import names_in, record, seed_of, tensors

from tightfit.errors import OutputError
from tightfit.memory.allocator import cpu_rise
from tightfit.training.checkpoint.background import BackgroundSaver
from tightfit.training.checkpoint.files import Files
from tightfit.training.checkpoint.store import Checkpoints
from tightfit.training.checkpoint.tensors import copy_bytes


class Gate(Files):
    """Nothing is written before it is opened."""

    def __init__(self) -> None:
        self.is_open, self.reached = threading.Event(), threading.Event()

    def write(self, descriptor: int, content: memoryview) -> int:
        self.reached.set()
        assert self.is_open.wait(timeout=60)
        return super().write(descriptor, content)


@pytest.mark.keeps("save-background-holds-values")
def test_what_changes_after_the_call_is_not_saved(scratch: Path):
    """pytorch#144657: saves in the background wrote tensors on the CPU as they were later."""
    gate, given, noted = Gate(), tensors(1), record(1)
    with BackgroundSaver(Checkpoints(scratch, gate)) as saver:
        saver.save(10, given, noted, {"plan.json": b"plan 1"})
        assert gate.reached.wait(timeout=60)
        for tensor in given.values():
            tensor.zero_()
        noted["position"]["epoch"] = 7
        noted["more"] = "later"
        assert saver.is_saving
        gate.is_open.set()

    found = Checkpoints(scratch).newest_intact().checkpoint
    assert found is not None
    assert seed_of(found) == 1
    assert found.manifest.tensors.same_as == {"model.head": "model.embedding"}


@pytest.mark.keeps("save-background-holds-values")
def test_there_is_one_save_at_a_time(scratch: Path):
    gate = Gate()
    saver = BackgroundSaver(Checkpoints(scratch, gate))
    saver.save(10, tensors(1), record(1))
    assert gate.reached.wait(timeout=60)
    threading.Timer(0.05, gate.is_open.set).start()

    saver.save(20, tensors(2), record(2))  # returns when the first is done

    assert "step-00000010" in names_in(scratch)
    saver.wait()
    assert names_in(scratch) == ["step-00000010", "step-00000020"]


class Full(Files):
    def sync(self, descriptor: int) -> None:
        raise OSError(28, "No space left on device")


@pytest.mark.keeps("save-background-holds-values")
@pytest.mark.parametrize("how", ["save", "wait", "end"])
def test_an_error_of_the_thread_is_one_line_at_the_next_call(scratch: Path, how: str):
    def run() -> None:
        with BackgroundSaver(Checkpoints(scratch, Full())) as saver:
            saver.save(10, tensors(1), record(1))
            if how == "save":
                saver.save(20, tensors(2), record(2))
            elif how == "wait":
                saver.wait()

    with pytest.raises(OutputError, match=r"step-00000010: cannot be written: No space left on device: make room"):
        run()
    assert names_in(scratch) == []


def test_an_error_is_raised_once_and_the_next_save_goes_on(scratch: Path):
    checkpoints = Checkpoints(scratch, Full())
    saver = BackgroundSaver(checkpoints)
    saver.save(10, tensors(1), record(1))
    with pytest.raises(OutputError):
        saver.wait()
    checkpoints._files = Files()

    saver.save(20, tensors(2), record(2))
    saver.wait()

    assert names_in(scratch) == ["step-00000020"]


def test_an_error_beside_another_is_noted_on_that(scratch: Path):
    def run() -> None:
        with BackgroundSaver(Checkpoints(scratch, Full())) as saver:
            saver.save(10, tensors(1), record(1))
            raise ValueError("of the training")

    with pytest.raises(ValueError, match="of the training") as raised:
        run()
    assert "No space left on device" in raised.value.__notes__[0]


def test_what_cannot_be_saved_is_refused_before_anything_is_copied(scratch: Path):
    saver = BackgroundSaver(Checkpoints(scratch))

    with pytest.raises(OutputError, match=r"record\.x: a set is no JSON"):
        saver.save(10, tensors(1), {"x": {1}})
    with pytest.raises(OutputError, match=r"the tensor 'a' .* cannot be saved"):
        saver.save(10, {"a": torch.zeros(2).to_sparse()}, {})
    assert not saver.is_saving


@pytest.mark.keeps("peaks-saving-loading-copying")
def test_the_copies_take_what_is_predicted_and_are_made_once(scratch: Path):
    given = {**tensors(1), "large": torch.zeros(200, 300).t(), "tied": torch.zeros(1000)}
    given["tied too"] = given["tied"]
    saver = BackgroundSaver(Checkpoints(scratch))
    saver.save(5, tensors(1), record(1))  # what a first save imports is there
    saver.wait()
    saver = BackgroundSaver(Checkpoints(scratch))

    first = cpu_rise(lambda: (saver.save(10, given, {}), saver.wait()))
    again = cpu_rise(lambda: (saver.save(20, given, {}), saver.wait()))

    assert first == pytest.approx(copy_bytes(given), rel=0.001)
    assert again == 0
    assert copy_bytes(given) == sum(given[name].nbytes for name in given if name not in ("tied too", "model.head"))


def test_copies_of_tensors_that_are_no_more_go(scratch: Path):
    saver = BackgroundSaver(Checkpoints(scratch))
    saver.save(10, {"a": torch.zeros(10), "b": torch.zeros(20)}, {})
    saver.save(20, {"a": torch.ones(11), "c": torch.ones(3)}, {})
    saver.wait()

    assert {name: tuple(copy.shape) for name, copy in saver._copies.items()} == {"a": (11,), "c": (3,)}
    found = Checkpoints(scratch).newest_intact().checkpoint
    assert found is not None
    assert torch.equal(found.read("a"), torch.ones(11))


def test_pruning_follows_each_save_in_the_thread(scratch: Path):
    checkpoints = Checkpoints(scratch)
    with BackgroundSaver(checkpoints, then=lambda: checkpoints.prune(1)) as saver:
        for step in (10, 20, 30):
            saver.save(step, tensors(step), record(step))

    assert names_in(scratch) == ["step-00000030"]
