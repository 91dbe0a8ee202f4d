"""The wording of tables, pictures and pages: operators, modules, and choices of blocks."""

import re
from collections.abc import Hashable, Sequence
from itertools import chain, groupby

from tightfit.planner.records import BlockChoice, StepFigures
from tightfit.units import format_bytes

_FOLDER = re.compile(r"[^\s(]*[/\\](?=[^\s/\\]+:\d)")  # the folder of a file with a line number
NAMED_RUNS = 3  # runs of blocks with the same choice that are named; more are counted
_PRODUCTS = ("addmm", "baddbmm", "bmm", "mm")


def keeps(choice: BlockChoice) -> str:
    """The tensors that a block keeps until backward, in words."""
    words = {
        "keep": "everything",
        "recompute": "only its input",
        "operators": kept_in_words([name for name, *_ in choice.kept], choice.kept_modules),
        "offload": offloaded_in_words(choice),
        "compile": f"{choice.share or 0:.0%} of what compiled code would keep",
    }
    kept = words[choice.action]
    kept = f"{kept}, not even its output" if choice.joined else kept
    runs = "captured" if choice.captured else "compiled" if choice.compiled else ""
    return f"{kept} ({runs})" if runs else kept


def kept_bytes(choices: Sequence[BlockChoice]) -> str:
    """The bytes that blocks with the same choice keep until backward; empty for compiled code, whose trace has none."""
    return "" if choices[0].action == "compile" else format_bytes(sum(choice.kept_bytes for choice in choices))


def offloaded_in_words(choice: BlockChoice) -> str:
    """The offloaded values of a block: `offloaded: its input, mlp.up_proj, attention (attention)`."""
    outputs = kept_in_words([name for name, *_ in choice.offloaded], choice.offloaded_modules)
    return f"offloaded: its input, {outputs}" if outputs else "offloaded: its input"


def alike(choices: Sequence[BlockChoice]) -> list[tuple[str, list[BlockChoice]]]:
    """Blocks with the same choice under one name: `layers.0 … layers.4`, or `layers.0, layers.2, … layers.30 (16)` if
    they are not neighbours.
    """
    runs: dict[Hashable, list[list[BlockChoice]]] = {}
    for what, run in groupby(choices, key=_what_it_does):
        runs.setdefault(what, []).append(list(run))
    return [(_name_of_runs(same), list(chain.from_iterable(same))) for same in runs.values()]


def _what_it_does(choice: BlockChoice) -> Hashable:
    kept = (choice.kept, choice.kept_modules, choice.joined, choice.offloaded)
    return (choice.action, choice.share, choice.captured, choice.compiled, *kept)


def _name_of_runs(runs: Sequence[Sequence[BlockChoice]]) -> str:
    """Each run by its two ends. Of many runs, the first ones, the last one, and the number of all blocks."""
    names = [named(run[0]) if len(run) == 1 else f"{named(run[0])} … {named(run[-1])}" for run in runs]
    if len(names) <= NAMED_RUNS:
        return ", ".join(names)
    return f"{', '.join(names[: NAMED_RUNS - 1])}, … {named(runs[-1][-1])} ({sum(map(len, runs))} blocks)"


def named(choice: BlockChoice) -> str:
    """The name of a block: its path, or "the whole model" for the model itself, whose path is empty."""
    return choice.path or "the whole model"


def kept_in_words(operators: Sequence[str], modules: Sequence[str]) -> str:
    """Kept outputs by module: `mlp.up_proj, attention (attention), norm (rsqrt), add ×2`.

    A module whose only kept output is a matrix product appears by its name alone. The most expensive outputs come
    first: attention, then matrix products, then the rest by name.
    """
    by_module: dict[str, dict[str, int]] = {}
    for operator, module in sorted(zip(operators, modules, strict=True), key=lambda pair: _by_weight(*pair)):
        counts = by_module.setdefault(module, {})
        counts[short(operator)] = counts.get(short(operator), 0) + 1
    own = by_module.pop("", {})  # operators of the block itself, such as residual sums
    words = [_module_in_words(module, counts) for module, counts in by_module.items()]
    return ", ".join([*words, *_counted(own)])


def _module_in_words(module: str, counts: dict[str, int]) -> str:
    if len(counts) == 1 and next(iter(counts)) in _PRODUCTS:
        return module
    return f"{module} ({', '.join(_counted(counts))})"


def _counted(counts: dict[str, int]) -> list[str]:
    return [name if count == 1 else f"{name} ×{count}" for name, count in counts.items()]


def _by_weight(operator: str, module: str) -> tuple[int, str, str]:
    name = short(operator)
    return (0 if name == "attention" else 1 if name in _PRODUCTS else 2, module, name)


def short(name: str) -> str:
    """`aten.mm.default` as `mm`; the long names of attention kernels as `attention`."""
    plain = name.removeprefix("aten.").removesuffix(".default").removesuffix(".Tensor")
    if "scaled_dot_product" in plain:
        return "attention backward" if "backward" in plain else "attention"
    return plain


def arithmetic(weights: str, precision: str) -> str:
    """`fp32 weights, bf16 autocast`; only the precision if the weights' dtypes were not recorded."""
    if not weights:
        return precision
    return f"{weights} weights, {'no' if precision == 'fp32' else precision} autocast"


def where(step_figures: StepFigures) -> str:
    """Phase, module and operator of the peak."""
    return f"{step_figures.peak_phase}, {step_figures.peak_module or 'top level'}, {short(step_figures.peak_operator)}"


def without_folders(assumptions: Sequence[str]) -> list[str]:
    """The assumptions, each once, with files without folders."""
    return list(dict.fromkeys(_FOLDER.sub("", assumption) for assumption in assumptions))
