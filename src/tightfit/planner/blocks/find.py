"""Finds the blocks of a model: the parts that run one after the other.

The forwards of a traced step form a tree: which module called which. If a module calls several modules of one class, or
one module several times, these are blocks. It makes no difference whether a list, a dict or attributes hold them. If
nothing is repeated, the largest parts that keep something for backward are the blocks, or else the model itself.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median

from torch import nn

from tightfit.devices.families import Family, family_of
from tightfit.levers.recompute.lever import matching_modules
from tightfit.runtime.module_paths import named_modules
from tightfit.tracing.record import Category, OperatorRecord, Phase, StepTrace

# A repeated part is split if the repeated parts inside it keep at least this share of its bytes. That splits stages of
# blocks. It does not split a block with repeated experts or heads, because its attention keeps bytes outside of them
# (nineteen shapes of models: tests/planner/model_shapes.py).
COVERED = 0.9
_IN_BACKWARD = (Phase.RECOMPUTE, Phase.BACKWARD)  # a forward inside backward counts as recompute
AS_HEAVY = 0.5  # a part that is not repeated is a block if it keeps this share of what repeated parts beside it keep
WORTH_IT = 0.01  # of what the heaviest block keeps; a block that keeps less is ignored
_HOLDERS = nn.ModuleList | nn.Sequential | nn.ModuleDict
_LISTS = nn.ModuleList | nn.Sequential


@dataclass(eq=False)
class CalledModule:
    """A module, the bytes that its calls keep for backward, and the modules that it calls.

    `kind` is its class, `shape` its class with the shapes of its weights, `holder` the path of the list that it is a
    member of.
    """

    path: str
    kind: str
    shape: str
    holder: str
    composed: bool  # more than a single layer
    kept_bytes: int = 0
    calls: int = 0
    parts: dict[str, "CalledModule"] = field(default_factory=dict)

    @property
    def candidates(self) -> list["CalledModule"]:
        return [part for part in self.parts.values() if part.composed and part.kept_bytes]

    @property
    def repeated(self) -> list["CalledModule"]:
        """The candidates that repeat: of one class, in one list, or called several times in one call of this part."""
        kinds = Counter(part.kind for part in self.candidates)
        holders = Counter(part.holder for part in self.candidates if part.holder)
        return [
            part
            for part in self.candidates
            if kinds[part.kind] > 1 or holders[part.holder] > 1 or part.calls > max(1, self.calls)
        ]

    @property
    def has_equal_parts(self) -> bool:
        """True if parts of equal shapes keep most of its bytes. It is then a stage, not a block."""
        shapes = Counter(part.shape for part in self.candidates)
        equal = sum(part.kept_bytes for part in self.candidates if shapes[part.shape] > 1)
        inner = sum(part.kept_bytes for part in self.candidates if part.has_equal_parts and shapes[part.shape] == 1)
        return equal + inner >= COVERED * self.kept_bytes


def find_blocks(model: nn.Module, pattern: str | None = None, trace: StepTrace | None = None) -> list[str]:
    """Paths of the blocks: the matches of a glob, or the repeated parts of the traced step, else its largest parts.

    Without glob and trace, or where they run inside backward alone, the blocks are the repeated parts of the module
    tree: members of lists and dicts, and attributes of one class. Raises `LeverError` if the glob matches nothing.

    Of a traced step, blocks that no lever leaves as they are stay out: those that move state twice, and those that call
    functions under `torch.compile`, whose code rounds otherwise than operators do.
    """
    if pattern is not None:
        return matching_modules(model, pattern)
    if trace is None:
        return [part.path for part in repeated_parts(_as_held(model), into_stages=False)]
    root = _as_run(model, trace)
    blocks = repeated_parts(root, into_stages=True) or largest_parts(root)
    if [part.path for part in blocks] in ([], [""]) and (inside := _run_in_backward(model, trace)):
        return inside
    least = WORTH_IT * max((part.kept_bytes for part in blocks), default=0)
    left_out = modules_left_out(trace)
    return [
        path
        for path in dict.fromkeys(part.path for part in blocks if part.kept_bytes >= least)
        if not any(f"{module}.".startswith(f"{path}." if path else "") for module in left_out)
    ]


def modules_left_out(trace: StepTrace) -> dict[str, str]:
    """The modules whose results or state levers would change, by path, and why. Blocks with such modules stay out."""
    moved = dict.fromkeys(_moved_twice(trace), "buffers move in a checkpoint of the model's own")
    return moved | {call.path: "functions under torch.compile are called" for call in trace.calls if call.runs_compiled}


def _moved_twice(trace: StepTrace) -> set[str]:
    """The modules in checkpoints of the model's own whose state moves in forward and again in backward.

    How far such a checkpoint runs again depends on what the blocks in it save, so levers on them would move other
    state than the plain run.
    """
    checkpointed = {call.path for call in trace.calls if call.is_checkpointed}
    again = [o for o in trace.operators if o.phase is Phase.RECOMPUTE and o.module in checkpointed]
    return {operator.module for operator in again if any(_is_state(trace, value) for value in operator.makes)}


def _is_state(trace: StepTrace, value: int) -> bool:
    """True if a value lies in memory that the step found, that its forward allocated, or that outlives the step."""
    storage = trace.storages[trace.values[value].storage]
    return storage.operator is None or storage.died is None or trace.operators[storage.operator].phase is Phase.FORWARD


def _run_in_backward(model: nn.Module, trace: StepTrace) -> list[str]:
    """The repeated parts of the module tree, where all of them run inside backward, as those of a two-pass contrastive
    loss do (GradCache, Gao et al. 2021): its first pass keeps nothing.
    """
    held = find_blocks(model)
    first, last = trace.repeated
    calls = [call for call in trace.calls if first <= call.start < last]
    inside = {call.path for call in calls if trace.operators[call.start].phase in _IN_BACKWARD}
    return held if inside.issuperset(held) else []


def repeated_parts(part: CalledModule, *, into_stages: bool) -> list[CalledModule]:
    """The repeated parts below a part, in the order in which they run. `into_stages` replaces a stage by its parts."""
    repeated = part.repeated
    least = AS_HEAVY * median([child.kept_bytes for child in repeated] or [0])
    blocks = []
    for child in part.candidates:
        if child in repeated and not (into_stages and child.has_equal_parts):
            blocks.append(child)
            continue
        inner = repeated_parts(child, into_stages=into_stages)
        if not inner and repeated and child.kept_bytes >= least:
            inner = [child]  # as heavy as a block, for example the one layer of another class between equal ones
        blocks += inner
    return blocks


def largest_parts(part: CalledModule) -> list[CalledModule]:
    """The blocks of a part in which nothing is repeated: its parts if they keep most of its bytes, else the part."""
    parts = part.candidates
    covered = sum(child.kept_bytes for child in parts) >= COVERED * part.kept_bytes
    if len(parts) == 1 and covered:
        return largest_parts(parts[0])
    if not part.calls or (parts and covered):
        return parts
    return [part] if part.kept_bytes else []


# The parts as a step ran them


def _as_run(model: nn.Module, trace: StepTrace) -> CalledModule:
    """The tree of module calls in the forward of the last micro-batch, with the model as root.

    Calls of modules that are not in the model (made by the loss, for example) are skipped: the modules that they call
    belong to their caller.
    """
    modules = dict(named_modules(model))
    root = _part("", model)
    parts = {"": root}
    place = {-1: root}  # the part of each call
    first, last = trace.repeated
    kept, products = _running_sum(_kept_bytes(trace)), _running_sum([_is_product(o) for o in trace.operators])
    done: Counter[str] = Counter()
    for number, call in enumerate(trace.calls):
        caller = place.get(call.caller, root)
        module = modules.get(call.path)
        if module is None or not first <= call.start < last or trace.operators[call.start].phase is not Phase.FORWARD:
            place[number] = caller
            continue
        if call.path not in parts:
            parts[call.path] = caller.parts[call.path] = _part(call.path, module)
            parts[call.path].holder = _list_of(call.path, modules)
        part = place[number] = parts[call.path]
        part.calls += 1
        part.kept_bytes += kept[call.end] - kept[call.start]
        done[call.path] += products[call.end] - products[call.start]
    root.kept_bytes = root.kept_bytes or sum(part.kept_bytes for part in root.parts.values())
    for path, part in parts.items():
        part.composed = bool(part.parts) or done[path] > part.calls
    return root


def _list_of(path: str, modules: Mapping[str, nn.Module]) -> str:
    """The path of the list that contains a module, or nothing. A holder that is no module is a plain Python list."""
    parent, _, name = path.rpartition(".")
    holder = modules.get(parent)
    return parent if name.isdecimal() and (holder is None or isinstance(holder, _LISTS)) else ""


def _running_sum(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)]


def _is_product(operator: OperatorRecord) -> bool:
    return family_of(operator.name) in (Family.PRODUCT, Family.ATTENTION)


def _kept_bytes(trace: StepTrace) -> list[int]:
    """For each operator, the bytes of activations that it allocated and that were still held when backward began."""
    middle = trace.end_of_forward
    kept = [0] * len(trace.operators)
    for storage in trace.storages:
        stays = storage.died is None or storage.died > middle
        if storage.category is Category.ACTIVATION and storage.operator is not None and stays:
            kept[storage.operator] += storage.bytes
    return kept


# The parts as a model holds them


def _as_held(model: nn.Module) -> CalledModule:
    """The module tree without lists and dicts. The number of weights replaces the bytes kept, which need a run."""
    root = _part("", model)
    root.calls = 1
    _hold(model, "", root, alone=False)
    return root


def _hold(module: nn.Module, path: str, part: CalledModule, *, alone: bool) -> None:
    for name, child in module.named_children():
        child_path = f"{path}.{name}".lstrip(".")
        # An `nn.Sequential` in a list runs as one module, so it is a block. Elsewhere it only holds modules.
        is_member = isinstance(module, _LISTS) and isinstance(child, nn.Sequential)
        if isinstance(child, _HOLDERS) and not is_member:
            composed = [member for member in child.children() if _has_children(member)]
            _hold(child, child_path, part, alone=isinstance(child, nn.ModuleList) and len(composed) == 1)
            continue
        inner = part.parts[child_path] = _part(child_path, child)
        inner.composed = _has_children(child)
        inner.holder = path if isinstance(module, _LISTS) else ""
        inner.kept_bytes = max(1, sum(parameter.numel() for parameter in child.parameters()))
        inner.calls = 2 if alone else 1  # a list of one block suggests that the block runs several times
        _hold(child, child_path, inner, alone=False)


def _part(path: str, module: nn.Module) -> CalledModule:
    weights = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in (*module.parameters(), *module.buffers())]
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    return CalledModule(path, kind, f"{kind} {weights}", "", composed=_has_children(module))


def _has_children(module: nn.Module) -> bool:
    return any(True for _ in module.children())
