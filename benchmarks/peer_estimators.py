"""Estimators of a training's peak that others have published, asked as their own documentation asks them.

Packages are called; formulas that exist as text or inside larger programs are written anew, with their source. None of
them is corrected here. An estimator is asked about steps for which it was made. `NotAsked` and `ImportError` say why
there is no answer.
"""

import importlib
import math
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from tightfit.step import Loss, Part, Precision, StepSettings, forward_backward, model_loss, update

Weights = Literal["fp32", "bf16", "bf16 weights"]  # fp32; fp32 under autocast; weights, gradients and states in bf16
STEPS = 2  # the first makes the optimizer's states


class NotAsked(Exception):
    """The estimator makes no statement about such a step."""


@dataclass(frozen=True)
class Shape:
    """What formulas read of a decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    gated: bool


@dataclass(frozen=True)
class Question:
    """A training step by AdamW, in the words of its author: a model, a batch and a loss."""

    build: Callable[[], nn.Module]
    make_batch: Callable[[], Mapping[str, Any]]
    shape: Shape
    size: int
    length: int
    precision: Weights = "fp32"
    checkpointed: bool = False
    loss: Loss = model_loss

    @property
    def autocast(self) -> Precision:
        return "bf16" if self.precision == "bf16" else "fp32"


@dataclass(frozen=True)
class Estimator:
    """One of the peers: what it counts, where it comes from, and how it is asked. `packages` are what it needs."""

    counts: str
    source: str
    ask: Callable[[Question], int]
    packages: tuple[str, ...] = ()


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def on_meta(question: Question) -> nn.Module:
    with torch.device("meta"):
        return question.build()


def only(question: Question, *precisions: Weights) -> None:
    if question.precision not in precisions:
        raise NotAsked(f"made for {' and '.join(precisions)}")


# Rules of bytes a parameter


def sixteen_bytes(question: Question) -> int:
    only(question, "fp32", "bf16")
    return 16 * parameters_of(on_meta(question))


def anatomy(question: Question) -> int:
    only(question, "fp32", "bf16")
    weights = 6 if question.precision == "bf16" else 4
    return (weights + 4 + 8) * parameters_of(on_meta(question))


# Packages


def accelerate(question: Question) -> int:
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    total, _ = calculate_maximum_sizes(on_meta(question).float())
    named = {"fp32": "float32", "bf16": "bfloat16", "bf16 weights": "bfloat16"}[question.precision]
    return int(max(estimate_training_usage(total, named).values()))


def deepspeed_zero2(question: Question) -> int:
    only(question, "bf16")
    module = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2")
    estimate = module.estimate_zero2_model_states_mem_needs
    return estimate(parameters_of(on_meta(question)), num_gpus_per_node=1, num_nodes=1, cpu_offload=False)[1]


def deepspeed_zero3(question: Question) -> int:
    only(question, "bf16")
    module = importlib.import_module("deepspeed.runtime.zero.stage3")
    model = on_meta(question)
    largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    estimate = module.estimate_zero3_model_states_mem_needs
    how = {"num_gpus_per_node": 1, "num_nodes": 1, "cpu_offload": False, "cpu_offload_params": False}
    return estimate(parameters_of(model), largest, **how)[1]


def torchinfo(question: Question) -> int:
    summary = importlib.import_module("torchinfo").summary
    batch = dict(question.make_batch())
    with torch.autocast("cpu", torch.bfloat16, enabled=question.precision == "bf16"):
        found = summary(question.build(), input_data=batch, mode="train", verbose=0, device="cpu")
    return found.total_input + found.total_output_bytes + found.total_param_bytes


def llm_analysis(question: Question) -> int:
    only(question, "bf16")
    analysis = importlib.import_module("llm_analysis.analysis")
    config = importlib.import_module("llm_analysis.config")
    importlib.import_module("logging").getLogger("llm_analysis").setLevel("ERROR")
    shape = question.shape
    model = config.ModelConfig(
        name="asked",
        num_layers=shape.layers,
        n_head=shape.heads,
        hidden_dim=shape.hidden,
        vocab_size=shape.vocabulary,
        max_seq_len=question.length,
        num_key_value_heads=shape.kv_heads,
        ffn_embed_dim=shape.inner,
        expansion_ratio=shape.inner / shape.hidden,
    )
    card = config.get_gpu_config_by_name("a100-sxm-80gb")
    whole = analysis.ActivationRecomputation.FULL
    found = analysis.LLMAnalysis(model, card, config.get_dtype_config_by_name("w16a16e16")).training(
        batch_size_per_gpu=question.size,
        gradient_accumulation_steps=1,
        seq_len=question.length,
        activation_recomputation=whole if question.checkpointed else analysis.ActivationRecomputation.NONE,
        mlp_gated_linear_units=shape.gated,
    )
    parts = ("weight", "gradient", "optimizer_state", "activation")
    return int(sum(found[f"{part}_memory_per_gpu"] for part in parts))


# PyTorch's tracker


def trainer_of(question: Question, model: nn.Module) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    """The optimizer of what is trained, and a step on the question's batch."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    batch = question.make_batch()

    def step() -> None:
        forward_backward(model, [Part(batch, 1.0)], question.loss, question.autocast)
        update(model, optimizer, StepSettings(question.autocast))

    return optimizer, step


def tracked(question: Question, model: nn.Module | None = None) -> int:
    """The peak that `MemTracker` reports for two steps."""
    tracker = importlib.import_module("torch.distributed._tools.mem_tracker").MemTracker()
    model = question.build() if model is None else model
    optimizer, step = trainer_of(question, model)
    tracker.track_external(model, optimizer)
    with tracker as found:
        for _ in range(STEPS):
            step()
            found.reset_mod_stats()  # it keeps a module's figures of one step only; its peak is that of all
        snapshot: Mapping[torch.device, Mapping[Any, int]] = found.get_tracker_snapshot("peak")
    return snapshot[torch.device("cpu")]["Total"]


def tracked_fake(question: Question) -> int:
    """On fake CPU tensors: builds of PyTorch for CPUs run no backward of fake CUDA tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = on_meta(question)
    with FakeTensorMode():
        return tracked(question, faked(model))


def faked(model: nn.Module) -> nn.Module:
    """A model on meta with fake CPU tensors. A fake model is not cast by `to`: its weights cannot be swapped."""
    fakes: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if id(tensor) not in fakes:
                fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                is_weight = isinstance(tensor, nn.Parameter)
                fakes[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_weight else fake
            setattr(module, name, fakes[id(tensor)])
    return model


# Formulas, written anew

MIB_2 = 2 * 2**20


def llmem(question: Question) -> int:
    """One GPU, `tp=0`. Its base is measured on the card: here the fp16 weights, which gradients reuse, and their fp32
    copies, without the CUDA context, which no other estimate counts either.
    """
    only(question, "bf16")
    if not question.checkpointed:
        raise NotAsked("made for checkpointed blocks")
    model, shape = on_meta(question), question.shape
    weights = [m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    states = sum(2 * whole(4 * count) for count in weights[:-1]) + whole(2 * weights[-1])
    tokens = question.size * question.length
    between = (shape.layers + 2) * whole(2 * tokens * shape.hidden)
    shifted = question.size * (question.length - 1)
    head = whole(2 * tokens * shape.vocabulary) + 2 * whole(2 * shifted * shape.vocabulary)
    return 6 * parameters_of(model) + states + whole(8 * tokens) + between + head


def whole(count: int) -> int:
    """Rounded up to blocks of 2 MiB."""
    return math.ceil(count / MIB_2) * MIB_2


def cookbook(question: Question) -> int:
    """`calc_mem` for one GPU and its other defaults."""
    only(question, "fp32", "bf16")
    s = question.shape
    factor, linears = s.inner / s.hidden, 3 if s.gated else 2
    parameters = 2 * s.vocabulary * s.hidden + s.hidden * question.length + 8 * s.hidden * s.layers + 2 * s.hidden
    parameters += int(2 * (1 + s.kv_heads / s.heads) * s.layers * s.hidden**2)
    parameters += linears * s.layers * s.hidden * factor * s.hidden
    a_layer = 34 + (0 if question.checkpointed else 5 * s.heads * question.length / s.hidden)
    activations = question.length * question.size * s.hidden * s.layers * a_layer
    return int(parameters * ((2 if question.precision == "bf16" else 4) + 4 + 12) + activations)


def megatron(question: Question) -> int:
    """`report_theoretical_memory` for one GPU without sequence parallelism."""
    only(question, "bf16")
    if question.checkpointed:
        raise NotAsked("does not count recomputation of whole blocks")
    s = question.shape
    norms = s.hidden * (1 if s.gated else 2)
    a_layer = 2 * s.hidden**2 * (1 + s.kv_heads / s.heads) + 2 * s.hidden * s.inner * (1.5 if s.gated else 1)
    parameters = s.layers * (a_layer + 2 * norms) + norms + s.hidden * s.vocabulary
    tokens = question.length * question.size
    activations = tokens * (34 * s.hidden * s.layers + 8 + s.hidden + 2 * (s.vocabulary + s.hidden))
    return int(18 * parameters + 1.05 * activations)


ESTIMATORS: dict[str, Estimator] = {
    "accelerate estimate-memory": Estimator(
        "weights, gradients or states, whichever is larger",
        "`accelerate.commands.estimate.estimate_training_usage`",
        accelerate,
        ("accelerate",),
    ),
    "PyTorch MemTracker": Estimator(
        "every tensor of a step that really runs",
        "`torch.distributed._tools.mem_tracker`",
        tracked,
    ),
    "PyTorch MemTracker under FakeTensorMode": Estimator(
        "every tensor of a step that runs on fake CPU tensors",
        "`torch.distributed._tools.mem_tracker`, `torch._subclasses.fake_tensor`",
        tracked_fake,
    ),
    "DeepSpeed, ZeRO-2 model states": Estimator(
        "weights, gradients, states",
        "`deepspeed.runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs`, one GPU",
        deepspeed_zero2,
        ("deepspeed",),
    ),
    "DeepSpeed, ZeRO-3 model states": Estimator(
        "weights, gradients, states",
        "`deepspeed.runtime.zero.stage3.estimate_zero3_model_states_mem_needs`, one GPU",
        deepspeed_zero3,
        ("deepspeed",),
    ),
    "LLMem": Estimator(
        "weights, states, outputs of checkpointed blocks, logits",
        "taehokim20/LLMem, size_estimator.py at 3d289b4 (arXiv 2404.10933), written anew",
        llmem,
    ),
    "16 bytes a parameter": Estimator(
        "weights, gradients, states", "ZeRO, arXiv 1910.02054, section 3.1", sixteen_bytes
    ),
    "16 or 18 bytes a parameter": Estimator(
        "weights, gradients, states", "Hugging Face, transformers' page on GPU memory usage", anatomy
    ),
    "EleutherAI's calculator": Estimator(
        "weights, gradients, states, activations",
        "EleutherAI/cookbook, calc/calc_transformer_mem.py at 069ae2e, written anew",
        cookbook,
    ),
    "Megatron-LM's theoretical memory": Estimator(
        "weights, gradients, states, activations",
        "NVIDIA/Megatron-LM, theoretical_memory_usage.py at d98e8a6 (arXiv 2205.05198), written anew",
        megatron,
    ),
    "llm-analysis": Estimator(
        "weights, gradients, states, activations", "`llm_analysis.analysis.LLMAnalysis.training`", llm_analysis,
        ("llm-analysis",),
    ),
    "torchinfo": Estimator(
        "weights, outputs of modules twice", "`torchinfo.summary`, estimated total size", torchinfo, ("torchinfo",)
    ),
}  # fmt: skip


def versions(estimators: Iterable[Estimator]) -> dict[str, str]:
    """The versions of the packages that are installed."""
    metadata: types.ModuleType = importlib.import_module("importlib.metadata")
    found = {}
    for package in {name for estimator in estimators for name in estimator.packages}:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return dict(sorted(found.items()))
