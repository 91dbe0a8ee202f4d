"""A model that lies on a graphics card is run dry on the host: nothing of the card is used, or even read."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from tightfit.tracing.shapes import KNOWN_LIMIT, TensorShape


@contextmanager
def on_host(tensors: Iterable[Tensor], kind: str = "cuda") -> Iterator[None]:
    """Inside, tensors of a kind of device have memory on the host that nobody touches; afterwards their own again.

    Integers, truth values and what is small come with their content, so that masks and branches are answered truly.
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
