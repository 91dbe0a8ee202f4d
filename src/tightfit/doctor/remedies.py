"""Prices remedies: runs the same step dry with each lever."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from torch import nn

from tightfit.config.schema import AdapterConfig
from tightfit.doctor.records import Remedy
from tightfit.errors import CannotFit, CompileError, DeviceError, InputError, LeverError, ModelError
from tightfit.levers.recompute import Policy
from tightfit.models.adapters import add_adapter
from tightfit.names.optimizers import FRUGAL_OPTIMIZERS, OPTIMIZERS
from tightfit.planner.blocks.find import find_blocks
from tightfit.planner.levers import Combination, Exactness, Offer, PlainStep, Role, allowed_levers, lever_types
from tightfit.planner.request import Optimizer, Request, Tracer
from tightfit.planner.search.candidates import UNSEEN_BYTES, Candidate
from tightfit.planner.search.search import Search
from tightfit.runtime.activity import aside
from tightfit.runtime.module_paths import module_at
from tightfit.tracing.record import StepTrace
from tightfit.tracing.twin import unbacked_copy
from tightfit.units import format_bytes


@dataclass(frozen=True)
class Priced:
    """The plain step, the ranked remedies, and sentences about remedies that could not be tried."""

    plain: StepTrace
    remedies: tuple[Remedy, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Trial:
    """One way to run the step, to be priced."""

    name: str
    exactness: str
    request: Request
    combination: Combination
    inside: Policy | None  # the policy of every block
    python: str
    yaml: str


@aside()
def priced_remedies(request: Request, limit_bytes: int | None) -> Priced:
    """Run the step dry without and with each remedy, and rank the remedies.

    If `limit_bytes` is known, remedies that fit come first, the fastest at the head; those that change the numerics
    come after the others. The best plan for the limit is one of them. All other remedies are ranked by the bytes they
    save.
    """
    plain = Tracer(request).whole(request.plain, {})
    remedies: list[Remedy] = []
    notes: list[str] = []
    for trial in _trials(request, plain, notes):
        try:
            trace = _traced(trial)
        except (LeverError, DeviceError, CompileError, InputError) as error:
            notes.append(f"{trial.name} was not tried: {error}.")
            continue
        if trace.peak_bytes < plain.peak_bytes:
            remedies.append(_remedy(trial, trace, plain, limit_bytes))
    if limit_bytes is not None and plain.peak_bytes + UNSEEN_BYTES > limit_bytes:
        try:
            remedies.append(_planned(request, plain, limit_bytes))
        except CannotFit as error:
            notes.append(f"No plan of exact levers fits: {error}.")
    return Priced(plain, tuple(sorted(remedies, key=_rank)), tuple(notes))


def _rank(remedy: Remedy) -> tuple[bool, bool, float]:
    """The sort key of a remedy. Among those that fit, inexact ones come last."""
    if remedy.fits:
        return False, remedy.exactness == "inexact", remedy.added_seconds or 0.0
    return True, False, -(remedy.saved_bytes or 0)


def _trials(request: Request, plain: StepTrace, notes: list[str]) -> Iterator[_Trial]:
    """Each lever alone, the levers of the class "rounding" together, then autocast and other optimizers.

    `notes` gets a sentence for each remedy that cannot be set up.
    """
    paths = tuple(find_blocks(request.model, request.blocks))
    step = PlainStep(request.model, request.batch, plain, paths, request.micro_batches, request.size)
    kinds = [kind for kind in lever_types() if kind.refusal(request.device) is None]
    together: list[Offer] = []
    for kind in kinds:
        offers = kind.offers(step)
        for offer in offers:
            asked = replace(request, levers=frozenset((kind.name,)))
            combination = request.plain.with_lever(offer.lever)
            yield _Trial(offer.name, kind.exactness, asked, combination, offer.inside, offer.python, offer.yaml)
        if kind.role in (Role.INSIDE_BLOCKS, Role.COMBINED) and kind.name in allowed_levers("rounding"):
            together += offers[-1:]
    if len(together) > 1:
        yield _all_together(request, together, paths)
    if request.settings.precision == "fp32":
        yield _bf16(request)
    yield from _optimizers(request)
    try:
        yield from _adapters(request, paths)
    except ModelError as error:
        notes.append(f"Adapters were not tried: {error}.")


def _all_together(request: Request, offers: Sequence[Offer], paths: Sequence[str]) -> _Trial:
    combination = request.plain
    for offer in offers:
        combination = combination.with_lever(offer.lever)
    inside = next((offer.inside for offer in offers if offer.inside is not None), None)
    return _Trial(
        f"all of it: {combination}" + (", all blocks recomputed" if inside and paths else ""),
        Exactness.ROUNDING,
        request,
        combination,
        inside,
        'tightfit.plan(model, batch, "BUDGET", levers="rounding").apply(model).backward(batch)',
        "memory: {budget: BUDGET, levers: rounding}",
    )


def _bf16(request: Request) -> _Trial:
    python = f'with torch.autocast("{request.device.kind}", torch.bfloat16):'
    asked = replace(request, settings=replace(request.settings, precision="bf16"))
    yaml = "training: {precision: bf16}"
    return _Trial("autocast to bf16", Exactness.INEXACT, asked, request.plain, None, python, yaml)


def _optimizers(request: Request) -> Iterator[_Trial]:
    """Variants of AdamW with smaller states on the device. Nothing for other optimizers, which learn differently."""
    if _kind_of(request.optimizer) not in ("adamw", "adamw_fused"):
        return
    for name, frugal in FRUGAL_OPTIMIZERS.items():
        if frugal.on_device and request.device.kind == "cpu":
            continue  # states on the host save nothing if the host is the device
        asked = replace(request, optimizer=name)
        yaml = f"training: {{optimizer: {name}}}"
        yield _Trial(f"optimizer {name}", frugal.exactness, asked, request.plain, None, frugal.python, yaml)


def _adapters(request: Request, paths: Sequence[str]) -> Iterator[_Trial]:
    """Low-rank adapters on the linear layers of all blocks, where the whole model is trained now."""
    kind = _kind_of(request.optimizer)
    layers = _linear_layers(request.model, paths)
    trains_all = all(p.requires_grad for p in request.model.parameters())
    if not trains_all or not layers or kind not in OPTIMIZERS or find_spec("peft") is None:
        return
    config = AdapterConfig(target_modules=layers)
    adapted = add_adapter(unbacked_copy(request.model), config)
    # peft calls the model under two modules of its own, so paths that the user named do not match any more.
    asked = replace(request, model=adapted, optimizer=kind, blocks=None)
    names = ", ".join(layers)
    python = (
        f"import peft; model = peft.get_peft_model(model, peft.LoraConfig(r={config.r}, lora_alpha={config.alpha:g}, "
        f"target_modules={list(layers)}))"
    )
    yaml = f"model: {{path: FOLDER, adapter: {{r: {config.r}, target_modules: [{names}]}}}}"
    name = f"low-rank adapters (r = {config.r}), the model frozen"
    yield _Trial(name, Exactness.INEXACT, asked, asked.plain, None, python, yaml)


def _linear_layers(model: nn.Module, paths: Sequence[str]) -> tuple[str, ...]:
    """The names of the linear layers in these blocks, as adapters are targeted."""
    names = {
        path.rpartition(".")[2]
        for block in paths
        for path, module in module_at(model, block).named_modules()
        if isinstance(module, nn.Linear)
    }
    return tuple(sorted(names - {""}))


def _kind_of(optimizer: Optimizer) -> str:
    """The optimizer's name, of an instance that of its class."""
    return optimizer if isinstance(optimizer, str) else type(optimizer).__name__.lower()


def _traced(trial: _Trial) -> StepTrace:
    paths = find_blocks(trial.request.model, trial.request.blocks) if trial.inside is not None else []
    policies = {} if trial.inside is None else dict.fromkeys(paths, trial.inside)
    return Tracer(trial.request).whole(trial.combination, policies)


def _remedy(trial: _Trial, trace: StepTrace, plain: StepTrace, limit_bytes: int | None) -> Remedy:
    needed = trace.peak_bytes + UNSEEN_BYTES
    budget = _rounded_up(needed)
    return Remedy(
        name=trial.name,
        exactness=trial.exactness,
        python=trial.python.replace("BUDGET", budget),
        yaml=trial.yaml.replace("BUDGET", budget),
        saved_bytes=plain.peak_bytes - trace.peak_bytes,
        added_seconds=trace.step_seconds - plain.step_seconds,
        peak_bytes=trace.peak_bytes,
        fits=None if limit_bytes is None else needed <= limit_bytes,
    )


def _rounded_up(size: int) -> str:
    """A budget of at least `size` bytes, as a person would write it."""
    return f"{-(-size // 2**20)}MiB"


def _planned(request: Request, plain: StepTrace, limit_bytes: int) -> Remedy:
    """The fastest plan within the limit."""
    search = Search(replace(request, levers=allowed_levers("rounding")), limit_bytes)
    found: Candidate = search.run()
    budget = f"{limit_bytes // 2**20}MiB"
    return Remedy(
        name=f"a plan for {format_bytes(limit_bytes)}: {search.in_words(found)}",
        exactness="exact" if found.combination == request.plain else "rounding",
        python=f'tightfit.plan(model, batch, "{budget}", levers="rounding").apply(model).backward(batch)',
        yaml=f"memory: {{budget: {budget}, levers: rounding}}",
        saved_bytes=plain.peak_bytes - found.peak_bytes,
        added_seconds=found.seconds - plain.step_seconds,
        peak_bytes=found.peak_bytes,
        fits=True,
    )
