"""The batches that a plan must fit: the first real one, the longest one, and the longest one with padding.

Each is run dry as if exactly one label were ignored, the worst case.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from tightfit.errors import InputError
from tightfit.integrations.longest import longest_samples
from tightfit.levers.micro_batch import IGNORE_INDEX
from tightfit.levers.samples import is_table, mapped, per_sample, stretched
from tightfit.step import Batch


def repeated(batch: Batch, times: int) -> Batch:
    """A batch of `times` copies along the first dimension. Values without a batch dimension do not change."""
    return batch if times == 1 else per_sample(batch, lambda value: torch.cat([value] * times))


def all_labels_counted(batch: Batch) -> Batch:
    """The batch with exactly one label ignored, the last one. The batch itself, if it ignores no label."""
    # The chunked loss drops tokens with ignored labels, and their number differs between batches. Its worst case is one
    # ignored label. With none it needs less, because it reads the tokens in place instead of gathering them.
    values = batch.values() if isinstance(batch, Mapping) else batch
    if not any(map(ignores_labels, values)):
        return batch

    def changed(value: Any) -> Any:
        if not ignores_labels(value):
            return value
        counted = value.masked_fill(value == IGNORE_INDEX, 0)
        counted[(-1,) * value.dim()] = IGNORE_INDEX
        return counted

    return mapped(batch, changed)


def with_padding(batch: Batch) -> Batch:
    """The batch with the last token of each sample masked and its label ignored, in masks that mask no token yet.

    Masks are the integer or boolean tensors (B, L) with "mask" in their name.
    """
    if not isinstance(batch, Mapping):
        return batch
    masks = [key for key, value in batch.items() if "mask" in str(key) and is_table(value) and bool(value.all())]
    fills = dict.fromkeys(masks, 0)
    if masks and is_table(batch.get("labels")):
        fills["labels"] = IGNORE_INDEX

    def padded(key: Any, value: torch.Tensor) -> torch.Tensor:
        return torch.cat([value[:, :-1], torch.full_like(value[:, -1:], fills[key])], dim=1)

    return {key: padded(key, value) if key in fills else value for key, value in batch.items()}


def checked_length(max_length: int | None) -> int | None:
    """Check a length in tokens. Raises `InputError` unless it is a whole number above 0, or None."""
    if max_length is not None and (type(max_length) is not int or max_length < 1):
        raise InputError(f"max_length={max_length!r}: give the longest sequence in tokens, 1 or more")
    return max_length


def worst_batches(
    dataset: Any, size: int, collate: Callable[[list[Any]], Any], max_length: int | None = None
) -> list[Batch]:
    """The worst batches of a data set, collated as in the training.

    They are the first batch, `size` times the longest sample, the longest samples of each field together, and these
    with the shortest sample. With `max_length` (in tokens) the samples are not searched. The first batch is stretched
    to that length instead, without and with padding. Raises `InputError` if a data set cannot be searched and
    `max_length` is None.
    """
    # With the shortest sample: shorter samples are padded, and padding makes a model build a mask.
    if max_length is not None:
        first = collate(_first(dataset, size))
        longest = stretched(first, max_length)
        return distinct([first, longest, with_padding(longest)])
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise InputError(
            f"the lengths of the samples of a {type(dataset).__name__} are unknown before the training: "
            "give the longest length in tokens as max_length="
        )
    batches = [_first(dataset, size)]
    if found := longest_samples(dataset):
        most, shortest = [dataset[index] for index in found[0]], dataset[found[1]]
        batches += [[most[0]] * size, [most[i % len(most)] for i in range(size)]]
        batches += [[*most, *[shortest] * (size - len(most))]] if len(most) < size else [[s] * size for s in most[1:]]
    return distinct([collate(samples) for samples in batches])


def distinct(batches: Iterable[Batch]) -> list[Batch]:
    """The batches without those that equal an earlier one in shapes, in whether tokens are masked, and in whether
    labels are ignored.
    """
    seen = {}
    for batch in batches:
        seen.setdefault(_likeness(batch), batch)
    return list(seen.values())


def have_one_shape(batches: Iterable[Batch]) -> bool:
    """True if the tensors of all batches have the same shapes."""
    shapes = {tuple(shape for _, shape, *_ in _likeness(batch)) for batch in batches}
    return len(shapes) == 1


def ignores_labels(value: Any) -> bool:
    """True if a value contains `IGNORE_INDEX`, so that it holds labels of which some are ignored."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and bool((value == IGNORE_INDEX).any())


def is_mask(value: torch.Tensor) -> bool:
    """True if a tensor contains only zeros and ones."""
    return value.numel() > 1 and bool(((value == 0) | (value == 1)).all())


def _likeness(batch: Batch) -> tuple:
    values: Sequence[tuple[Any, Any]] = list(batch.items() if isinstance(batch, Mapping) else enumerate(batch))
    return tuple(
        (key, tuple(value.shape), "mask" in str(key) and not bool(value.all()), ignores_labels(value))
        for key, value in values
        if isinstance(value, torch.Tensor)
    )


def _first(dataset: Any, size: int) -> list[Any]:
    """The first samples, repeated if there are fewer than `size`."""
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        found = [dataset[index] for index in range(min(size, len(dataset)))]
    elif iter(dataset) is dataset:
        raise InputError(f"a {type(dataset).__name__} can be read only once: give a data set that can be read again")
    else:
        found = [sample for sample, _ in zip(dataset, range(size), strict=False)]
    if not found:
        raise InputError("the training data set is empty")
    return [found[index % len(found)] for index in range(size)]
