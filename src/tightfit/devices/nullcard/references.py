"""References for operators that only CUDA has, in PyTorch's CPU operators: attention, fused norms, wider products.

Each reference gets the CUDA operator's results (CPU tensors over the same memory, not yet filled) and its arguments by
name, and returns what the results are to hold. Sums run in fp32, as in the kernels.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten
Reference = Callable[..., Any]


def mixed(seed: int, offset: int) -> int:
    """One seed for the CPU's generator out of a seed and a position of CUDA's."""
    return (seed * 0x9E3779B97F4A7C15 + offset * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % (1 << 63)


def _drop_mask(shape: tuple[int, ...], dropout: float, seed: int) -> torch.Tensor:
    """Which of attention's weights are kept, as numbers 0 or 1/(1-p): the same for forward and backward of one seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator).ge(dropout).float() / (1 - dropout)


def _weights(
    q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, diagonal: int | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmaxed scores (B, H, Tq, Tk) and the logarithms of their sums (B, H, Tq), of fp32 q and k with equal heads.

    Query i sees the keys up to i + `diagonal`, or all.
    """
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.float()
    if diagonal is not None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(diagonal)
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0), scores.logsumexp(-1)


def _repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.float().repeat_interleave(heads // x.shape[1], 1) if x.shape[1] != heads else x.float()


def _attend(
    q: Any, k: Any, v: Any, bias: Any, diagonal: int | None, scale: float | None, dropout: float, seed: int | None
) -> Any:
    """Attention (B, H, Tq, D) in q's dtype, and the logarithms of the sums."""
    weights, sums = _weights(q.float(), _repeated(k, q.shape[1]), bias, diagonal, scale)
    if dropout:
        assert seed is not None
        weights = weights * _drop_mask(tuple(weights.shape), dropout, seed)
    return (weights @ _repeated(v, q.shape[1])).to(q.dtype), sums


def _attend_backward(
    grad: Any, q: Any, k: Any, v: Any, bias: Any, diagonal: int | None, scale: Any, dropout: float, seed: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v and of the scores (FlashAttention, arXiv:2205.14135, section B.2)."""
    heads, factor = q.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    keys, values, query, grad = _repeated(k, heads), _repeated(v, heads), q.float(), grad.float()
    weights, _ = _weights(query, keys, bias, diagonal, scale)
    kept = _drop_mask(tuple(weights.shape), dropout, seed or 0) if dropout else None
    grad_values = (weights * kept if kept is not None else weights).transpose(-1, -2) @ grad
    grad_weights = grad @ values.transpose(-1, -2)
    if kept is not None:
        grad_weights = grad_weights * kept
    scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True))
    grad_query, grad_keys = scores @ keys * factor, scores.transpose(-1, -2) @ query * factor

    def summed(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        groups = heads // like.shape[1]
        return x if groups == 1 else x.view(x.shape[0], like.shape[1], groups, *x.shape[2:]).sum(2)

    return grad_query.to(q.dtype), summed(grad_keys, k).to(k.dtype), summed(grad_values, v).to(v.dtype), scores


def _seed_of(state: Any, offset: Any = None) -> int:
    """The seed that a forward left for its backward: a pair of numbers, or two tensors."""
    numbers = [
        int(n) for t in (state, offset) if isinstance(t, torch.Tensor) and t.numel() for n in t.flatten().tolist()
    ]
    return mixed(*[*numbers, 0, 0][:2])


def _fill_sums(result: Any, sums: torch.Tensor) -> Any:
    """The logarithms of the sums in a result that may be longer (padded), or empty where nobody needs them."""
    if not isinstance(result, torch.Tensor) or not result.numel():
        return result
    flat = sums.unsqueeze(-1) if result.dim() == 4 else sums
    if result.shape == flat.shape:
        return flat
    filled = torch.zeros_like(result)
    filled[..., : sums.shape[-1]] = sums
    return filled


def _drawn(results: Any, *places: int) -> int:
    """A seed for a forward with dropout, written where its backward finds it.

    CUDA's kernel leaves the generator's seed and position there. These numbers are drawn from the seed of this call.
    """
    for place in places:
        state = results[place]
        if isinstance(state, torch.Tensor) and state.numel():
            state.copy_(torch.randint(1 << 30, state.shape).to(state.dtype))
    return _seed_of(*(results[place] for place in places))


def _diagonal(query: Any, key: Any, is_causal: bool, from_end: bool) -> int | None:
    return (key.shape[-2] - query.shape[-2] if from_end else 0) if is_causal else None


def _forward(seeds: tuple[int, int], from_end: bool = False) -> Callable[..., Any]:
    """Of one of CUDA's attention operators.

    Args:
        seeds: the places of its seed and position among its results.
        from_end: the last query of causal attention sees the last key, as in the flash kernel
            (`torch.nn.attention.bias.CausalBias`); in the others the first one sees the first.
    """

    def reference(
        results: Any,
        query: Any,
        key: Any,
        value: Any,
        dropout_p: float,
        is_causal: bool,
        scale: Any,
        attn_bias: Any = None,
        **_: Any,
    ) -> Any:
        seed = _drawn(results, *seeds) if dropout_p else None
        diagonal = _diagonal(query, key, is_causal, from_end)
        out, sums = _attend(query, key, value, attn_bias, diagonal, scale, dropout_p, seed)
        return (out, _fill_sums(results[1], sums), *results[2:])

    return reference


def _backward(from_end: bool = False) -> Callable[..., Any]:
    """Of the backward of one of these operators."""

    def reference(
        results: Any,
        query: Any,
        key: Any,
        value: Any,
        philox_seed: Any,
        philox_offset: Any,
        dropout_p: float,
        is_causal: bool,
        scale: Any,
        attn_bias: Any = None,
        grad_out: Any = None,
        grad_out_: Any = None,
        **_: Any,
    ) -> Any:
        grad = grad_out if grad_out_ is None else grad_out_
        seed = _seed_of(philox_seed, philox_offset) if dropout_p else None
        diagonal = _diagonal(query, key, is_causal, from_end)
        *grads, scores = _attend_backward(grad, query, key, value, attn_bias, diagonal, scale, dropout_p, seed)
        if len(results) == 3:
            return grads
        of_bias = results[3]
        if isinstance(of_bias, torch.Tensor) and of_bias.numel():
            of_bias = scores.sum_to_size(of_bias.shape).to(of_bias.dtype)
        return (*grads, of_bias)

    return reference


def _rms_norm(results: Any, input: Any, normalized_shape: Any, weight: Any, eps: Any, **_: Any) -> Any:
    over = tuple(range(input.dim() - len(normalized_shape), input.dim()))
    wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    inverse = (wide.square().mean(over, keepdim=True) + eps).rsqrt()
    out = wide * inverse
    return (out if weight is None else out * weight.to(wide.dtype)).to(results[0].dtype), inverse


def _rms_norm_backward(
    results: Any, grad_out: Any, input: Any, normalized_shape: Any, rstd: Any, weight: Any, output_mask: Any, **_: Any
) -> Any:
    """Zhang and Sennrich, arXiv:1910.07467, section 4.2."""
    before = input.dim() - len(normalized_shape)
    wide, grad, inverse = input.float(), grad_out.float(), rstd.float()
    scaled = grad if weight is None else grad * weight.float()
    mean = (scaled * wide).mean(tuple(range(before, input.dim())), keepdim=True)
    of_input = (inverse * (scaled - wide * inverse.square() * mean)).to(input.dtype) if output_mask[0] else None
    if weight is None or not output_mask[1]:
        return of_input, None
    return of_input, (grad * wide * inverse).sum(tuple(range(before))).to(weight.dtype)


def _masked_scale(results: Any, self: Any, mask: Any, scale: float, **_: Any) -> Any:
    return self * mask * scale


def _log_sigmoid(results: Any, self: Any, **_: Any) -> Any:
    return aten.log_sigmoid_forward(self)[0], results[1]  # the CPU keeps what its backward computes; CUDA nothing


def _log_sigmoid_backward(results: Any, grad_output: Any, self: Any, **_: Any) -> Any:
    return aten.log_sigmoid_backward(grad_output, self, aten.log_sigmoid_forward(self)[1])


def _wide_product(product: Callable[..., Any], *factors: str) -> Callable[..., Any]:
    """A product whose result has a wider dtype than its factors."""

    def reference(
        results: Any, out_dtype: torch.dtype, beta: Any = 1, alpha: Any = 1, out: Any = None, **named: Any
    ) -> Any:
        found = product(*(named[factor].to(out_dtype) for factor in factors)) * alpha
        return found if beta == 0 or len(named) == len(factors) else found + beta * named["self"].to(out_dtype)

    return reference


def _written(operator: str) -> Callable[..., Any]:
    """An operator of bitsandbytes that writes into `out`, which has no kernel on the CPU, by the one that returns."""

    def reference(results: Any, out: Any, **named: Any) -> Any:
        out.copy_(getattr(torch.ops.bitsandbytes, operator).default(**named))
        return results

    return reference


_WIDE = {
    "mm": _wide_product(torch.mm, "self", "mat2"),
    "bmm": _wide_product(torch.bmm, "self", "mat2"),
    "addmm": _wide_product(torch.mm, "mat1", "mat2"),
    "baddbmm": _wide_product(torch.bmm, "batch1", "batch2"),
}


def _grouped_mm(results: Any, self: Any, mat2: Any, offs: Any, **_: Any) -> Any:
    """Of rows that belong to groups: group g has the rows from offs[g-1] to offs[g]."""
    if offs is None:
        return torch.bmm(self.float(), mat2.float()).to(results.dtype)
    filled = torch.zeros(results.shape, dtype=torch.float32)
    begin = 0
    for group, end in enumerate(offs.tolist()):
        rows = slice(begin, end)
        if self.dim() == 2 and mat2.dim() == 3:
            filled[rows] = self[rows].float() @ mat2[group].float()
        elif self.dim() == 3:
            filled[:, rows] = self[group].float() @ mat2[:, rows].float()
        else:
            filled[group] = self[:, rows].float() @ mat2[rows].float()
        begin = end
    return filled.to(results.dtype)


def _convolution(
    results: Any,
    self: Any,
    weight: Any,
    padding: Any,
    stride: Any,
    dilation: Any,
    groups: int,
    output_padding: Any = None,
    **_: Any,
) -> Any:
    transposed = output_padding is not None
    outer = output_padding if transposed else [0] * len(padding)
    return aten.convolution(self, weight, None, stride, padding, dilation, transposed, outer, groups)


def _depthwise(
    results: Any, self: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, **_: Any
) -> Any:
    return aten.convolution(self, weight, bias, stride, padding, dilation, False, [0] * len(padding), self.shape[1])


def _batch_norm(results: Any, training: bool, epsilon: float, exponential_average_factor: float, **named: Any) -> Any:
    tensors = (named[name] for name in ("input", "weight", "bias", "running_mean", "running_var"))
    out, *saved = aten.native_batch_norm(*tensors, training, exponential_average_factor, epsilon)
    return (out, *(saved if training else results[1:3]), *results[3:])


def _batch_norm_backward(results: Any, epsilon: float, **named: Any) -> Any:
    names = ("grad_output", "input", "weight", "running_mean", "running_var", "save_mean", "save_var")
    return aten.native_batch_norm_backward(*(named[name] for name in names), True, epsilon, [True, True, True])


def _recurrent(
    input: Any, weight: Any, weight_stride0: int, hx: Any, cx: Any, mode: int, hidden_size: int, proj_size: int,
    num_layers: int, batch_first: bool, dropout: float, train: bool, bidirectional: bool, batch_sizes: Any, seed: int,
    **_: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Output and last states of a recurrent network. The modes are `cudnnRNNMode_t`'s."""
    networks: Any = (torch.rnn_relu, torch.rnn_tanh, torch.lstm, torch.gru)
    network, states = networks[mode], hx if cx is None else (hx, cx)
    has_biases = weight_stride0 in (4, 5)  # the last is a projection where there is one
    rows = hidden_size * (1, 1, 4, 3)[mode]
    # Under autocast the weights come as columns of one memory.
    shapes = [(rows, -1), (rows, -1), *[(-1,)] * (2 * has_biases), *[(proj_size, -1)] * bool(proj_size)]
    weight = [each.reshape(shapes[at % weight_stride0]) for at, each in enumerate(weight)]
    how = (has_biases, num_layers, dropout if train else 0.0, train, bidirectional)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if batch_sizes:
            return network(input, torch.tensor(batch_sizes), states, weight, *how)
        return network(input, states, weight, *how, batch_first)


def _wide(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_wide(each) for each in value]
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _rnn(results: Any, dropout_state: Any, **named: Any) -> Any:
    """The state of dropout moves with each call, as cuDNN's does; the reserved memory tells backward which it was."""
    cells, reserve, buffer = results[2:]
    seed = 0
    if dropout_state is not None and dropout_state.numel() >= 8:
        counter = dropout_state[:8].view(torch.int64)
        seed = abs(int(counter))
        counter.copy_(torch.tensor(mixed(seed, 1)))
    if reserve.numel() >= 8:
        reserve[:8].view(torch.int64).fill_(seed)
    found = _recurrent(seed=seed, **{name: _wide(value) for name, value in named.items()})
    return [*found, *([cells] if len(found) == 2 else []), reserve, buffer]


def _rnn_backward(
    results: Any, input: Any, weight: Any, hx: Any, cx: Any, grad_output: Any, grad_hy: Any, grad_cy: Any, reserve: Any,
    output_mask: Any, **named: Any,
) -> Any:  # fmt: skip
    seed = int(reserve[:8].view(torch.int64)) if reserve.numel() >= 8 else 0
    with torch.enable_grad():
        leaves = [_wide(each).detach().requires_grad_() for each in (input, hx, *([] if cx is None else [cx]), *weight)]
        states = leaves[1 : 2 if cx is None else 3]
        weights = leaves[1 + len(states) :]
        last = states[1] if len(states) == 2 else None
        found = _recurrent(leaves[0], weights, hx=states[0], cx=last, seed=seed, **named)
        given = [
            (one, _wide(g)) for one, g in zip(found, (grad_output, grad_hy, grad_cy), strict=False) if g is not None
        ]
        gradients = torch.autograd.grad([o for o, _ in given], leaves, [g for _, g in given], allow_unused=True)
    gradients = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, gradients, strict=True)]
    of_cells = gradients[2] if cx is not None else results[2]
    return [gradients[0], gradients[1], of_cells, gradients[1 + len(states) :] if output_mask[3] else results[3]]


REFERENCES: Mapping[str, Reference] = {
    "aten::_cudnn_rnn": _rnn,
    "aten::_cudnn_rnn_backward": _rnn_backward,
    "aten::_cudnn_rnn_flatten_weight": lambda results, **_: results,  # its copies are the runtime's
    "aten::_cudnn_init_dropout_state": lambda results, **_: results,
    "aten::_scaled_dot_product_flash_attention": _forward(seeds=(6, 7), from_end=True),
    "aten::_scaled_dot_product_flash_attention_backward": _backward(from_end=True),
    "aten::_scaled_dot_product_efficient_attention": _forward(seeds=(2, 3)),
    "aten::_scaled_dot_product_efficient_attention_backward": _backward(),
    "aten::_scaled_dot_product_cudnn_attention": _forward(seeds=(6, 7)),
    "aten::_scaled_dot_product_cudnn_attention_backward": _backward(),
    "aten::_fused_rms_norm": _rms_norm,
    "aten::_fused_rms_norm_backward": _rms_norm_backward,
    "aten::_masked_scale": _masked_scale,
    **{
        f"bitsandbytes::{name}.out": _written(name)
        for name in ("dequantize_4bit", "dequantize_blockwise", "gemv_4bit", "int8_linear_matmul")
    },
    "aten::log_sigmoid_forward": _log_sigmoid,
    "aten::log_sigmoid_backward": _log_sigmoid_backward,
    **{f"aten::{name}.dtype{out}": product for name, product in _WIDE.items() for out in ("", "_out")},
    "aten::_grouped_mm": _grouped_mm,
    "aten::cudnn_convolution": _convolution,
    "aten::cudnn_convolution_transpose": _convolution,
    "aten::_conv_depthwise2d": _depthwise,
    "aten::conv_depthwise3d": _depthwise,
    "aten::cudnn_batch_norm": _batch_norm,
    "aten::cudnn_batch_norm_backward": _batch_norm_backward,
}


def by_name(operator: Any, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of its operator's schema, left-out ones with their defaults."""
    arguments = operator._schema.arguments
    named = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    named.update((argument.name, value) for argument, value in zip(arguments, args, strict=False))
    return {**named, **kwargs}
