"""What is computed again in backward sees the settings of PyTorch of its forward; backward itself sees its own."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import tightfit
from tightfit.levers.activity import activity
from tightfit.levers.captured.lever import CapturedForward
from tightfit.levers.recompute import RECOMPUTE_ALL
from tightfit.runtime.internals import function_switches

pytestmark = pytest.mark.keeps("computed-again-backward-sees")


@contextmanager
def changed(read, write, value):
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def without_mkldnn():
    return changed(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False)


def in_less_precision():
    return changed(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium")


def in_more_threads():
    return changed(torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1)


def deterministic():
    return changed(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True)


@contextmanager
def in_less_precision_of_one_backend():
    with in_less_precision():  # which also restores it
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"
        yield


SETTINGS = [without_mkldnn, in_less_precision, in_more_threads, deterministic, in_less_precision_of_one_backend]


class Block(nn.Module):
    """Sets something inside, if a test says so."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(96, 192), nn.Linear(192, 96)
        self.inside = None

    def forward(self, x):
        hidden = self.first(x).sin()
        if self.inside is None:
            return self.second(hidden).softmax(-1)
        with self.inside():
            return self.second(hidden.tanh()).softmax(-1)


def stack():
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(3)])


class Watch(TorchDispatchMode):
    """Notes the settings under which operators run: those that are computed again, and the others."""

    def __init__(self, convolves=lambda func: False):
        super().__init__()
        self.convolves = convolves
        self.again, self.others = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        again = activity.recomputing
        # Of what only functions or convolutions read, operators that are computed again see what they need.
        (self.again if again else self.others).add(function_switches(calls=False, convolves=self.convolves(func)))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(8, 4, 96)


def seen():
    return function_switches(calls=False, convolves=False)


LEVERS = {
    "recompute": lambda model: tightfit.recompute(model, "*"),
    "capture": lambda model: tightfit.capture(model, "*", policy=RECOMPUTE_ALL),
}


def assert_replays_see(settings, lever, model, x):
    """Operators that are computed again run under the settings of forward, the others under those outside."""
    present, everything = seen(), function_switches()
    with LEVERS[lever](model):
        for _ in range(4):  # functions are learnt in the first run, and runs of blocks after that
            with settings():
                inside = seen()
                loss = model(x).square().sum()
            with Watch() as watch:
                loss.backward()
            assert watch.again == {inside} != {present}
            assert watch.others == {present}
    assert function_switches() == everything


@pytest.mark.sampled(5)
@pytest.mark.parametrize("lever", LEVERS)
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_replay_sees_the_settings_of_forward(x, settings, lever):
    assert_replays_see(settings, lever, stack(), x)


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_setting_that_a_block_changes_inside_is_seen_by_what_ran_there(x, settings):
    model = stack()
    for block in model:
        block.inside = settings
    present = seen()
    with settings():
        inside = seen()
    with tightfit.recompute(model, "*"):
        for _ in range(4):
            loss = model(x).square().sum()
            with Watch() as watch:
                loss.backward()
            assert watch.again == {present, inside}


def by_the_formula():
    return sdpa_kernel(SDPBackend.MATH)


@contextmanager
def convolutions_in_less_precision():
    before = torch.backends.mkldnn.conv.fp32_precision
    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    yield
    torch.backends.mkldnn.conv.fp32_precision = before


@pytest.mark.parametrize("settings", [without_mkldnn, by_the_formula, convolutions_in_less_precision])
def test_a_tile_runs_again_under_the_settings_of_forward(x, settings):
    seen = []

    class Notes(nn.Linear):
        def forward(self, x):
            seen.append(function_switches())
            return super().forward(x)

    model = nn.Sequential(Notes(96, 96))
    with tightfit.tile(model, "*", tokens=2):
        with settings():
            inside, loss = function_switches(), model(x).square().sum()
        seen.clear()
        loss.backward()
    assert set(seen) == {inside}


class Convolves(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x):
        return self.conv(x).sin()


@pytest.mark.parametrize("lever", LEVERS)
def test_convolutions_are_computed_again_in_the_precision_of_forward(x, lever):
    def is_convolution(func):
        return "conv" in str(func)

    model = nn.Sequential(*[Convolves() for _ in range(3)])
    with LEVERS[lever](model):
        for _ in range(4):
            with convolutions_in_less_precision():
                inside = function_switches(calls=False)
                loss = model(x).square().sum()
            with Watch(is_convolution) as watch:
                loss.backward()
            assert inside in watch.again
            assert function_switches(calls=False) not in watch.again


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(96, 288), nn.Linear(96, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 6, 16).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


@pytest.mark.slow  # captures blocks
@pytest.mark.sampled(1)
@pytest.mark.parametrize("lever", LEVERS)
def test_attention_runs_the_kernel_that_is_chosen_around_its_forward(lever):
    """Also where the same block ran with another one before."""

    def gradients(model, kernels):
        model.zero_grad()
        with sdpa_kernel(kernels):
            loss = model(inputs).square().mean()
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    inputs, order = torch.randn(4, 64, 96), [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    model = nn.Sequential(*[Attends() for _ in range(3)])
    plain = [gradients(model, kernels) for kernels in order]
    assert not all(map(torch.equal, plain[0], plain[1]))
    with LEVERS[lever](model):
        for expected, kernels in zip(plain, order, strict=True):
            assert all(map(torch.equal, expected, gradients(model, kernels)))


@pytest.mark.parametrize("lever", LEVERS)
def test_gradients_without_mkldnn_are_bit_equal(x, lever):
    def gradients(model):
        model.zero_grad()
        with without_mkldnn():
            loss = model(x).square().sum()
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    model = stack()
    plain = gradients(model)
    with LEVERS[lever](model):
        for _ in range(4):
            assert all(torch.equal(a, b) for a, b in zip(plain, gradients(model), strict=True))


def test_captured_blocks_are_recorded_again_under_settings_that_choose_operators(x):
    class Alone(Block):
        """Of which nothing is recorded yet."""

    begun, note = [], CapturedForward.note_capture

    def noted(forward, arguments):
        begun.append(torch._C._get_mkldnn_enabled())
        note(forward, arguments)

    model = nn.Sequential(Alone())
    with pytest.MonkeyPatch.context() as patch, tightfit.capture(model, "*"):
        patch.setattr(CapturedForward, "note_capture", noted)
        for settings in (nullcontext, without_mkldnn, nullcontext):
            with settings():
                model(x).sum().backward()
    assert begun == [True, False]
