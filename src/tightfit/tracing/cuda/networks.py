"""Recurrent networks on cards: cuDNN's operator in place of PyTorch's own steps, its results and its memory.

Source: `_cudnn_impl`, `_cudnn_rnn` and `_cudnn_rnn_backward` in ATen/native/cudnn/RNN.cpp. What cuDNN keeps for
backward, and what it needs meanwhile, is not published: a number is counted for each gate and state, as the null card
does.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tightfit.tracing.cuda.allocator import RESULT
from tightfit.tracing.recurrent import CUDNN_GATES, CUDNN_GRU, CUDNN_LSTM, CUDNN_RELU, CUDNN_TANH
from tightfit.tracing.shapes import TensorShape

aten = torch.ops.aten
Shapes = Sequence[TensorShape]
_DROPS = torch.empty(0, dtype=torch.uint8)  # stands for cuDNN's state of dropout, which a process makes once
FORWARD, BACKWARD = "aten._cudnn_rnn.default", "aten._cudnn_rnn_backward.default"


def composites() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """PyTorch's functions of recurrent networks with cuDNN's branch: names, dispatch key and kernels."""
    for name, mode in (("rnn_relu", CUDNN_RELU), ("rnn_tanh", CUDNN_TANH), ("lstm", CUDNN_LSTM), ("gru", CUDNN_GRU)):
        yield f"aten::{name}.input", "AutogradCPU", _of_input(mode)
        yield f"aten::{name}.data", "AutogradCPU", _of_packed(mode)


def _of_input(mode: int) -> Callable[..., Any]:
    def network(
        input: Tensor, hx: Any, params: list[Tensor], has_biases: bool, num_layers: int, dropout: float, train: bool,
        bidirectional: bool, batch_first: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        return _cudnn(mode, input, hx, params, has_biases, num_layers, batch_first, dropout, train, bidirectional, [])

    return network


def _of_packed(mode: int) -> Callable[..., Any]:
    def network(
        data: Tensor, batch_sizes: Tensor, hx: Any, params: list[Tensor], has_biases: bool, num_layers: int,
        dropout: float, train: bool, bidirectional: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        rows = batch_sizes.tolist()
        return _cudnn(mode, data, hx, params, has_biases, num_layers, False, dropout, train, bidirectional, rows)

    return network


def _cudnn(
    mode: int, input: Tensor, hx: Any, params: list[Tensor], has_biases: bool, layers: int, batch_first: bool,
    dropout: float, train: bool, bidirectional: bool, rows: list[int],
) -> tuple[Tensor, ...]:  # fmt: skip
    hidden, cells = (hx[0], hx[1]) if mode == CUDNN_LSTM else (hx, None)
    # `try_get_weight_buf`: on a card the weights lie in one memory, at which an empty tensor is set to look
    whole = torch.empty(0, dtype=params[0].dtype)
    if torch.is_autocast_enabled("cpu"):  # of the card that is simulated
        # `_cudnn_rnn_cast_reflatten`: to fp16 whatever autocast's dtype is, and no cast of a weight is remembered
        whole, params = _in_one_memory(params)
        cells = None if cells is None else cells.to(torch.float16)
        hidden, input = hidden.to(torch.float16), input.to(torch.float16)
    width = hidden.shape[2] if cells is None else cells.shape[2]
    projected = 0 if width == hidden.shape[2] else hidden.shape[2]
    each = (4 if has_biases else 2) + bool(projected)
    state = _DROPS if dropout and train else None
    how = (mode, width, projected, layers, batch_first, dropout, train, bidirectional, rows, state)
    found = aten._cudnn_rnn.default(input, params, each, whole, hidden, cells, *how)
    return found[:3] if mode == CUDNN_LSTM else found[:2]


def _in_one_memory(params: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A memory for all weights in fp16 and their copies in it, each a column and a tensor of its own, as
    `copy_weights_to_flat_buf_views` makes them.
    """
    flat = torch.zeros(sum(each.numel() for each in params), dtype=torch.float16)
    copies, begun = [], 0
    for each in params:
        torch.empty(0, dtype=torch.float16)  # is set to look at its part
        copies.append(flat[begun : begun + each.numel()].view(-1, 1).data)
        begun += each.numel()
    for copy, each in zip(copies, params, strict=True):
        copy.copy_(each.view(-1, 1))
    return flat, copies


def _area(out: TensorShape, mode: int, hidden: int, projected: int) -> int:
    return out.numel // (projected or hidden) * hidden * CUDNN_GATES[mode] * out.dtype.itemsize


def _forward(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    mode, hidden, projected, _, batch_first = _settings(arguments)
    copied = [inputs[0].bytes] if batch_first else []
    states = [RESULT] * (3 if mode == CUDNN_LSTM else 2)  # what comes out is one, and others have no cells
    return [*copied, *states, _area(outputs[0], mode, hidden, projected), RESULT]


def _backward(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    mode, hidden, projected, _, batch_first = _settings(arguments)
    source = inputs[0]
    copied = [source.bytes] if batch_first else []
    # Gradients of the last states: zeros, where nobody reads these
    states = [outputs[1].bytes] * (2 if mode == CUDNN_LSTM else 1)
    out = next(x for x in inputs[1:] if len(x.shape) == len(source.shape) and x.shape[:-1] == source.shape[:-1])
    upstream = [x for x in inputs[2:] if x.shape == out.shape]
    laid = [] if len(upstream) < 2 or _lies_by_step(upstream[1], batch_first) else [out.bytes]
    area = _area(out, mode, hidden, projected)
    first = [*states, *copied, *laid, *[RESULT] * (len(states) + 1), area, *(-size for size in (area, *laid, *copied))]
    weights = [RESULT] * (len(outputs) - 1 - len(states))
    return [*first, *copied, *weights, area]


def _lies_by_step(shape: TensorShape, batch_first: bool) -> bool:
    order = (1, 0, 2) if batch_first and len(shape.shape) == 3 else range(len(shape.shape))
    strides, expected = [shape.stride[dim] for dim in order], 1
    for size, stride in zip([shape.shape[dim] for dim in order][::-1], strides[::-1], strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return math.prod(shape.shape) > 0


def _settings(arguments: tuple) -> tuple[int, int, int, int, bool]:
    """Mode, width, projected width, layers and whether the batch comes first: the first numbers behind the weights."""
    numbers = [each for each in arguments if isinstance(each, int)]  # the first says how many weights a layer has
    mode, hidden, projected, layers, batch_first = numbers[1:6]
    return mode, hidden, projected, layers, bool(batch_first)


FORMULAS: dict[str, Callable[[Shapes, Shapes, tuple], list[int]]] = {FORWARD: _forward, BACKWARD: _backward}
