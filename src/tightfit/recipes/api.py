"""The public function `fit`: which recipes train a model on a device, best first."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from tightfit.config.schema import AdapterConfig, PretrainedModel
from tightfit.devices.present import lookup
from tightfit.errors import InputError
from tightfit.memory.allocator import old_objects_left_alone
from tightfit.models.adapters import is_adapted
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import PRESETS, DecoderConfig
from tightfit.models.loading import build_model, vocabulary_size
from tightfit.planner.api import describe_batch
from tightfit.planner.asked import Asked
from tightfit.ranks.world import world_of
from tightfit.recipes.choices import Wanted, recipes_for
from tightfit.recipes.listed import Recipes
from tightfit.recipes.of_ranks import RanksSearch, recipes_of_ranks
from tightfit.recipes.ranking import ranked
from tightfit.recipes.records import Autocast, Dtype, Largest, Outcome
from tightfit.recipes.search import Found, RecipeSearch, is_small
from tightfit.recipes.sizes import Sizes
from tightfit.recipes.variants import OptimizerOf, Variant, optimizer_of
from tightfit.runtime.activity import aside
from tightfit.runtime.forked import processes_for, shared_out
from tightfit.step import Batch, Loss, TokenBatch
from tightfit.tracing.build import build_dry
from tightfit.tracing.twin import real_tensors, twin_of

CONFIRMED = 5  # rows whose figures rest on a dry run of the whole step, and whose sizes are confirmed
FASTER = 0.98  # of another recipe's time: a gain worth a row
LENGTH = 1024  # tokens of the one sequence that is meant where no batch is given
Notice = Callable[[str], None]


def fit(
    model: nn.Module | str,
    batch: Batch | None = None,
    *,
    device: Any = None,
    budget: int | str | None = None,
    loss: Loss | None = None,
    dtype: Dtype | None = None,
    adapter: AdapterConfig | None = None,
    optimizer: str | None = None,
    precision: Autocast | None = None,
    micro_batches: int = 1,
    grad_clip: float | None = None,
    levers: str | Sequence[str] | None = "rounding",
    notice: Notice | None = None,
    world_size: int | None = None,
    nodes: int | None = None,
    parallel: Literal["ddp", "fsdp2"] | None = None,
) -> Recipes:
    """Find how a model can be trained on a device: which dtype of weights, what is trained, which optimizer.

    `model` is a module, or a name: a preset, a published model, a Hugging Face folder. `batch` is one step's; without
    it, one sequence of 1024 tokens. `budget` is the peak of a step (None: all of a card, 80% of a CPU's memory).
    `dtype`, `adapter`, `optimizer` and `precision` fix what they name, and the search chooses the rest. `levers` are
    those that a plan may use. `notice` is called with a line for each recipe as it is found. The other arguments are
    those of `plan`.

    With `world_size` the rows are of full training on 2, 4, 8 cards up to so many, and on so many, with FSDP2 and DDP
    (`parallel` names one of them). Each has one plan for all ranks; `batch` is that of one rank.

    The result is a sequence of outcomes, best first: those that fit, by what they change in the result and by their
    speed, then the others, by what they need. Nothing is computed: the model is run dry, once for all optimizers.

    Example:
        >>> import tightfit
        >>> from tightfit.models.decoder import Decoder
        >>> from tightfit.models.decoder_config import DecoderConfig
        >>> model = Decoder(DecoderConfig(hidden_size=32, num_layers=2, num_heads=2, vocab_size=64))
        >>> batch = tightfit.TokenBatch(2, 32, 64)
        >>> found = tightfit.fit(model, batch, device="rtx4090", dtype="fp32", optimizer="adamw_fused")
        >>> found.best.fits and found.best.peak_bytes <= found.budget_bytes
        True
    """
    if isinstance(model, str):
        model = _built(model)
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}, wanted a torch.nn.Module or the name of a model")
    if is_adapted(model):
        raise InputError("the model has adapters already: give the model below them, and `adapter` for their shape")
    asked = Asked(
        model=model,
        batch=_batch(model) if batch is None else batch,
        loss=loss,
        device=lookup(device),
        micro_batches=micro_batches,
        grad_clip=grad_clip,
        levers=levers,
        world_size=world_size,
        nodes=nodes,
        parallel=parallel,
    )
    wanted = Wanted(dtype, adapter, None if adapter is None else adapter.base, optimizer, precision)
    if adapter is not None:
        wanted = replace(wanted, trains="adapters")
    return recipes_of(asked, budget, wanted, notice=notice)


@aside()
@old_objects_left_alone()
@real_tensors()
def recipes_of(
    asked: Asked,
    budget: int | str | None,
    wanted: Wanted,
    *,
    optimizer: OptimizerOf = optimizer_of,
    notice: Notice | None = None,
    pick: int | None = None,
    name: str = "",
    processes: int = 1,
) -> Recipes:
    """`tightfit.fit`, with its arguments as records. The recipe of the number `pick` (from 1) is planned in full. Up to
    so many processes find the sizes, where this one can be forked.
    """
    device = lookup(asked.device)
    asked = replace(asked, device=device, model=twin_of(asked.model))
    if budget is None:
        budget = "100%" if device.kind == "cuda" else "80%"
    if (world := world_of(asked.world_size, asked.nodes, asked.parallel)) is not None:
        ranks = RanksSearch(asked, world, budget, optimizer, notice or _say_nothing)
        if not (outcomes := ranks.run(recipes_of_ranks(asked, wanted))):
            raise InputError(f"no recipe could be tried: {'; '.join(ranks.notes)}")
        return Recipes(
            outcomes=tuple(outcomes),
            device=device.name,
            budget_bytes=ranks.budget_bytes,
            batch=describe_batch(asked.batch),
            model=name or type(asked.model).__name__,
            notes=tuple(ranks.notes),
        )
    search = RecipeSearch(asked, budget, optimizer, notice or _say_nothing)
    recipes = recipes_for(
        device, wanted, may_adapt=not isinstance(asked.model, Decoder), clips=asked.grad_clip is not None
    )
    if not recipes:
        raise InputError("no recipe is left to try: adapters are for models of `transformers`, and need peft")
    found = search.run(recipes)
    if not found:
        raise InputError(f"no recipe could be tried: {'; '.join(search.notes)}")
    found = _worth_a_row(_confirmed(search, found))
    by_outcome = {id(each.outcome): each for each in found}
    order = [by_outcome[id(outcome)] for outcome in ranked([each.outcome for each in found])]
    if pick is not None:
        order = _picked(search, order, pick)
    return Recipes(
        outcomes=tuple(_with_sizes(search, order, pick, processes)),
        device=device.name,
        budget_bytes=next(iter(search.searches.values())).budget_bytes,
        batch=describe_batch(asked.batch),
        model=name or type(asked.model).__name__,
        notes=tuple(search.notes),
    )


def _confirmed(search: RecipeSearch, found: list[Found]) -> list[Found]:
    """The recipes that fit, the first ones with the whole step traced as applied; of small models, all of them."""
    left = list(found)
    done: set[int] = set()
    while True:
        # A recipe that turns out not to fit makes room for another one among the first.
        order = ranked([each.outcome for each in left])
        place = {id(each.outcome): index for index, each in enumerate(left)}
        first = [place[id(outcome)] for outcome in order if outcome.fits]
        small = [index for index in first if (variant := left[index].variant) is not None and is_small(variant)]
        todo = [index for index in dict.fromkeys([*first[:CONFIRMED], *small]) if index not in done]
        if not todo:
            return left
        left[todo[0]] = search.confirmed(left[todo[0]])
        done.add(todo[0])


def _worth_a_row(found: list[Found]) -> list[Found]:
    """The recipes without steps in backward that change neither whether a recipe fits nor its speed."""
    plain = {each.recipe: each.outcome for each in found if not each.recipe.step_in_backward}

    def adds(each: Found) -> bool:
        other = plain.get(replace(each.recipe, step_in_backward=False))
        if not each.recipe.step_in_backward or other is None or not other.fits:
            return True
        seconds, other_seconds = each.outcome.step_seconds, other.step_seconds
        return bool(seconds and other_seconds and seconds < FASTER * other_seconds)

    return [each for each in found if adds(each)]


def _with_sizes(search: RecipeSearch, order: list[Found], pick: int | None, processes: int) -> list[Outcome]:
    """The outcomes in their order. Those that fit have their longest sequence and largest batch."""
    outcomes = [each.outcome for each in order]
    confirmed = {*range(CONFIRMED), *([] if pick is None else [pick - 1])}
    variants: dict[Variant, list[int]] = {}
    for number, each in enumerate(order):
        if each.outcome.fits:
            variants.setdefault(Variant.of(each.recipe), []).append(number)
    # Recipes of one variant share dry runs, so they stay together. Those that take longest come first.
    parts = sorted(variants.values(), key=lambda numbers: _dry_runs(numbers, confirmed), reverse=True)
    sizes = Sizes(search)

    def sized(numbers: list[int], notice: Notice) -> dict[int, tuple[Largest | None, Largest | None]]:
        done = {}
        for number in numbers:
            outcome = sizes.of(order[number], confirm=number in confirmed).outcome
            notice(f"{outcome.name}: sequences of {outcome.longest_sequence} tokens")
            done[number] = (outcome.longest_sequence, outcome.largest_batch)
        return done

    for part in shared_out(sized, parts, search.notice, min(processes, processes_for(len(parts)))):
        for number, (longest, largest) in part.items():
            outcomes[number] = replace(outcomes[number], longest_sequence=longest, largest_batch=largest)
    return outcomes


def _dry_runs(numbers: list[int], confirmed: set[int]) -> int:
    """About how many dry runs find the sizes of recipes of one variant."""
    return 4 + 4 * len(confirmed.intersection(numbers))


def _picked(search: RecipeSearch, order: list[Found], pick: int) -> list[Found]:
    """The recipes with the one of this number planned as `tightfit plan` does. Raises `InputError`."""
    if not 1 <= pick <= len(order) or not order[pick - 1].outcome.fits:
        count = sum(each.outcome.fits for each in order)
        raise InputError(f"--pick {pick}: there are {count} recipes that fit: give a number from 1 to {count}")
    chosen = order[pick - 1]
    search.notice(f"{chosen.outcome.name}: planned in full")
    return [*order[: pick - 1], search.planned(chosen.recipe, chosen.variant), *order[pick:]]


def _built(name: str) -> nn.Module:
    """The model of a name, without weights. Raises `ModelError`."""
    section = DecoderConfig(**PRESETS[name]) if name in PRESETS else None
    asked = section or PretrainedModel(path=name, random_init=True, dtype="fp32")
    return build_dry(lambda: build_model(asked, seed=0))


def _batch(model: nn.Module) -> TokenBatch:
    vocabulary = vocabulary_size(model)
    if vocabulary is None:
        raise InputError(f"{type(model).__name__} has no embedding to make token ids for: give a batch")
    return TokenBatch(1, LENGTH, vocabulary)


def _say_nothing(line: str) -> None:
    """The default `notice`."""
