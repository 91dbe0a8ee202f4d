"""AdamW at 7 bytes a parameter: 24-bit master weights and 8-bit moments (FlashOptim, arXiv:2602.23349)."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tightfit.errors import InputError
from tightfit.optim import companding
from tightfit.optim.adamw_step import MOMENTS
from tightfit.optim.base import FrugalOptimizer
from tightfit.optim.companding import GROUP
from tightfit.runtime.internals import is_dense
from tightfit.runtime.simulation import repeated, simulation

ERROR = "error"
SCALES = tuple(f"{moment}_scale" for moment in MOMENTS)
# Numbers that are updated at a time, each with some 24 bytes of scratch memory: what a CPU's cache holds, and enough
# for a card that a kernel takes longer than its launch.
CHUNK, CHUNK_ON_CARDS = 1 << 17, 1 << 21


class FlashAdamW(FrugalOptimizer):
    """AdamW in fp32 arithmetic with moments in 8 bits, and for bf16 weights 8 more bits of each: 24-bit masters.

    A parameter takes 7.125 bytes: 2 of its bf16 weight, 2 of its gradient, 1 of the master's further bits, 2 of
    moments, and 8 bytes of scales for each 64 parameters. Updates smaller than a master's last bit count on average.
    fp32 weights keep 8-bit moments only. The parameters are updated in chunks, so that scratch memory is small.

    Args:
        params: Parameters or groups, as for `torch.optim.AdamW`, like `lr`, `betas`, `eps` and `weight_decay`.

    Raises:
        InputError: A setting is out of range, a parameter is neither bf16 nor fp32 or has gaps in memory, or, in a
            step, a gradient is sparse.

    Example:
        >>> import torch
        >>> from tightfit.optim import FlashAdamW
        >>> model = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
        >>> optimizer = FlashAdamW(model.parameters(), lr=1e-2)
        >>> before = model.weight.clone()
        >>> model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> torch.equal(model.weight, before)
        False
    """

    def adopt(self, parameters: Sequence[Tensor], choice: Any = None) -> None:
        check_parameters("FlashAdamW", parameters)

    def state_shape(self, parameter: Tensor, key: str) -> tuple[int, ...]:
        return scales_shape(parameter) if key in SCALES else super().state_shape(parameter, key)

    def update(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    self._step_one(parameter, parameter.grad, group)

    def _step_one(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if gradient.layout != torch.strided:
            raise InputError("FlashAdamW: a gradient is sparse: make the embedding with sparse=False")
        state = self.state[parameter]
        if MOMENTS[0] not in state:
            state.update(self._new_state(parameter))
        state["step"] += 1
        factors = Factors.of(group, int(state["step"]))
        weight = in_memory_order(parameter)
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        tensors = {key: in_memory_order(value) for key, value in state.items() if key != "step"}
        for piece, times in pieces(parameter):
            with repeated(times):
                chunk_step(weight, in_memory_order(gradient), tensors, piece, factors)

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        new = {"step": torch.tensor(0.0, dtype=torch.float32)}
        kinds = {MOMENTS[0]: torch.int8, MOMENTS[1]: torch.uint8}
        if parameter.dtype == torch.bfloat16:
            kinds[ERROR] = torch.int8
        for key, dtype in kinds.items():
            new[key] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
        for key in SCALES:
            new[key] = parameter.new_zeros(scales_shape(parameter), dtype=torch.float32)
        return new


def check_parameters(name: str, parameters: Sequence[Tensor]) -> None:
    """Raise `InputError` for a parameter that the optimizer of this name cannot hold in few bits."""
    for parameter in parameters:
        if parameter.dtype not in (torch.bfloat16, torch.float32):
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise InputError(f"{name}: a parameter is {dtype}: use bf16 or fp32")
        if not is_dense(parameter):
            raise InputError(f"{name}: a parameter has gaps in memory: give it a contiguous copy")


def scales_shape(parameter: Tensor) -> tuple[int]:
    """The shape of a state that has one number for each `GROUP` of a parameter's."""
    return (-(-parameter.numel() // GROUP),)


class Factors(NamedTuple):
    """The numbers of one step of AdamW."""

    beta1: float
    beta2: float
    eps: float
    decay: float  # of the weights
    size: float  # of the step
    correction: float  # the root of the second moment's bias correction
    threshold: int  # of the masters' rounding

    @classmethod
    def of(cls, group: dict[str, Any], step: int) -> "Factors":
        (beta1, beta2), rate = group["betas"], float(group["lr"])
        return cls(
            beta1,
            beta2,
            group["eps"],
            1 - rate * group["weight_decay"],
            rate / (1 - beta1**step),
            (1 - beta2**step) ** 0.5,
            companding.threshold_of(step),
        )


class Piece(NamedTuple):
    """A range of a parameter's numbers in the order of memory, whole groups or the last one."""

    first: int
    last: int

    def of(self, tensor: Tensor) -> Tensor:
        return tensor[self.first : self.last]

    def rows(self, tensor: Tensor) -> Tensor:
        """The range of a tensor, a group in each row."""
        return self.of(tensor).view(-1, min(GROUP, self.last - self.first))

    def scales(self, tensor: Tensor) -> Tensor:
        return tensor[self.first // GROUP : -(-self.last // GROUP)].view(-1, 1)


def pieces(parameter: Tensor) -> Iterator[tuple[Piece, int]]:
    """The pieces of a parameter, and how many of them each stands for: in a dry run one for all of its length."""
    count, chunk = parameter.numel(), CHUNK if parameter.device.type == "cpu" else CHUNK_ON_CARDS
    whole = count // chunk
    if simulation.is_dry and whole:
        yield Piece(0, chunk), whole
    else:
        yield from ((Piece(i * chunk, (i + 1) * chunk), 1) for i in range(whole))
    even = count // GROUP * GROUP
    if whole * chunk < even:
        yield Piece(whole * chunk, even), 1
    if even < count:
        yield Piece(even, count), 1


def chunk_step(weight: Tensor, gradient: Tensor, state: dict[str, Tensor], piece: Piece, factors: Factors) -> None:
    """Update one piece of a weight and of its states, all flat.

    Nothing is written before all is computed, so a step that runs out of memory here can be finished.
    """
    grad = piece.rows(gradient).float()
    first = companding.signed_decoded(piece.rows(state[MOMENTS[0]]), piece.scales(state[SCALES[0]]))
    second = companding.squares_decoded(piece.rows(state[MOMENTS[1]]), piece.scales(state[SCALES[1]]))
    first.lerp_(grad, 1 - factors.beta1)
    second.mul_(factors.beta2).addcmul_(grad, grad, value=1 - factors.beta2)
    del grad
    roots = second.sqrt_()
    old = piece.rows(weight)
    is_narrow = ERROR in state
    new = companding.joined(old, piece.rows(state[ERROR])) if is_narrow else old.clone()
    divisor = roots.div(factors.correction).add_(factors.eps)
    new.mul_(factors.decay).addcdiv_(first, divisor, value=-factors.size)
    del divisor
    moments = companding.signed_encoded(first), companding.roots_encoded(roots)
    del first, second, roots
    if is_narrow:
        write_split(piece, new, weight, state[ERROR], factors.threshold)
    else:
        old.copy_(new)
    for key, scale_key, (codes, scale) in zip(MOMENTS, SCALES, moments, strict=True):
        piece.rows(state[key]).copy_(codes)
        piece.scales(state[scale_key]).copy_(scale)


def write_split(piece: Piece, number: Tensor, weight: Tensor, error: Tensor, threshold: int) -> None:
    """Write new numbers of a piece into a bf16 weight and its further bits, both flat. Overwrites the numbers."""
    upper, lower = companding.split(number, threshold)
    piece.rows(weight).view(torch.int16).copy_(upper)
    piece.rows(error).copy_(lower)


def in_memory_order(tensor: Tensor) -> Tensor:
    """A flat view of a tensor without gaps, in the order of its memory."""
    tensor = tensor.detach()
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
