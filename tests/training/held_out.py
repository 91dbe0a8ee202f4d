"""The loss on samples that are not trained on, as one number."""

from typing import Any

from tightfit.training.evaluation import held_out_sums


def evaluation_loss(*args: Any, **options: Any) -> float | None:
    """The mean over the valid tokens of all samples; None where there are none, or where the evaluation was stopped."""
    found = held_out_sums(*args, **options)
    return None if found is None else found.mean
