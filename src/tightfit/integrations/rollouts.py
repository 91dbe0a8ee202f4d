"""Batches of trainers that learn what their model generates (trl's GRPO and RLOO), before anything is generated."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tightfit.errors import InputError, LeverError
from tightfit.integrations.batches import distinct, with_padding
from tightfit.step import Batch
from tightfit.tracing.record import Category
from tightfit.units import format_bytes

if TYPE_CHECKING:
    from transformers import Trainer

TOKENIZED = 16  # prompts with the most characters, whose tokens are counted


def generates(trainer: "Trainer") -> bool:
    """True if a trainer's step makes its tensors from completions that it generates, as trl's do."""
    return hasattr(trainer, "_generate_and_score_completions") and hasattr(trainer.args, "max_completion_length")


class Reservation(NamedTuple):
    """Bytes of the device that an engine in this process takes to generate, and whether it sleeps during steps."""

    nbytes: int
    sleeps: bool

    @property
    def while_training(self) -> int:
        return 0 if self.sleeps else self.nbytes


def reservation(trainer: Any, device_bytes: int) -> Reservation:
    """The memory that a trainer of trl lets vLLM take in its own process (`vllm_mode="colocate"`): a share of the
    device, which it gives back for each step with `vllm_enable_sleep_mode`.
    """
    settings: Any = trainer.args
    if not getattr(trainer, "use_vllm", False) or getattr(settings, "vllm_mode", None) != "colocate":
        return Reservation(0, sleeps=False)
    nbytes = int(settings.vllm_gpu_memory_utilization * device_bytes)
    return Reservation(nbytes, bool(getattr(settings, "vllm_enable_sleep_mode", False)))


def refuse_generation_beyond(budget: int, held: Mapping[str, int], taken: Reservation) -> None:
    """Raise `LeverError` if an engine exceeds a budget while it generates, beside weights and optimizer states.

    `held` are the bytes of a step at its peak by category.
    """
    stays = held.get(Category.PARAMETER, 0) + held.get(Category.OPTIMIZER_STATE, 0)
    if taken.nbytes and stays + taken.nbytes > budget:
        raise LeverError(
            f"while vLLM generates, its {format_bytes(taken.nbytes)} (vllm_gpu_memory_utilization) and "
            f"{format_bytes(stays)} of weights and optimizer states are beyond the budget of {format_bytes(budget)}: "
            "lower vllm_gpu_memory_utilization, or raise the budget"
        )


def rollout_batches(trainer: "Trainer", dataset: Any, max_length: int | None) -> list[Batch]:
    """The worst batches of an update: the longest prompt with completions of the full length, without and with padding.

    Args:
        trainer: Of trl, with its settings and its tokenizer.
        dataset: Its samples, each with a prompt.
        max_length: The longest sequence in tokens, prompt and completion together; None: the longest prompt is looked
            for among those with the most characters.

    Raises:
        InputError: The prompts cannot be searched, or pictures belong to them, whose tensors only the trainer makes.
    """
    settings: Any = trainer.args
    completion = settings.max_completion_length
    prompt = _longest_prompt(trainer, dataset) if max_length is None else max_length - completion
    if prompt < 1:
        raise InputError(
            f"max_length={max_length} leaves no prompt beside max_completion_length={completion}: raise it"
        )
    whole = _batch(trainer, settings.per_device_train_batch_size, prompt, completion)
    return distinct([whole, with_padding(whole)])


def _longest_prompt(trainer: Any, dataset: Any) -> int:
    """Tokens of the longest prompt."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise InputError(
            f"the prompts of a {type(dataset).__name__} are unknown before the training: give the longest sequence "
            "in tokens, prompt and completion together, as max_length="
        )
    samples = [dataset[index] for index in range(len(dataset))]
    if any("prompt" not in sample or sample.get("image") or sample.get("images") for sample in samples):
        raise InputError(
            f"the samples of {type(trainer).__name__} are no prompts of text alone, and its step makes the tensors of "
            "others: plan the model on a batch of such tensors (tightfit.plan), and leave MemoryBudget out"
        )
    prompts = sorted((sample["prompt"] for sample in samples), key=lambda prompt: -len(str(prompt)))[:TOKENIZED]
    tokens, *_ = trainer._tokenize_prompts(prompts)
    return max(map(len, tokens))


def _batch(trainer: Any, size: int, prompt: int, completion: int) -> Mapping[str, Any]:
    """The tensors of an update, as `_generate_and_score_completions` leaves them."""
    ids = torch.zeros(size, prompt + completion, dtype=torch.long)
    ones = torch.ones_like(ids)
    batch: dict[str, Any] = {
        "prompt_ids": ids[:, :prompt].clone(),
        "prompt_mask": ones[:, :prompt].clone(),
        "completion_ids": ids[:, prompt:].clone(),
        "completion_mask": ones[:, prompt:].clone(),
        "advantages": torch.ones(size),
        "num_items_in_batch": torch.tensor(size * completion),
    }
    if not hasattr(trainer, "loss_type"):  # RLOO, whose loss is of whole completions
        return {**batch, "old_logps": torch.zeros(size)}
    every = trainer.args.steps_per_generation * trainer.num_iterations
    corrects = getattr(trainer, "use_vllm", False) and getattr(trainer, "vllm_importance_sampling_correction", False)
    log_probabilities = torch.zeros(size, completion)
    if trainer.args.gradient_accumulation_steps % every or corrects:
        batch["old_per_token_logps"] = log_probabilities.clone()
    if corrects:
        batch["importance_sampling_ratio"] = log_probabilities.clone()
        batch["sampling_per_token_logps"] = log_probabilities.clone()
    if trainer.beta != 0.0:
        batch["ref_per_token_logps"] = log_probabilities.clone()
    return batch
