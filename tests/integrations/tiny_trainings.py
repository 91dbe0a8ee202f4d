"""Small trainings of the guests, and the peak of one of their steps as the allocator records it."""

import gc
from typing import Any

import torch
import transformers

from tightfit.memory.allocator import recorded_rise, storage_bytes
from tightfit.optim.by_name import state_tensors

VOCABULARY = 300


def llama(**settings: Any) -> Any:
    """A Llama of some 100k parameters, on a fixed seed."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **{**sizes, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 128, **settings}
    )
    return transformers.LlamaForCausalLM(config)


def samples(count: int = 200, shortest: int = 20, longest: int = 64) -> list[dict[str, list[int]]]:
    """Samples of ragged lengths; the longest is somewhere in the middle."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(shortest, longest, (count,), generator=generator).tolist()
    lengths[count // 2] = longest
    return [{"input_ids": torch.randint(1, VOCABULARY, (n,), generator=generator).tolist()} for n in lengths]


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A collator: padded to the longest, padding masked and not among the labels."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        mask[i, : len(row["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def arguments(folder: Any, **settings: Any) -> Any:
    """TrainingArguments for twenty steps on the CPU, each of them logged."""
    chosen = {"max_steps": 20, "per_device_train_batch_size": 8, "logging_steps": 1, "learning_rate": 1e-3}
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    return transformers.TrainingArguments(output_dir=str(folder), **{**chosen, **quiet, **settings})


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def norms(trainer: Any) -> list[float]:
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


class StepPeak:
    """The peak of what runs between `begin` and `end`, on the CPU: what the model and the optimizer hold, and the
    highest point of the allocator's record above it.
    """

    def __init__(self, model: Any, optimizer: Any):
        self.model = model
        self.optimizer = optimizer

    def begin(self) -> None:
        gc.collect()
        gc.disable()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        held = [*self.model.parameters(), *gradients, *self.model.buffers(), *state_tensors(self.optimizer)]
        self.resident = storage_bytes(held)
        activities = [torch.profiler.ProfilerActivity.CPU]
        self.profile = torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True)
        self.profile.__enter__()

    def end(self) -> int:
        self.profile.__exit__(None, None, None)
        gc.enable()
        return self.resident + recorded_rise(self.profile).highest


class PeakOfSteps(transformers.TrainerCallback):
    """Measures some steps of a `Trainer`. `bytes` is the highest."""

    def __init__(self, first: int = 2, last: int = 20):
        self.steps = range(first, last + 1)
        self.bytes = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 in self.steps:
            self.measured = StepPeak(kwargs["model"], kwargs["optimizer"].optimizer)
            self.measured.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in self.steps:
            self.bytes = max(self.bytes, self.measured.end())
