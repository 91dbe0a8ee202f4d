"""FlashAdamW's step in fp64, number by number and without chunks: what the optimizer is compared with."""

import math

import torch

from tightfit.optim.companding import GROUP


def grouped(numbers):
    """The largest size in each number's group, as long as the numbers."""
    sizes = [max(abs(n) for n in numbers[i : i + GROUP]) for i in range(0, len(numbers), GROUP)]
    return [sizes[i // GROUP] for i in range(len(numbers))]


def decoded(state):
    """Both moments as lists of numbers."""
    signed, steps = state["exp_avg"].flatten().tolist(), state["exp_avg_sq"].flatten().tolist()
    scales, roots = state["exp_avg_scale"].tolist(), state["exp_avg_sq_scale"].tolist()
    first = [math.copysign((c / 127) ** 2, c) * scales[i // GROUP] for i, c in enumerate(signed)]
    second = [((((c + 0.5) / 255.5) ** 2) * roots[i // GROUP]) ** 2 for i, c in enumerate(steps)]
    return first, second


def master(weight, state):
    """The weight with its error, as a list of numbers."""
    if "error" not in state:
        return weight.detach().flatten().tolist()
    upper = weight.detach().flatten().view(torch.int16).tolist()
    bits = [(u * 256 + e) * 256 for u, e in zip(upper, state["error"].flatten().tolist(), strict=True)]
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32).tolist()


def step(weights, gradients, first, second, count, *, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
    """AdamW on lists of numbers. Returns the weights and the moments, not encoded."""
    beta1, beta2 = betas
    first = [beta1 * m + (1 - beta1) * g for m, g in zip(first, gradients, strict=True)]
    second = [beta2 * v + (1 - beta2) * g * g for v, g in zip(second, gradients, strict=True)]
    rate, correction = lr / (1 - beta1**count), math.sqrt(1 - beta2**count)
    moved = [
        w * (1 - lr * weight_decay) - rate * m / (math.sqrt(v) / correction + eps)
        for w, m, v in zip(weights, first, second, strict=True)
    ]
    return moved, first, second


def codes(first, second):
    """Both moments' codes, not rounded."""
    signed = [
        math.copysign(math.sqrt(abs(m) / s), m) * 127 if s else 0 for m, s in zip(first, grouped(first), strict=True)
    ]
    roots = [math.sqrt(v) for v in second]
    steps = [min(math.sqrt(r / s) * 255.5, 255) if s else 0 for r, s in zip(roots, grouped(roots), strict=True)]
    return signed, steps
