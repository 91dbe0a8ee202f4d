"""The levers of a plan: one file for each, registered here in the order in which users read them.

`register` adds a lever that is not listed here. It then appears wherever levers are listed.
"""

from tightfit.planner.levers.base import (
    CLASSES,
    ROUNDING_SPREAD,
    BlockKind,
    BlockLever,
    Choice,
    Exactness,
    Lever,
    PlainStep,
    Role,
    Separation,
    Suggestion,
    allowed_levers,
    find,
    forget,
    lever_from_dict,
    lever_types,
    register,
)

from tightfit.planner.levers.recompute import Recompute  # isort: skip
from tightfit.planner.levers.micro_batch import MicroBatches  # isort: skip
from tightfit.planner.levers.chunked_loss import ChunkedLoss  # isort: skip
from tightfit.planner.levers.tile import TiledModules  # isort: skip
from tightfit.planner.levers.offload import Offload  # isort: skip
from tightfit.planner.levers.stream import Stream  # isort: skip
from tightfit.planner.levers.compiled import CompiledBlocks  # isort: skip
from tightfit.planner.levers.captured import CapturedBlocks  # isort: skip
from tightfit.planner.levers.combination import Combination  # isort: skip

__all__ = [
    "CLASSES",
    "ROUNDING_SPREAD",
    "BlockKind",
    "BlockLever",
    "CapturedBlocks",
    "Choice",
    "ChunkedLoss",
    "Combination",
    "CompiledBlocks",
    "Exactness",
    "Lever",
    "MicroBatches",
    "Offload",
    "PlainStep",
    "Recompute",
    "Role",
    "Separation",
    "Stream",
    "Suggestion",
    "TiledModules",
    "allowed_levers",
    "find",
    "forget",
    "lever_from_dict",
    "lever_types",
    "register",
]
