"""A CPU simulates CUDA in a dry run: which operators are called, and what they keep."""

import collections
import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tiny
from tightfit import recompute
from tightfit.levers.micro_batch import as_parts
from tightfit.runtime.internals import has_kernel, operators_with_kernel
from tightfit.step import Part, StepSettings, model_loss
from tightfit.tracing.cuda import CudaRole
from tightfit.tracing.cuda.allocator import round_size
from tightfit.tracing.cuda.autocast import CUDA_LISTS
from tightfit.tracing.cuda.replay import play
from tightfit.tracing.record import StepTrace
from tightfit.tracing.step import trace_step

A100 = CudaRole((8, 0), 108)
H200 = CudaRole((9, 0), 132)
SIZE, LENGTH, WIDTH, HEADS = 4, 512, 256, 4
ROWS = SIZE * LENGTH


def traced(model: nn.Module, batch: Any, role: CudaRole | None, precision: Any = "bf16", **more: Any) -> StepTrace:
    loss = more.pop("loss", model_loss)
    settings = StepSettings(precision, more.pop("grad_clip", None))
    return trace_step(model, as_parts([batch], loss), loss, settings=settings, role=role, **more)


def names(trace: StepTrace) -> collections.Counter[str]:
    return collections.Counter(operator.name.split(".")[1] for operator in trace.operators)


def saved_bytes(trace: StepTrace) -> int:
    """Bytes of what forward made and backward found."""
    backward = next(i for i, o in enumerate(trace.operators) if o.phase == "backward")
    there = [s for s in trace.alive_at(backward) if s.operator is not None and s.operator < backward]
    return sum(s.bytes for s in there)


class Block(nn.Module):
    """A pre-norm decoder block: RMS norm, attention, residual, RMS norm, SwiGLU, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm_1(x)).view(SIZE, LENGTH, 3 * HEADS, -1).transpose(1, 2).chunk(3, 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(SIZE, LENGTH, -1)
        x = x + self.out(attended)
        inner = self.norm_2(x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))


def sum_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["x"]).sum()


def block_batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(SIZE, LENGTH, WIDTH, requires_grad=True)}


@pytest.mark.keeps("block-saves-saves-cuda")
@pytest.mark.parametrize("role", [A100, H200], ids=["flash", "cudnn"])
def test_a_decoder_block_keeps_what_cuda_keeps_under_bf16_autocast(role):
    hidden = ROWS * WIDTH
    weights = 2 * WIDTH * WIDTH * (3 + 1 + 2 + 2 + 2)  # bf16 copies, cached by autocast and saved
    norms = 2 * 4 * ROWS + 3 * 2 * hidden  # a reciprocal root each; results in bf16, cast for qkv, gate and up
    attention = 2 * 3 * hidden + 2 * hidden + 4 * ROWS * HEADS  # q, k, v, output in bf16; logsumexp in fp32
    residual = 4 * hidden  # the sum that the second norm reads
    gated = 2 * 2 * hidden * 4  # gate, up, silu(gate) and the product, each twice the width, in bf16
    small = 3 * 512  # seed, offset and the loss: nothing is smaller than a block
    trace = traced(Block(), block_batch(), role, loss=sum_of)
    assert saved_bytes(trace) == weights + norms + attention + residual + gated + small


def test_norms_are_fused_and_attention_is_that_of_the_device():
    on_a100, on_h200 = (names(traced(Block(), block_batch(), role, loss=sum_of)) for role in (A100, H200))
    assert on_a100["_fused_rms_norm"] == on_h200["_fused_rms_norm_backward"] == 2
    assert on_a100["_scaled_dot_product_flash_attention_backward"] == 1
    assert on_h200["_scaled_dot_product_cudnn_attention_backward"] == 1


def test_a_boolean_mask_becomes_a_bias_whose_rows_are_aligned():
    length = 71
    q, mask = torch.randn(2, 4, length, 32, requires_grad=True), torch.ones(2, 1, length, length, dtype=torch.bool)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, q: torch.Tensor) -> torch.Tensor:
            q = q * self.scale
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum()

    trace = traced(Masked(), {"q": q}, A100, "fp32")
    assert names(trace)["_scaled_dot_product_efficient_attention_backward"] == 1
    assert any(s.bytes == round_size(4 * 2 * length * 72) for s in trace.storages)


def test_dropout_keeps_its_mask_as_booleans():
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x * self.scale, 0.1).sum()

    batch = {"x": torch.randn(500, 1000)}
    trace = traced(Dropped(), batch, A100, "fp32")
    assert names(trace)["native_dropout"] == 1
    assert saved_bytes(trace) == round_size(500 * 1000) + 512  # the mask and the loss


@pytest.mark.keeps("block-saves-saves-cuda")
def test_the_optimizer_is_foreach_and_its_root_of_second_moments_is_counted():
    model, batch = tiny.decoder(), tiny.token_batch()
    trace = traced(model, batch, A100, "fp32", grad_clip=1.0)
    parameters = sum(round_size(p.nbytes) for p in model.parameters())
    at_root = next(i for i, o in enumerate(trace.operators) if o.name == "aten._foreach_sqrt.default")
    assert sum(s.bytes for s in trace.storages if s.operator == at_root) == parameters
    assert names(traced(model, batch, None, "fp32"))["_foreach_sqrt"] == 0


NOT_PLAYED = {
    "aten::_cudnn_rnn",  # known to builds with CUDA only, where tensors of the CPU do not get there
    # Dimensions by name, until torch 2.12: no kernel written in Python takes them.
    "aten::cumprod.dimname",
    "aten::cumsum.dimname",
    "aten::log_softmax.Dimname",
    "aten::norm.names_ScalarOpt_dim",
    "aten::prod.dim_Dimname",
    "aten::softmax.Dimname",
    "aten::sum.dim_DimnameList",
}


def test_the_lists_hold_every_operator_that_this_release_casts_for_cuda():
    ours = {f"aten::{name}" for names in CUDA_LISTS.values() for name in names}
    aten = {name for name in operators_with_kernel("AutocastCUDA") if name.startswith("aten::")}
    assert aten - NOT_PLAYED <= ours


def cast_dtype(function: Any, *inputs: torch.Tensor) -> torch.dtype:
    with A100.simulated(), torch.autocast("cpu", torch.bfloat16):
        return function(*inputs).dtype


@pytest.mark.keeps("block-saves-saves-cuda")
@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x: x @ x, torch.bfloat16),
        (lambda x: F.linear(x, x), torch.bfloat16),
        (lambda x: torch.einsum("ij,jk->ik", x, x), torch.bfloat16),
        (lambda x: x.exp(), torch.float32),
        (lambda x: x.pow(2), torch.float32),
        (lambda x: x.bfloat16().pow(2), torch.float32),
        (lambda x: x.bfloat16().sum(), torch.float32),
        (lambda x: x.bfloat16().norm(), torch.float32),
        (lambda x: x.bfloat16().cumsum(0), torch.float32),
        (lambda x: F.softmax(x.bfloat16(), -1), torch.float32),
        (lambda x: F.softmax(x.bfloat16(), -1, dtype=torch.bfloat16), torch.bfloat16),
        (lambda x: F.layer_norm(x.bfloat16(), (8,)), torch.float32),
        (lambda x: F.cross_entropy(x.bfloat16(), torch.arange(8)), torch.float32),
        (lambda x: torch.addcmul(x.bfloat16(), x, x), torch.float32),
        (lambda x: torch.stack([x, x]), torch.float32),
        (lambda x: x.double() @ x.double(), torch.float64),
    ],
)
def test_autocast_gives_the_dtype_of_cudas_lists(function, dtype):
    assert cast_dtype(function, torch.randn(8, 8)) == dtype


def test_a_step_in_fp16_holds_the_numbers_of_the_scaler():
    role = CudaRole((7, 5), 40)
    both = [traced(nn.Linear(8, 8), {"x": torch.randn(4, 8)}, role, p, loss=sum_of) for p in ("fp16", "bf16")]
    scaled, plain = both
    held = [{s.name for s in trace.storages if s.category == "workspace" and s.died is None} for trace in both]
    assert held[0] - held[1] == {"scale of the loss", "steps since the loss scale grew"}
    assert names(scaled)["mul"] == names(plain)["mul"] + 2, "the loss is scaled, and its gradient"
    assert scaled.peak_bytes >= plain.peak_bytes + 2 * 512


def test_plain_attention_adds_its_mask_in_place():

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 4, 512, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query = self.weight * 2
            return F.scaled_dot_product_attention(query, query, query, attn_mask=x)

    trace = traced(Masked(), {"x": torch.randn(512, 512)}, CudaRole((7, 5), 40), loss=sum_of)
    (place,) = [i for i, o in enumerate(trace.operators) if o.name == "aten.add.Tensor" and o.phase == "forward"]
    (scores,) = [s for s in trace.storages if s.died == place and s.shape == (8, 512, 512)]
    (sums,) = [s for s in trace.storages if s.born == place]
    assert scores.bytes == sums.bytes
    assert trace.levels[place] <= trace.levels[place - 1]


class Attending(nn.Module):
    """Attention that only the plain path takes, under a boolean mask."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query = self.proj(x)
        return F.scaled_dot_product_attention(query, query[:, :1], query[:, :1], attn_mask=mask, enable_gqa=True)


class Passing(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_plain_attention_makes_numbers_of_a_boolean_mask_and_adds_them_anew_under_a_mode():
    batch = {"x": torch.randn(2, 4, 512, 64), "mask": torch.ones(512, 512, dtype=torch.bool).tril()}

    def level(watched: bool) -> int:
        """Where the mask is added to the products."""

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            with Passing() if watched else contextlib.nullcontext():
                return model(**batch).sum()

        trace = traced(Attending(), batch, CudaRole((7, 5), 40), "fp32", loss=loss)
        operators = [o.name for o in trace.operators]
        assert "aten.where.self" in operators
        return trace.levels[operators.index("aten.add.Tensor", operators.index("aten.bmm.default"))]

    assert level(watched=True) - level(watched=False) == 2 * 4 * 512 * 512 * 4


def test_a_weight_is_cast_once_within_a_region_and_anew_in_the_next():
    weight = nn.Parameter(torch.randn(8, 8))
    casts = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            casts.append(func is torch.ops.aten._to_copy.default and args[0].shape == weight.shape)
            return func(*args, **(kwargs or {}))

    x = torch.randn(2, 8)
    with A100.simulated(), Spy():
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                F.linear(F.linear(x, weight), weight)
    assert sum(casts) == 2


@pytest.mark.parametrize(
    ("call", "order"),
    [
        (lambda a, b, c: torch.addmm(a, b, c), "c b a"),
        (lambda a, b, c: F.linear(b, c, bias=a), "a c b"),
        (lambda a, b, c: torch.ops.aten.addmm.default(mat2=c, self=a, mat1=b), "c b a"),
        (lambda a, b, c: torch.linalg.multi_dot([a, b, c]), "a b c"),  # a list is cast by a loop
    ],
    ids=["positions", "a bias", "names", "a list"],
)
def test_autocast_casts_an_operators_last_argument_first(call, order):
    # Compared with the CUDA wheel by tests/card/test_casts.py. Plans name casts by their occurrence.
    tensors = {name: torch.randn(3, 3) for name in "abc"}
    cast: list[str] = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default and kwargs["dtype"] == torch.bfloat16:
                cast.extend(n for n, t in tensors.items() if t.data_ptr() == args[0].data_ptr())
            return func(*args, **(kwargs or {}))

    with A100.simulated(), Spy(), torch.autocast("cpu", torch.bfloat16):
        call(*tensors.values())
    assert " ".join(cast) == order


@pytest.mark.keeps("playing-cuda-leaves-cpu")
def test_afterwards_the_cpu_is_a_cpu_again():
    model, batch = tiny.decoder(dropout=0.1), tiny.token_batch()
    before = traced(model, batch, None).levels
    traced(model, batch, H200)
    after = traced(model, batch, None)
    assert after.levels == before
    assert "_scaled_dot_product_cudnn_attention" not in names(after)
    assert not has_kernel("aten::_fused_rms_norm", "CPU")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.randn(8).exp().dtype == torch.float32


def test_small_frozen_attention_and_norms_give_true_numbers_so_that_branches_on_them_are_true():
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.scale = nn.RMSNorm(16), nn.Parameter(torch.ones(16))
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            normed = self.frozen(x)
            attended = F.scaled_dot_product_attention(normed, normed, normed)
            seen.append(bool(attended.isfinite().all()))
            return (x * self.scale).sum()

    seen: list[bool] = []
    traced(Branching(), {"x": torch.randn(2, 2, 8, 16)}, H200, "fp32")
    assert all(seen)


def test_code_that_asks_which_kernel_takes_its_attention_gets_the_cards_answer():
    from torch.backends.cuda import SDPAParams

    def asked(dtype: torch.dtype, **grouped: bool) -> tuple[bool, bool]:
        query, key = torch.ones(1, 4, 8, 64, dtype=dtype), torch.ones(1, 2 if grouped else 4, 16, 64, dtype=dtype)
        call = SDPAParams(query, key, key, None, 0.0, False, bool(grouped))
        own: Any = torch.backends.cuda
        return own.can_use_flash_attention(call), own.can_use_efficient_attention(call)

    before = asked(torch.bfloat16)
    with A100.simulated():
        assert asked(torch.bfloat16) == (True, True)
        assert asked(torch.bfloat16, grouped=True) == (True, False)
        assert asked(torch.float32) == (False, True)
    assert asked(torch.bfloat16) == before == (False, False)


def test_the_class_of_switches_between_cards_stays_a_class():
    """bitsandbytes asks for the cards' capabilities through it when it is imported, and swallows the error."""

    class Switching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert not isinstance(x, torch.cuda.device)
            with torch.cuda.device(x.device):
                return self.inner(x).sum()

    switch = torch.cuda.device
    trace = traced(Switching(), (torch.randn(4, 4),), A100, None, loss=lambda model, batch: model(*batch))
    assert trace.operators
    assert torch.cuda.device is switch


def test_a_state_of_a_generator_is_on_the_host():
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1)))
    with recompute(model, "0"):
        trace = traced(model, (torch.randn(8, 64),), A100, None, loss=lambda m, batch: m(*batch).sum())
    assert "native_dropout" in names(trace)
    assert not any(s.bytes for s in trace.storages if s.dtype == "uint8")


def test_a_number_that_python_writes_into_a_part_of_a_tensor_stays_on_the_host():

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shifted = x.clone()
            shifted[:, 0] = 1
            return self.embedding(shifted).sum()

    trace = traced(Shifted(), (torch.zeros(2, 8, dtype=torch.int64),), A100, None, loss=lambda m, batch: m(*batch))
    fills = [o.name.startswith("aten.fill_.") for o in trace.operators]  # of a tensor, or since torch 2.15 of a number
    place = fills.index(True)
    assert trace.levels[place] == trace.levels[place - 1]


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        counts = torch.histc(ids.int(), bins=4, min=0, max=3)
        assert counts.tolist() == [2, 1, 0, 1]
        return self.inner(x).sum()


def test_integers_are_counted_as_on_a_card():
    batch = (torch.randn(4, 4), torch.tensor([0, 0, 1, 3]))
    trace = traced(Counted(), batch, A100, None, loss=lambda m, batch: m(*batch))
    assert names(trace)["histc"] == 1


@pytest.mark.parametrize(("capability", "grouped"), [((7, 5), 0), ((8, 0), 2)])
def test_experts_are_multiplied_in_groups_where_the_card_can(capability, grouped):
    model, role = tiny.decoder(num_experts=4, experts_per_token=2), CudaRole(capability, 40)
    trace = traced(model, tiny.token_batch(2, 16), role, None)
    counted = sum(o.name == "aten._grouped_mm.default" and o.phase == "forward" for o in trace.operators)
    assert counted == grouped * len(model.layers)


@pytest.fixture
def other_library():
    """A library of somebody's with operators that the CPU's autocast casts, like torchvision's `nms`."""
    library = torch.library.Library("tightfit_tests", "FRAGMENT")
    for name, keys in {"by_both": ("AutocastCPU", "AutocastCUDA"), "by_the_cpu": ("AutocastCPU",)}.items():
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, torch.square, "CPU")
        for key in keys:
            library.impl(name, _cast(getattr(torch.ops.tightfit_tests, name)), key)
    yield torch.ops.tightfit_tests
    library._destroy()


def _cast(operator):
    def kernel(x: torch.Tensor) -> torch.Tensor:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return operator(x.bfloat16())

    return kernel


@pytest.mark.parametrize(("name", "dtype"), [("by_both", torch.bfloat16), ("by_the_cpu", torch.float32)])
def test_operators_of_other_libraries_are_cast_if_autocast_casts_them_on_cards(other_library, name, dtype):
    x, operator = torch.ones(2, 2), getattr(other_library, name)
    with torch.autocast("cpu", torch.bfloat16):
        assert operator(x).dtype == torch.bfloat16
        with A100.simulated():
            assert operator(x).dtype == dtype
        assert operator(x).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["went", "came"])
def test_a_library_is_not_taken_for_one_that_went(name):
    x, library = torch.ones(2), torch.library.Library(f"tightfit_{name}", "FRAGMENT")  # as many operators as before
    library.define("once(Tensor x) -> Tensor")
    library.impl("once", torch.square, "CPU")
    operator = getattr(torch.ops, f"tightfit_{name}").once
    library.impl("once", _cast(operator), "AutocastCPU")
    try:
        with torch.autocast("cpu", torch.bfloat16), A100.simulated():
            assert operator(x).dtype == torch.float32
    finally:
        library._destroy()


def test_steps_behind_an_emptied_cache_reserve_less_where_states_split_what_activations_left():
    model, parts = tiny.decoder(num_layers=2, hidden_size=256, vocab_size=2000), [Part(tiny.token_batch(16, 256), 1.0)]
    role = CudaRole((8, 9), 128)
    trace = trace_step(model, parts, model_loss, optimizer="adamw", settings=StepSettings("bf16"), role=role)
    kept, emptied = play(trace), play(trace, emptied=True)
    assert max(emptied.levels) <= emptied.reserved_bytes < kept.reserved_bytes
