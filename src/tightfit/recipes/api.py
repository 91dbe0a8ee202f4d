"""The public function `fit`: which recipes train a model on a device, best first."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from tightfit.devices.present import lookup
from tightfit.errors import CannotFit, InputError
from tightfit.memory.allocator import old_objects_left_alone
from tightfit.models.adapters import is_adapted, usual_layers
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import PRESETS, DecoderConfig
from tightfit.models.loading import build_model, vocabulary_size
from tightfit.names import facts_of
from tightfit.optim.by_name import parsed_name
from tightfit.planner.api import describe_batch
from tightfit.planner.host import host_of
from tightfit.planner.levers import CLASSES
from tightfit.planner.request import Request
from tightfit.ranks.world import world_of
from tightfit.recipes.choices import ADAPTER, NO_ADAPTERS, Wanted, install_line, not_installed, recipes_for, why_none
from tightfit.recipes.leaving_out import LeftOut, in_words
from tightfit.recipes.of_ranks import outcomes_of_ranks, recipes_of_ranks
from tightfit.recipes.ranking import ranked
from tightfit.recipes.records import Autocast, Dtype, Outcome, Recipe
from tightfit.recipes.search import RecipeSearch, budget_of_recipes
from tightfit.recipes.shares import Row, Shares
from tightfit.recipes.table import Recipes
from tightfit.recipes.variants import OptimizerOf, optimizer_of
from tightfit.runtime.outside import outside_training
from tightfit.step import Batch, Loss, TokenBatch
from tightfit.tracing.build import build_dry
from tightfit.tracing.twin import real_tensors
from tightfit.training.config.schema import AdapterConfig, PretrainedModel
from tightfit.units import format_bytes, parse_bytes

CONFIRMED = 5  # rows whose figures rest on a dry run of the whole step, and whose sizes are confirmed
RESORTS = 3  # recipes for which the levers of least memory are searched, where nothing else fits
FASTER = 0.98  # of another recipe's time: a gain worth a row
NOTHING_TO_TRY = "no recipe is left to try: "
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
    host_budget: int | str | None = None,
) -> Recipes:
    """Find how a model can be trained on a device: which dtype of weights, what is trained, which optimizer.

    Nothing is computed: the model is run dry, once for all optimizers.

    Args:
        model: A module, or a name: a preset, a published model, a Hugging Face folder.
        batch: The batch of one step, of one rank. None: one sequence of 1024 tokens.
        device: As for `tightfit.estimate`.
        budget: The peak of a step, in bytes or as text. None: all of a card, 80% of a CPU's memory.
        loss: As for `tightfit.estimate`, like `grad_clip`, `micro_batches` and `nodes`.
        dtype: The dtype of the weights. None, here and for the next three: the search chooses.
        adapter: The low-rank adapters to train.
        optimizer: The optimizer's name.
        precision: `"fp32"`, or autocast to `"bf16"` or `"fp16"`.
        levers: The levers that a plan may use, as for `tightfit.plan`.
        notice: A function that is called with a line for each recipe as it is found.
        world_size: Rows are then of training on 2, 4, 8 cards up to so many, and on so many, with FSDP2 and DDP: of all
            weights, and of adapters on a base in fp32 or bf16. Each has one plan for all ranks.
        parallel: The only one of `"fsdp2"` and `"ddp"` to try.

    Returns:
        A sequence of outcomes, best first: those that fit, by what they change in the result and by their speed, then
        the others, by the bytes that they need.

    Raises:
        InputError: An argument is wrong.

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
    asked = Request.of(
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
        host_budget=host_budget,
    )
    wanted = Wanted(dtype, adapter, None if adapter is None else adapter.base, optimizer, precision)
    if adapter is not None:
        wanted = replace(wanted, trains="adapters")
    return recipes_of(asked, budget, wanted, notice=notice)


@outside_training()
@old_objects_left_alone()
@real_tensors()
def recipes_of(
    asked: Request,
    budget: int | str | None,
    wanted: Wanted,
    *,
    optimizer: OptimizerOf = optimizer_of,
    notice: Notice | None = None,
    name: str = "",
    processes: int = 1,
) -> Recipes:
    """`tightfit.fit`, with its arguments as records. Up to so many processes share the recipes, where this one can be
    forked.
    """
    device, notice = lookup(asked.step.device), notice or (lambda line: None)
    asked = asked.but(device=device, model=asked.model)
    if wanted.optimizer is not None:
        parsed_name(wanted.optimizer)  # before a model is traced
    if budget is None:
        budget = "100%" if device.kind == "cuda" else "80%"
    if (world := world_of(asked.step.world_size, asked.step.nodes, asked.step.parallel)) is not None:
        tried = recipes_of_ranks(asked, wanted, may_adapt=not isinstance(asked.model, Decoder))
        if not tried:
            raise InputError(f"{NOTHING_TO_TRY}{NO_ADAPTERS}, and need peft: {install_line(['hf'])}")
        how = {"optimizer": optimizer, "notice": notice, "processes": processes}
        outcomes, left_out = outcomes_of_ranks(asked, world, budget, tried, **how)
        if not outcomes:
            raise _nothing_tried(left_out)
        return Recipes(
            outcomes=tuple(outcomes),
            device=device.name,
            budget_bytes=budget_of_recipes(asked, budget),
            batch=describe_batch(asked.batch),
            model=name or type(asked.model).__name__,
            notes=in_words(left_out),
        )
    search = RecipeSearch(asked, budget, optimizer, notice, process_bytes=host_of(asked).process)
    may_adapt = not isinstance(asked.model, Decoder)
    if may_adapt:
        wanted = _with_usual_layers(wanted, asked.model)
    choices = {"may_adapt": may_adapt, "clips": asked.step.grad_clip is not None}
    recipes = recipes_for(device, wanted, **choices)
    further = not_installed(device, wanted, **choices)
    if not recipes:
        raise InputError(f"{NOTHING_TO_TRY}{'; '.join(further) or why_none(wanted, **choices)}")
    with Shares(search, recipes, processes) as shares:
        rows = shares.rows()
        if not rows:
            raise _nothing_tried(search.left_out)
        if not any(row.outcome.fits for row in rows):
            rows = _with_last_resorts(shares, rows)
        if device.kind == "cuda" and asked.levers_named in CLASSES:  # names are all that a plan may use
            rows = _with_streams(shares, rows)
        if not (rows := _worth_a_row(_confirmed(shares, rows))):
            raise _nothing_tried(search.left_out)
        rows, beyond = _within_host(rows, asked.host_budget)
        by_outcome = {id(row.outcome): row for row in rows}
        rows = [by_outcome[id(outcome)] for outcome in ranked([row.outcome for row in rows])]
        outcomes = _with_sizes(shares, rows)
    return Recipes(
        outcomes=tuple(outcomes),
        device=device.name,
        budget_bytes=search.budget_bytes,
        batch=describe_batch(asked.batch),
        model=name or type(asked.model).__name__,
        notes=(*beyond, *in_words(search.left_out), *further),
    )


def _within_host(rows: list[Row], budget: int | str | None) -> tuple[list[Row], list[str]]:
    """The recipes within the budget of the host's memory, and a line about the others. Raises `CannotFit` if all of
    those that fit the device are among these.
    """
    if budget is None:
        return rows, []
    limit = parse_bytes(budget)
    beyond = {row.recipe: row.outcome.host_peak_bytes or 0 for row in rows if row.outcome.fits}
    beyond = {recipe: peak for recipe, peak in beyond.items() if peak > limit}
    if not beyond:
        return rows, []
    least, size = min(beyond.values()), format_bytes(limit)
    line = (
        f"{len(beyond)} more fit the device and take more than {size} of the host's memory: from {format_bytes(least)}."
    )
    left = [row for row in rows if row.recipe not in beyond]
    if not any(row.outcome.fits for row in left):
        raise CannotFit(
            f"{size} of host memory cannot fit: of the recipes that fit the device the least takes "
            f"{format_bytes(least)} ({least} bytes) there: raise host_budget, or take weights of fewer bits",
            least,
        )
    return left, [line]


def _with_last_resorts(shares: Shares, rows: list[Row]) -> list[Row]:
    """The recipes that need least, with the levers of least memory."""
    better = shares.at_last(sorted(rows, key=lambda row: row.outcome.needed_bytes)[:RESORTS])
    return [better.get(row.recipe, row) for row in rows]


def _with_streams(shares: Shares, rows: list[Row]) -> list[Row]:
    """The recipes that can stream weights and do not fit otherwise, three of them: adapters on the base that takes
    most, which changes least, and on the one that takes least of the host and the link; and all weights, updated on the
    host, in the dtype that takes least.
    """
    left = sorted((row for row in rows if not row.outcome.fits), key=lambda row: row.outcome.needed_bytes)
    adapters = [row for row in left if row.recipe.adapter is not None]
    whole = [row for row in left if facts_of(row.recipe.optimizer).on_host]
    tried = [*adapters[-1:], *adapters[:-1][:1], *whole[:1]]
    better = shares.streamed(tried) if tried else {}
    return [better.get(row.recipe, row) for row in rows]


def _confirmed(shares: Shares, rows: list[Row]) -> list[Row]:
    """The recipes that fit, the first ones with the whole step traced as applied; of small models, all of them."""
    left = {row.recipe: row for row in rows}
    done: set[Recipe] = set()
    while True:
        # A recipe that turns out not to fit makes room for another one among the first.
        first = [outcome.recipe for outcome in ranked([row.outcome for row in left.values()]) if outcome.fits]
        small = [recipe for recipe in first if left[recipe].is_small]
        todo = [recipe for recipe in dict.fromkeys([*first[:CONFIRMED], *small]) if recipe not in done]
        if not todo:
            return list(left.values())
        found = shares.confirmed([left[recipe] for recipe in todo])
        left = {recipe: row for recipe, row in (left | found).items() if recipe in found or recipe not in todo}
        done |= set(todo)


def _worth_a_row(rows: list[Row]) -> list[Row]:
    """The recipes without steps in backward that change neither whether a recipe fits nor its speed."""
    plain = {row.recipe: row.outcome for row in rows if not row.recipe.step_in_backward}

    def adds(each: Row) -> bool:
        other = plain.get(replace(each.recipe, step_in_backward=False))
        if not each.recipe.step_in_backward or other is None or not other.fits:
            return True
        seconds, other_seconds = each.outcome.step_seconds, other.step_seconds
        return bool(seconds and other_seconds and seconds < FASTER * other_seconds)

    return [row for row in rows if adds(row)]


def _with_sizes(shares: Shares, rows: list[Row]) -> list[Outcome]:
    """The outcomes in their order. Those that fit have their longest sequence and largest batch."""
    confirmed = {row.recipe for row in rows[:CONFIRMED]}
    sizes = shares.sizes([row for row in rows if row.outcome.fits], lambda row: row.recipe in confirmed)
    unknown = (None, None)
    return [
        replace(row.outcome, longest_sequence=longest, largest_batch=largest)
        for row in rows
        for longest, largest in (sizes.get(row.recipe, unknown),)
    ]


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


def _with_usual_layers(wanted: Wanted, model: nn.Module) -> Wanted:
    """With the layers named that adapters go on, where peft knows none for the model, so that every text names them."""
    adapter = wanted.adapter or ADAPTER
    if adapter.target_modules is not None or adapter.config is not None:
        return wanted
    return replace(wanted, adapter=adapter.model_copy(update={"target_modules": usual_layers(model)}))


def _nothing_tried(left: list[LeftOut]) -> InputError:
    """Why there is no table: the reason, where it is one, else all."""
    reasons = list(dict.fromkeys(each.reason for each in left))
    return InputError(f"no recipe could be tried: {reasons[0] if len(reasons) == 1 else '; '.join(in_words(left))}")
