"""A block that runs again gives the same bits, whatever has changed since its last run."""

import copy
import functools
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from test_recompute_traps import CASES
from torch import nn
from trap_levers import LEVERS, RandomPolicy

import exactness
from exactness import assert_bit_equal
from tightfit import recompute
from tightfit.levers.recompute import KEEP_ALL, RECOMPUTE_ALL
from tightfit.levers.recompute.lever import apply_policies
from tightfit.levers.recompute.values import Operation, Product

WIDTH, TIMES = 16, 4


def repeated(name, levers=None):
    case = CASES[name]
    return exactness.run(*case.build(), case.loss, backward=case.backward, levers=levers, times=TIMES)


@functools.cache
def plain(name):
    try:
        return repeated(name)
    except RuntimeError:
        return None  # its second step needs the graph of the first


@pytest.mark.keeps("block-runs-again-same")
@pytest.mark.sampled(20)
@pytest.mark.parametrize("lever", ["whole blocks", "products kept", "everything kept", "random half 1"])
@pytest.mark.parametrize("name", CASES)
def test_a_trap_that_is_stepped_into_again_leaves_everything_bit_equal(name, lever):
    expected = plain(name)
    if expected is not None:
        assert_bit_equal(expected, repeated(name, LEVERS[lever]))


class Block(nn.Module):
    """A block with views, lists, writes inside of functions and draws."""

    def __init__(self):
        super().__init__()
        self.norm, self.root = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.also = lambda x: x
        self.zero = 0.0

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        q = torch.cat([-q[..., 4:], q[..., :4]], -1) * 0.5
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = self.also(x + self.out(mixed).float())
        x = x + (x.detach() * self.zero).reciprocal().clamp(-1, 1)
        return x + self.dropout(F.gelu(self.root(x))).softmax(-1)


def build(blocks=3):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks))), torch.randn(2, 5, WIDTH)


def step(model, x):
    torch.manual_seed(3)
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.keeps("block-runs-again-same")
def test_nothing_is_left_of_a_run_whose_graph_is_dropped():
    model, x = build()
    with recompute(model, "*"):
        step(model, x)
        gc.collect()
        gc.disable()
        try:
            # Other tests of this process may have left some, in the traceback of an error for example.
            others = {id(t) for t in gc.get_objects() if isinstance(t, Product | Operation)}
            y = model(x)
            left = weakref.ref(y.untyped_storage())
            held = [weakref.ref(t) for t in gc.get_objects() if isinstance(t, Product) and id(t) not in others]
            assert held
            del y
            assert left() is None
            assert not any(reference() for reference in held)
            now = [t for t in gc.get_objects() if isinstance(t, Operation)]
            assert not [t for t in now if id(t) not in others]
        finally:
            gc.enable()


def switched(block):
    block.also = torch.tanh


def written(block):
    block.also = lambda x: x.add_(0.25)


def by_numpy(block):
    def also(x):
        x.detach().numpy()[:] *= 2
        return x * 1

    block.also = also


def by_data(block):
    def also(x):
        x.data.mul_(0.5)
        return x * 1

    block.also = also


def other_constant(block):
    block.norm.eps = 0.5


def other_zero(block):
    block.zero = -0.0


def other_tensor(block):
    block.out.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.1))


def frozen(block):
    block.qkv.weight.requires_grad_(False)


def shared(block):
    block.root.weight = block.norm.weight


def other_strides(block):
    block.out.weight.data = block.out.weight.data.t().contiguous().t()


def without_gradient(block):
    def also(x):
        with torch.no_grad():
            y = x * 2
        return x + y

    block.also = also


def inside_hooks(block):
    def also(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return x * x

    block.also = also


def under_autocast(block):
    def also(x):
        with torch.autocast("cpu", torch.bfloat16):
            return block.out(x).float()

    block.also = also


def ends_early(block):
    block.forward = lambda x: block.norm(x)


def raises_inside(block):
    def also(x):
        try:
            F.linear(x, block.qkv.weight[:, :3])
        except RuntimeError:
            return x.sigmoid()

    block.also = also


def gradient_inside(block):
    def also(x):
        leaf = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((leaf * leaf.exp()).sum(), leaf)
        return x * slope

    block.also = also


def custom_function(block):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * ctx.saved_tensors[0] * grad

    block.also = Twice.apply


def kept_on_the_module(block):
    def also(x):
        block.kept = x * 3
        return x + block.kept.tanh()

    block.also = also


def evaluated(block):
    block.eval()


def deterministic(block):
    def also(x):
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return x.mul(torch.tensor(0.5)).float() if block.training else x
        finally:
            torch.set_default_dtype(dtype)

    block.also = also


CHANGES = [
    switched, written, by_numpy, by_data, other_constant, other_zero, other_tensor, frozen, shared, other_strides,
    without_gradient, inside_hooks, under_autocast, ends_early, raises_inside, gradient_inside, custom_function,
    kept_on_the_module, evaluated, deterministic,
]  # fmt: skip


@pytest.mark.sampled(20)
@pytest.mark.keeps("block-runs-again-same")
@pytest.mark.parametrize("policy", [RECOMPUTE_ALL, RandomPolicy(seed=1), RandomPolicy(seed=2), KEEP_ALL], ids=str)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_after_three_runs_is_noticed(change, policy):
    model, x = build()
    twin = copy.deepcopy(model)
    with apply_policies(twin, dict.fromkeys("012", policy)):
        for _ in range(3):
            step(twin, x)
        for each in (model, twin):
            if change is not ends_early:
                change(each[1])
        if change is ends_early:
            model[1].out = twin[1].out = nn.Identity()
        for _ in range(4):
            expected, found = step(model, x), step(twin, x)
            assert len(expected) == len(found)
            assert all(map(torch.equal, expected, found))
            assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))


@pytest.mark.parametrize("runs", [1, 4])
def test_other_memory_of_a_parameter_before_backward_changes_nothing(runs):
    model, x = build()
    twin = copy.deepcopy(model)
    found = []
    with recompute(twin, "*"):
        for each in (model, twin):
            for _ in range(runs - 1):
                step(each, x)
            each.zero_grad()
            torch.manual_seed(3)
            y = each(x).square().sum()
            for parameter in each.parameters():
                parameter.data = parameter.data * 2
            y.backward()
            found.append([parameter.grad for parameter in each.parameters()])
    assert all(map(torch.equal, *found))
