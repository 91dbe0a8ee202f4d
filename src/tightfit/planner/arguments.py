"""Checks the arguments of a user's call before anything is traced. Errors name the wrong argument."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tightfit.devices.spec import DeviceSpec
from tightfit.errors import InputError
from tightfit.names import STEP_IN_BACKWARD_AND_CLIPPING, STEP_IN_BACKWARD_AND_SCALER
from tightfit.optim.by_name import parsed_name
from tightfit.optim.in_backward import steps_in_backward
from tightfit.planner.levers import ChunkedLoss, MicroBatches, Offload, Recompute, allowed_levers, lever_types
from tightfit.ranks.world import IN_WORDS, World
from tightfit.runtime.internals import process_group_exists
from tightfit.step import AUTOCAST_DTYPES, Batch, TokenBatch


def check_step(model: nn.Module, batch: Batch, loss: Any, optimizer: Any, precision: str) -> None:
    """Check the parts of a training step. Raises `InputError`."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}, wanted a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(f"{type(model).__name__} has no parameter to train: none requires a gradient")
    refuse_compiled(model)
    check_batch(batch)
    if hasattr(loss, "_torchdynamo_orig_callable"):
        raise InputError(
            "loss is compiled by torch.compile, and tightfit does not predict the memory of such code: pass the "
            "uncompiled function"
        )
    if loss is not None and not callable(loss):
        raise InputError(f"loss is a {type(loss).__name__}, wanted callable(model, batch) -> scalar tensor, or None")
    if not (isinstance(optimizer, str | torch.optim.Optimizer) or callable(optimizer)):
        raise InputError(
            f"optimizer is a {type(optimizer).__name__}, wanted a name such as 'adamw', an optimizer, or a callable "
            "that takes parameters"
        )
    if precision not in ("fp32", *AUTOCAST_DTYPES):
        raise InputError(f"precision {precision!r} is not known: choose fp32, bf16 or fp16")


def refuse_compiled(model: nn.Module) -> None:
    """Raise `InputError` for a model that was compiled, whole or in part: a dry run would trace it as eager code."""
    for path, module in model.named_modules():
        is_wrapper = "_orig_mod" in module._modules
        replaced = getattr(module, "_compiled_call_impl", None) is not None
        if is_wrapper or replaced or hasattr(module.forward, "_torchdynamo_orig_callable"):
            raise InputError(
                f"{path or 'the model'} is compiled by torch.compile, and tightfit does not predict the memory of such "
                "code: pass the uncompiled model, or name the lever compile, which compiles blocks within a plan"
            )


def check_batch(batch: Batch) -> None:
    """Raise `InputError` for a batch with which a model cannot be called."""
    if isinstance(batch, TokenBatch):
        for name, count in batch._asdict().items():
            if count < 1:
                raise InputError(f"batch {batch}: {name} is {count}, wanted at least 1")
    elif not isinstance(batch, dict | tuple | list):
        raise InputError(
            f"batch is a {type(batch).__name__}, wanted a dict (passed as keywords), a tuple (positional) or "
            "TokenBatch(size, length, vocab_size)"
        )


def check_settings(micro_batches: int, grad_clip: float | None, blocks: str | None) -> None:
    """Check how a step is computed. Raises `InputError`."""
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise InputError(f"micro_batches is {micro_batches!r}, wanted an integer of at least 1")
    if grad_clip is not None and not is_positive(grad_clip):
        raise InputError(f"grad_clip is {grad_clip!r}, wanted a number above zero, or None for no clipping")
    if blocks is not None and not isinstance(blocks, str):
        raise InputError(f"blocks is a {type(blocks).__name__}, wanted a glob over module paths such as 'layers.*'")


def check_step_in_backward(in_backward: bool, grad_clip: float | None, precision: str) -> None:
    """Raise `InputError` for a step in backward with settings that need all gradients at once."""
    if in_backward and grad_clip is not None:
        raise InputError(STEP_IN_BACKWARD_AND_CLIPPING.refusal(other=f"grad_clip {grad_clip:g}"))
    if in_backward and precision == "fp16":
        raise InputError(STEP_IN_BACKWARD_AND_SCALER.refusal())


def check_world(world: World | None, optimizer: Any, in_backward: bool, micro_batches: int = 1) -> None:
    """Raise `InputError` for a step that no rank of a world can be simulated with."""
    if world is None:
        return
    # FSDP2 replaces the parameters, DDP keeps them. Where a guest's model is sharded, its optimizer is known.
    of_several = world.parallel != "ddp" and world.shards is None
    if isinstance(optimizer, torch.optim.Optimizer) and of_several:
        raise InputError(
            f"optimizer: this {type(optimizer).__name__} holds the parameters of one process, and each rank makes its "
            "own: give its name, or a callable that takes parameters"
        )
    if in_backward or (isinstance(optimizer, torch.optim.Optimizer) and steps_in_backward(optimizer)):
        raise InputError(
            "step_in_backward and world_size are both given, and gradients of several ranks are averaged before the "
            "step: leave one out"
        )
    if world.ddp.splits_no_batch and micro_batches > 1:
        raise InputError(
            f"micro_batches is {micro_batches}, and DDP's static_graph fails with no_sync, an assertion of PyTorch: "
            "leave static_graph out, or add up gradients in every micro-batch (ddp's no_sync: False)"
        )
    facts = parsed_name(optimizer).facts if isinstance(optimizer, str) else None
    if world.parallel == "tp" and facts is not None and not facts.steps_parts:
        raise InputError(
            f"optimizer {optimizer} reads whole matrices, and parallel='tp' gives each rank a part: take adamw, or "
            "parallel='fsdp2'"
        )
    if process_group_exists() and of_several:
        raise InputError(
            "this process is a rank of a distributed run already: ask about world_size in a process of its own, or "
            "give parallel='ddp'"
        )


def check_steps(steps: Any) -> None:
    """Raise `InputError` for what is no number of steps."""
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise InputError(f"steps is {steps!r}, wanted None or the number of steps that the plan is for, at least 1")


def levers_of_ranks(world: World | None, named: Any, device: DeviceSpec) -> frozenset[str]:
    """The levers that a plan may use, on the ranks of a world. Raises `InputError` for one that no rank is simulated
    with, and for an unknown one.
    """
    levers = allowed_levers(named)
    if world is None:
        return levers
    if world.parallel in _OF_ONE_BATCH:
        return _levers_of_one_batch(levers, named, world.parallel)
    excluded = {
        # DDP copies what a model returns to find what was used, so logits would be materialised all the same.
        ChunkedLoss.name: (world.ddp.reads_outputs, "find_unused_parameters or static_graph", "copies the logits"),
        MicroBatches.name: (world.ddp.splits_no_batch, "static_graph", "fails with no_sync, an assertion of PyTorch,"),
    }
    for lever, (is_excluded, setting, reason) in excluded.items():
        if is_excluded and lever in levers:
            if not isinstance(named, str | None) and lever in named:
                raise InputError(
                    f"lever {lever} and DDP's {setting} are both given, and DDP {reason} then: leave one out"
                )
            levers -= {lever}
    requested = [kind.name for kind in lever_types() if kind.on_request and kind.name in levers]
    if (
        Offload.name in requested
        and world.parallel in ("fsdp2", "hsdp")
        and world.shards is None
        and device.kind == "cuda"
    ):
        requested.remove(Offload.name)  # shards may be on the host; activations stay
        levers -= {Offload.name}
    if requested:
        raise InputError(
            f"lever {requested[0]} and world_size are both given, and a plan for several ranks does not use that "
            "lever: leave one out"
        )
    return levers


# Where all ranks read one batch. In tensor parallel a head computes a part of the logits, and a tile's backward would
# send its gradients in pieces.
_OF_ONE_BATCH = {
    "tp": frozenset({Recompute.name, MicroBatches.name}),
    "cp": frozenset({Recompute.name, MicroBatches.name, ChunkedLoss.name}),
}


def _levers_of_one_batch(levers: frozenset[str], named: Any, parallel: str) -> frozenset[str]:
    known = _OF_ONE_BATCH[parallel]
    asked_for = () if isinstance(named, str | None) else (name for name in named if name not in ("exact", "rounding"))
    refused = sorted(set(asked_for) - known)
    if refused:
        raise InputError(
            f"lever {refused[0]} and parallel={parallel!r} are both given, and a plan for {IN_WORDS[parallel]} uses "
            f"{', '.join(sorted(known))}: leave it out"
        )
    return levers & known


def check_levers(levers: Any) -> None:
    """Raise `InputError` for an argument that cannot be names of levers."""
    if levers is not None and not isinstance(levers, str | Sequence | set | frozenset):
        raise InputError(f"levers is a {type(levers).__name__}, wanted 'exact', 'rounding' or a list of them and names")


def is_positive(number: Any) -> bool:
    return isinstance(number, int | float) and not math.isnan(number) and number > 0
