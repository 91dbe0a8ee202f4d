"""What others offer against the memory of a training step, each applied to a model as its documentation shows.

A peer changes a model, or brings an optimizer or a loss. `NotHere` says why it does not run here.
"""

import importlib
import importlib.util
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.memory.allocator import measured_peak
from tightfit.step import Loss, Precision, StepSettings, forward_backward, model_loss, update
from tightfit.training.loop import resident_tensors

REFERENCE = "torch.utils.checkpoint, every block"
# Parts of the names of peers that save memory of activations, beside which plans are made.
AGAINST_ACTIVATIONS = ("checkpoint", "save_on_cpu", "activation_memory_budget")
LEARNING_RATE = 1e-4
aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
ATTENTION = tuple(
    getattr(aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
)


class NotHere(Exception):
    """The peer does not run on this machine, or not with this model."""


def nothing(model: nn.Module) -> None:
    """Leaves the model as it is."""


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


@dataclass(frozen=True)
class Peer:
    """How a training uses one of them. `source` is where its documentation says so."""

    source: str
    apply: Callable[[nn.Module], None] = nothing
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw
    loss: Loss = model_loss


def blocks(model: nn.Module) -> list[nn.Module]:
    """The longest list of modules: a decoder's blocks."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len))


@contextmanager
def applied(peer: str, model: nn.Module) -> Iterator[None]:
    """A model with a peer's checkpoints for a while."""
    PEERS[peer].apply(model)
    try:
        yield
    finally:
        for block in blocks(model):
            with suppress(AttributeError):  # of blocks that the peer left alone
                del block.forward


class Steps:
    """Real training steps of one model."""

    def __init__(self, model: nn.Module, batch: dict[str, Tensor], optimizer: Any, precision: Precision = "fp32"):
        self.model, self.batch, self.optimizer, self.precision = model, batch, optimizer, precision
        self.device = next(model.parameters()).device

    def run(self, micro_batches: int) -> float:
        """Seconds until the device has finished."""
        began = time.perf_counter()
        parts = as_parts(split_batch(self.batch, micro_batches), model_loss)
        forward_backward(self.model, parts, model_loss, self.precision)
        update(self.model, self.optimizer, StepSettings(self.precision))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - began

    def peak(self, micro_batches: int) -> int:
        resident = resident_tensors(self.model, self.optimizer, self.batch)
        return measured_peak(lambda: self.run(micro_batches), resident)


def installed(name: str) -> Any:
    """A package, or why there is none."""
    if importlib.util.find_spec(name) is None:
        raise NotHere(f"{name} is not installed")
    return importlib.import_module(name)


# Checkpoints


def checkpointed(model: nn.Module, every: int = 1, context: Callable[[], Any] | None = None) -> None:
    how = {} if context is None else {"context_fn": context}
    for number, block in enumerate(blocks(model)):
        if number % every == 0:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **how)


def keeping(operators: Iterable[Any]) -> Callable[[], Any]:
    return partial(create_selective_checkpoint_contexts, list(operators))


def every_second_product() -> Any:
    """torchtitan's policy: attention and every second product are kept."""
    seen: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = operator in ATTENTION
        if operator in PRODUCTS:
            seen[context.is_recompute] += 1
            kept = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def by_transformers(model: nn.Module) -> None:
    enable = getattr(model, "activation_checkpointing_enable", getattr(model, "gradient_checkpointing_enable", None))
    if enable is None:
        raise NotHere("the model is not one of transformers")
    model.config.use_cache = False
    enable()


def by_lightning(model: nn.Module) -> None:
    raise NotHere("its checkpointing belongs to FSDPStrategy and DeepSpeedStrategy, which require a GPU accelerator")


def on_cpu(model: nn.Module) -> None:
    raise NotHere("moves saved tensors to the CPU, where they are already")


# The compiler


def compiled(model: nn.Module, share: float | None = None) -> None:
    """`activation_memory_budget` is a setting of the process, and each peer has a process of its own."""
    if share is not None:
        importlib.import_module("torch._functorch.config").activation_memory_budget = share
    model.compile()


# Optimizers


def of_torchao(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    installed("torchao")
    return getattr(importlib.import_module("torchao.optim"), name)(parameters, lr=LEARNING_RATE)


def offloaded_by_torchao(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    installed("torchao")
    if not torch.cuda.is_available():
        raise NotHere("CPUOffloadOptimizer requires a card")
    offload = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    return offload(parameters, torch.optim.AdamW, lr=LEARNING_RATE, fused=True)


def of_bitsandbytes(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return installed("bitsandbytes").optim.AdamW8bit(parameters, lr=LEARNING_RATE)


def of_deepspeed(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    installed("deepspeed")
    adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    try:
        return adam(list(parameters), lr=LEARNING_RATE)
    except Exception as error:  # it compiles its kernel at this moment
        raise NotHere(f"its kernel does not build: {str(error).splitlines()[0][:120]}") from error


# Loss heads


def headless(model: nn.Module) -> None:
    """The head returns its input, so the loss can multiply by its weight itself."""
    head_of(model).forward = lambda hidden: hidden


def head_of(model: nn.Module) -> nn.Linear:
    own = getattr(model, "head", None)
    return own if isinstance(own, nn.Linear) else model.get_output_embeddings()


def linear_cross_entropy(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    hidden = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    target = batch["labels"][:, 1:].flatten()
    options = nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, head_of(model).weight, target, options=options)


def with_linear_cross_entropy(model: nn.Module) -> None:
    if not hasattr(F, "linear_cross_entropy"):
        raise NotHere(f"torch {torch.__version__} has none")
    headless(model)


def by_liger(model: nn.Module) -> None:
    if not torch.cuda.is_available():
        raise NotHere("its kernels are Triton's, which need a card")
    installed("liger_kernel")
    patch = importlib.import_module("liger_kernel.transformers")
    patch._apply_liger_kernel_to_instance(model=model)


DOCS = "docs.pytorch.org/docs/stable"
PEERS: dict[str, Peer] = {
    "plain": Peer("no setting"),
    REFERENCE: Peer(f"{DOCS}/checkpoint.html", checkpointed),
    "torch.utils.checkpoint, every 2nd block": Peer(f"{DOCS}/checkpoint.html", partial(checkpointed, every=2)),
    "torch.utils.checkpoint, every 4th block": Peer(f"{DOCS}/checkpoint.html", partial(checkpointed, every=4)),
    "selective checkpoint, products and attention kept": Peer(
        f"{DOCS}/checkpoint.html, create_selective_checkpoint_contexts",
        partial(checkpointed, context=keeping((*PRODUCTS, *ATTENTION))),
    ),
    "selective checkpoint, attention kept": Peer(
        f"{DOCS}/checkpoint.html, create_selective_checkpoint_contexts",
        partial(checkpointed, context=keeping(ATTENTION)),
    ),
    "selective checkpoint, every 2nd product kept": Peer(
        "pytorch/torchtitan, activation_checkpoint mode selective, option op",
        partial(checkpointed, context=every_second_product),
    ),
    "save_on_cpu": Peer(f"{DOCS}/autograd.html, torch.autograd.graph.save_on_cpu", on_cpu),
    "transformers' checkpointing": Peer("huggingface.co/docs/transformers, gradient checkpointing", by_transformers),
    "Lightning's checkpointing": Peer("lightning.ai/docs, FSDPStrategy(activation_checkpointing_policy)", by_lightning),
    "torch.compile": Peer(f"{DOCS}/torch.compiler.html", compiled),
    **{
        f"torch.compile, activation_memory_budget {share}": Peer(
            "pytorch.org/blog/activation-checkpointing-techniques", partial(compiled, share=share)
        )
        for share in (0.75, 0.5, 0.25, 0.0)
    },
    "linear_cross_entropy": Peer(
        f"{DOCS}/nn.functional.html, with LinearCrossEntropyOptions()",
        with_linear_cross_entropy,
        loss=linear_cross_entropy,
    ),
    "Liger": Peer("linkedin/Liger-Kernel, README", by_liger),
    "torchao AdamW8bit": Peer("pytorch/ao, torchao/optim", optimizer=partial(of_torchao, "AdamW8bit")),
    "torchao AdamW4bit": Peer("pytorch/ao, torchao/optim", optimizer=partial(of_torchao, "AdamW4bit")),
    "torchao CPUOffloadOptimizer": Peer("pytorch/ao, torchao/optim", optimizer=offloaded_by_torchao),
    "bitsandbytes AdamW8bit": Peer("huggingface.co/docs/bitsandbytes, 8-bit optimizers", optimizer=of_bitsandbytes),
    "DeepSpeed CPU Adam": Peer("deepspeed.readthedocs.io, DeepSpeedCPUAdam", optimizer=of_deepspeed),
}
