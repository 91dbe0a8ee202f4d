"""The functions of PyTorch that a recorder may see as a whole, instead of operator by operator.

A dispatch mode takes longer than a small operator itself, so functions of two kinds run without it. Views change
geometry and compute nothing. Pure functions depend on their arguments alone, and which operators they call follows from
shapes, strides, dtypes and numbers (`programs.py`). Everything else runs under the dispatch mode: a function that is
missing here costs time and nothing else.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F

_VIEWS = (
    "view view_as transpose permute unbind split chunk tensor_split narrow select unsqueeze squeeze expand expand_as t "
    "swapaxes swapdims movedim unflatten unfold detach diagonal __getitem__ __iter__"
)
_QUESTIONS = (
    "size dim numel nelement stride storage_offset is_contiguous is_floating_point is_complex element_size get_device "
    "__len__"
)
_ATTRIBUTES = "shape dtype device layout ndim requires_grad grad_fn is_leaf is_cuda is_meta _version grad"
_VIEWED_ATTRIBUTES = "T mT"
_PURE = (
    "add sub subtract rsub mul multiply div divide true_divide neg abs exp exp2 log log1p sqrt rsqrt reciprocal square "
    "pow sin cos tanh sigmoid erf relu relu6 silu gelu mish elu selu celu softplus softsign leaky_relu hardtanh "
    "hardswish hardsigmoid logsigmoid glu clamp clamp_min clamp_max maximum minimum where lerp addcmul addcdiv "
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__ __div__ __pow__ __neg__ "
    "__matmul__ matmul mm bmm mv dot addmm addmv baddbmm addbmm outer linear bilinear einsum tensordot "
    "softmax log_softmax mean sum amax amin logsumexp cumsum var std norm linalg_vector_norm "
    "layer_norm rms_norm group_norm normalize scaled_dot_product_attention dropout embedding cross_entropy "
    "conv1d conv2d conv3d avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d pad "
    "cat concat stack hstack vstack roll flip repeat tile masked_fill tril triu gather index_select take_along_dim "
    "reshape reshape_as flatten contiguous clone to type_as float half bfloat16 double "
    "eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ logical_and logical_or logical_not __and__ __or__ "
    "__invert__ zeros_like ones_like full_like"
)
_PLACES = (torch, torch.Tensor, F)


def _functions(names: str, places: Iterable[Any]) -> frozenset[Callable[..., Any]]:
    found = (getattr(place, name, None) for name in names.split() for place in places)
    return frozenset(function for function in found if callable(function) and not isinstance(function, type))


def _attributes(names: str) -> list[Callable[..., Any]]:
    return [getattr(torch.Tensor, name).__get__ for name in names.split()]


# Functions that call no operator.
QUESTIONS = frozenset([*_functions(_QUESTIONS, _PLACES), *_attributes(_ATTRIBUTES)])
# Whether a function is pure (true) or gives a view (false).
KNOWN = dict.fromkeys([*_functions(_VIEWS, _PLACES), *_attributes(_VIEWED_ATTRIBUTES)], False)
KNOWN |= dict.fromkeys(_functions(_PURE, _PLACES), True)


def _is_of(dtype: torch.dtype) -> Callable[[tuple, dict], bool]:
    return lambda args, kwargs: not kwargs and args[0].dtype is dtype


# Functions that return their argument itself in these cases, so that no operator runs.
UNCHANGED: dict[Callable[..., Any], Callable[[tuple, dict], bool]] = {
    torch.Tensor.float: _is_of(torch.float32),
    torch.Tensor.half: _is_of(torch.float16),
    torch.Tensor.bfloat16: _is_of(torch.bfloat16),
    torch.Tensor.double: _is_of(torch.float64),
    torch.Tensor.type_as: lambda args, kwargs: len(args) == 2 and args[0].dtype is getattr(args[1], "dtype", None),
    torch.Tensor.to: lambda args, kwargs: len(args) == 2 and args[1] is args[0].dtype and not kwargs,
    torch.Tensor.contiguous: lambda args, kwargs: not kwargs and args[0].is_contiguous(),
    F.dropout: lambda args, kwargs: kwargs.get("p") == 0.0 or kwargs.get("training") is False,  # it names them itself
}
_PLACE_TYPES = (int, slice, type(None), type(...))


def is_plain_view(args: tuple) -> bool:
    """Whether the arguments of a function that gives a view say that it computes nothing (no index is a tensor)."""
    for argument in args[1:]:
        kind = type(argument)
        if kind in _PLACE_TYPES or kind is torch.Size or kind is torch.dtype:
            continue
        if kind is tuple:
            for place in argument:
                if type(place) not in _PLACE_TYPES:
                    return False
        elif isinstance(argument, torch.Tensor | list):
            return False
    return True
