"""The planner's request: the arguments of `tightfit.plan` and what they mean; and the dry runs of it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tightfit.devices.cost import CostModel
from tightfit.devices.figures import CopyRates, copy_rates
from tightfit.devices.present import lookup
from tightfit.devices.spec import DRIVE_BYTES_PER_SECOND, DeviceSpec
from tightfit.errors import DeviceError, InputError, LeverError, ModelError
from tightfit.levers.activity import activity
from tightfit.levers.handle import Applied
from tightfit.levers.micro_batch import as_parts, as_tensors, inseparable_samples, split_batch
from tightfit.levers.offload import HostStore, OffloadSettings, positive_bytes
from tightfit.levers.recompute import Policy
from tightfit.levers.stream import rings_on
from tightfit.memory.disk import disk_rates, drive_rate, is_in_memory, temporary_folder
from tightfit.names import optimizer_in_words
from tightfit.optim.by_name import optimizer_over, updates_on_host
from tightfit.planner.apply import apply_levers
from tightfit.planner.arguments import (
    check_levers,
    check_settings,
    check_step,
    check_step_in_backward,
    check_steps,
    check_world,
    levers_of_ranks,
)
from tightfit.planner.blocks.find import find_blocks
from tightfit.planner.levers import (
    Combination,
    Lever,
    MicroBatches,
    Offload,
    PlainStep,
    Separation,
    allowed_levers,
    lever_types,
)
from tightfit.planner.separation import can_be_tried, refuse_coupled
from tightfit.planner.wrapped import refuse_distributed
from tightfit.ranks.messages import overlapped, with_messages
from tightfit.ranks.peaks import RankTraces, trace_ranks
from tightfit.ranks.processes.launch import launched
from tightfit.ranks.simulated import SimulatedRank, own_copy, refusals_of_shards
from tightfit.ranks.world import Sharding, Shards, World, communicator_bytes, world_of
from tightfit.runtime.internals import default_group, process_group_exists
from tightfit.step import Batch, Loss, Optimizer, Part, Step, StepSettings, model_loss
from tightfit.tracing.copies import AWAY, BACK, IN_FILE, STREAM, TO_DEVICE, TO_HOST
from tightfit.tracing.cuda import CudaRole
from tightfit.tracing.cuda.replay import fits_device
from tightfit.tracing.cuda.workspace import CONTEXT_BYTES
from tightfit.tracing.outcomes import OpenNumbers, assumed
from tightfit.tracing.record import Category, Phase, StepTrace
from tightfit.tracing.recording import ExecutorCost, OperatorCost
from tightfit.tracing.rules import ONE_SIDED, Routing
from tightfit.tracing.shapes import TensorShape
from tightfit.tracing.step import trace_part, trace_step, trace_update
from tightfit.tracing.twin import has_no_memory, twin_of, with_memory

OF_THE_STEP = frozenset(field.name for field in fields(Step))


@dataclass(frozen=True)
class Request:
    """A step and what a plan of it may use, as the user gave them. What they mean is in the properties.

    `levers_named`: `"exact"`, `"rounding"`, names, or None; a frozenset is what a plan may use, checked before.
    `divided` is the world where a search has chosen how ranks share the step. `apart` and `shards` are of a running
    training in FSDP2: the modules that are sharded beside the blocks, and what was found around a model whose whole
    twin is the step's model. `resident` are further tensors of a running loop, which passes its own micro-batches.
    """

    step: Step
    levers_named: str | Sequence[str] | frozenset[str] | None = None
    blocks: str | None = None  # a glob over module paths; None: the planner finds the blocks
    offload_folder: str | None = None
    offload_budget: int | str | None = None
    host_budget: int | str | None = None  # most bytes of the host's memory, with the process
    weights_in_file: bool = False  # streamed weights of a card have no room in its host's memory
    steps: int | None = None  # how often the step will run, where that is known
    apart: tuple[str, ...] | None = None
    shards: Shards | None = None
    divided: World | None = None
    compiles: bool = False  # compiled blocks were asked for, also where the plain step fits
    resident: tuple[torch.Tensor, ...] | None = None

    @classmethod
    def of(cls, model: nn.Module, batch: Batch, **how: Any) -> "Request":
        """The request for the arguments of `tightfit.plan`, by their names there."""
        if isinstance(how.get("levers"), set | frozenset):  # a user's names, which nobody has looked at
            how = {**how, "levers": sorted(how["levers"])}
        return cls(Step(model, batch)).but(**how)

    def but(self, **changes: Any) -> "Request":
        """The request with other arguments, by the names that `tightfit.plan` has for them."""
        own = {_named(name): value for name, value in changes.items() if name not in OF_THE_STEP}
        changes = {name: value for name, value in changes.items() if name in OF_THE_STEP}
        if "model" not in changes and "twins" in self.__dict__:  # a twin is made once, and so are its traces' blocks
            changes = {"model": self.model, "batch": self.batch, "keep_gradients": self.keep_gradients, **changes}
        return replace(self, step=replace(self.step, **changes), **own)

    @property
    def how(self) -> dict[str, Any]:
        """The arguments of `tightfit.plan` except model, batch and budget, by their names there."""
        step = {name: value for name, value in vars(self.step).items() if name not in ("model", "batch")}
        names = ("blocks", "offload_folder", "offload_budget", "host_budget", "steps")
        own = {name: getattr(self, name) for name in names}
        return {**step, **own, "levers": self.levers_named}

    def without_levers(self) -> "Request":
        """The step without arguments of levers. An estimate must not fail for a lever that the device refuses."""
        return self.but(levers=None, blocks=None, offload_folder=None, offload_budget=None, host_budget=None)

    def counted(self) -> "Request":
        """The plain step, where a plan would choose the number of its micro-batches."""
        return self.but(micro_batches=self.micro_batches)

    def checked(self, *, may_choose: bool = False) -> "Request":
        """This request, each argument of which was looked at. With `may_choose`, `micro_batches="auto"` is allowed.

        Raises `InputError`, `ModelError`, `LeverError` and `DeviceError`.
        """
        step = self.step
        chooses = may_choose and self.fewest_micro_batches
        count: Any = 1 if chooses else step.micro_batches
        check_step(step.model, step.batch, step.loss, step.optimizer, step.precision)
        check_settings(count, step.grad_clip, self.blocks)
        check_step_in_backward(step.step_in_backward, step.grad_clip, step.precision)
        check_levers(self.levers_named)
        refuse_distributed(step.model, "a plan or an estimate")
        check_world(self.world, step.optimizer, step.step_in_backward, 2 if chooses else count)
        check_steps(self.steps)
        _ = self.twins, self.levers, self.offload
        return self

    # The step

    @cached_property
    def twins(self) -> tuple[nn.Module, Batch]:
        """Model and batch, replaced by twins that can run dry if they are on meta or fake.

        Raises `InputError` and `ModelError`.
        """
        model, optimizer = self.step.model, self.step.optimizer
        twin = twin_of(model)
        if twin is not model and isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(
                f"optimizer: this {type(optimizer).__name__} holds parameters without memory (meta, or fake): give its "
                "name, or a callable that takes parameters"
            )
        return twin, with_memory(self.step.batch, model)

    @property
    def model(self) -> nn.Module:
        return self.twins[0]

    @property
    def batch(self) -> Batch:
        return self.twins[1]

    @property
    def loss(self) -> Loss:
        return self.step.loss or model_loss

    @property
    def optimizer(self) -> Optimizer:
        return self.step.optimizer

    @property
    def micro_batches(self) -> int:
        """The micro-batches of the plain step: one if the plan chooses their number."""
        return 1 if self.fewest_micro_batches else self.step.micro_batches  # pyright: ignore[reportReturnType] - a number

    @property
    def fewest_micro_batches(self) -> bool:
        """True if the search stops at the first number of micro-batches that fits, even if a larger one is faster."""
        return self.step.micro_batches == "auto"

    @cached_property
    def keep_gradients(self) -> bool:
        given = self.step.keep_gradients
        return gradients_are_zero(self.step.model) if given is None else given

    @cached_property
    def settings(self) -> StepSettings:
        step = self.step
        return StepSettings(step.precision, step.grad_clip, self.keep_gradients, step.step_in_backward)

    @cached_property
    def device(self) -> DeviceSpec:
        """The device as one rank has it. Raises `DeviceError`."""
        return device_of_a_rank(self.step.device, in_ranks=self.world is not None)

    @property
    def ranks(self) -> int | None:
        """The number of ranks: that of the run that this process is part of, for DDP without a number."""
        step = self.step
        group = default_group() if step.parallel == "ddp" and step.world_size is None else None
        return step.world_size if group is None else group.size()

    @cached_property
    def world(self) -> World | None:
        """Several ranks, each with a device of its own; None: one process. Raises `InputError`."""
        if self.divided is not None:
            return self.divided
        step = self.step
        world = world_of(self.ranks, step.nodes, step.parallel, step.ddp, self.shards)
        if world is None or self.apart is None:
            return world
        return replace(world, sharding=Sharding(apart=self.apart), keeps_units=True)

    # What a plan may use

    @cached_property
    def levers(self) -> frozenset[str]:
        """The levers by name. Raises `InputError`, and `LeverError` for one that the device refuses."""
        named = self.levers_named
        levers = named if isinstance(named, frozenset) else levers_of_ranks(self.world, named, self.device)
        for kind in lever_types():
            refusal = kind.refusal(self.device) if kind.name in levers else None
            if refusal is not None:
                raise LeverError(refusal)
        return levers | {MicroBatches.name} if self.fewest_micro_batches else levers

    @cached_property
    def offload(self) -> OffloadSettings:
        return OffloadSettings(self.offload_folder, positive_bytes(self.offload_budget))

    @property
    def stream_folder(self) -> str | None:
        """The folder of the file that streamed weights are in; None: pinned memory, or a CPU's own choice."""
        folder = None if self.offload.folder is None else str(self.offload.folder)
        if self.device.kind == "cpu":
            return folder
        if not self.weights_in_file:
            return None
        place = Path(folder) if folder is not None else temporary_folder()
        if is_in_memory(place):
            raise LeverError(
                f"stream: {place} is in memory itself, and host_budget has no room for the weights there: name a "
                "folder on a disk (offload_folder)"
            )
        return str(place)

    @property
    def shards_leave(self) -> bool:
        """True if FSDP2's shards may be on the host of a card, where nothing else fits."""
        return self.world is not None and Offload.name in allowed_levers(self.levers_named)

    @cached_property
    def cost(self) -> OperatorCost:
        """Seconds of each operator on the device, and of the copies of offload."""
        price = CostModel(self.device).operator_seconds
        if self.world is not None:
            price = with_messages(price, self.device, self.world)
        rates = copy_rates(self.device)
        if rates is None and not self._copies:
            return price  # the rates of the disk are measured on first use, which takes time
        if rates is None:
            disk = disk_rates(self.offload.folder)
            rates = CopyRates(disk.write_bytes_per_second, disk.read_bytes_per_second)
        away, back = rates
        drive = self.drive_bytes_per_second
        streamed = back if drive is None else min(back, drive)

        def priced(name: str, inputs: Sequence[TensorShape], outputs: Sequence[TensorShape], arguments: tuple) -> float:
            if name in (AWAY, TO_HOST):
                return inputs[0].bytes / away
            if name in (BACK, TO_DEVICE):
                return inputs[0].bytes / back
            if name == STREAM:
                return inputs[0].bytes / streamed
            if name == IN_FILE:
                return 0.0 if drive is None else inputs[0].bytes / drive
            return price(name, inputs, outputs, arguments)

        return priced

    @cached_property
    def drive_bytes_per_second(self) -> float | None:
        """The rate of the drive from which weights stream to a card; None if they are in no file."""
        folders = [ring.folder for ring in rings_on(self.model)] or [self.stream_folder]
        if self.device.kind == "cpu" or folders[0] is None:
            return None
        if self.device.drive_bytes_per_second is not None:
            return self.device.drive_bytes_per_second
        return drive_rate(folders[0]) if self.device.is_measured else DRIVE_BYTES_PER_SECOND

    @property
    def _copies(self) -> bool:
        """True if a step may copy to a folder or back."""
        return not self.levers.isdisjoint(("offload", "stream")) or bool(rings_on(self.model))

    @property
    def executor(self) -> ExecutorCost:
        """The recompute executor's own seconds for each operator on the device."""
        device = self.device
        captured = 0.0 if device.captured_seconds is None else device.captured_seconds - device.host_seconds
        return ExecutorCost(device.recording_seconds, device.replaying_seconds, captured)

    @cached_property
    def role(self) -> CudaRole | None:
        """The CUDA device that dry runs simulate; None for a CPU."""
        return role_of(self.device)

    @property
    def communicator_bytes(self) -> int:
        """Bytes that NCCL is assumed to take of the device; 0 for one process and on a CPU."""
        return 0 if self.world is None or self.role is None else communicator_bytes(self.world)

    @cached_property
    def size(self) -> int:
        return inseparable_samples(self.batch, self.loss)

    @property
    def outcomes(self) -> tuple[OpenNumbers, ...]:
        """The outcomes of numbers read that change the plain step's memory, that of the highest peak first."""
        return self._outcomes[0]

    @property
    def refused_answers(self) -> str | None:
        """The exception of a step that does not go on with other answers than the usual ones, by name."""
        return self._outcomes[1]

    @cached_property
    def _outcomes(self) -> tuple[tuple[OpenNumbers, ...], str | None]:
        refused: str | None = None
        peaks: dict[tuple[int, ...], tuple[int, OpenNumbers]] = {}
        reads_draws, has_answers = True, self.world is None
        for numbers in OpenNumbers:
            if numbers is not OpenNumbers.HIGH and not (reads_draws if numbers.is_drawn else has_answers):
                continue
            try:
                trace = Tracer(self, numbers).whole(self.plain, {})
            except ModelError:
                continue  # with every layer dropped a loss depends on no weight, which ends a training too
            except Exception as error:
                if numbers.is_drawn:
                    raise
                # Other answers than the usual ones may be none: code may divide by them, or raise whatever it likes.
                refused = type(error).__name__
                continue
            peaks.setdefault(trace.levels, (trace.peak_bytes, numbers))
            if numbers is OpenNumbers.HIGH:
                # A rank's step is not run again, and so has no other answers.
                reads_draws, has_answers = trace.reads_draws, trace.has_answers and self.world is None
        ordered = sorted(peaks.values(), key=lambda found: found[0], reverse=True)
        return tuple(numbers for _, numbers in ordered), refused

    def has_outcomes(self, trace: StepTrace) -> bool:
        """True if a traced step may take other memory with other numbers than those that it read."""
        return trace.reads_draws or (trace.has_answers and self.world is None)

    @cached_property
    def separation(self) -> Separation:
        """The reason why samples of the batch stay together, if any; tried on real numbers where there are some."""
        if self.size < 2 or not can_be_tried(self.model, self.batch):
            return Separation(None, tried=False)
        try:
            refuse_coupled(self.model, self.batch, self.loss)
        except LeverError as error:
            return Separation(str(error), tried=True)
        return Separation(None, tried=True)

    def parts(self, micro_batches: int) -> list[Part]:
        if self.resident is not None:
            return [Part((self.batch, self.resident), 1.0)] * micro_batches
        return as_parts(split_batch(as_tensors(self.batch), micro_batches), self.loss)

    @property
    def plain(self) -> Combination:
        """The step with no lever, in the caller's own micro-batches."""
        return Combination.of(self.micro_batches)

    def may(self, kind: type[Lever]) -> bool:
        """True if a plan may use the lever."""
        return kind.name in self.levers or self.may_repay(kind)

    def may_repay(self, kind: type[Lever]) -> bool:
        """True if a plan may use the lever, which nobody named, if the steps to come repay its preparation.

        How many those are must be known on a CPU, where it gains little.
        """
        is_alike = kind.repaid_beside is not None and kind.repaid_beside in self.levers
        return (
            is_alike
            and kind.name not in self.levers
            and (self.steps is not None or self.device.kind == "cuda")
            and self.world is None
            and kind.refusal(self.device) is None
        )

    @property
    def optimizer_name(self) -> str:
        name = self.optimizer if isinstance(self.optimizer, str) else type(self.optimizer).__name__
        return optimizer_in_words(name, self.settings.step_in_backward)


def _named(name: str) -> str:
    """The field of an argument that has another name in `tightfit.plan`."""
    return {"levers": "levers_named", "world": "divided"}.get(name, name)


def device_of_a_rank(named: Any, *, in_ranks: bool) -> DeviceSpec:
    """The device as one rank has it: the ranks that torchrun started on a machine share its memory."""
    device, launch = lookup(named), launched() if in_ranks and process_group_exists() else None
    if launch is None or device.kind != "cpu":
        return device
    return replace(device, memory_bytes=device.memory_bytes // launch.local_size)


def gradients_are_zero(model: nn.Module) -> bool:
    """True if the model has gradients and all of them are zero."""
    # Only `zero_grad(set_to_none=False)` leaves such gradients: a backward leaves others (notes/bytes.md, "Gradients
    # that stay"). Sparse gradients and those without memory cannot be read here.
    held = [p.grad for p in model.parameters() if p.grad is not None]
    known = all(g.layout is torch.strided and not has_no_memory(g) for g in held)
    return bool(held) and known and not any(bool(g.detach().any()) for g in held)


def _of_copies(
    optimizer: torch.optim.Optimizer, model: nn.Module, copies: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The user's optimizer over a rank's copies of a model's trained parameters, which are in the model's order."""
    # FSDP2 makes parameters of its own from those of the rank's copy, in their order.
    known: dict[torch.Tensor, torch.Tensor] = {}
    known.update(zip((p for p in model.parameters() if p.requires_grad), copies, strict=True))
    return optimizer_over(optimizer, known)


def plain_step(request: Request, trace: StepTrace, paths: Sequence[str]) -> PlainStep:
    """The request's step without levers as levers see it, with its trace and the paths of its blocks."""
    return PlainStep(
        request.model,
        request.batch,
        trace,
        tuple(paths),
        request.micro_batches,
        request.size,
        lambda: request.separation,
        updates_on_host(request.optimizer, on_card=request.device.kind != "cpu"),
        request.stream_folder,
    )


def role_of(device: DeviceSpec) -> CudaRole | None:
    """The CUDA device that dry runs for a device simulate; None for a CPU."""
    if device.kind == "cpu":
        return None
    if device.compute_capability is None or device.sm_count is None:
        raise DeviceError(f"{device.name}: its compute capability is not known: calibrate the device again")
    return CudaRole(device.compute_capability, device.sm_count, name=device.name, memory_bytes=device.memory_bytes)


@dataclass(frozen=True)
class Tracer:
    """Runs a request's step dry, with levers applied.

    `refused` says why blocks of the last run could not be captured, by path.
    """

    request: Request
    numbers: OpenNumbers | None = None  # the outcome of numbers read; None: that of the highest peak
    refused: dict[str, str] = field(default_factory=dict, kw_only=True)

    def whole(
        self,
        combination: Combination,
        policies: Mapping[str, Policy],
        joined: Sequence[str] = (),
        routing: Routing = Routing.BALANCED,
    ) -> StepTrace:
        """The whole step as it will run, optimizer included. With several ranks, that of the first one.

        If the outcome of numbers read is open, that of the highest peak.
        """
        request = self.request
        if self.numbers is None:
            levers = combination, policies, joined, routing
            high: StepTrace | None = None
            with suppress(ModelError):
                high = replace(self, numbers=OpenNumbers.HIGH).whole(*levers)
                if not request.has_outcomes(high):
                    return high
            found = [
                high if numbers is OpenNumbers.HIGH and high else replace(self, numbers=numbers).whole(*levers)
                for numbers in request.outcomes or (OpenNumbers.HIGH,)
            ]
            return max(found, key=lambda trace: trace.peak_bytes)
        if request.world is not None:
            return self.of_rank(
                own_copy(request.model), self.rank(request.world), combination, policies, joined, routing
            )
        with self.applied(combination, policies, joined):
            return self._step(request.model, combination, routing)

    def _step(
        self, model: nn.Module, combination: Combination, routing: Routing, rank: SimulatedRank | None = None
    ) -> StepTrace:
        """A step of a model that has its levers on."""
        request = self.request
        with assumed(self.numbers or OpenNumbers.HIGH):
            return trace_step(
                model,
                request.parts(combination.micro_batches),
                request.loss,
                optimizer=request.optimizer if rank is None else self.optimizer_of_rank,
                settings=request.settings if rank is None else self.settings_of_rank,
                cost=request.cost,
                executor=request.executor,
                role=request.role,
                routing=routing,
                rank=rank,
            )

    def rank(self, world: World, number: int = 0) -> SimulatedRank:
        """A rank of a world, which shards the blocks of the request's model one by one."""
        are_sharded = world.is_sharded and world.shards is None
        blocks = find_blocks(self.request.model, self.request.blocks) if are_sharded else []
        return SimulatedRank(world, number, blocks, self.request.settings.precision)

    @property
    def settings_of_rank(self) -> StepSettings:
        """How a rank computes its step."""
        world, settings = self.request.world, self.request.settings
        # FSDP2 casts weights and activations itself, so autocast has nothing to do.
        return replace(settings, precision="fp32") if world is not None and world.is_sharded else settings

    @property
    def optimizer_of_rank(self) -> Optimizer:
        """The optimizer of a rank, over its own parameters."""
        optimizer = self.request.optimizer
        is_the_users = isinstance(optimizer, torch.optim.Optimizer)
        return partial(_of_copies, optimizer, self.request.model) if is_the_users else optimizer

    def of_rank(
        self,
        model: nn.Module,
        rank: SimulatedRank,
        combination: Combination,
        policies: Mapping[str, Policy],
        joined: Sequence[str] = (),
        routing: Routing = Routing.BALANCED,
    ) -> StepTrace:
        """The whole step of a rank with levers. The model is the rank's own."""
        refusals = refusals_of_shards(self.request.optimizer_name)
        with self.applied(combination, policies, joined, model=model), refusals:
            return overlapped(self._step(model, combination, routing, rank), rank.world)

    def ranks(
        self,
        world: World,
        combination: Combination | None = None,
        policies: Mapping[str, Policy] | None = None,
        joined: Sequence[str] = (),
        routing: Routing = Routing.BALANCED,
        first: StepTrace | None = None,
    ) -> RankTraces:
        """The step of every rank of a world: the plain one, or with levers. `first` is the first rank's, if known."""
        request = self.request
        levers = (combination or request.plain, policies or {}, joined, routing)
        settings = self.settings_of_rank

        def trace(model: nn.Module, rank: SimulatedRank) -> StepTrace:
            return first if first is not None and rank.number == 0 else self.of_rank(model, rank, *levers)

        def update(model: nn.Module) -> StepTrace:
            trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
            return trace_update(
                model,
                self.optimizer_of_rank,
                settings=settings,
                with_gradient=trained,
                cost=request.cost,
                role=request.role,
            )

        return trace_ranks(request.model, world, self.rank(world).blocks, request.settings.precision, trace, update)

    def routed_peaks(
        self, trace: StepTrace, combination: Combination, policies: Mapping[str, Policy], joined: Sequence[str] = ()
    ) -> list[int]:
        """The peaks in bytes with all tokens routed to the fewest experts, for each way to do that.

        The list is empty if the traced step routes nothing. It has one element if routing changes none of its levels.
        """
        peaks: list[int] = []
        if trace.peak_depends_on_data:
            for routing in ONE_SIDED:
                routed = self.whole(combination, policies, joined, routing)
                peaks.append(routed.peak_bytes)
                # All levels, not only the peak: with levers applied, the peak is at another operator.
                if routed.levels == trace.levels:
                    break
        return peaks

    def part(
        self,
        combination: Combination,
        policies: Mapping[str, Policy],
        plain: StepTrace,
        joined: Sequence[str] = (),
        *,
        compared: bool = False,
    ) -> StepTrace:
        """Forward and backward of the last micro-batch, with optimizer states and gradients as in the plain step.

        With `compared`, each block is priced as if other blocks that offload followed it.
        """
        request = self.request
        model, rank, settings = request.model, None, request.settings
        if request.world is not None:
            model, rank, settings = own_copy(model), self.rank(request.world), self.settings_of_rank
        numbers = request.outcomes[0] if request.has_outcomes(plain) and request.outcomes else OpenNumbers.HIGH
        with self.applied(combination, policies, joined, compared, model=model), assumed(numbers):
            trace = trace_part(
                model,
                request.parts(combination.micro_batches),
                request.loss,
                settings=settings,
                state_bytes=state_bytes(plain),
                with_gradient=plain.with_gradient,
                gradients_before=plain.gradients_before,
                optimizer=request.optimizer,
                cost=request.cost,
                executor=request.executor,
                role=request.role,
                rank=rank,
            )
        return trace if rank is None else overlapped(trace, rank.world)

    @contextmanager
    def applied(
        self,
        combination: Combination,
        policies: Mapping[str, Policy],
        joined: Sequence[str],
        compared: bool = False,
        *,
        model: nn.Module | None = None,
    ) -> Iterator[None]:
        """A context in which levers are on the request's model, or on a rank's copy of it."""
        offload_store = HostStore(self.request.offload, compared) if "offload" in self.request.levers else None
        model = self.request.model if model is None else model
        is_built = self.request.device.kind == "cpu"  # a card need not be here
        with Applied(apply_levers(model, policies, combination.levers, joined, offload_store, is_built=is_built)):
            self.refused.clear()
            outer, activity.on_refused_capture = activity.on_refused_capture, self.refused.__setitem__
            try:
                yield
            finally:
                activity.on_refused_capture = outer


def state_bytes(trace: StepTrace) -> int:
    """Bytes of the optimizer's states in a traced step."""
    return trace.by_category(0)[Category.OPTIMIZER_STATE]


def lacking(trace: StepTrace, device_bytes: int) -> int:
    """Bytes that a device of `device_bytes` lacks for a traced step; 0 if it fits.

    On CUDA the allocator's segments and the context must fit too.
    """
    if trace.reserved_bytes is None:
        return max(0, trace.peak_bytes - device_bytes)
    # The allocator returns free segments before it raises an out-of-memory, so more may fit than was reserved.
    room = device_bytes - CONTEXT_BYTES
    return 0 if trace.reserved_bytes <= room or fits_device(trace, room) else trace.reserved_bytes - room


def optimizer_peak(trace: StepTrace) -> int:
    """The highest level of the optimizer's phase."""
    return trace.phase_peaks()[Phase.OPTIMIZER]
