"""Out of memory is known by its words, and nothing that ran is held after it."""

import gc
import weakref

import pytest
import torch
from torch import nn

from injected_out_of_memory import CPU_WORDS, CUDA_WORDS
from tightfit.errors import CannotFit, RecoveryError
from tightfit.memory.failure import is_out_of_memory
from tightfit.training.recovery.catching import TRIES, Failure, caught, insist
from tightfit.training.recovery.tightening import SHARES, next_bound, tighter
from tightfit.units import parse_budget

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError(CUDA_WORDS), True),
        (RuntimeError(CPU_WORDS), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError(CPU_WORDS), False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(error, is_one):
    assert is_out_of_memory(error) == is_one


def test_a_real_allocation_that_fails_is_caught():
    failure = caught(lambda: torch.empty(2**60, dtype=torch.uint8), CPU)
    assert failure.memory.requested_bytes == 2**60
    assert str(failure) == f"out of memory on cpu (asked for {2**60:,} bytes)"


def test_what_ran_is_not_held_after_a_failure_nor_what_it_had_caught_itself():
    """Somebody may keep the error, as those do who report errors: its traceback holds the frames."""
    held, kept = [], RuntimeError(CPU_WORDS)

    def inner():
        tensor = torch.zeros(1000)
        held.append(weakref.ref(tensor))
        raise ValueError("the cause")

    def outer():
        tensor = torch.zeros(1000)
        held.append(weakref.ref(tensor))
        try:
            inner()
        except ValueError as error:
            raise kept from error

    gc.disable()
    try:
        assert caught(outer, CPU) is not None
        assert [reference() for reference in held] == [None, None]
    finally:
        gc.enable()


def test_what_an_interrupted_backward_has_saved_is_not_held():
    """Autograd's engine keeps nodes that waited until the next backward, which a recovered step runs too late."""
    saved = []

    def fails(parameter):
        raise RuntimeError(CPU_WORDS)

    def step():
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
        model[2].bias.register_post_accumulate_grad_hook(fails)
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda box: box.tensor):
            y = model(torch.randn(4, 8, requires_grad=True)).sum()
        y.backward()

    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor.detach()
            saved.append(weakref.ref(self))

    assert caught(step, CPU) is not None
    assert len(saved) > 3
    assert all(reference() is None for reference in saved)


def test_any_other_error_goes_through_with_its_traceback():
    def call():
        raise KeyError("theirs")

    with pytest.raises(KeyError) as raised:
        caught(call, CPU)
    assert raised.traceback[-1].name == "call"


def test_what_needs_next_to_nothing_is_repeated_and_then_given_up_in_one_line():
    left = [1, 2]

    def sometimes():
        if left:
            left.pop()
            raise RuntimeError(CPU_WORDS)
        return "done"

    assert insist(sometimes, CPU) == "done"
    left[:] = range(TRIES)
    with pytest.raises(RecoveryError, match="next to nothing") as raised:
        insist(sometimes, CPU)
    assert "\n" not in str(raised.value)


def test_the_next_plan_may_take_what_the_device_has_or_a_share_of_the_peak():
    silent = Failure("out of memory")
    assert [next_bound(silent, 1000, n) for n in (1, 2, 50)] == [950, 900, int(1000 * SHARES[-1])]
    full = caught(_full_card, CPU)
    room = int(0.95 * (7 * 2**30 + 2 * 2**20 + 128 * 2**20))
    assert full.room_bytes == room
    assert next_bound(full, 10 * 2**30, 1) == room
    assert next_bound(full, 4 * 2**30, 1) == int(0.95 * 4 * 2**30)


def _full_card():
    raise torch.OutOfMemoryError(CUDA_WORDS)


def test_where_more_was_measured_than_the_bound_leaves_the_plan_of_least_peak_is_taken():
    asked = []

    def within(budget):
        asked.append(parse_budget(budget))
        if budget < 500:
            raise CannotFit("too little", 400)
        return budget

    assert tighter(within, bound_bytes=-1_000_000, peak_bytes=2_000_000) == asked[-1]
    assert tighter(within, bound_bytes=-1_000_000, peak_bytes=400) is None
