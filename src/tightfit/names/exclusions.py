"""Which levers and settings exclude each other, and why: for the code that refuses them, and for the page about levers.

No torch here.
"""

from dataclasses import dataclass


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
