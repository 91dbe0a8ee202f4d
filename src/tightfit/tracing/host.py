"""Moves a model that is on a graphics card to tensors without memory on the host, for a dry run."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from tightfit.tracing.shapes import KNOWN_LIMIT, TensorShape


@contextmanager
def on_host(tensors: Iterable[Tensor], kind: str = "cuda") -> Iterator[None]:
    """A context in which tensors of a kind of device have no memory and are on the host. Afterwards they are restored.

    Integer, boolean and small tensors are copied with their content, so that masks and branches see true values.
    """
    away = {id(t): (t, t.data) for t in tensors if t.device.type == kind}
    for tensor, data in away.values():
        tensor.data = _stand_in(data)
    try:
        yield
    finally:
        for tensor, data in away.values():
            tensor.data = data


def _stand_in(data: Tensor) -> Tensor:
    if not data.is_floating_point() or data.numel() <= KNOWN_LIMIT:
        return data.to("cpu", copy=True)
    return TensorShape.of(data).unbacked()
