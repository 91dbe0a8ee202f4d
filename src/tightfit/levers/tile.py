"""The lever tile, applied by hand: `tile(model, "layers.*.mlp", 1024)`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.errors import LeverError
from tightfit.levers.handle import Applied
from tightfit.levers.recompute.lever import matching_modules
from tightfit.levers.recompute.region import FrugalForward
from tightfit.ops.tiled import tiled
from tightfit.runtime.internals import transforms_are_active
from tightfit.runtime.simulation import has_numbers

__all__ = ["tile"]

PROBE_TOKENS = 4  # tokens in each half of the sample on which a module is tested


def tile(model: nn.Module, pattern: str, tokens: int) -> Applied:
    """Run every module whose path matches a glob over `tokens` tokens of the sequence at a time.

    Use it for modules that treat each token by itself, such as the feed-forward of a block. Such a module takes one
    tensor (B, T, n) and returns one tensor (B, T, m). Results are equal to rounding. With gradients the module's
    forward runs twice. The first forward tests each module on a few tokens, and refuses those that mix tokens or draw
    random numbers.

    Args:
        model: The module whose parts are tiled.
        pattern: A glob over module paths, such as `"layers.*.mlp"`.
        tokens: The number of tokens at a time, at least 1.

    Returns:
        A handle whose `undo()` restores the model exactly.

    Raises:
        LeverError: Nothing matches, a module's forward is already replaced, `tokens` is less than 1, or, in the first
            forward, a module cannot be tiled.

    Example:
        >>> import tightfit, torch
        >>> blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(4)]
        >>> model = torch.nn.Sequential(*blocks)
        >>> x = torch.randn(2, 64, 8)
        >>> plain = model(x)
        >>> with tightfit.tile(model, "*", tokens=16):
        ...     tiled = model(x)
        >>> torch.allclose(plain, tiled, atol=1e-6)
        True
    """
    if tokens < 1:
        raise LeverError(f"tile: tokens={tokens} is less than 1: give the tokens of one tile")
    return tile_paths(model, matching_modules(model, pattern), tokens)


def tile_paths(model: nn.Module, paths: Sequence[str], tokens: int) -> Applied:
    """Tile the modules at these paths. Raises `LeverError` if a module's forward is already replaced."""
    for path in paths:
        if "forward" in model.get_submodule(path).__dict__:
            raise LeverError(f"tile: the forward of {path} is already replaced: undo that first")
    forwards = [TiledForward(model.get_submodule(path), path, tokens) for path in paths]
    for forward in forwards:
        forward.install()
    return Applied(forwards)


class TiledForward(FrugalForward):
    """Replaces the forward of a module that treats each token by itself."""

    tried = False

    def __init__(self, module: nn.Module, path: str, tokens: int):
        super().__init__(module, path)
        self.tokens = tokens

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.removed or transforms_are_active():  # `Tiled` is an autograd.Function without a rule for transforms
            return self.original(*args, **kwargs)
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or args[0].dim() != 3:
            raise LeverError(f"tile: {self.path} is not given one tensor (B, T, n): leave it out of the pattern")
        (x,) = args
        if not self.tried and has_numbers(x):
            self.try_out(x)
            self.tried = True
        return tiled(self.of_tile, x, self.tokens, self.module.parameters())

    def of_tile(self, part: Tensor) -> Tensor:
        """The module's result for some tokens. Raises `LeverError` unless it is one tensor with these tokens."""
        out = self.original(part)
        if not isinstance(out, Tensor) or out.dim() != 3 or out.shape[:2] != part.shape[:2]:
            raise LeverError(f"tile: {self.path} does not return one tensor (B, T, m): leave it out of the pattern")
        return out

    @torch.no_grad()
    def try_out(self, x: Tensor) -> None:
        """Raise `LeverError` unless two halves of a few tokens give the same results apart as together."""
        few = x[:, : 2 * PROBE_TOKENS]
        # The test must not use up random numbers of the training.
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            together = self.of_tile(few)
            apart = torch.cat([self.of_tile(part) for part in few.split(PROBE_TOKENS, dim=1)], dim=1)
        if not torch.allclose(
            together.float(), apart.float(), rtol=1e-2, atol=1e-2 * together.float().abs().max().item()
        ):
            raise LeverError(
                f"tile: {self.path} mixes tokens or draws random numbers (dropout), so that tiles would compute "
                "something else: leave it out of the pattern"
            )
