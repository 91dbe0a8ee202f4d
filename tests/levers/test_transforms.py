"""Recompute and the transforms of `torch.func`: right results, and nothing left on when something fails."""

import sys
import threading

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tightfit.errors import RecomputeError
from tightfit.levers.chunked_loss import apply_chunked_loss
from tightfit.levers.compiled import compile_blocks
from tightfit.levers.recompute import recompute
from tightfit.levers.recompute.recorder import Recorder
from tightfit.levers.recompute.region import RecordedForward
from tightfit.levers.tile import tile

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's own forward AD uses it
WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def build():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 5)), torch.randn(4, 3, WIDTH), torch.randn(4, 3, WIDTH)


def loss(model, parameters, x):
    return functional_call(model, parameters, (x,)).pow(2).sum()


def dual(model, x, tangent):
    with forward_ad.dual_level():
        out, moved = forward_ad.unpack_dual(model(forward_ad.make_dual(x, tangent)))
        return torch.autograd.grad(out.sum() + moved.pow(2).sum(), list(model.parameters())[:-1])


def doubled(model, x, tangent):
    twice = {name: 2 * parameter for name, parameter in model.named_parameters()}
    return torch.autograd.grad(functional_call(model, twice, (x,)).pow(2).sum(), list(model.parameters()))


USES = {
    "grad": lambda model, x, t: grad(lambda p: loss(model, p, x))(dict(model.named_parameters())),
    "grad of grad": lambda model, x, t: grad(lambda x: grad(lambda x: model(x).pow(2).sum())(x).pow(2).sum())(x),
    "vmap": lambda model, x, t: vmap(model)(x.unsqueeze(0).expand(2, -1, -1, -1)),
    "gradients of samples": lambda model, x, t: vmap(grad(lambda p, x: loss(model, p, x)), in_dims=(None, 0))(
        dict(model.named_parameters()), x.unsqueeze(1)
    ),
    "jvp": lambda model, x, t: jvp(model, (x,), (t,)),
    "vjp": lambda model, x, t: vjp(model, x)[1](torch.ones(4, 3, 5)),
    "jacrev": lambda model, x, t: jacrev(lambda x: model(x).sum((0, 1)))(x),
    "jacfwd": lambda model, x, t: jacfwd(lambda x: model(x).sum((0, 1)))(x),
    "hessian": lambda model, x, t: hessian(lambda x: model(x).pow(2).sum())(x),
    "functional_call": doubled,
    "dual numbers": dual,
    "jacobian": lambda model, x, t: torch.autograd.functional.jacobian(lambda x: model(x).sum((0, 1)), x),
    "vectorised jacobian": lambda model, x, t: torch.autograd.functional.jacobian(
        lambda x: model(x).sum((0, 1)), x, vectorize=True
    ),
}
LEVERS = {
    "recompute": lambda model: recompute(model, "[01]"),
    "reentrant": lambda model: recompute(model, "[01]", use_reentrant=True),
    "tile": lambda model: tile(model, "[01]", tokens=2),
    "chunked_loss": lambda model: apply_chunked_loss(model, "2"),
    "compile": lambda model: compile_blocks(model, "[01]"),
}
TRANSFORMS = ["grad", "grad of grad", "vmap", "gradients of samples", "jvp", "vjp", "jacrev", "jacfwd", "hessian"]


@pytest.mark.parametrize("use", USES)
def test_a_recomputed_model_gives_what_the_plain_one_gives(use):
    model, *inputs = build()
    plain = tree_leaves(USES[use](model, *inputs))
    with recompute(model, "[01]"):
        found = tree_leaves(USES[use](model, *inputs))
    assert len(plain) == len(found) > 0
    assert all(map(torch.equal, plain, found))
    assert nothing_is_left_on()


@pytest.mark.keeps("transform-torch-func-lever")
@pytest.mark.parametrize("lever", [name for name in LEVERS if name != "recompute"])
@pytest.mark.parametrize("use", TRANSFORMS)
def test_under_a_transform_every_lever_falls_through_to_the_plain_forward(lever, use):
    model, *inputs = build()
    plain = tree_leaves(USES[use](model, *inputs))
    with LEVERS[lever](model):
        found = tree_leaves(USES[use](model, *inputs))
    assert all(map(torch.equal, plain, found))


# What fails leaves nothing on


def nothing_is_left_on():
    """Whether no mode watches this thread, and no hook takes what autograd saves."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    return hooks is None and modes == 0 and torch._C._is_torch_function_all_disabled() is False


def assert_as_ever(model):
    """What was left is as if nothing had happened: gradients equal the plain ones, and are recomputed."""
    assert nothing_is_left_on()
    fresh, x, _ = build()
    model.zero_grad()
    loss = model(x).pow(2).sum()
    loss.backward()
    fresh(x).pow(2).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


def test_hooks_that_are_refused_take_the_other_observers_along():
    model, x, _ = build()
    with recompute(model, "[01]"):
        refused = torch.autograd.graph.disable_saved_tensors_hooks("no hooks here")
        with refused, pytest.raises(RuntimeError, match="no hooks here"):
            model(x)
        assert_as_ever(model)


class StopsAt(TorchDispatchMode):
    """Raises at one of the operators that it sees."""

    def __init__(self, number, error):
        super().__init__()
        self.number, self.error, self.count = number, error, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.number:
            raise self.error("stop")
        return func(*args, **(kwargs or {}))


@pytest.mark.keeps("transform-torch-func-lever")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, GeneratorExit, SystemExit])
def test_whatever_is_raised_at_whichever_operator_nothing_is_left_on(error):
    model, x, _ = build()
    number, stopped = 0, True
    with recompute(model, "[01]"):
        while stopped:
            number += 1
            try:
                with StopsAt(number, error):
                    model(x).pow(2).sum().backward()
                stopped = False
            except error:
                assert_as_ever(model)
    assert number > 30  # forward, recomputation and backward


def interrupted_at(line, call):
    """Call something; a KeyboardInterrupt comes at one of the lines of the observers' entering. Whether it came."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if frame.f_code not in (Recorder.start.__code__, RecordedForward.__call__.__wrapped__.__code__):
            return trace if "recompute" in frame.f_code.co_filename else None
        if event == "line":
            count += 1
            if count == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_at_any_line_of_the_entering_leaves_nothing_on():
    model, x, _ = build()
    line = 1
    with recompute(model, "[01]"):
        while interrupted_at(line, lambda: model(x)):
            assert nothing_is_left_on(), line
            line += 1
        assert_as_ever(model)
    assert line > 10


def test_a_failure_in_one_model_leaves_recompute_on_in_another():
    class Fails(Block):
        def forward(self, x):
            return grad(lambda x: super(Fails, self).forward(x).sum())(x)  # no hooks are allowed in there

    failing, (model, x, _) = nn.Sequential(Fails()), build()
    with recompute(failing, "0"), recompute(model, "[01]"):
        with pytest.raises(RecomputeError, match=r"0: the block uses torch\.func\.grad"):
            failing(x)
        assert_as_ever(model)


def test_a_failure_in_one_thread_leaves_others_alone():
    model, x, _ = build()
    problems = []

    def train(fails):
        try:
            for _ in range(20):
                if fails:
                    with pytest.raises(RuntimeError), torch.autograd.graph.disable_saved_tensors_hooks("no hooks"):
                        model(x)
                else:
                    torch.autograd.grad(model(x).sum(), list(model.parameters()))
                assert nothing_is_left_on()
        except BaseException as error:
            problems.append(error)

    with recompute(model, "[01]"):
        threads = [threading.Thread(target=train, args=(fails,)) for fails in (True, False, False)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not problems


def test_a_block_called_in_a_generator_that_is_left_half_way():
    model, x, _ = build()

    def steps():
        try:
            for block in model:
                yield block(x)
        finally:
            model[0](x).sum().backward()

    with recompute(model, "[01]"):
        running = steps()
        next(running).sum().backward()
        running.close()
        assert_as_ever(model)
