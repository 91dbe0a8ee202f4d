"""Batches that the model itself writes: completions of prompts, what they are worth, and their log-probabilities.

Completions are drawn by generators seeded with the place of their prompts in the data, so a resumed training draws the
same ones by arithmetic, and a signal may cut a rollout at any line: the next run makes it again. Only where a rollout
is learnt from several times is it kept in checkpoints.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn

from tightfit.errors import LeverError
from tightfit.levers.chunked_loss import apply_needed_logits, chunks_without_gradients
from tightfit.memory.allocator import measured_peak
from tightfit.memory.failure import parse_out_of_memory
from tightfit.models.adapters import is_adapted
from tightfit.models.generation import generate
from tightfit.models.mode import evaluating
from tightfit.step import Precision, autocast
from tightfit.training.data.packing import BatchStream, StreamPosition
from tightfit.training.data.prompts import PROMPTS, PromptSamples, completed
from tightfit.training.data.tokenizer import TextTokenizer
from tightfit.training.interrupt import Interrupt
from tightfit.training.loop import measured_steps, resident_tensors
from tightfit.training.objective import ADVANTAGES, DRAWN, REFERENCE, on_device, token_log_probs
from tightfit.training.policy import advantages_of
from tightfit.training.rewards import Function, rewards_of
from tightfit.training.stepper import Stepper
from tightfit.units import format_count

GENERATION, LOG_PROBS, UPDATE = "generation", "log_probs", "update"
"""The phases of a step, in their order."""

T = TypeVar("T")


@dataclass(frozen=True)
class Drawing:
    """How completions are drawn: so many at once, prompts read in pieces of so many tokens."""

    rows: int
    chunk_size: int


@dataclass
class Rollouts(Iterator[dict[str, Tensor]]):
    """The batches of a GRPO training. Mutable: the rollout that is being learnt from, and the `measured` phases.

    `steps` are those before the first batch, and `repeated` the rollout of which `stream.position.repeat` updates are
    made already.
    """

    stream: BatchStream
    samples: PromptSamples
    tokenizer: TextTokenizer
    reward: tuple[str, Function]
    stepper: Stepper
    reference: nn.Module | None
    drawing: Drawing
    precision: Precision
    seed: int
    interrupt: Interrupt
    note: Callable[[str], None]
    steps: int
    max_steps: int
    position: StreamPosition = field(default_factory=StreamPosition)
    repeated: dict[str, Tensor] | None = None
    reward_mean: float = 0.0
    measured: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._due = min(measured_steps(self.max_steps, begun=self.steps), default=0)

    def __next__(self) -> dict[str, Tensor]:
        """Raises `Interrupted` where a signal cuts it, and leaves everything as it was."""
        done = self.position.repeat
        if not done:
            first = self.stream.position
            drawn = next(self.stream)[PROMPTS].tolist()
            try:
                self.repeated = self.interrupt.cuttable(lambda: self._made(drawn, self._seed(first)))
            except BaseException:
                self.stream.position = first
                raise
        assert self.repeated is not None, "a rollout that is repeated was made or read"
        self.steps += 1
        again = (done + 1) % self.samples.settings.iterations
        self.position = replace(self.stream.position, repeat=again)
        return self.repeated

    def to_file(self) -> bytes | None:
        """The rollout, where the next update learns from it once more."""
        if self.repeated is None or self.samples.settings.iterations == 1:
            return None
        return safetensors.torch.save(self.repeated, {"reward": repr(self.reward_mean)})

    def _seed(self, position: StreamPosition) -> int:
        place = f"{self.seed} rollout {position.epoch} {position.sample}"
        return int.from_bytes(hashlib.sha256(place.encode()).digest()[:7])

    def _made(self, prompts: Sequence[int], seed: int) -> dict[str, Tensor]:
        samples, settings = self.samples, self.samples.settings
        is_measured = self.steps + 1 >= self._due and GENERATION not in self.measured
        completions = self._phase(GENERATION, lambda: self._drawn(prompts, seed), is_measured)
        texts = [self.tokenizer.decode([t for t in c if t != samples.stop]) for c in completions]
        rows = [prompt for prompt in prompts for _ in range(settings.group_size)]
        columns = {name: [values[row] for row in rows] for name, values in samples.columns.items()}
        rewards = rewards_of(*self.reward, [samples.written[row] for row in rows], texts, columns, seed)
        batch = completed(
            list(zip((samples.ids[row] for row in rows), completions, strict=True)), settings, samples.pad_id
        )
        batch[ADVANTAGES] = advantages_of(rewards, settings.group_size)
        if DRAWN in batch or REFERENCE in batch:
            self._phase(LOG_PROBS, lambda: self._weighed(batch), is_measured)
        self.reward_mean = float(rewards.mean())
        return batch

    def _phase(self, name: str, work: Callable[[], T], is_measured: bool) -> T:
        stepper = self.stepper
        is_cuda = stepper.device.type == "cuda"
        if not is_cuda and not is_measured:
            return work()
        found: list[T] = []
        resident = resident_tensors(stepper.model, stepper.optimizer, [], stepper.loss)
        peak = measured_peak(lambda: found.append(work()), resident)
        self.measured[name] = max(self.measured.get(name, 0), peak)
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(stepper.device)  # what follows is the update's
        return found[0]

    # Generation

    def _drawn(self, prompts: Sequence[int], seed: int) -> list[list[int]]:
        """The ids of all completions, the stop at their ends included, the groups one after the other."""
        size, found = self.samples.settings.group_size, []
        for at, prompt in enumerate(prompts):
            while True:
                group = self._group(self.samples.ids[prompt], seed + at * size)
                if group is not None:
                    break
                self.drawing = replace(self.drawing, rows=self.drawing.rows // 2)
                self.note(f"the generation is out of memory: it goes on with {self.drawing.rows} completions at a time")
            found += group
        return found

    def _group(self, prompt: Sequence[int], seed: int) -> list[list[int]] | None:
        """The completions of one prompt; None where they ran out of memory and may."""
        settings, rows = self.samples.settings, self.drawing.rows
        found: list[list[int]] = []
        try:
            for first in range(0, settings.group_size, rows):
                ids = self._continued(prompt, min(rows, settings.group_size - first), seed + first)
                found += ids[:, len(prompt) :].tolist()
        except RuntimeError as error:
            if rows == 1 or parse_out_of_memory(str(error)) is None:
                raise
            return None
        stop = self.samples.stop
        return [ids[: ids.index(stop) + 1] if stop in ids else ids for ids in found]

    def _continued(self, prompt: Sequence[int], rows: int, seed: int) -> Tensor:
        device = self.stepper.device
        with autocast(self.precision, device.type):
            return generate(
                self.stepper.model,
                torch.tensor([prompt], device=device).repeat(rows, 1),
                max_new_tokens=self.samples.settings.max_completion_tokens,
                temperature=self.samples.settings.temperature,
                seed=seed,
                end_of_text=self.samples.stop,
                chunk_size=self.drawing.chunk_size,
            )

    # Log-probabilities

    def _weighed(self, batch: dict[str, Tensor]) -> None:
        """Put the log-probabilities of the tokens into the batch: the model's now, and the reference's."""
        stepper, temperature = self.stepper, self.samples.settings.temperature
        reference = stepper.model if self.reference is None else self.reference
        models = {name: m for name, m in ((DRAWN, stepper.model), (REFERENCE, reference)) if name in batch}
        count = len(batch["input_ids"])
        size = max(count // stepper.micro_batches, 1)
        first = 0
        while first < count:
            rows = slice(first, first + size)
            part = {name: batch[name][rows].clone() for name in ("input_ids", "labels")}
            part = on_device(part, stepper.device)
            is_done = False
            try:
                for name, model in models.items():
                    found = log_probs(model, part, temperature, self.precision, is_reference=name == REFERENCE)
                    batch[name][rows] = found.cpu()
                    del found  # else it would lie beside the next model's
                is_done = True
            except RuntimeError as error:
                if size == 1 or parse_out_of_memory(str(error)) is None:
                    raise
            if not is_done:  # outside of the `except`, whose exception holds what the frames held
                size //= 2
                self.note(f"the log-probabilities are out of memory: they go on with {format_count(size)} at a time")
                continue
            first += size


@torch.no_grad()
def log_probs(
    model: nn.Module, batch: Mapping[str, Tensor], temperature: float, precision: Precision, *, is_reference: bool
) -> Tensor:
    """The log-probability of each label, (B, T) fp32, without dropout and without the logits of all tokens; with
    `is_reference`, a model with adapters runs without them.
    """
    plain: Any = model
    without = plain.disable_adapter() if is_reference and is_adapted(model) else nullcontext()
    device = next(model.parameters()).device.type
    with evaluating(model), without, _no_whole_logits(model), autocast(precision, device):
        return token_log_probs(model, batch, temperature).of_tokens


@contextmanager
def _no_whole_logits(model: nn.Module) -> Iterator[None]:
    """Inside, a cross-entropy without gradients computes a linear head in chunks, under the lever or not."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else getattr(model, "head", None)
    path = next((path for path, module in model.named_modules() if module is head), None)
    handle: AbstractContextManager[Any] = nullcontext()
    if path is not None and "forward" not in vars(head):
        try:
            handle = apply_needed_logits(model, path)
        except LeverError:  # no plain linear layer: its logits are computed whole
            handle = nullcontext()
    with handle, chunks_without_gradients(model):
        yield


def rollout_from_file(content: bytes) -> tuple[dict[str, Tensor], float]:
    """The rollout that `Rollouts.to_file` wrote, and its mean reward."""
    length = int.from_bytes(content[:8], "little")
    record = json.loads(content[8 : 8 + length])["__metadata__"]
    return safetensors.torch.load(content), float(record["reward"])
