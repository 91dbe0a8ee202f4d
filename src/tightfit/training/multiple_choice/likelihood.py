"""Log-likelihoods of continuations in batches: rows padded on the right, logits of the tokens that count and no others.

A causal model computes a token from those before it, so padding on the right changes nothing before it and needs no
mask.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.errors import ModelError
from tightfit.levers.chunked_loss import apply_needed_logits
from tightfit.models.mode import evaluating
from tightfit.planner.levers.head import find_head
from tightfit.tracing.cuda import CudaRole
from tightfit.tracing.step import trace_inference
from tightfit.training.multiple_choice.prompts import ScoredChoice


class Target(NamedTuple):
    """The part of a row that one request needs: the tokens that follow, and where the first of their logits stands."""

    request: int
    first: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class ScoredRow:
    """A row that the model reads once: choices of one token (letters) after the same context share a row."""

    ids: tuple[int, ...]
    targets: tuple[Target, ...]

    @property
    def counted(self) -> int:
        """Tokens whose logits are needed."""
        return sum(len(target.tokens) for target in self.targets)


def rows_of(requests: Sequence[ScoredChoice], limit: int | None) -> tuple[list[ScoredRow], int]:
    """The rows that answer all requests, longest first, and how many contexts were cut.

    A row holds all but the last token, whose own logits nobody asks for. What exceeds `limit` positions is cut from the
    beginning of the context, as lm-evaluation-harness does. Raises `ModelError` for a continuation that does not fit.
    """
    targets: dict[tuple[int, ...], list[Target]] = {}
    cut = 0
    for number, request in enumerate(requests):
        read = (request.context + request.continuation)[:-1]
        if limit is not None and len(read) > limit:
            if len(request.continuation) > limit:
                raise ModelError(
                    f"a choice has {len(request.continuation)} tokens, the model's positions reach {limit}: shorten "
                    "it, or take a model with more max_position_embeddings"
                )
            read = read[-limit:]
            cut += 1
        first = len(read) - len(request.continuation)
        targets.setdefault(read, []).append(Target(number, max(first, 0), request.continuation))
    rows = [ScoredRow(ids, tuple(asked)) for ids, asked in targets.items()]
    return sorted(rows, key=lambda row: -len(row.ids)), cut


def batch_of(rows: Sequence[ScoredRow], padding: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """`input_ids` (B, T) padded on the right; `places` (n,) of the logits that count in (B * T, V); `targets` (n,), the
    token that each of them is asked about. All int64.
    """
    length = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), length), padding)
    places: list[int] = []
    tokens: list[int] = []
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.tensor(row.ids)
        for target in row.targets:
            start = number * length + target.first
            places.extend(range(start, start + len(target.tokens)))
            tokens.extend(target.tokens)
    batch = {"input_ids": ids, "places": torch.tensor(places), "targets": torch.tensor(tokens)}
    return {name: tensor.to(device) for name, tensor in batch.items()}


@torch.no_grad()
def log_likelihoods(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """log p of each target given what its row holds before it, (n,), in nats; fp32, or fp64 of a model in fp64."""
    logits = model(input_ids=batch["input_ids"]).logits
    needed = logits.flatten(0, 1)[batch["places"]]
    del logits
    needed = needed if needed.dtype == torch.float64 else needed.float()
    return F.cross_entropy(needed, batch["targets"], reduction="none").neg()


@contextmanager
def reading(model: nn.Module, ids: Tensor, role: CudaRole | None = None) -> Iterator[None]:
    """Inside, the model is in evaluation mode, and its head computes the logits that are asked for and no others.

    Where the logits go through more than a linear layer (a cap, a scale), all logits of a batch exist. The head is
    found by a dry run over a few tokens, `ids` (1, T).
    """
    with evaluating(model):
        head = find_head(trace_inference(model, ids, _all_losses, role=role), model)
        if head is None:
            yield
            return
        with apply_needed_logits(model, head):
            yield


def _all_losses(model: nn.Module, ids: Tensor) -> Tensor:
    """A cross-entropy of every logit, as `find_head` looks for one."""
    return F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), ids.flatten())
