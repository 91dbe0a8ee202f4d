"""The ways out of a refusal, which `CannotFit` looks for by the name of this file."""

from tightfit.memory.allocator import old_objects_left_alone
from tightfit.planner.refusal import Refusal
from tightfit.recipes.finding import Finder
from tightfit.recipes.finding_of_ranks import RanksFinder
from tightfit.recipes.ways import WaysOut
from tightfit.runtime.outside import outside_training
from tightfit.tracing.twin import real_tensors


@outside_training()
@old_objects_left_alone()
@real_tensors()
def ways_out_of(refusal: Refusal | None) -> WaysOut:
    """The ways out of a refusal, ranked; none where no plan was asked for."""
    if refusal is None:
        return WaysOut()
    finder = Finder if refusal.search.request.world is None else RanksFinder
    return finder(refusal).found()
