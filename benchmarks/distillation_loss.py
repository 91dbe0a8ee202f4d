"""The distillation loss of two heads in chunks, against a loop with two logit tensors and against TRL's losses.

Memory beyond inputs and gradients, predicted by a dry run and measured; time; and how exact gradients are. TRL's
generalised JSD gets both logit tensors, as its trainer hands them over. TRL's chunked divergence gets the two heads, as
ours does, in tiles of its own size, up to 4096 tokens by 32768 words: more than all logits at the small size. Without
trl installed, both are left out by name. Full size is a vocabulary of 128256 and 16384 tokens.

    python benchmarks/distillation_loss.py --small [--output results.json]
    python benchmarks/distillation_loss.py --device cuda
"""

import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

import tightfit
from taking_turns import options_of, ratios, report, take_turns
from tightfit.memory.allocator import measured_peak, storage_bytes
from tightfit.ops import distillation_loss, stored_distillation_loss, top_k_tokens
from tightfit.ops.distillation import plain_distillation_loss

# Vocabulary, width of the student and of the teacher, tokens.
FULL, SMALL = (128_256, 2048, 4096, 16_384), (8_192, 64, 128, 1_024)
ERRORS_AT = (2_048, 64, 128, 256)
BETA = 0.5
DIVERGENCES = {"forward KL": {}, "reverse KL": {"divergence": "reverse_kl"}, "JSD": {"divergence": "jsd", "beta": BETA}}
STORED = 16  # tokens
Loss = Callable[..., Tensor]


def trl_logits(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, labels: Tensor
) -> Tensor:
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    student = (hidden @ weight.T)[None]
    with torch.no_grad():
        teacher = (teacher_hidden @ teacher_weight.T)[None]
    return GKDTrainer.generalized_jsd_loss(student, teacher, labels[None], beta=BETA)


def trl_heads(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, labels: Tensor) -> Tensor:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    made: Any = ChunkedDivergenceFunction.apply(hidden, weight, None, teacher_hidden, teacher_weight, None, BETA)
    return made[0].mean()


def sides() -> tuple[dict[str, Loss], list[str]]:
    """The losses by name, and the ones that are left out."""
    found: dict[str, Loss] = {}
    for name, options in DIVERGENCES.items():
        found[f"{name}, two logit tensors"] = partial(plain_distillation_loss, **options)
        found[f"{name}, chunked"] = partial(distillation_loss, **options)
    if importlib.util.find_spec("trl") is None:
        return found, ["JSD, TRL on logits: trl is not installed", "JSD, TRL on heads: trl is not installed"]
    found.update({"JSD, TRL on logits": trl_logits, "JSD, TRL on heads": trl_heads})
    return found, []


def inputs(size: tuple[int, int, int, int], device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """hidden, weight, teacher_hidden, teacher_weight, labels."""
    vocabulary, width, teacher_width, tokens = size
    torch.manual_seed(0)
    tensors = []
    for columns, learns in ((width, True), (teacher_width, False)):
        hidden = torch.randn(tokens, columns, device=device, dtype=dtype)
        weight = torch.randn(vocabulary, columns, device=device, dtype=dtype) / columns**0.5
        tensors += [hidden.requires_grad_(learns), weight.requires_grad_(learns)]
    return *tensors, torch.randint(vocabulary, (tokens,), device=device)


def gradients(loss: Loss, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(*tensors), tensors[:2])


def extra_bytes(loss: Loss, tensors: Sequence[Tensor]) -> dict[str, int]:
    """Peak of forward and backward above the inputs and the student's gradients, by a dry run and by the allocator."""
    given = storage_bytes(tensors) + storage_bytes(tensors[:2])
    device = None if tensors[0].is_cuda else "cpu"
    predicted = tightfit.trace(gradients, loss, tensors, device=device).peak_bytes
    return {
        "predicted_extra_bytes": predicted - given,
        "extra_bytes": measured_peak(lambda: gradients(loss, tensors), tensors) - given,
    }


def worst_error(loss: Loss, exact: Loss, dtype: torch.dtype, device: str) -> float:
    """The largest error of a gradient against fp64, as a share of its largest element."""
    own = inputs(ERRORS_AT, device, dtype)
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in own[:-1]]
    truth = gradients(exact, [*wide, own[-1]])
    return max(
        float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(gradients(loss, own), truth, strict=True)
    )


def plain_of(name: str) -> str:
    return f"{name.split(',')[0]}, two logit tensors"


def stored(tensors: Sequence[Tensor]) -> dict[str, Any]:
    """The loss against stored tokens of the teacher, which is gone."""
    hidden, weight, teacher_hidden, teacher_weight, labels = tensors
    with torch.no_grad():
        parts = [top_k_tokens(part @ teacher_weight.T, STORED) for part in teacher_hidden.split(128)]
    ids, weights, tail = (torch.cat(part) for part in zip(*parts, strict=True))

    def loss(hidden: Tensor, weight: Tensor, ids: Tensor, weights: Tensor, tail: Tensor, labels: Tensor) -> Tensor:
        return stored_distillation_loss(hidden, weight, ids, weights, labels, tail_weight=tail)

    return {"k": STORED, **extra_bytes(loss, [hidden, weight, ids, weights, tail, labels])}


def measure(small: bool, device: str, rounds: int) -> dict[str, Any]:
    size, dtype = SMALL if small else FULL, torch.bfloat16 if device == "cuda" else torch.float32
    tensors = inputs(size, device, dtype)
    losses, left_out = sides()
    seconds = take_turns({name: partial(gradients, loss, tensors) for name, loss in losses.items()}, rounds, device)
    found: dict[str, Any] = {}
    for name, loss in losses.items():
        plain = plain_of(name)
        own = ratios({name: seconds[name], plain: seconds[plain]}, plain)[name]
        error = worst_error(loss, losses[plain], dtype, device)
        found[name] = {**own, **extra_bytes(loss, tensors), "gradient_error": error}
    for name, side in found.items():
        side["extra_of_plain"] = side["extra_bytes"] / found[plain_of(name)]["extra_bytes"]
    versions = {} if left_out else {"trl": version("trl")}
    return {
        "shape": size,
        "dtype": str(dtype),
        "peers": versions,
        "left_out": left_out,
        "sides": found,
        "stored": stored(tensors),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    warnings.filterwarnings("ignore", module="trl")
    options = options_of(__doc__ or "", arguments, rounds=5)
    report(options, measure(options.small, options.device, options.rounds))


if __name__ == "__main__":
    main()
