"""Kernels of other packages in a dry run for a CUDA device: Triton's launches, operators of `torch.library`, questions.

The quick tests launch kernels of a stand-in package, which has Triton's classes and refuses to run anything.
"""

import importlib
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

import tightfit
from tightfit.errors import TraceError
from tightfit.levers.micro_batch import as_parts
from tightfit.step import StepSettings, model_loss
from tightfit.tracing.cuda import CudaRole
from tightfit.tracing.cuda.role import OTHERS
from tightfit.tracing.record import StepTrace
from tightfit.tracing.step import trace_step

A100 = CudaRole((8, 0), 108, name="A100", memory_bytes=80 * 2**30)
ROWS, WIDTH = 64, 256
JIT = """
class KernelInterface:
    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

class JITFunction(KernelInterface):
    def __init__(self, fn):
        self.fn, self.__name__ = fn, fn.__name__

    def run(self, *args, **kwargs):
        raise RuntimeError("0 active drivers")

class Autotuner(KernelInterface):
    def __init__(self, fn):
        self.fn = fn

    def run(self, *args, **kwargs):
        raise RuntimeError("timed")
"""
DRIVER = """
class DriverConfig:
    @property
    def active(self):
        raise RuntimeError("0 active drivers")

driver = DriverConfig()
"""


@pytest.fixture
def triton(monkeypatch, tmp_path):
    """A package with Triton's classes, on the path and not imported."""
    importlib.import_module("torch._dynamo")  # PyTorch asks once for the true package, and must not find this one
    runtime = tmp_path / "triton" / "runtime"
    runtime.mkdir(parents=True)
    (tmp_path / "triton" / "__init__.py").touch()
    (runtime / "__init__.py").touch()
    (runtime / "jit.py").write_text(JIT, "utf-8")
    (runtime / "driver.py").write_text(DRIVER, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        del sys.modules[name]
    importlib.invalidate_caches()


def kernel(tuned: bool = False) -> Any:
    jit = importlib.import_module("triton.runtime.jit")

    def scale_kernel(x: Any, y: Any, count: int) -> None: ...

    made = jit.JITFunction(scale_kernel)
    return jit.Autotuner(made) if tuned else made


def traced(model: nn.Module, role: CudaRole | None = A100, loss: Any = None, **more: Any) -> StepTrace:
    loss = loss or (lambda model, batch: model(batch).sum())
    parts = as_parts([torch.ones(ROWS, WIDTH)], loss)
    return trace_step(model, parts, loss, settings=StepSettings(more.pop("precision", "fp32")), role=role, **more)


class Scaled(torch.autograd.Function):
    """Saves its input, and allocates what it returns, as packages with kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, launch: Any) -> torch.Tensor:
        ctx.launch = launch
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        launch(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        into = torch.empty_like(x)
        ctx.launch(gradients[0], into)
        return into, None


class WithLaunch(nn.Module):
    def __init__(self, launch: Any):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.launch = launch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(self.linear(x), self.launch)  # pyright: ignore[reportReturnType]


@pytest.mark.keeps("launch-triton-kernel-runs")
@pytest.mark.parametrize("tuned", [False, True])
def test_a_launch_runs_nothing_and_takes_no_memory(triton, tuned):
    launched = kernel(tuned)
    found = traced(WithLaunch(lambda x, y: launched[lambda meta: 1 / 0](x, y, x.numel())))
    plain = traced(WithLaunch(lambda x, y: torch.mul(x, 2, out=y)))
    assert found.peak_bytes == plain.peak_bytes
    names = [operator.name for operator in found.operators]
    assert names.count("triton.scale_kernel") == 2
    questions = {a.question: a.answer for a in found.assumptions}
    assert "moving the bytes" in questions["the time of the kernel triton.scale_kernel"]
    with pytest.raises(RuntimeError, match="timed" if tuned else "0 active drivers"):
        launched[(1,)](None)


@pytest.mark.keeps("launch-triton-kernel-runs")
def test_a_launch_takes_the_time_of_its_bytes(triton):
    launched = kernel()
    model = WithLaunch(lambda x, y: launched[(1,)](x, y))
    trace = traced(model, cost=lambda name, inputs, outputs, arguments: float(sum(i.bytes for i in inputs)))
    seconds = [operator.seconds for operator in trace.operators if operator.name.startswith("triton.")]
    assert seconds == [2 * ROWS * WIDTH * 4] * 2


@pytest.mark.keeps("code-asks-about-cuda")
def test_a_package_imported_within_the_step_is_replaced_too_and_left_as_it_was(triton):
    def launch(x: torch.Tensor, y: torch.Tensor) -> None:
        kernel().run(x, y, grid=(1,), warmup=False)
        driver = importlib.import_module("triton.runtime.driver").driver
        assert driver.active.get_current_target().arch == 80
        assert driver.active.utils.get_device_properties(0)["multiprocessor_count"] == 108

    assert "triton" not in sys.modules
    finders = list(sys.meta_path)
    traced(WithLaunch(launch))
    assert sys.meta_path == finders
    jit, driver = sys.modules["triton.runtime.jit"], sys.modules["triton.runtime.driver"]
    assert jit.__spec__ is not None
    assert type(jit.__spec__.loader).__module__.startswith("_frozen_importlib")
    for owner in (jit.JITFunction, jit.Autotuner, jit.KernelInterface, driver.DriverConfig):
        assert not any("tightfit" in getattr(item, "__module__", "") for item in vars(owner).values())
    with pytest.raises(RuntimeError, match="0 active drivers"):
        driver.driver.active  # noqa: B018 - a property


@pytest.mark.keeps("launch-triton-kernel-runs")
def test_what_a_kernel_may_have_written_is_unknown_afterwards_and_lengths_are_not(triton):
    seen = []

    def launch(x: torch.Tensor, y: torch.Tensor) -> None:
        lengths, counts = torch.tensor([3, 4]).cumsum(0), torch.zeros(2, dtype=torch.int64)
        small = torch.full((2,), 5.0)
        kernel()[(1,)](x, y, lengths, counts, small)
        seen.append((lengths.tolist(), counts.tolist(), small.tolist()))

    counts_assumed, small_assumed = [0, 0], [1.0, 1.0]
    traced(WithLaunch(launch))
    assert all(found == ([3, 7], counts_assumed, small_assumed) for found in seen)


def test_a_kernel_that_is_asked_for_what_only_a_compiler_knows_is_named(triton):
    with pytest.raises(TraceError, match=r"triton\.scale_kernel\.n_regs cannot be run dry"):
        traced(WithLaunch(lambda x, y: kernel()[(1,)](x, y).n_regs))


def test_a_plan_recomputes_a_block_with_a_kernel_as_applied(triton):
    launched = kernel()
    model = nn.Sequential(*(WithLaunch(lambda x, y: launched[(1,)](x, y)) for _ in range(3)))
    batch = (torch.ones(2048, WIDTH),)
    arguments: Any = {"loss": lambda model, batch: model(*batch).sum(), "device": "a100-80gb", "optimizer": "sgd"}
    plain = tightfit.estimate(model, batch, **arguments)
    plan = tightfit.plan(model, batch, budget=plain.peak_bytes, **arguments)
    assert plan.peak_bytes <= plain.peak_bytes


# Operators of torch.library


@pytest.fixture(scope="module")
def operators():
    """Operators as packages register them: with a fake kernel, for CUDA alone, and without a fake kernel."""

    @torch.library.custom_op("tightfit_tests::scaled", mutates_args=(), device_types="cuda")
    def scaled(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a dry run computes nothing")

    @scaled.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    scaled.register_autograd(lambda ctx, gradient: torch.ops.tightfit_tests.scaled(gradient))

    @torch.library.custom_op("tightfit_tests::not_fake", mutates_args=(), device_types="cuda")
    def not_fake(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a dry run computes nothing")

    return torch.ops.tightfit_tests


class WithOperator(nn.Module):
    def __init__(self, operator: Any):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.operator = operator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        small = self.operator(torch.ones(2))  # known and small: no kernel of the CPU computes it either
        return self.operator(self.linear(x)) * small.sum()


@pytest.mark.keeps("operators-torch-library-go")
def test_an_operator_of_torch_library_goes_through_its_fake_kernel(operators):
    trace = traced(WithOperator(operators.scaled))
    plain = traced(WithOperator(lambda x: x * 2))
    assert [o.name for o in trace.operators].count("tightfit_tests.scaled.default") == 3
    assert trace.peak_bytes == plain.peak_bytes
    assert "the time of the kernel tightfit_tests.scaled.default" in {a.question for a in trace.assumptions}


@pytest.mark.keeps("operators-torch-library-go")
def test_an_operator_without_a_fake_kernel_is_one_line_with_its_name(operators):
    with pytest.raises(TraceError, match=r"tightfit_tests\.not_fake\.default cannot be run dry.*register_fake"):
        traced(WithOperator(operators.not_fake))


# Questions about CUDA


class Asks(nn.Module):
    """Branches on where its tensors are, as packages with kernels do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.device = self.linear.weight.device
        self.answers: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device, kind = x.device, x.device.type
        assert device == self.device
        assert device == self.linear.weight.device
        with torch.cuda.device(device):
            made = torch.zeros(2, device=device) + torch.arange(2, device=device.type)
        answers = {
            "is_cuda": x.is_cuda,
            "type": [kind == "cuda", kind != "cpu", kind in ("cuda", "xpu"), "cuda" in kind],
            "table": {"cuda": "fused", "cpu": "plain"}.get(device.type),
            "index": (device.index, x.get_device(), torch.cuda.current_device(), torch.cuda.device_count()),
            "there": (torch.cuda.is_available(), torch.cuda.is_bf16_supported(), torch.cuda.get_device_name(device)),
            "capability": torch.cuda.get_device_capability(device),
            "processors": torch.cuda.get_device_properties(device).multi_processor_count,
            "autocast": (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
            "switch": isinstance(torch.cuda.device(0), torch.cuda.device),  # PyTorch's own code looks for the class
            "moved": (x.to(device) is x, x.cuda() is x, made.to(device=device).is_cuda),
        }
        self.answers.update(answers)
        return self.linear(x)


@pytest.mark.keeps("code-asks-about-cuda")
def test_questions_about_cuda_get_the_answers_of_the_device_and_only_in_a_dry_run_for_it():
    model, answers = Asks(), {}
    model.answers = _Kept(answers)
    before = {name: torch.Tensor.__dict__.get(name) for name in ("device", "is_cuda", "get_device", "cuda")}
    functions = dict(vars(torch.cuda)), torch.is_autocast_enabled, torch.autocast.__init__, torch.cuda.device.__init__
    traced(model, precision="bf16")
    assert answers == {
        "is_cuda": True,
        "type": [True, True, True, True],
        "table": "fused",
        "index": (0, 0, 0, 1),
        "there": (True, True, "A100"),
        "capability": (8, 0),
        "processors": 108,
        "autocast": (True, torch.bfloat16),
        "switch": True,
        "moved": (True, True, True),
    }
    assert {name: torch.Tensor.__dict__.get(name) for name in before} == before
    assert functions == (
        dict(vars(torch.cuda)), torch.is_autocast_enabled, torch.autocast.__init__, torch.cuda.device.__init__
    )  # fmt: skip


class _Kept(dict):
    """Answers that outlive the dry run, which puts back what modules hold."""

    def __init__(self, kept: dict[str, Any]):
        super().__init__()
        self.kept = kept

    def update(self, *args: Any, **kwargs: Any) -> None:
        self.kept.update(*args, **kwargs)


@pytest.mark.keeps("code-asks-about-cuda")
def test_other_threads_and_failed_steps_are_left_as_they_were(triton):
    launched, refused = kernel(), []

    def ask() -> None:
        refused.append((torch.ones(1).is_cuda, torch.ones(1).device, torch.cuda.is_available()))
        try:
            launched[(1,)](None)
        except RuntimeError as error:
            refused.append(str(error))

    def launch(x: torch.Tensor, y: torch.Tensor) -> None:
        assert x.is_cuda
        other = threading.Thread(target=ask)
        other.start()
        other.join()
        raise ValueError("the step fails")

    before = dict(vars(sys.modules["triton.runtime.jit"].KernelInterface)), dict(vars(torch.cuda))
    with pytest.raises(ValueError, match="the step fails"):
        traced(WithLaunch(launch))
    assert refused == [(False, torch.device("cpu"), False), "0 active drivers"]
    assert (dict(vars(sys.modules["triton.runtime.jit"].KernelInterface)), dict(vars(torch.cuda))) == before
    assert "device" not in vars(torch.Tensor)


@pytest.mark.keeps("code-asks-about-cuda")
def test_replacements_last_until_the_last_of_two_threads_leaves():
    begun, go_on = threading.Event(), threading.Event()

    def first() -> None:
        with OTHERS.active():
            begun.set()
            go_on.wait(60)

    before = dict(vars(torch.cuda))
    thread = threading.Thread(target=first)
    thread.start()
    begun.wait(60)
    with OTHERS.active():
        go_on.set()
        thread.join()
        assert "device" in vars(torch.Tensor)
        assert not torch.cuda.is_available()  # nobody simulates a device
    assert dict(vars(torch.cuda)) == before
    assert "device" not in vars(torch.Tensor)


# flash_attn


def language_model(attention: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, use_cache=False, dtype=torch.bfloat16,
    )  # fmt: skip
    make = transformers.AutoModelForCausalLM.from_config
    return tightfit.build_dry(lambda: make(config, attn_implementation=attention, dtype=torch.bfloat16))


@pytest.mark.keeps("model-flash-attn-built")
def test_a_model_for_flash_attn_runs_dry_with_the_flash_kernel_of_pytorch_and_says_so():
    ids = torch.arange(64).view(2, 32)
    batch = {"input_ids": ids, "labels": ids}
    padded = {**batch, "attention_mask": torch.tensor([[1] * 32, [1] * 20 + [0] * 12])}
    flash, sdpa = language_model("flash_attention_2"), language_model("sdpa")
    found = tightfit.estimate(flash, batch, device="a100-80gb")
    assert found.peak_bytes == tightfit.estimate(sdpa, batch, device="a100-80gb").peak_bytes
    assert any(line.startswith("the package flash_attn, which is not installed") for line in found.assumptions)
    utilities = sys.modules["transformers.modeling_flash_attention_utils"]
    assert utilities._loaded_implementation is None
    traced_code = tightfit.trace(lambda: flash(**batch), device="a100-80gb")
    assert any(line.startswith("the package flash_attn") for line in traced_code.assumptions)
    joined = trace_step(flash, as_parts([padded], model_loss), model_loss, role=A100)
    names = [operator.name for operator in joined.operators]
    assert names.count("aten._flash_attention_forward.default") == 2  # over the 52 tokens that are not padding
    assert names.count("aten._flash_attention_backward.default") == 2
    with pytest.raises(TraceError, match="takes float16 and bfloat16, and got float32 in model"):
        tightfit.estimate(language_model("flash_attention_2").float(), batch, device="a100-80gb")
    with pytest.raises(TraceError, match="flash_attention_2 needs a CUDA device"):
        tightfit.estimate(flash, batch, device="cpu")
