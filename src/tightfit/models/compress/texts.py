"""Real text as rows of token ids: for calibration, and held out for perplexity."""

from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from tightfit.errors import ConfigError, DataError
from tightfit.models.loading import position_limit, vocabulary_size
from tightfit.names import CONFIG
from tightfit.training.config import load_config
from tightfit.training.data.corpus import DEFAULT_SOURCE, read_documents
from tightfit.training.data.prepare import prepare_data
from tightfit.training.data.tokenizer import TextTokenizer

LEAST_TOKENS = 2  # of a row: a token is scored after those before it
LONGEST_ROW = 512  # tokens, where nobody gives a length


def row_length(model: nn.Module, length: int | None = None) -> int:
    """Tokens in a row: those that are asked for, as far as the model has positions."""
    limit = position_limit(model)
    return min(length or LONGEST_ROW, limit or LONGEST_ROW)


def held_out_of(folder: Path, model: nn.Module, length: int | None, rows: int) -> tuple[str, Tensor] | None:
    """The source of a run's data, and rows of what the run has held out of it, (rows, length) int64; None where the
    folder is no run's, its data is gone, or nothing of even length was held out.
    """
    try:
        config = load_config(folder / CONFIG)
        own = config.data.model_copy(update={"tokenizer": str(folder)})
        data = prepare_data(own, config.model, objective=config.training.objective)
    except (ConfigError, DataError):
        return None
    samples = data.validation
    if data.objective == "dpo" or not samples.is_even or not len(samples):
        return None
    ids = samples.batch(range(min(len(samples), rows)))["input_ids"]
    return config.data.source, ids[:, : row_length(model, length)]


def token_rows(
    file: str | Path, tokenizer: TextTokenizer, model: nn.Module, *, option: str, length: int | None = None, rows: int
) -> Tensor:
    """The first `rows` rows of a text, (rows, length) int64, fewer where it is shorter; a text shorter than one row is
    one row. Documents follow each other with an end of text between them.

    `file` is what `data.source` may name: a text file, JSON lines of {"text"}, a folder of either, or `default`.
    `option` is what errors call it. Raises `DataError`.
    """
    if str(file) != DEFAULT_SOURCE and not Path(file).exists():
        raise DataError(f"{option} {str(file)!r}: no such file: give a text file, or JSON lines of {{'text': ...}}")
    length = row_length(model, length)
    ids: list[int] = []
    for document in read_documents(str(file)):
        ids.extend(chain(tokenizer.encode(document), (tokenizer.end_of_text,)))
        if len(ids) >= rows * length:
            break
    if len(ids) < LEAST_TOKENS:
        raise DataError(f"{option} {str(file)!r}: holds too little text, {len(ids)} tokens: give a longer one")
    vocabulary = vocabulary_size(model)
    if vocabulary is not None and max(ids) >= vocabulary:
        raise DataError(
            f"{option} {str(file)!r}: the tokenizer gives the id {max(ids)}, and the model has {vocabulary} "
            "embeddings: give the tokenizer of this model"
        )
    if len(ids) < length:
        return torch.tensor([ids])
    count = min(rows, len(ids) // length)
    return torch.tensor(ids[: count * length]).view(count, length)
