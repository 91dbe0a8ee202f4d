"""Records to items of token ids: a batch of records in memory at a time."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np

from tightfit.errors import DataError
from tightfit.training.data.bad_lines import BadLine, Tally
from tightfit.training.data.chats import ChatText
from tightfit.training.data.corpus import Corpus, read_records
from tightfit.training.data.records import Completion, Conversation, Preference, Record, Text
from tightfit.training.data.store import Kind
from tightfit.training.data.tokenizer import TextTokenizer
from tightfit.training.data.writing import TokenWriter

# Records handed to the tokenizer at once: enough for its threads, few enough that their ids take little memory.
ENCODED_AT_ONCE = 64
MOST_CHARACTERS = 4_000_000  # of documents handed over at once

Item = tuple[np.ndarray, np.ndarray | None]
"""Ids, and which of them are learnt."""


@dataclass(frozen=True)
class CorpusReading:
    """A corpus, and how it is read. `policy` and `ceiling` are `data.bad_lines` and `data.max_bad_lines`."""

    corpus: Corpus
    source: str
    max_documents: int | None
    policy: str
    ceiling: int | None

    def records(self, tally: Tally) -> Iterator[tuple[Record, str]]:
        return read_records(self.corpus, self.source, tally, max_documents=self.max_documents)

    def tally(self) -> Tally:
        return Tally("skip" if self.policy == "skip" else "strict", self.ceiling)


class SampleTexts(Iterable[str]):
    """The texts that a tokenizer is trained on, read anew each time: documents, or what is said in conversations."""

    def __init__(self, reading: CorpusReading):
        self.reading = reading

    def __iter__(self) -> Iterator[str]:
        for record, _ in self.reading.records(self.reading.tally()):
            yield from _said(record)


class Tokenizing:
    """Reads a source, tokenizes it and writes the items: what the cache is filled with."""

    def __init__(self, reading: CorpusReading, tokenizer: TextTokenizer):
        self._reading, self._tokenizer = reading, tokenizer
        self.kind: Kind = reading.corpus.kind
        self.dtype = tokenizer.dtype
        self.has_learnt = self.kind != "text"
        self.tokenizer: Mapping[str, str] = tokenizer.to_files()

    def fill(self, writer: TokenWriter) -> Tally:
        """Write all items. Raises `DataError`."""
        tally = self._reading.tally()
        for batch in _batches(self._reading.records(tally)):
            for ids, learnt in self._items(batch, tally):
                writer.add(ids, learnt)
        if writer.items == 0:
            raise DataError(f"{tally.first}. It is the first of {tally.skipped} bad lines, and there are no others")
        tally.notes = tuple(tally.unused.lines(self._tokenizer.chat.template_text if tally.unused.given else None))
        return tally

    def _items(self, batch: list[tuple[Record, str]], tally: Tally) -> Iterator[Item]:
        if self.kind == "text":
            return self._documents([cast(Text, record).text for record, _ in batch])
        if self.kind == "conversations":
            return self._conversations(batch, tally)
        return self._preferences(batch, tally)

    def _documents(self, texts: list[str]) -> Iterator[Item]:
        end = self._tokenizer.end_of_text
        for ids in self._tokenizer.encode_batch(texts):
            yield np.append(ids, ids.dtype.type(end)), None

    def _conversations(self, batch: list[tuple[Record, str]], tally: Tally) -> Iterator[Item]:
        texts: list[ChatText] = []
        for record, place in batch:
            if isinstance(record, Completion):
                yield from self._encoded(texts)
                texts = []
                yield self._answer(record)
                continue
            try:
                texts.extend(self._tokenizer.chat.texts(cast(Conversation, record)))
            except BadLine as bad:
                tally.refuse(bad, place)
        yield from self._encoded(texts)

    def _encoded(self, texts: list[ChatText]) -> Iterator[Item]:
        for encoded in self._tokenizer.chat.encode(texts) if texts else ():
            yield encoded.ids, encoded.learnt

    def _preferences(self, batch: list[tuple[Record, str]], tally: Tally) -> Iterator[Item]:
        for record, place in batch:
            pair = cast(Preference, record)
            try:
                items = [self._answer(pair.chosen), self._answer(pair.rejected)]
            except BadLine as bad:
                tally.refuse(bad, place)
                continue
            yield from items

    def _answer(self, answer: Conversation | Completion) -> Item:
        if isinstance(answer, Completion):
            prompt, said = self._tokenizer.encode(answer.prompt), self._tokenizer.encode(answer.answer)
            ids = np.array([*prompt, *said, self._tokenizer.end_of_text], np.int64)
            return ids, np.arange(len(ids)) >= len(prompt)
        chat = self._tokenizer.chat
        encoded = chat.encode(chat.texts(answer)[-1:])[
            0
        ]  # the whole; where there are several texts, up to the last turn
        return encoded.ids, encoded.learnt


def _batches(records: Iterator[tuple[Record, str]]) -> Iterator[list[tuple[Record, str]]]:
    batch: list[tuple[Record, str]] = []
    characters = 0
    for record, place in records:
        batch.append((record, place))
        characters += len(record.text) if isinstance(record, Text) else 0
        if len(batch) == ENCODED_AT_ONCE or characters > MOST_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _said(record: Record) -> Iterator[str]:
    """The text that a tokenizer learns from: the turns, each behind its role, as a template writes them."""
    if isinstance(record, Text):
        yield record.text
    elif isinstance(record, Conversation):
        for message in record.messages:
            yield f"{message['role']}\n{message.get('content', '')}\n"
    elif isinstance(record, Completion):
        yield f"{record.prompt}{record.answer}"
    else:
        yield from _said(record.chosen)
        yield from _said(record.rejected)
