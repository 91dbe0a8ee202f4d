"""Group relative policy optimisation: to write more of what is rewarded above the mean of its group.

Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
arXiv:2402.03300. For each prompt a group of completions is drawn from the model. The advantage of a completion, and of
each of its tokens, is its reward less the group's mean, divided by the group's standard deviation (section 4.1.2). So
no model of values is trained.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tightfit.levers.micro_batch import IGNORE_INDEX
from tightfit.training.objective import ADVANTAGES, DRAWN, REFERENCE, WHOLE_ROWS, next_tokens, token_log_probs

# Added to the standard deviation, so that a group of almost equal rewards is not divided by almost zero.
LEAST_DEVIATION = 1e-4


def advantages_of(rewards: Tensor, group_size: int) -> Tensor:
    """The advantage of each completion, of rewards (groups * group_size,) in the order of their groups.

    The deviation is that of the group itself, not an estimate for more of them. A group of equal rewards has none.
    """
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    deviations = groups.std(dim=1, correction=0, keepdim=True)
    return (centred / (deviations + LEAST_DEVIATION)).flatten()


@dataclass(frozen=True)
class PolicyLoss:
    """`loss(model, batch)`: the batch's share of the mean GRPO loss over completions, a scalar.

    With the ratio w of a token's probabilities, now and when it was drawn, the advantage A of its completion, and the
    ratio v of its probabilities under the reference and now, the loss of a token is
    -min(w * A, clip(w, 1 - epsilon, 1 + epsilon) * A) + beta * (v - log v - 1): equations 3 and 4 of the paper, which
    take the mean over each completion's tokens, and of that the mean over completions.

    `batch` is a mapping with `input_ids` and `labels`, int64 (B, T); labels are -100 where a token is not part of the
    completion. `advantages` (B,) are A. `drawn_log_probs` (B, T) fp32 are those of the tokens when they were drawn;
    without them they are those of now, as in the first update from a completion. `reference_log_probs` (B, T) are the
    reference's, read if beta is not zero. `whole_rows`, an int, is B of the effective batch, which `counted` adds. All
    other entries go to the model, which returns an object with `logits` (B, T, V), and perhaps an `auxiliary_loss`, a
    scalar that is added to the mean: each micro-batch's by its share of the completions.
    """

    clip_epsilon: float
    beta: float = 0.0
    temperature: float = 1.0
    modules_beside: tuple[nn.Module, ...] = ()  # the reference, if it is a model of its own

    is_cross_entropy: ClassVar[bool] = False
    reduction: ClassVar[str] = "sum"  # of micro-batches: their losses add up as they are

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        now, auxiliary = token_log_probs(model, batch, self.temperature)
        advantages = batch[ADVANTAGES][:, None]
        ratio = (now - batch.get(DRAWN, now.detach())).exp()
        clipped = ratio.clamp(1 - self.clip_epsilon, 1 + self.clip_epsilon)
        of_tokens = -torch.minimum(ratio * advantages, clipped * advantages)
        if self.beta:
            behind = batch[REFERENCE] - now
            of_tokens = of_tokens + self.beta * (behind.exp() - behind - 1)
        is_learnt = next_tokens(batch["labels"]).view(now.shape) != IGNORE_INDEX
        of_rows = (of_tokens * is_learnt).sum(dim=1) / is_learnt.sum(dim=1).clamp(min=1)
        total = of_rows.sum()
        if auxiliary is not None:
            total = total + auxiliary * len(of_rows)
        return total / self.count(batch)

    def count(self, batch: Mapping[str, Any]) -> int:
        """The completions of the effective batch."""
        return batch[WHOLE_ROWS]
