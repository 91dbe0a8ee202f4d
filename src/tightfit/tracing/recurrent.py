"""The memory of oneDNN's recurrent layer (LSTM) on a CPU beside its results: a workspace that it keeps for backward,
and scratch memory in forward and backward.

PyTorch's meta kernel says that the workspace is empty. oneDNN chooses it by shape and instruction set, so the layer is
run.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from tightfit.memory.allocator import cpu_rise
from tightfit.runtime.internals import no_modes

aten = torch.ops.aten
_LSTM, _GATES = 2, 4  # `ideep::rnn_kind`; the only kind for which PyTorch takes oneDNN
_PERIOD = 64  # each part is a multiple of 64 bytes for each step and row, rounded up to pages of 4096 bytes
_AT_ONCE = 1 << 30  # products of numbers in a layer that is run as it is


class Taken(NamedTuple):
    """Bytes of the workspace, and of scratch memory in forward and in backward."""

    workspace: int
    forward: int
    backward: int


def taken(x: Sequence[int], hidden: int, dtype: torch.dtype) -> Taken:
    """The memory of one direction of one layer.

    A longer or wider layer has the same parts, each larger by whole pages for each further 64 steps or rows. So four
    small layers say what a large one has.

    Args:
        x: steps, rows and width of the input.
        hidden: width of the state.
        dtype: of the input.
    """
    steps, rows, width = x
    if steps * rows * hidden * (width + hidden) * _GATES <= _AT_ONCE:
        return _measured(steps, rows, width, hidden, dtype)
    (first, more), (some, others) = _parts(steps), _parts(rows)
    one = _measured(first, some, width, hidden, dtype)
    longer = _measured(first + _PERIOD, some, width, hidden, dtype) if more else one
    wider = _measured(first, some + _PERIOD, width, hidden, dtype) if others else one
    both = _measured(first + _PERIOD, some + _PERIOD, width, hidden, dtype) if more and others else None
    return Taken(
        *(
            a + more * (b - a) + others * (c - a) + (more * others * (both[i] - b - c + a) if both else 0)
            for i, (a, b, c) in enumerate(zip(one, longer, wider, strict=True))
        )
    )


def _parts(size: int) -> tuple[int, int]:
    """A size of at most 64, and how many times 64 it is smaller."""
    more = max(-(-size // _PERIOD) - 1, 0)
    return size - more * _PERIOD, more


@lru_cache(1 << 10)
def _measured(steps: int, rows: int, width: int, hidden: int, dtype: torch.dtype) -> Taken:
    with no_modes(), torch.enable_grad():  # without gradients there is no workspace
        weights = [torch.zeros(_GATES * hidden, width, dtype=dtype), torch.zeros(_GATES * hidden, hidden, dtype=dtype)]
        weights += [torch.zeros(_GATES * hidden, dtype=dtype) for _ in range(2)]
        x, state, cell = torch.zeros(steps, rows, width, dtype=dtype), *torch.zeros(2, rows, hidden, dtype=dtype)
        results: list[Any] = []

        def forward() -> None:
            results[:] = aten.mkldnn_rnn_layer.default(
                x, *weights, state, cell, False, [], _LSTM, hidden, 1, True, False, True, True
            )

        def backward() -> None:
            output, last, end, workspace = results
            gradients[:] = aten.mkldnn_rnn_layer_backward.default(
                x, *weights, state, cell, output, last, end, output, last, end, False, _LSTM, hidden, 1, True, True,
                False, [], True, workspace,
            )  # fmt: skip

        gradients: list[Any] = []
        rises = cpu_rise(forward), cpu_rise(backward)
        kept = [sum(t.untyped_storage().nbytes() for t in made) for made in (results, gradients)]
        return Taken(results[3].untyped_storage().nbytes(), rises[0] - kept[0], rises[1] - kept[1])


# cuDNN's operator on cards (tracing/cuda/networks.py has its scratch memory)

CUDNN_RELU, CUDNN_TANH, CUDNN_LSTM, CUDNN_GRU = range(4)  # `cudnnRNNMode_t`
CUDNN_GATES = {CUDNN_RELU: 1, CUDNN_TANH: 1, CUDNN_LSTM: 4, CUDNN_GRU: 3}
CUDNN_STATES = {CUDNN_RELU: 1, CUDNN_TANH: 1, CUDNN_LSTM: 2, CUDNN_GRU: 1}


def cudnn_results(
    input: torch.Tensor, weight: Any, weight_stride0: int, weight_buf: Any, hx: torch.Tensor, cx: Any, mode: int,
    hidden_size: int, proj_size: int, num_layers: int, batch_first: bool, dropout: float, train: bool,
    bidirectional: bool, batch_sizes: Any, dropout_state: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The results of the operator: what comes out, both states, what is kept, and no copy of the weights."""
    ways = 2 if bidirectional else 1
    out = ways * (proj_size or hidden_size)
    if batch_sizes:
        output, steps, rows = input.new_empty(input.shape[0], out), len(batch_sizes), batch_sizes[0]
    else:
        steps, rows = (input.shape[1], input.shape[0]) if batch_first else input.shape[:2]
        output = input.new_empty(steps, rows, out)
        output = output.transpose(0, 1) if batch_first else output
    one = steps * rows * hidden_size * ways * input.dtype.itemsize
    kept = one * num_layers * (CUDNN_GATES[mode] + CUDNN_STATES[mode]) if train else 0
    cells = input.new_empty(0) if cx is None else torch.empty_like(cx, memory_format=torch.contiguous_format)
    state = torch.empty_like(hx, memory_format=torch.contiguous_format)
    return output, state, cells, input.new_empty(kept, dtype=torch.uint8), input.new_empty(0)


def cudnn_gradients(
    input: torch.Tensor, weight: Any, weight_stride0: int, weight_buf: Any, hx: torch.Tensor, cx: Any, output: Any,
    grad_output: Any, grad_hy: Any, grad_cy: Any, mode: int, hidden_size: int, proj_size: int, num_layers: int,
    batch_first: bool, *rest: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """The results of its backward. With the batch first, that of the input lies as its transposed copy did."""
    of_input = torch.empty_like(input, memory_format=torch.contiguous_format)
    if batch_first:
        of_input = input.new_empty(input.shape[1], input.shape[0], *input.shape[2:]).transpose(0, 1)
    states = [None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in (hx, cx)]
    return of_input, *states, [torch.empty_like(x) for x in weight]
