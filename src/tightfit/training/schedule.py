"""The learning rate of each step: a linear warm-up, then cosine, stable and decay, or constant."""

import math

from tightfit.training.config.schema import TrainingConfig

# Share of the steps after the warm-up in which `wsd` decays: within the 10% to 20% at which its loss meets that of the
# cosine schedule (Hägele et al. 2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations").
DECAY_SHARE = 0.2


def learning_rate(step: int, training: TrainingConfig) -> float:
    """The learning rate of step 1, 2, ... `max_steps`.

    It reaches `learning_rate` in the last step of the warm-up, and `learning_rate * min_lr_ratio` in the last step of
    all unless the schedule is constant. Cosine decay: Loshchilov and Hutter 2017; stable, then linear decay: Hu et al.
    2024 (MiniCPM).
    """
    if step <= training.warmup_steps:
        return training.learning_rate * step / training.warmup_steps
    first = max(training.warmup_steps, 1)  # the step with the highest rate
    decaying = training.max_steps - first
    progress = (step - first) / decaying if decaying else 0.0
    return training.learning_rate * _share(training, progress)


def moved_schedule(before: int, step: int, training: TrainingConfig) -> str | None:
    """A line about a training that was begun for `before` steps and goes on behind `step` to another end: its learning
    rate jumps to the schedule of the new length. None where it goes on as it was.
    """
    if before == training.max_steps or step >= training.max_steps or training.schedule == "constant":
        return None
    was = learning_rate(step, training.model_copy(update={"max_steps": before}))
    now = learning_rate(step + 1, training)
    if math.isclose(was, now, rel_tol=0.01):
        return None
    return (
        f"training.max_steps was {before} and is {training.max_steps}: the schedule is that of the new length, so the "
        f"learning rate goes from {was:.3g} in step {step} to {now:.3g}"
    )


def _share(training: TrainingConfig, progress: float) -> float:
    """Of the highest learning rate, where `progress` goes from 0 after the warm-up to 1 in the last step."""
    least = training.min_lr_ratio
    if training.schedule == "cosine":
        return least + (1 - least) * (1 + math.cos(math.pi * progress)) / 2
    if training.schedule == "wsd":
        left = min(1.0, (1 - progress) / DECAY_SHARE)
        return least + (1 - least) * left
    return 1.0
