"""Statistics of the activations of a model on real text: the energy of each input, how much each layer changes what it
is given.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.models.compress.pruning.slicing import EXPERTS_IN, EXPERTS_OUT
from tightfit.models.mode import evaluating

Rows = Tensor | Sequence[Tensor]  # of token ids: (rows, tokens), or rows of lengths of their own


@dataclass
class Statistics:
    """Mutable: sums over all tokens so far, in fp32.

    `inputs` has for each linear layer and norm, by the name of its weight, the sum of the squares of each channel of
    its input; for experts a row each. `tokens` counts those, `seen` those that each expert got. `changes` has for each
    layer the sum of 1 - cosine between what it is given and what it returns.
    """

    inputs: dict[str, Tensor] = field(default_factory=dict)
    changes: dict[int, Tensor] = field(default_factory=dict)
    tokens: int = 0

    def add(self, name: str, squares: Tensor) -> None:
        self.inputs[name] = self.inputs[name] + squares if name in self.inputs else squares

    def norm(self, name: str) -> Tensor:
        """The L2 norm of each channel of an input over all tokens."""
        return self.inputs[name].sqrt()


@torch.no_grad()
def statistics_of(model: nn.Module, rows: Rows) -> Statistics:
    """The statistics of a text. The model is as it was afterwards."""
    found = Statistics()
    with evaluating(model), _watched(model, found):
        for row in rows:
            found.tokens += row.numel()
            model(input_ids=row[None])
    return found


@contextmanager
def _watched(model: nn.Module, found: Statistics) -> Iterator[None]:
    """Inside, forwards of the model add to the statistics."""
    handles: list[Any] = []
    try:
        for path, module in model.named_modules():
            if hasattr(module, "gate_up_proj") and hasattr(module, "down_proj") and hasattr(module, "act_fn"):
                if isinstance(module.gate_up_proj, nn.Parameter):
                    handles.append(module.register_forward_pre_hook(_of_experts(path, found)))
            elif isinstance(getattr(module, "weight", None), nn.Parameter) and not isinstance(module, nn.Embedding):
                handles.append(module.register_forward_pre_hook(_of_input(f"{path}.weight", found)))
        for number, layer in enumerate(_layers(model)):
            handles.append(layer.register_forward_hook(_of_layer(number, found)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of a model that can be sliced; none of any other."""
    yield from getattr(getattr(model, "model", None), "layers", ())


def _of_input(name: str, found: Statistics) -> Callable[..., None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], Tensor) and arguments[0].is_floating_point():
            found.add(name, _squares(arguments[0]))

    return hook


def _of_experts(path: str, found: Statistics) -> Callable[..., None]:
    """Experts compute in one piece, so what is inside of each is computed here again."""
    owner = path.removesuffix("mlp.experts")

    def hook(module: Any, arguments: tuple[Any, ...]) -> None:
        tokens, chosen, weights = arguments[:3]
        read, written = [], []
        for expert, (gate_up, down) in enumerate(zip(module.gate_up_proj, module.down_proj, strict=True)):
            token, place = torch.where(chosen == expert)
            gate, up = F.linear(tokens[token], gate_up).chunk(2, dim=-1)
            # The router's weight scales what the expert adds.
            inner = module.act_fn(gate) * up * weights[token, place, None].to(up.dtype)
            read.append(_squares(tokens[token]) if len(token) else tokens.new_zeros(gate_up.shape[1]).float())
            written.append(_squares(inner) if len(token) else tokens.new_zeros(down.shape[1]).float())
        found.add(owner + EXPERTS_IN, torch.stack(read))
        found.add(owner + EXPERTS_OUT, torch.stack(written))

    return hook


def _of_layer(number: int, found: Statistics) -> Callable[..., None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        given, returned = arguments[0], output if isinstance(output, Tensor) else output[0]
        change = (1 - F.cosine_similarity(given.float(), returned.float(), dim=-1)).sum()
        found.changes[number] = found.changes.get(number, torch.zeros(())) + change

    return hook


def _squares(x: Tensor) -> Tensor:
    return x.detach().float().flatten(0, -2).square().sum(0)
