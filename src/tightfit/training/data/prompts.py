"""Prompts, for a training that learns from what its model writes after them: a file of JSON lines."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightfit.errors import ConfigError, DataError
from tightfit.training.config.schema import DataConfig, GrpoConfig, ModelConfig
from tightfit.training.data.bad_lines import BadLine
from tightfit.training.data.json_line import parse_line
from tightfit.training.data.lines import read_lines
from tightfit.training.data.prepare import PreparedData
from tightfit.training.data.samples import ADVANTAGES, DRAWN, IGNORE_INDEX, REFERENCE
from tightfit.training.data.tokenized import loaded_tokenizer
from tightfit.training.data.tokenizer import TextTokenizer, train_tokenizer

PROMPT, PROMPTS = "prompt", "prompts"
Prompt = str | list[dict[str, Any]]
"""A text, or the turns of a conversation that the model answers."""


@dataclass(frozen=True)
class PromptSamples:
    """Prompts and what is known beside them. A batch has their indices; its rows are completions, made later.

    `written` are the prompts as the data has them, `ids` their tokens, `columns` the further fields of the records, one
    list each. `stop` is the token that ends a completion.
    """

    written: Sequence[Prompt]
    ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]
    stop: int
    pad_id: int
    settings: GrpoConfig

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def rows(self) -> int:
        return self.settings.group_size

    @property
    def is_even(self) -> bool:
        return False

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each prompt with its longest completion."""
        return np.array([len(ids) + self.settings.max_completion_tokens for ids in self.ids], np.int64)

    def batch(self, samples: Sequence[int] | np.ndarray) -> dict[str, Tensor]:
        return {PROMPTS: torch.from_numpy(np.asarray(samples, np.int64))}

    def fullest(self, size: int, length: int) -> dict[str, Tensor]:
        most = self.settings.max_completion_tokens
        return completed([([self.pad_id] * (length - most), [self.stop] * most)] * size, self.settings, self.pad_id)

    def beginning(self, count: int) -> list[int]:
        return list(self.ids[0][:count])

    def __str__(self) -> str:
        longest = max(map(len, self.ids), default=0)
        return (
            f"{len(self)} prompts of at most {longest} tokens, {self.rows} completions of at most "
            f"{self.settings.max_completion_tokens} to each,"
        )


def completed(
    texts: Sequence[tuple[Sequence[int], Sequence[int]]], settings: GrpoConfig, pad_id: int
) -> dict[str, Tensor]:
    """The batch of an update from the ids of prompts and of their completions: padded on the right, what is learnt is
    the completions. Advantages are one and log-probabilities zero, until they are known.
    """
    width = max(len(prompt) + len(completion) for prompt, completion in texts)
    ids = torch.full((len(texts), width), pad_id, dtype=torch.long)
    labels = torch.full_like(ids, IGNORE_INDEX)
    for row, (prompt, completion) in enumerate(texts):
        end = len(prompt) + len(completion)
        ids[row, :end] = torch.tensor([*prompt, *completion])
        labels[row, len(prompt) : end] = ids[row, len(prompt) : end]
    batch = {"input_ids": ids, "labels": labels, ADVANTAGES: torch.ones(len(texts))}
    if settings.iterations > 1:
        batch[DRAWN] = torch.zeros(ids.shape)
    if settings.beta:
        batch[REFERENCE] = torch.zeros(ids.shape)
    return batch


def prepare_prompts(config: DataConfig, model: ModelConfig, settings: GrpoConfig) -> PreparedData:
    """The prompts of `data.source` as samples, none of them held out. Raises `DataError` and `ConfigError`."""
    records = list(_records(config))
    numbers, written, columns = _columns(records, config.source)
    tokenizer = loaded_tokenizer(config, model)
    if tokenizer is None:
        is_chat = any(not isinstance(prompt, str) for prompt in written)
        tokenizer = train_tokenizer([text for p in written for text in _texts(p)], config.vocab_size, chat=is_chat)
    ids = [_encoded(tokenizer, p, f"{config.source}:{n}") for n, p in zip(numbers, written, strict=True)]
    most = config.sequence_length - settings.max_completion_tokens
    for number, found in zip(numbers, ids, strict=True):
        if len(found) > most:
            raise DataError(
                f"{config.source}:{number}: the prompt has {len(found)} tokens, and data.sequence_length "
                f"{config.sequence_length} leaves {most} beside training.grpo.max_completion_tokens "
                f"{settings.max_completion_tokens}: raise the one, lower the other, or shorten the prompt"
            )
    samples = PromptSamples(written, ids, columns, _stop(tokenizer, written), tokenizer.end_of_text, settings)
    none = PromptSamples([], [], {name: [] for name in columns}, samples.stop, samples.pad_id, settings)
    content = json.dumps([written, columns, tokenizer.digest, config.seed, config.shuffle], sort_keys=True)
    fingerprint = hashlib.sha256(content.encode()).hexdigest()
    return PreparedData(tokenizer, samples, none, fingerprint, objective="grpo")


def _records(config: DataConfig) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The objects of the file and the numbers of their lines."""
    path = Path(config.source)
    if not path.is_file():
        raise ConfigError(
            f"data.source {config.source!r} is no file: training.objective grpo reads one of JSON lines, each an "
            f"object with a {PROMPT!r}"
        )
    for count, (number, line) in enumerate(read_lines(path)):
        if count == config.max_documents:
            return
        try:
            value = None if line is None else parse_line(line, is_first=number == 1)[0]
        except BadLine as bad:
            raise DataError(f"{path}:{number}, column {bad.column}: {bad.reason}") from None
        if not isinstance(value, dict) or not _is_prompt(value.get(PROMPT)):
            raise DataError(
                f"{path}:{number}: holds no {PROMPT!r}: give an object whose {PROMPT!r} is a text, or a list of turns "
                "with role and content"
            )
        yield number, value


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value)
    turns = value if isinstance(value, list) else []
    wanted = ("role", "content")
    return bool(turns) and all(isinstance(t, dict) and all(isinstance(t.get(k), str) for k in wanted) for t in turns)


def _columns(
    records: Sequence[tuple[int, Mapping[str, Any]]], source: str
) -> tuple[list[int], list[Prompt], dict[str, list[Any]]]:
    if not records:
        raise DataError(f"{source}: holds no prompt to learn from: give at least one line")
    names = records[0][1].keys()
    for number, record in records:
        if record.keys() != names:
            name = sorted(record.keys() ^ names)[0]
            has = "has" if name in record else "has no"
            raise DataError(f"{source}:{number}: {has} {name!r}, unlike line {records[0][0]}: give all lines the same")
    columns = {name: [record[name] for _, record in records] for name in names if name != PROMPT}
    return [number for number, _ in records], [record[PROMPT] for _, record in records], columns


def _texts(prompt: Prompt) -> list[str]:
    return [prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt]


def _encoded(tokenizer: TextTokenizer, prompt: Prompt, place: str) -> list[int]:
    try:
        return tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.chat.prompt(prompt)
    except BadLine as bad:
        raise DataError(f"{place}: the prompt cannot be put into the chat template: {bad.reason}") from None


def _stop(tokenizer: TextTokenizer, written: Sequence[Prompt]) -> int:
    """The token that ends a completion: that of a turn, if the prompts are conversations."""
    found = None if all(isinstance(prompt, str) for prompt in written) else tokenizer.chat.end_of_turn()
    return tokenizer.end_of_text if found is None else found
