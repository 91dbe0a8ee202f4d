"""Captured programs write in place, and eager code may not: on a CPU both have to round alike."""

import warnings

import pytest
import torch
from torch import nn

import tightfit
from exactness import assert_bit_equal, run
from tightfit.levers.captured import in_place

aten = torch.ops.aten
SHAPE = (6, 5, 9, 8)
LAYOUTS = {
    "contiguous": lambda x: x,
    "as a Fourier transform leaves it": lambda x: x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
    "one for all samples": lambda x: x[:1],
}
DTYPES = [torch.float32, torch.bfloat16, torch.complex64]
OPERATORS = [
    operator
    for packet in (getattr(aten, name) for name in dir(aten))
    if isinstance(packet, torch._ops.OpOverloadPacket)
    for operator in (getattr(packet, name) for name in packet.overloads())
    if in_place.in_place_form(operator) is not None and torch.Tag.nondeterministic_seeded not in operator.tags
]


class Made:
    """A node of a graph, with the value that it makes."""

    def __init__(self, value):
        self.meta = {"val": value}


def operands(operator, dtype, first, second):
    """Arguments for an operator, a tensor first, and numbers that 16 bits do not hold. None: it wants others."""
    torch.manual_seed(0)
    layouts, found = iter([LAYOUTS[first], *[LAYOUTS[second]] * 3]), []
    for argument in operator._schema.arguments:
        if argument.kwarg_only:
            continue
        kind = str(argument.type)
        if kind == "Tensor":
            found.append(next(layouts)(torch.randn(SHAPE).to(dtype) * (1 + 1j if dtype.is_complex else 1)))
        elif kind in ("number", "float"):
            found.append(0.7)
        elif not argument.has_default_value():
            return None
    return found if found and isinstance(found[0], torch.Tensor) else None


def alike(one, other):
    return torch.equal(*(torch.view_as_real(each) if each.is_complex() else each.float() for each in (one, other)))


@pytest.mark.sampled(1)
@pytest.mark.keeps("captured-blocks-leave-loss")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_a_program_writes_in_place_rounds_as_it_does_out_of_place(dtype):
    compared = 0
    for operator in OPERATORS:
        for first in list(LAYOUTS)[:2]:
            for second in LAYOUTS:
                given = operands(operator, dtype, first, second)
                if given is None:
                    continue
                try:
                    out = operator(*given)
                    written = in_place.in_place_form(operator)(given[0].clone(), *given[1:])
                except RuntimeError:  # not for such numbers
                    continue
                if out.stride() != written.stride() or out.dtype != written.dtype:
                    continue
                compared += 1
                same = alike(out.nan_to_num(), written.nan_to_num())
                assert same or in_place.rounds_otherwise(operator, Made(out)), (operator, first, second)
    assert compared > (50 if dtype.is_complex else 200)


class Filtered(nn.Module):
    """A block that filters its input by frequencies."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(6, 4, 8, 2))
        self.norm, self.out, self.function = nn.LayerNorm(8), nn.Linear(8, 8), function

    def forward(self, x):
        found = self.function(torch.fft.rfft2(self.norm(x), dim=(1, 2)), torch.view_as_complex(self.weight))
        return x + self.out(torch.fft.irfft2(found, s=(6, 6), dim=(1, 2)))


def written(x, weight):
    x *= weight
    return x


def a_part_of_it_written(x, weight):
    x[:, :, :3] /= weight[:, :3] + 2
    return x


FILTERS = {
    "a product": lambda x, weight: x * weight,
    "a quotient": lambda x, weight: x / (weight + 2),
    "a product that is added": lambda x, weight: torch.addcmul(x, x, weight) + x * weight.conj(),
}


def captured_beside_plain(function):
    """Compare both; returns what was said of the capture."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Filtered(function), Filtered(function)), torch.randn(8, 6, 6, 8)
    plain = run(model, x, times=2)
    model.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_bit_equal(plain, run(model, x, times=2, levers=lambda m: tightfit.capture(m, "*")))
    return [str(each.message) for each in caught]


@pytest.mark.keeps("captured-blocks-leave-loss")
@pytest.mark.parametrize("function", FILTERS.values(), ids=FILTERS)
def test_blocks_that_compute_complex_numbers_are_captured_bit_equal(function):
    assert captured_beside_plain(function) == []


@pytest.mark.keeps("captured-blocks-leave-loss")
@pytest.mark.parametrize("function", [written, a_part_of_it_written])
def test_blocks_that_compute_complex_numbers_in_place_run_uncaptured_and_say_so(function):
    (said,) = captured_beside_plain(function)
    assert "computes complex numbers in place" in said


class Cell(nn.Module):
    """A block of a recurrent cell, whose kernel writes into the parts of its gates."""

    def __init__(self, kind):
        super().__init__()
        self.before, self.cell = nn.Linear(8, 8), kind(8, 8)

    def forward(self, x):
        state = self.before(x)
        found = self.cell(x, (state, state) if isinstance(self.cell, nn.LSTMCell) else state)
        return x + (found[0] if isinstance(found, tuple) else found)


class OwnCell(nn.Linear):
    """A cell that does the same by hand."""

    def __init__(self, width, hidden):
        super().__init__(width, 3 * hidden)

    def forward(self, x, state):
        one, two, three = torch.unsafe_chunk(super().forward(x), 3, -1)
        return one.add_(two).sigmoid_() * three * state


@pytest.mark.sampled(1)
@pytest.mark.keeps("captured-blocks-leave-loss")
@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell, OwnCell])
def test_blocks_that_write_into_parts_of_their_gates_run_uncaptured_and_say_so(kind):
    torch.manual_seed(0)
    model, x = nn.Sequential(Cell(kind), Cell(kind)), torch.randn(4, 8)
    plain = run(model, x, times=2)
    model.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_bit_equal(plain, run(model, x, times=2, levers=lambda m: tightfit.capture(m, "*")))
    assert "written in place, which rounds by its layout" in str(caught[0].message)
