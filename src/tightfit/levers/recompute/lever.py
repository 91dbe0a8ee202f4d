"""The lever recompute, applied by hand: `recompute(model, "layers.*")`."""

import fnmatch
import re
from collections.abc import Iterable, Mapping

from torch import nn

from tightfit.errors import LeverError
from tightfit.levers.handle import Applied
from tightfit.levers.recompute.expected import Expected
from tightfit.levers.recompute.policy import Policy
from tightfit.levers.recompute.region import STREAMED, FrugalForward, RecordedForward, ReentrantForward, forwards_on
from tightfit.levers.recompute.rule import Rule, every_block
from tightfit.levers.recompute.values import OffloadStore
from tightfit.names import SEGMENTS_AND_REENTRANT
from tightfit.runtime.internals import ignore_hooks_around_selective_checkpoints
from tightfit.runtime.module_paths import module_at, named_modules

__all__ = ["Applied", "apply_policies", "matching_modules", "recompute", "undo"]


def recompute(model: nn.Module, pattern: str, *, segments: int | None = None, use_reentrant: bool = False) -> Applied:
    """`tightfit.recompute` by the recorder alone (or the reentrant checkpoint), with its arguments and errors."""
    paths = matching_modules(model, pattern)
    if segments is not None and not 1 <= segments <= len(paths):
        raise LeverError(f"segments={segments} is out of range: {pattern!r} matches {len(paths)} modules")
    if segments is not None and use_reentrant:
        raise LeverError(SEGMENTS_AND_REENTRANT.refusal())
    if use_reentrant:
        return install(ReentrantForward(module_at(model, path), path) for path in paths)
    return apply_rule(model, every_block(paths, segments=segments))


def apply_rule(model: nn.Module, rule: Rule) -> Applied:
    """Apply a rule's policies to a model."""
    return apply_policies(model, rule.policies, joined=rule.joined)


def apply_policies(
    model: nn.Module,
    policies: Mapping[str, Policy],
    *,
    joined: Iterable[str] = (),
    offload_store: OffloadStore | None = None,
    expected: Mapping[str, Expected] | None = None,
) -> Applied:
    """Give each named block its policy.

    Blocks in `joined` do not hold their output for the next block. Policies that offload use the `offload_store`.
    `expected` are the operators of each block from which its policy was made.
    """
    joined = set(joined)
    ignore_hooks_around_selective_checkpoints()
    return install(
        RecordedForward(
            module_at(model, path),
            path,
            policy,
            offload_store=offload_store,
            holds_output=path not in joined,
            expected=None if expected is None else expected.get(path),
        )
        for path, policy in policies.items()
    )


def install(forwards: Iterable[FrugalForward]) -> Applied:
    installed = []
    for forward in forwards:
        previous = forward.previous
        if isinstance(previous, FrugalForward) and not goes_with(forward, previous):
            Applied(installed).undo()  # a refused call must not leave half of its levers on the model
            raise LeverError(
                f"{forward.path} is already {previous.does}: undo that first, by the handle's undo() or, where "
                "there is none (a copy of a model), by tightfit.undo(model)"
            )
        forward.install()
        installed.append(forward)
    return Applied(installed)


def goes_with(forward: FrugalForward, previous: FrugalForward) -> bool:
    """True if both levers may be on one block: one of them streams it, and the other one does not prevent that."""
    return (forward.does == STREAMED) != (previous.does == STREAMED) and (
        forward.reads_streamed or previous.reads_streamed
    )


def undo(model: nn.Module) -> None:
    """Remove every lever from a model whose handles are lost, for example a copy of a model with levers.

    A handle's own `undo()` does the same. On a model without levers this does nothing.

    Example:
        >>> import tightfit, torch
        >>> blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(4)]
        >>> model = torch.nn.Sequential(*blocks)
        >>> _ = tightfit.recompute(model, "*")
        >>> tightfit.undo(model)
        >>> any("forward" in vars(block) for block in model)
        False
    """
    while forwards := forwards_on(model):  # levers may be nested: removing one uncovers the next
        for forward in forwards:
            forward.remove()


def matches(path: list[str], pattern: list[str]) -> bool:
    return len(path) == len(pattern) and all(fnmatch.fnmatchcase(*pair) for pair in zip(path, pattern, strict=True))


def matching_modules(model: nn.Module, pattern: str) -> list[str]:
    """Paths of the modules that match the glob, in the model's order. An empty glob matches the model itself.

    Raises `LeverError` if nothing matches.
    """
    if not pattern:
        return [""]
    parts = pattern.split(".")
    paths = [path for path, _ in named_modules(model) if path and matches(path.split("."), parts)]
    if not paths:
        known = sorted({re.sub(r"\d+", "*", path) for path, _ in named_modules(model) if path})
        raise LeverError(f"no module matches {pattern!r}: the paths of this model are {', '.join(known[:12])}")
    return paths
