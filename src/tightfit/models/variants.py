"""A model as another training would hold it: its weights in a dtype, or frozen below adapters. Nothing has memory."""

from typing import Literal

from torch import nn

from tightfit.models.adapters import add_adapter
from tightfit.models.dtypes import WEIGHT_DTYPES, convert_weights
from tightfit.tracing.build import build_dry
from tightfit.tracing.twin import unbacked_copy
from tightfit.training.config.schema import AdapterConfig

WeightDtype = Literal["fp32", "bf16"]


def as_recipe(model: nn.Module, *, dtype: WeightDtype | None = None, adapter: AdapterConfig | None = None) -> nn.Module:
    """A copy of a model for dry runs, with its weights in `dtype` (None: as they are) and under `adapter`.

    The copy allocates no memory, so the model may be larger than this machine. With an adapter on a base of fp32 or
    bf16, that is the dtype of all frozen weights. On a base of few bits, `dtype` is that of the weights which are not
    in few bits: embeddings, norms and the head.

    Raises `ModelError` where the model cannot be copied or has no layer to adapt, and `InputError` where a package is
    missing.
    """
    kept = adapter.base if adapter is not None and adapter.base in WEIGHT_DTYPES else dtype

    def made() -> nn.Module:
        copy = unbacked_copy(model)
        if kept is not None:
            convert_weights(copy, WEIGHT_DTYPES[kept])
        return copy if adapter is None else add_adapter(copy, adapter).train(model.training)

    return build_dry(made)  # a dry run converts and quantises tensors without memory
