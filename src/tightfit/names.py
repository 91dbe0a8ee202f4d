"""The names that users write, and what goes with what, without torch: optimizers, allocator settings, ways to quantise,
exclusions between settings; and the files of a run.
"""

import ast
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from tightfit.errors import InputError

# Optimizers.

_AS_ADAMW = ("lr", "betas", "eps", "weight_decay")


@dataclass(frozen=True)
class OptimizerFacts:
    """The facts about an optimizer that are known outside of `tightfit.optim`, where `by_name` builds it.

    - `summary` and `words` say what it is, in the documentation and in a table of recipes.
    - `made` is the class, and `settings` its arguments, as a loop of plain PyTorch writes them.
    - `takes` are the settings with the same meaning as AdamW's.
    - `state_bytes` are the least bytes of states for each trained number, of weights in fp32 and in bf16.
    - `changes` is what its states change beside AdamW's, and `master` what it changes of weights in 16 bits. None: it
      is another optimizer.
    - `tried` are the dtypes of weights with which a search for recipes tries it.
    """

    summary: str
    words: str
    made: str
    settings: str = ""
    takes: tuple[str, ...] = _AS_ADAMW
    state_bytes: tuple[float, float] = (8.0, 4.0)
    changes: str | None = ""
    master: str = ""
    tried: tuple[str, ...] = ()
    needs_bf16: bool = False
    rounds: bool = False  # updates of bf16 weights are rounded to nearest, so small ones are lost
    tried_on_cpu: bool = True
    on_host: bool = False  # states, or a share of them, and their gradients
    steps_in_backward: bool = True
    steps_parts: bool = True  # of a matrix; false: an update of a part needs the rest
    steps_shards: bool = False  # of FSDP2
    foreign: tuple[str, ...] = ()  # its names in other trainers

    @property
    def home(self) -> str:
        """The module of its class."""
        return self.made.rpartition(".")[0]

    @property
    def package(self) -> str | None:
        """The package that brings it, beside torch and tightfit."""
        package = self.made.partition(".")[0]
        return None if package in ("torch", "tightfit") else package


OPTIMIZERS = {
    "adamw": OptimizerFacts(
        "AdamW, as PyTorch chooses its implementation", "AdamW", "torch.optim.AdamW", rounds=True, steps_shards=True,
        foreign=("adamw_torch",),
    ),
    "adamw_fused": OptimizerFacts(
        "AdamW in one kernel", "fused AdamW", "torch.optim.AdamW", "fused=True", tried=("fp32", "bf16"), rounds=True,
        steps_shards=True, foreign=("adamw_torch_fused",),
    ),
    "adamw_bf16": OptimizerFacts(
        "AdamW for bf16 weights, with 16 more bits kept beside them: an exact fp32 master", "AdamW with an fp32 master",
        "tightfit.optim.BF16AdamW", state_bytes=(8.0, 10.0), tried=("bf16",), needs_bf16=True,
    ),
    "adamw_bf16_stochastic": OptimizerFacts(
        "AdamW for bf16 weights, rounded stochastically", "AdamW, stochastic rounding", "tightfit.optim.BF16AdamW",
        'keeping="stochastic"', state_bytes=(8.0, 8.0), tried=("bf16",), needs_bf16=True,
    ),
    "flash_adamw": OptimizerFacts(
        "AdamW with 8-bit states, and for bf16 weights 8 more bits kept beside them: 24-bit masters", "flash AdamW",
        "tightfit.optim.FlashAdamW", state_bytes=(2.0, 3.0), changes="8-bit states", master="24-bit master weights",
        tried=("fp32", "bf16"),
    ),
    "adamw8bit": OptimizerFacts(
        "AdamW with 8-bit states (package bitsandbytes)", "8-bit AdamW", "bitsandbytes.optim.AdamW8bit",
        state_bytes=(2.0, 2.0), changes="8-bit states", tried=("fp32", "bf16"), rounds=True,
        foreign=("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit"),
    ),
    "adamw4bit": OptimizerFacts(
        "AdamW with 4-bit states (package torchao)", "4-bit AdamW", "torchao.optim.AdamW4bit", state_bytes=(1.0, 1.0),
        changes="4-bit states", tried=("fp32", "bf16"), rounds=True, foreign=("adamw_torch_4bit",),
        tried_on_cpu=False,  # it compiles its step for a minute
    ),
    "offloaded_adamw": OptimizerFacts(
        "AdamW with its states on the host; `offloaded_adamw:0.5` for half of them", "AdamW, states on the host",
        "tightfit.optim.OffloadedAdamW", state_bytes=(0.0, 0.0), on_host=True,
        steps_in_backward=False,  # it has moved its gradients already
    ),
    "offloaded_adamw_fused": OptimizerFacts(
        "the same in one kernel of the host, which passes once over its memory", "fused AdamW, states on the host",
        "tightfit.optim.OffloadedAdamW", "fused=True", state_bytes=(0.0, 0.0), tried=("fp32", "bf16"), on_host=True,
        tried_on_cpu=False,  # there the host is the device
        steps_in_backward=False,
    ),
    "adam": OptimizerFacts("Adam", "Adam", "torch.optim.Adam", changes=None, rounds=True, steps_shards=True),
    "adafactor": OptimizerFacts(
        "Adafactor", "Adafactor", "torch.optim.Adafactor", takes=("lr", "weight_decay"), state_bytes=(0.0, 0.0),
        changes=None, tried=("fp32", "bf16"), rounds=True, steps_parts=False,
    ),
    "muon": OptimizerFacts(
        "Muon on matrices, AdamW on the rest", "Muon", "tightfit.optim.MuonWithAdamW", state_bytes=(4.0, 2.0),
        changes=None, tried=("fp32",), steps_parts=False,
        steps_in_backward=False,  # it orders its matrices
    ),
    "muon8bit": OptimizerFacts(
        "Muon with 8-bit momentum on matrices, flash AdamW on the rest, and for bf16 weights 8 more bits of each",
        "8-bit Muon", "tightfit.optim.Muon8bit", state_bytes=(1.0, 2.0), changes=None, steps_parts=False,
        steps_in_backward=False,  # it orders its matrices
    ),
    "sgd": OptimizerFacts(
        "SGD", "SGD", "torch.optim.SGD", takes=("lr",), state_bytes=(0.0, 0.0), changes=None, rounds=True,
        steps_shards=True,
    ),
}  # fmt: skip
OFFLOADED = "offloaded_adamw_fused"
FLASH = "flash_adamw"
FOREIGN = {foreign: name for name, facts in OPTIMIZERS.items() for foreign in facts.foreign}


class OptimizerName(NamedTuple):
    """A kind of optimizer: a name of `OPTIMIZERS`, or the class `module:Class` with the arguments for it. `fraction` is
    the share of its states on the host, where the name has one.
    """

    kind: str
    fraction: float | None = None
    arguments: Mapping[str, Any] = MappingProxyType({})

    @property
    def facts(self) -> OptimizerFacts:
        """The facts about this optimizer. A class of somebody else is assumed to need whole matrices and all gradients,
        and to have no states: a dry run counts those.
        """
        if self.kind in OPTIMIZERS:
            return OPTIMIZERS[self.kind]
        module, _, name = self.kind.partition(":")
        return OptimizerFacts(
            summary=f"{name} of {module}",
            words=name,
            made=f"{module}.{name}",
            settings=_as_code(self.arguments),
            takes=("lr",),
            state_bytes=(0.0, 0.0),
            changes=None,
            rounds=True,
            steps_in_backward=False,
            steps_parts=False,
        )


_CLASS = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_][\w.]*)(\(.*\))?", re.DOTALL)


def optimizer_class(name: str, arguments: Mapping[str, Any]) -> str:
    """The text of a class with its arguments: `torch.optim:RAdam(lr=0.1)`, which `parse_optimizer` reads."""
    return f"{name}({_as_code(arguments)})" if arguments else name


def _as_code(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


LOW_RANK = ("apollo", "galore")  # packages apollo-torch and galore-torch


def optimizer_in_words(name: str, step_in_backward: bool) -> str:
    """An optimizer as tables call it."""
    return f"{name}, step in backward" if step_in_backward else name


def facts_of(text: str) -> OptimizerFacts:
    """The facts about the optimizer of this name. Raises `ValueError` with one clear line."""
    return parse_optimizer(text).facts


def parse_optimizer(text: str) -> OptimizerName:
    """Parse a name such as `adamw`, `offloaded_adamw:0.5`, `torch.optim:RAdam` or `torch.optim:RAdam(lr=0.1)`. Nothing
    is imported. Raises `ValueError` with one clear line.
    """
    kind, colon, share = text.partition(":")
    if kind not in OPTIMIZERS:
        if (of_class := _CLASS.fullmatch(text)) is not None:
            return OptimizerName(f"{of_class[1]}:{of_class[2]}", arguments=_arguments_of(text, of_class[3]))
        if kind in LOW_RANK:
            raise ValueError(
                f"optimizer {text!r} has no name here, since a checkpoint cannot save the projectors that its package "
                "keeps in its states: name a class of yours with its ranks by module:Class, as docs/optimizers.md shows"
            )
        near = difflib.get_close_matches(kind, OPTIMIZERS, n=1)
        hint = f": did you mean {near[0]!r}?" if near else f": choose one of {', '.join(OPTIMIZERS)}, or module:Class"
        raise ValueError(f"optimizer {text!r} is not known{hint}")
    if not colon:
        return OptimizerName(kind)
    if not OPTIMIZERS[kind].on_host:
        takes = " and ".join(name for name, facts in OPTIMIZERS.items() if facts.on_host)
        raise ValueError(f"optimizer {text!r}: only {takes} take a share of states, as in {OFFLOADED}:0.5")
    try:
        fraction = float(share)
    except ValueError:
        raise ValueError(f"optimizer {text!r}: {share!r} is no number: write {kind}:0.5") from None
    if not 0 <= fraction <= 1:
        raise ValueError(f"optimizer {text!r}: the share of the states on the host goes from 0 to 1")
    return OptimizerName(kind, fraction)


def _arguments_of(text: str, call: str | None) -> dict[str, Any]:
    """The arguments in brackets, which are literals of Python. Raises `ValueError`."""
    try:
        tree = ast.parse(f"_{call or '()'}", mode="eval").body
        assert isinstance(tree, ast.Call), "a name with brackets behind it"
        if tree.args or any(each.arg is None for each in tree.keywords):
            raise ValueError
        return {str(each.arg): ast.literal_eval(each.value) for each in tree.keywords}
    except (ValueError, SyntaxError, AssertionError):
        raise ValueError(
            f"optimizer {text!r}: the arguments in brackets are no key=value of numbers, texts and tuples: write "
            "them as in torch.optim:RAdam(lr=0.001, betas=(0.9, 0.99))"
        ) from None


# Settings of CUDA's allocator.

# Short names, and what each is in PyTorch's own words.
SETTINGS = {"expandable_segments": "expandable_segments:True"}

# What PyTorch reads (c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.cpp, torch 2.11 to 2.13).
KEYS = (
    "backend",
    "expandable_segments",
    "garbage_collection_threshold",
    "graph_capture_record_stream_reuse",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "roundup_power2_divisions",
    "throw_on_cudamalloc_oom",
)


def parse_allocator(text: str) -> str:
    """An allocator's setting in PyTorch's words: `expandable_segments`, or `key:value` with commas between.

    Raises `ValueError` with one clear line where a key is not one; what the values may be, PyTorch says.
    """
    if text in SETTINGS:
        return SETTINGS[text]
    for part in parts_between_commas(text):
        key, colon, value = (word.strip() for word in part.partition(":"))
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose among {', '.join(KEYS)}"
            raise ValueError(f"allocator {text!r}: {key!r} is no setting of CUDA's allocator: {hint}")
        if not colon or not value:
            raise ValueError(f"allocator {text!r}: {key!r} has no value: write {key}:VALUE")
    return ",".join(part.strip() for part in parts_between_commas(text))


def parts_between_commas(text: str) -> list[str]:
    """The settings between the commas; those within brackets belong to one value."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


# Ways to quantise a model.

QUANTISED_FILE = "quantisation.json"  # in the folder of a quantised model: how it was made
FEW_BITS = ("int8", "fp8", "nf4")  # of frozen weights below adapters
METHODS: dict[str, str] = {
    "int8_dynamic": "int8 weights, one scale a row; activations in int8, one scale a token, found as it runs",
    "int8": "int8 weights, one scale a row; activations as they are",
    "int8_static": "int8 weights, one scale a row; activations in int8, one scale a layer, from a calibration text",
    "int4": "4-bit weights, one scale and zero for 32 weights of a row; all else in bf16",
}
# Methods of GPTQModel. 7.7.0 declares torch>=2.14.1, and 7.1.0 numpy==2.2.6: neither installs beside our versions.
OF_GPTQMODEL = ("gptq", "awq")
GGUF = "gguf"  # what `tightfit export` writes


def refuse_other(name: str) -> None:
    """Raise `InputError` for a name that is not among `METHODS`."""
    if name in METHODS:
        return
    if name in OF_GPTQMODEL:
        raise InputError(
            f"--to {name}: GPTQModel, which has it, needs other versions of torch or numpy than tightfit is tested "
            "with: run GPTQModel in an environment of its own, or take int4"
        )
    if name.startswith(GGUF):
        raise InputError(
            f"--to {name}: quantise writes what tightfit reads: tightfit export --to gguf_q8_0 writes GGUF, and "
            "llama.cpp's llama-quantize makes its other types of that"
        )
    near = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"choose {', '.join([*METHODS][:-1])} or {[*METHODS][-1]}"
    raise InputError(f"--to {name!r} is not known: {hint}")


# Levers and settings that exclude each other, and why: for the code that refuses them, and for the page about levers.


@dataclass(frozen=True)
class Exclusion:
    """Two settings that cannot both be in force. `one` and `other` name them as a configuration does."""

    one: str
    other: str
    reason: str
    remedy: str

    def refusal(self, one: str | None = None, other: str | None = None) -> str:
        """The line for the user; `one` and `other` as they were found, where that says more than their names."""
        return f"{one or self.one} and {other or self.other} exclude each other, since {self.reason}: {self.remedy}"


STEP_IN_BACKWARD_AND_CLIPPING = Exclusion(
    "step_in_backward",
    "grad_clip",
    "clipping needs all gradients at once",
    "set grad_clip to null, or step_in_backward to false",
)
STEP_IN_BACKWARD_AND_SCALER = Exclusion(
    "step_in_backward",
    "precision fp16",
    "the gradient scaler looks at all gradients before the step",
    "use bf16, or set step_in_backward to false",
)
BUDGET_AND_RECOMPUTE = Exclusion(
    "memory.budget",
    "memory.recompute",
    "the plan for a budget chooses what to recompute",
    "remove one",
)
BUDGET_AND_COMPILED_BLOCKS = Exclusion(
    "memory.budget",
    "memory.compile_blocks",
    "the plan for a budget chooses the compiled blocks",
    "remove it, and name the lever compile in memory.levers",
)
RECOMPUTE_AND_COMPILED_BLOCKS = Exclusion(
    "memory.recompute",
    "memory.compile_blocks",
    "recompute repeats operators, which compiled code does not show",
    "remove one",
)
SEGMENTS_AND_REENTRANT = Exclusion(
    "segments",
    "use_reentrant",
    "PyTorch's reentrant checkpoint keeps each block's inputs",
    "remove one",
)
CHUNKED_ATTENTION_AND_DROPOUT = Exclusion(
    "model.attention chunked",
    "model.attention_dropout",
    "chunked attention never materialises the weights that dropout would drop",
    "set model.attention_dropout to 0 or model.attention to sdpa",
)
WINDOW_AND_DROPOUT = Exclusion(
    "model.attention_window",
    "model.attention_dropout",
    "attention within a window has no dropout of attention weights",
    "set model.attention_dropout to 0 or leave the window out",
)
EXPERTS_AND_TILES = Exclusion(
    "model.num_experts",
    "model.mlp_tile",
    "experts take the tokens of the whole batch, sorted by expert",
    "leave one out",
)
LARGEST_BATCH_AND_COUNTED_MICRO_BATCHES = Exclusion(
    "the largest batch_size",
    "micro_batches auto",
    "in enough micro-batches every batch fits",
    "set their number, or remove micro_batches for one",
)

# Those that concern no lever; the others stand with their levers (`planner.levers`).
OF_NO_LEVER = (
    STEP_IN_BACKWARD_AND_CLIPPING,
    STEP_IN_BACKWARD_AND_SCALER,
    CHUNKED_ATTENTION_AND_DROPOUT,
    WINDOW_AND_DROPOUT,
    EXPERTS_AND_TILES,
)


# The files of a run, for those who write them and for those who only list runs.

CONFIG, PLAN, METRICS, RESULT = "config.yaml", "plan.json", "metrics.jsonl", "result.json"
PICTURE, PAGE = "memory.png", "report.html"
REFERENCE = "reference.safetensors"  # log-probabilities of preference pairs before the first step
CHECKPOINTS = "checkpoints"  # the folder of the checkpoints
LOCK = ".tightfit.lock"
MODEL = "model"  # before the names of a model's tensors in a checkpoint
MASKS = "masks.safetensors"  # of weights that stay zero
