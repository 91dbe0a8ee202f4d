"""Functions under `torch.compile` that a model calls: run dry as eager code, left as they are by levers and plans."""

import functools
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import tightfit
from exactness import assert_bit_equal, run
from tightfit.errors import CannotFit, RecomputeError, TraceError
from tightfit.step import Part, StepSettings
from tightfit.tracing.cuda import CudaRole
from tightfit.tracing.record import Phase
from tightfit.tracing.recording import no_cost
from tightfit.tracing.step import trace_step
from tightfit.verification import verify

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # within PyTorch's compiler
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # dynamo asks it of what it is given
]
LEVERS = {"recomputed": tightfit.recompute, "offloaded": tightfit.offload}


class Backend:
    """Counts the runs of compiled code, whose results differ from those of eager code."""

    def __init__(self):
        self.runs = 0

    def __call__(self, graph, inputs):
        def code(*args):
            self.runs += 1
            return tuple(each * 1.001 for each in graph(*args))

        return code


def gated(x, gate):
    return F.silu(gate) * x.tanh()


class Block(nn.Module):
    def __init__(self, function=gated):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(32, 128), nn.Linear(32, 128), nn.Linear(128, 32)
        self.function = function

    def forward(self, x):
        return x + self.down(self.function(self.up(x), self.gate(x)))


class Model(nn.Module):
    def __init__(self, *functions):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 1)
        self.layers = nn.ModuleList(Block(function) for function in functions)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


@pytest.fixture
def compiled():
    backend = Backend()
    yield torch.compile(gated, backend=backend, fullgraph=True), backend
    torch._dynamo.reset()


def loss(model, batch):
    return model(*batch).square().mean()


BATCH = (torch.randn(8, 64, 32, generator=torch.Generator().manual_seed(0)),)


@pytest.mark.keeps("functions-under-compile")
def test_a_dry_run_counts_the_operators_says_so_and_leaves_the_function_compiled(compiled):
    function, backend = compiled
    found = tightfit.estimate(Model(*[function] * 3), BATCH, loss=loss)
    plain = tightfit.estimate(Model(*[gated] * 3), BATCH, loss=loss)
    assert found.peak_bytes == plain.peak_bytes
    assert backend.runs == 0
    [line] = [a for a in found.assumptions if "torch.compile writes for gated" in str(a)]
    assert "test_compiled_functions.py" in str(line)
    loss(Model(*[function] * 3), BATCH)
    assert backend.runs == 3


@pytest.mark.keeps("functions-under-compile")
@pytest.mark.parametrize("lever", LEVERS)
def test_a_lever_refuses_a_block_that_calls_one_by_name(compiled, lever):
    function, backend = compiled
    model = Model(*[function] * 2)
    with (
        LEVERS[lever](model, "layers.*"),
        pytest.raises(RecomputeError, match=r"layers\.0: it calls gated under torch"),
    ):
        loss(model, BATCH)
    loss(model, BATCH)
    assert backend.runs == 2


HOLDERS = {
    "an attribute": lambda function: Model(*[function] * 2),
    "a closure": lambda function: Model(*[lambda x, gate: function(x, gate)] * 2),
    "a script": lambda function: Model(*[function] * 2),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("held_by", HOLDERS)
def test_captured_blocks_run_one_as_it_is(compiled, held_by):
    function = torch.jit.script(gated) if held_by == "a script" else compiled[0]
    model = HOLDERS[held_by](function)
    for _ in range(2):
        run(HOLDERS[held_by](function), BATCH, loss)  # a script rounds otherwise from its third call on
    plain = run(HOLDERS[held_by](function), BATCH, loss)
    with pytest.warns(UserWarning, match="they call gated, which PyTorch compiles"):
        found = run(model, BATCH, loss, levers=lambda model: tightfit.capture(model, "layers.*"))
    assert_bit_equal(plain, found)


@pytest.mark.keeps("functions-under-compile")
def test_a_plan_takes_other_blocks(compiled):
    function, _ = compiled
    model = Model(*[gated] * 4, function, function)
    planned = tightfit.plan(model, BATCH, "0.7x", loss=loss, levers=("recompute",))
    changed = {choice.path for choice in planned.choices if choice.action != "keep"}
    assert changed
    assert changed <= {f"layers.{n}" for n in range(4)}
    assert verify(model, BATCH, planned, loss=loss).ok
    assert any("left out: 2" in row.levers and "torch.compile" in row.reason for row in planned.rejected)
    with pytest.raises(
        CannotFit, match=r"reached by no lever.*functions under torch\.compile are called \(modules: 6\)"
    ):
        tightfit.plan(Model(*[function] * 6), BATCH, "0.7x", loss=loss, levers=("recompute",))


IMPORTS_LATE = """
import sys
import torch
import tightfit

class Late(torch.nn.Linear):
    def forward(self, x):
        return torch.compile(torch.tanh, backend="eager", fullgraph=True)(super().forward(x))

assert "torch._dynamo" not in sys.modules
found = tightfit.estimate(Late(4, 4), (torch.ones(2, 4),), loss=lambda model, batch: model(*batch).sum())
assert "torch.compile writes" in str(found.assumptions)
"""


@pytest.mark.slow  # an interpreter of its own
def test_a_step_may_import_the_compiler_itself():
    subprocess.run([sys.executable, "-c", IMPORTS_LATE], check=True)


# FlexAttention


def causal(b, h, i, j):
    return i >= j


class Flexible(nn.Module):
    """Attention of 4 heads to 2, each of 16 numbers."""

    def __init__(self, attend, score_mod=None):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 128), nn.Linear(64, 64)
        self.attend, self.score_mod = attend, score_mod

    def forward(self, x, mask):
        q, k, v = (part.unflatten(-1, (-1, 16)).transpose(1, 2) for part in self.qkv(x).split([64, 32, 32], -1))
        y = self.attend(q, k, v, score_mod=self.score_mod, block_mask=mask, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Attending(nn.Module):
    def __init__(self, attend, mask=create_block_mask, score_mod=None):
        super().__init__()
        self.layers = nn.ModuleList(Flexible(attend, score_mod) for _ in range(2))
        self.mask = mask

    def forward(self, x):
        length = x.shape[1]
        mask = self.mask(causal, None, None, length, length, device=x.device) if self.mask else None
        for layer in self.layers:
            x = layer(x, mask)
        return x


compile_eager = functools.partial(torch.compile, backend="eager")  # a dry run compiles nothing; inductor takes seconds
LONG = (torch.zeros(2, 1024, 64),)


def traced(model, batch=LONG, cost=no_cost):
    role = CudaRole((8, 9), 128, name="RTX 4090")
    parts, settings = [Part(batch, 1.0)], StepSettings("fp32")
    return trace_step(model, parts, loss, optimizer="adamw", settings=settings, role=role, cost=cost)


@pytest.mark.keeps("flex-attention-predicted")
@pytest.mark.parametrize(
    ("mask", "keys"), [(create_block_mask, 576), (compile_eager(create_block_mask), 576), (None, 1024)]
)
def test_flex_attention_runs_dry_with_what_its_kernels_take(mask, keys):
    met = []

    def cost(name, inputs, outputs, arguments):
        if name.startswith("tightfit.flex_attention"):
            met.append(arguments[-1])
        return 0.0

    trace = traced(Attending(compile_eager(flex_attention), mask), cost=cost)
    found = [o for o in trace.operators if o.name.startswith("tightfit.flex_attention")]
    assert [o.phase for o in found] == [Phase.FORWARD] * 2 + [Phase.BACKWARD] * 2
    assert [o.workspace_bytes for o in found if o.phase is Phase.BACKWARD] == [4 * 2 * 4 * 1024] * 2
    assert set(met) == {keys}  # (1 + ... + 8) / 8 blocks of 128
    assert not [a for a in trace.assumptions if "flex_attention" in a.question]


def test_a_mask_that_is_compiled_is_never_made_of_all_pairs():
    def highest_before_attention(mask):
        trace = traced(Attending(compile_eager(flex_attention), mask), (torch.zeros(1, 4096, 64),))
        first = next(n for n, o in enumerate(trace.operators) if o.name.startswith("tightfit.flex_attention"))
        return max(trace.levels[:first]) - trace.levels[0]

    assert highest_before_attention(create_block_mask) > 4096 * 4096
    assert highest_before_attention(compile_eager(create_block_mask)) < 4096 * 4096 / 4


def test_a_mask_of_all_pairs_that_is_asked_for_is_made():
    class Masked(nn.Linear):
        def forward(self, x):
            mask = compile_eager(create_mask)(causal, 1, 1, 64, 64, device=x.device)
            return super().forward(x) * mask[0, 0, :1, :1]

    assert tightfit.estimate(Masked(8, 8), (torch.ones(4, 8),), loss=loss, device="rtx4090").peak_bytes > 64 * 64


def test_flex_attention_says_what_a_dry_run_cannot_do():
    attend, slopes = compile_eager(flex_attention), nn.Parameter(torch.zeros(4))
    with pytest.raises(TraceError, match=r"flex_attention in layers\.0 cannot run dry without torch\.compile"):
        traced(Attending(flex_attention))
    with pytest.raises(TraceError, match=r"with a score_mod that is trained.*tightfit run"):
        traced(Attending(attend, score_mod=lambda score, b, h, i, j: score + slopes[h]))
    with pytest.raises(TraceError, match="needs a CUDA device to train on"):
        tightfit.estimate(Attending(attend), LONG, loss=loss)
