"""Recipes and what becomes of them on a device, as plain data. No torch here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from tightfit.names import FEW_BITS, facts_of, parse_optimizer
from tightfit.training.config.schema import AdapterConfig
from tightfit.units import format_bytes

if TYPE_CHECKING:
    from tightfit.planner.outcome import PlanRecord

Dtype = Literal["fp32", "bf16"]
Autocast = Literal["fp32", "bf16", "fp16"]

# What a recipe changes in the result, from the least to the most. AdamW in fp32 is what it is compared with.
NOTHING = "nothing"
ROUNDING = "rounding"
PRODUCTS = "products in 16 bits"
WEIGHTS = "weights in 16 bits"
OTHER = "another optimizer"
LOW_RANK = "low rank"


@dataclass(frozen=True)
class Recipe:
    """One way to train a model: what is trained, in which dtype, by which optimizer.

    `dtype` is the dtype of the weights that are trained, or that are kept beside weights in few bits. With `adapter`
    only low-rank adapters are trained, on the frozen base that it names.
    """

    dtype: Dtype = "fp32"
    adapter: AdapterConfig | None = None
    optimizer: str = "adamw"
    step_in_backward: bool = False
    precision: Autocast = "fp32"

    @property
    def trains(self) -> str:
        """The trained weights in words: `all`, or `LoRA r 16`."""
        if self.adapter is None:
            return "all"
        return f"LoRA r {self.adapter.r}" if self.adapter.config is None else f"adapters of {self.adapter.config}"

    @property
    def weights(self) -> str:
        """The weights in words: their dtype, or what an adapter is on."""
        return f"{self.dtype} weights" if self.adapter is None else f"{self.trains} on {self.adapter.base}"

    @property
    def name(self) -> str:
        """The recipe as a person says it: `bf16 weights, 8-bit AdamW`, `LoRA r 16 on nf4, AdamW`."""
        words = [self.weights]
        if self.dtype == "fp32" and self.precision != "fp32" and self.adapter is None:
            words.append(f"{self.precision} autocast")
        if self.adapter is not None and self.precision == "fp32":
            words.append("no autocast")
        made = parse_optimizer(self.optimizer)
        share = made.fraction
        words.append(made.facts.words if share is None else f"AdamW, {share:.0%} of states on the host")
        if self.step_in_backward:
            words.append("step in backward")
        return ", ".join(words)

    @property
    def frees_gradients(self) -> bool:
        """True if each gradient is used up in backward: by its update, or on the way to states on the host."""
        return self.step_in_backward or facts_of(self.optimizer).on_host

    @property
    def changed(self) -> tuple[str, ...]:
        """The changes of the recipe to the result, compared with AdamW on fp32 weights; empty if nothing."""
        found = []
        base = None if self.adapter is None else self.adapter.base
        if self.dtype == "fp32" and self.precision != "fp32" and base in (None, "fp32"):
            found.append(PRODUCTS)
        if base in FEW_BITS:
            found.append(f"frozen weights in {4 if base == 'nf4' else 8} bits")
        elif "bf16" in (base, self.dtype):
            found.append(WEIGHTS)
        facts = facts_of(self.optimizer)
        found += [OTHER] if facts.changes is None else filter(None, [facts.changes])
        if facts.master and self.dtype == "bf16":
            found.append(facts.master)
        return (*found, *((LOW_RANK,) if self.adapter is not None else ()))

    @property
    def changes(self) -> str:
        """The changes of the recipe to the result, in words; `nothing` if it is AdamW on fp32 weights."""
        return ", ".join(self.changed) or NOTHING


@dataclass(frozen=True)
class LargestSize:
    """A largest sequence or batch that fits. It is confirmed if a dry run of that size fits the budget."""

    value: int
    confirmed: bool = False

    def __str__(self) -> str:
        return f"{'' if self.confirmed else '~'}{self.value:,}"


@dataclass(frozen=True)
class Outcome:
    """The outcome of one recipe on a device, within a budget. Bytes are ints.

    `needed_bytes` is the smallest budget for the recipe with these levers, or, where it does not fit, with any. The
    figures of time are None where it does not fit. `plan` is the plan, where the recipe was planned in full.
    """

    recipe: Recipe
    fits: bool
    peak_bytes: int
    needed_bytes: int
    step_seconds: float | None = None
    host_seconds: float | None = None  # of the host's launches, and of the device's kernels
    device_seconds: float | None = None
    tokens_per_second: float | None = None
    longest_sequence: LargestSize | None = None
    largest_batch: LargestSize | None = None
    levers: tuple[str, ...] = ()
    streamed_blocks: int = 0  # whose frozen weights are on the host, of `blocks`
    blocks: int = 0
    from_file: bool = False  # whether streamed weights are in a file, and not in the host's memory
    micro_batches: int = 1  # whose gradients accumulate
    rounds: bool = False  # whether a lever is exact only to rounding
    world_size: int = 1  # cards; the figures are those of one, but for the tokens, which are those of all
    nodes: int = 1
    parallel: str | None = None  # the engine that joins the ranks: ddp or fsdp2
    rank_peak_bytes: tuple[int, ...] = ()  # of each rank, in their order; empty for one process
    communicator_bytes: int = 0  # assumed: what NCCL takes of a card's memory outside of the allocator
    host_bytes: int = 0  # of each rank, where shards, gradients and states are in the host's memory
    host_peak_bytes: int | None = field(default=None, compare=False)  # of the host's memory, the process included
    plan: "PlanRecord | None" = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        cards = "" if self.parallel is None else f"{self.world_size} cards, {self.parallel}, "
        file = " from a file" if self.from_file else ""
        streamed = f", {self.streamed_blocks} of {self.blocks} blocks streamed{file}" if self.streamed_blocks else ""
        return f"{cards}{self.recipe.name}{streamed}{', shards on the host' if self.host_bytes else ''}"

    @property
    def changes(self) -> str:
        """The changes of recipe and levers to the result, in words."""
        found = self.recipe.changed
        return ", ".join((*found, ROUNDING) if self.rounds and not found else found) or NOTHING

    def as_planned(self, plan: "PlanRecord", tokens: int | None) -> "Outcome":
        """The outcome with the figures and the levers of its plan, for batches of so many tokens on each card."""
        seconds = plan.step_seconds
        return replace(
            self,
            fits=True,
            peak_bytes=plan.peak_bytes,
            needed_bytes=plan.peak_bytes,
            step_seconds=seconds,
            host_seconds=plan.planned.host_seconds,
            device_seconds=plan.planned.device_seconds,
            tokens_per_second=plan.world_size * tokens / seconds if tokens and seconds else None,
            levers=tuple(lever.name for lever in plan.levers),
            micro_batches=plan.micro_batches,
            rounds=any(lever.exactness != "exact" for lever in plan.levers),
            plan=plan,
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields of the JSON of `tightfit fit`."""
        recipe = self.recipe
        return {
            "name": self.name,
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "needed_bytes": self.needed_bytes,
            "step_seconds": self.step_seconds,
            "host_seconds": self.host_seconds,
            "device_seconds": self.device_seconds,
            "tokens_per_second": self.tokens_per_second,
            "longest_sequence": None if self.longest_sequence is None else self.longest_sequence.value,
            "largest_batch": None if self.largest_batch is None else self.largest_batch.value,
            "confirmed": self.longest_sequence is not None and self.longest_sequence.confirmed,
            "changes": self.changes,
            "dtype": recipe.dtype,
            "trains": recipe.trains,
            "optimizer": recipe.optimizer,
            "precision": recipe.precision,
            "step_in_backward": recipe.step_in_backward,
            "adapter": None if recipe.adapter is None else recipe.adapter.model_dump(),
            "levers": list(self.levers),
            "streamed_blocks": self.streamed_blocks,
            "streamed_from_file": self.from_file,
            "micro_batches": self.micro_batches,
            "world_size": self.world_size,
            "nodes": self.nodes,
            "parallel": self.parallel,
            "rank_peak_bytes": list(self.rank_peak_bytes),
            "communicator_bytes": self.communicator_bytes,
            "host_bytes": self.host_bytes,
            "host_peak_bytes": self.host_peak_bytes,
        }


@dataclass(frozen=True)
class RecipesRecord(Sequence[Outcome]):
    """The outcomes of all recipes for one model on one device, best first."""

    outcomes: tuple[Outcome, ...]
    device: str
    budget_bytes: int
    batch: str = ""
    model: str = ""
    notes: tuple[str, ...] = ()  # why recipes were left out

    def __len__(self) -> int:
        return len(self.outcomes)

    def __getitem__(self, index: Any) -> Any:
        return self.outcomes[index]

    def __iter__(self) -> Iterator[Outcome]:
        return iter(self.outcomes)

    @property
    def fitting(self) -> tuple[Outcome, ...]:
        """Those that fit, best first."""
        return tuple(outcome for outcome in self.outcomes if outcome.fits)

    @property
    def best(self) -> Outcome | None:
        """The first one, if it fits."""
        return self.fitting[0] if self.fitting else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "recipes": [outcome.to_dict() for outcome in self.outcomes],
            "device": self.device,
            "budget_bytes": self.budget_bytes,
            "batch": self.batch,
            "model": self.model,
            "notes": list(self.notes),
        }

    @property
    def sentence(self) -> str:
        """The answer in one line."""
        count, within = len(self.fitting), f"{format_bytes(self.budget_bytes)} on {self.device}"
        if count:
            return f"{count} of {len(self)} recipes fit {within}."
        least = min(outcome.needed_bytes for outcome in self.outcomes)
        return f"None of {len(self)} recipes fits {within}: the least needs {format_bytes(least)}."
