"""A short training on a card, whose last step is like all that would follow."""

from typing import Any

import torch

history: list[Any] = []  # PyTorch's own of the last peak; `conftest` says of a failed test what that was made of


def peak_of_the_third(model: torch.nn.Module, batch: dict[str, torch.Tensor], precision: str) -> int:
    """Train for three steps, and return the peak of allocated bytes of the last one."""
    optimizer = torch.optim.AdamW(model.parameters())
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
    try:
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                loss = model(**batch).loss
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        history[:] = [torch.cuda.memory._snapshot()]
        return torch.cuda.max_memory_allocated()
    finally:
        torch.cuda.memory._record_memory_history(None)
