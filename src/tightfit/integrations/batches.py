"""The batches a plan must hold for: the first real one, the longest one, and the longest one with padding in it; all of
them with as many labels that count as a batch of their shape can have.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from tightfit.errors import InputError
from tightfit.integrations.longest import longest_samples
from tightfit.levers.micro_batch import IGNORE_INDEX, batch_size
from tightfit.step import Batch


def repeated(batch: Batch, times: int) -> Batch:
    """A batch of as many copies, along the first dimension. What is not per sample stays as it is."""
    return batch if times == 1 else _per_sample(batch, lambda value: torch.cat([value] * times))


def first_samples(batch: Batch, count: int) -> Batch:
    """The first samples of a batch. What is not per sample stays as it is."""
    return _per_sample(batch, lambda value: value[:count])


def all_labels_counted(batch: Batch) -> Batch:
    """The batch with none of its labels ignored but the very last, if some are; else the batch itself.

    The chunked loss drops tokens whose labels are ignored; how many those are differs from batch to batch. It takes
    most where it is one: with none, the tokens are read where they lie instead of gathered.
    """
    values = batch.values() if isinstance(batch, Mapping) else batch
    if not any(map(ignores_labels, values)):
        return batch

    def changed(value: Any) -> Any:
        if not ignores_labels(value):
            return value
        counted = value.masked_fill(value == IGNORE_INDEX, 0)
        counted[(-1,) * value.dim()] = IGNORE_INDEX
        return counted

    return _mapped(batch, changed)


def stretched(batch: Batch, length: int) -> Batch:
    """The batch with sequences of another length: its tokens repeated, or cut.

    Sequences are the tensors (B, L) whose L is the largest second dimension among the integers.
    """
    values = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
    widths = [v.shape[1] for v in values if is_table(v)]
    if not widths:
        raise InputError("max_length: the batch holds no tensor of token ids (batch, length) whose length could be set")
    width = max(widths)

    def changed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() != 2 or value.shape[1] != width:
            return value
        return value.repeat(1, -(-length // width))[:, :length]

    return _mapped(batch, changed)


def with_padding(batch: Batch) -> Batch:
    """The batch with the last token of each sample masked, and ignored among the labels, where no token is masked yet.

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
    """Raises `InputError` for a length in tokens that is no whole number above 0."""
    if max_length is not None and (type(max_length) is not int or max_length < 1):
        raise InputError(f"max_length={max_length!r}: give the longest sequence in tokens, 1 or more")
    return max_length


def worst_batches(
    dataset: Any, size: int, collate: Callable[[list[Any]], Any], max_length: int | None = None
) -> list[Batch]:
    """What a data set's batches can be at most, collated as they will be: the first one, `size` times the longest
    sample, those with most in each of their fields, and these beside the shortest one.

    With `max_length` (in tokens) the samples are not searched, and batches of that length are made of the first one, as
    it is and with padding. Raises `InputError` where a data set cannot be searched, and no `max_length` is given.
    """
    if max_length is not None:
        first = collate(_first(dataset, size))
        longest = stretched(first, max_length)
        return distinct([first, longest, with_padding(longest)])
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise InputError(
            f"how long the samples of a {type(dataset).__name__} are is not known before they come: "
            "give the longest length in tokens as max_length="
        )
    batches = [_first(dataset, size)]
    if found := longest_samples(dataset):
        most, shortest = [dataset[index] for index in found[0]], dataset[found[1]]
        batches += [[most[0]] * size, [most[i % len(most)] for i in range(size)]]
        batches += [[*most, *[shortest] * (size - len(most))]] if len(most) < size else [[s] * size for s in most[1:]]
    return distinct([collate(samples) for samples in batches])


def distinct(batches: Iterable[Batch]) -> list[Batch]:
    """Without those that a model cannot tell from an earlier one by shapes, nor by whether some tokens are masked or
    some labels ignored.
    """
    seen = {}
    for batch in batches:
        seen.setdefault(_likeness(batch), batch)
    return list(seen.values())


def is_table(value: Any) -> bool:
    """Whether a value of a batch is an integer or a truth value for each token: (B, L)."""
    return isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point()


def ignores_labels(value: Any) -> bool:
    """Whether a value holds labels of which some are ignored."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and bool((value == IGNORE_INDEX).any())


def is_mask(value: torch.Tensor) -> bool:
    """Whether a tensor holds zeros and ones only."""
    return value.numel() > 1 and bool(((value == 0) | (value == 1)).all())


def _per_sample(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """The batch with the tensors changed that have a row for each sample."""
    size = batch_size(batch)

    def changed(value: Any) -> Any:
        per_sample = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == size
        return change(value) if per_sample else value

    return _mapped(batch, changed)


def _mapped(batch: Batch, change: Callable[[Any], Any]) -> Batch:
    if isinstance(batch, Mapping):
        return {key: change(value) for key, value in batch.items()}
    return tuple(change(value) for value in batch)


def _likeness(batch: Batch) -> tuple:
    values: Sequence[tuple[Any, Any]] = list(batch.items() if isinstance(batch, Mapping) else enumerate(batch))
    return tuple(
        (key, tuple(value.shape), "mask" in str(key) and not bool(value.all()), ignores_labels(value))
        for key, value in values
        if isinstance(value, torch.Tensor)
    )


def _first(dataset: Any, size: int) -> list[Any]:
    """The first samples, over again where there are fewer."""
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        found = [dataset[index] for index in range(min(size, len(dataset)))]
    elif iter(dataset) is dataset:
        raise InputError(f"a {type(dataset).__name__} can be read only once: make it begin anew at each iteration")
    else:
        found = [sample for sample, _ in zip(dataset, range(size), strict=False)]
    if not found:
        raise InputError("the training data set is empty")
    return [found[index % len(found)] for index in range(size)]
