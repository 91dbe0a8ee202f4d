"""Conversations to token ids, and to the flags of the tokens that are learnt: those of the assistant's turns.

A template with `{% generation %}` marks them itself. Else a turn is what rendering it adds to the rendering of the
turns before it with the generation prompt behind them. So the model learns to write exactly what it is asked to write
in a chat, the end-of-turn token included.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tightfit.training.data.bad_lines import BadLine
from tightfit.training.data.chat_template import ChatTemplate, Rendered
from tightfit.training.data.records import Conversation
from tightfit.training.data.turns import ASSISTANT, Message

Span = tuple[int, int]
"""[begin, end) in a text."""

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode leaves them to programs
_KEPT_TAILS = 1024


@dataclass(frozen=True)
class Encoded:
    """`ids` int64 and `learnt` bool, both (tokens,)."""

    ids: np.ndarray
    learnt: np.ndarray


@dataclass(frozen=True)
class ChatText:
    """A conversation as text. The spans in `learnt` are the assistant's. Parts between the `cuts` are encoded apart. At
    a place in `checked` the text is cut too, unless the ids up to there are those of the text up to there.
    """

    text: str
    learnt: tuple[Span, ...] = ()
    cuts: tuple[int, ...] = ()
    checked: tuple[int, ...] = ()


class ChatEncoder:
    """Encodes conversations with a tokenizer and its chat template.

    The name of a special token in what somebody says stays text: it ends no turn.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate):
        self.template_text = template.text
        own = Tokenizer.from_str(tokenizer.to_str())
        own.encode_special_tokens = False  # the template writes special tokens by their names
        own.post_processor = None  # some take spaces off the offsets
        own.no_truncation()
        own.no_padding()
        self._tokenizer, self._template = own, template
        added = own.get_added_tokens_decoder()
        self._added = np.array(sorted(added), dtype=np.int64)
        names = sorted((token.content for token in added.values() if token.special), key=len, reverse=True)
        self._names = re.compile("|".join(re.escape(name) for name in names if len(name) > 1) or "(?!)")
        self._tails: dict[str, list[int]] = {}

    def texts(self, conversation: Conversation) -> list[ChatText]:
        """The texts of a conversation: one; or one for each turn of the assistant where the template renders a turn
        otherwise once others follow it (that of Qwen 3 drops its reasoning), so that no one text has all of them.

        Raises `BadLine` where the template refuses the conversation or leaves nothing to learn, `DataError` where it is
        no template.
        """
        said, guard = self._guarded(conversation)
        return [_unguarded(text, guard) for text in self._rendered(said)]

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """The ids of a conversation and of the beginning of the assistant's next turn. Raises `BadLine`."""
        said, guard = self._guarded(Conversation(tuple(messages), None if tools is None else tuple(tools)))
        rendered = self._render(said, len(said.messages), prompt=True)
        return self.encode([_unguarded(ChatText(rendered.text), guard)])[0].ids.tolist()

    def encode(self, texts: Sequence[ChatText]) -> list[Encoded]:
        """The ids and the flags of each text; in parallel over texts."""
        found = self._tokenizer.encode_batch([text.text for text in texts], add_special_tokens=False)
        return [
            self._encoded(text, np.array(e.ids, np.int64), _offsets(e.offsets))
            for text, e in zip(texts, found, strict=True)
        ]

    def end_of_turn(self) -> int | None:
        """The special token that ends a turn of the assistant; None where the template writes none."""
        probe = Conversation(({"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}))
        encoded = self.encode(self.texts(probe)[-1:])[0]
        ends = [token for token in encoded.ids[encoded.learnt].tolist() if token in self._added]
        return ends[-1] if ends else None

    def _rendered(self, conversation: Conversation) -> list[ChatText]:
        if self._template.marks_answers:
            return [self._marked(conversation)]
        whole = self._render(conversation, len(conversation.messages)).text
        turns = [self._turn(conversation, turn) for turn in _learnt_turns(conversation)]
        if not all(whole.startswith(turn.text) for turn in turns):
            return turns
        spans = tuple(span for turn in turns for span in turn.learnt)
        return [ChatText(whole, spans, checked=tuple(at for span in spans for at in span))]

    def _render(self, conversation: Conversation, turns: int, *, prompt: bool = False) -> Rendered:
        """The first turns of a conversation as text."""
        return self._template.render(
            conversation.messages[:turns],
            conversation.tools,
            add_generation_prompt=prompt,
            variables=conversation.variables,
        )

    def _marked(self, conversation: Conversation) -> ChatText:
        rendered = self._render(conversation, len(conversation.messages))
        spans = list(rendered.generated)
        unlearnt = [turn for turn in sorted(conversation.unlearnt) if turn >= conversation.learnt_from]
        for turn in reversed(unlearnt):
            del spans[self._marks(conversation, turn) : self._marks(conversation, turn + 1)]
        if conversation.learnt_from:
            spans = spans[self._marks(conversation, conversation.learnt_from) :]
        if not any(begin < end for begin, end in spans):
            raise BadLine(f"the chat template ({self._template.source}) marks nothing of it as generated: remove it")
        return ChatText(rendered.text, tuple(spans))

    def _marks(self, conversation: Conversation, turns: int) -> int:
        """How many spans the template marks in the first turns of a conversation."""
        return len(self._render(conversation, turns).generated) if turns else 0

    def _turn(self, conversation: Conversation, turn: int) -> ChatText:
        """The conversation up to a turn of the assistant, of which only that turn is learnt."""
        before = self._render(conversation, turn, prompt=True).text
        text = self._render(conversation, turn + 1).text
        # Some prompts begin a turn otherwise than it is rendered (an empty <think>): what is alike is given.
        begin = _alike(before, text)
        if begin < len(before) and not text.startswith(self._render(conversation, turn).text):
            raise BadLine(
                f"the chat template ({self._template.source}) renders earlier turns otherwise once turn {turn + 1} "
                "follows, so that its tokens cannot be found: put {% generation %} around them in the template"
            )
        if begin == len(text):
            raise BadLine(f"the chat template ({self._template.source}) writes nothing for turn {turn + 1}: remove it")
        return ChatText(text, ((begin, len(text)),), checked=(begin,))

    def _guarded(self, conversation: Conversation) -> tuple[Conversation, str]:
        """The conversation with a character inside each name of a special token that somebody spells, and that
        character; none where nobody does.
        """
        said: Any = [conversation.messages, conversation.tools, conversation.variables]
        if not any(self._names.search(text) for text in _texts_in(said)):
            return conversation, ""
        everything = "".join(_texts_in(said))
        guard = next(mark for mark in _NONCHARACTERS if mark not in everything)

        def spell(text: str) -> str:
            return self._names.sub(lambda name: name[0][0] + guard + name[0][1:], text)

        messages, tools, variables = _replaced(said, spell)
        whole = None if tools is None else tuple(tools)
        return replace(conversation, messages=tuple(messages), tools=whole, variables=variables), guard

    def _encoded(self, text: ChatText, ids: np.ndarray, offsets: np.ndarray) -> Encoded:
        cuts = text.cuts
        if cuts:
            ids, offsets = self._in_parts(text.text, cuts)
        moved = [at for at in text.checked if not self._stands_alone(text.text, at, ids, offsets)]
        if moved:
            ids, offsets = self._in_parts(text.text, sorted({*cuts, *moved}))
        learnt = np.zeros(len(ids), dtype=np.bool_)
        for begin, end in text.learnt:
            first = np.searchsorted(offsets[:, 1], begin, side="right")
            last = np.searchsorted(offsets[:, 0], end, side="left")
            learnt[first:last] = True
        return Encoded(ids, learnt)

    def _in_parts(self, text: str, cuts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The ids and offsets where no token reaches over a cut."""
        bounds = [0, *cuts, len(text)]
        parts = [text[begin:end] for begin, end in pairwise(bounds)]
        found = self._tokenizer.encode_batch(parts, add_special_tokens=False)
        ids = [np.array(encoding.ids, np.int64) for encoding in found]
        offsets = [_offsets(e.offsets) + begin for e, begin in zip(found, bounds[:-1], strict=True)]
        return np.concatenate(ids), np.concatenate(offsets)

    def _stands_alone(self, text: str, at: int, ids: np.ndarray, offsets: np.ndarray) -> bool:
        """True if the text up to a place has the ids that it has as a part of the whole.

        Added tokens are split off before anything else, so it is enough to look at the text from the last one on.
        """
        count = int(np.searchsorted(offsets[:, 1], at, side="right"))
        if count < len(ids) and offsets[count, 0] < at:
            return False
        added = np.flatnonzero(np.isin(ids[:count], self._added))
        first = int(added[-1]) if len(added) else 0
        begin = int(offsets[first, 0]) if len(added) else 0
        return self._alone(text[begin:at]) == ids[first:count].tolist()

    def _alone(self, text: str) -> list[int]:
        """The ids of a text. Those of most turns' beginnings are the same, and kept."""
        if text not in self._tails:
            if len(self._tails) >= _KEPT_TAILS:
                self._tails.clear()
            self._tails[text] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._tails[text]


def _learnt_turns(conversation: Conversation) -> list[int]:
    turns = set(range(conversation.learnt_from, len(conversation.messages))) - conversation.unlearnt
    return [turn for turn in sorted(turns) if conversation.messages[turn]["role"] == ASSISTANT]


def _alike(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    if other.startswith(one):
        return len(one)
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _offsets(pairs: Sequence[Span]) -> np.ndarray:
    """(tokens, 2) int64."""
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _unguarded(text: ChatText, guard: str) -> ChatText:
    """Without the guard's character, with a cut in each of its places."""
    if not guard or guard not in text.text:
        return text
    parts = text.text.split(guard)
    ends = np.cumsum([len(part) for part in parts])

    def place(at: int) -> int:
        return at - text.text.count(guard, 0, at)

    return ChatText(
        "".join(parts),
        tuple((place(begin), place(end)) for begin, end in text.learnt),
        tuple(int(end) for end in ends[:-1]),
        tuple(place(at) for at in text.checked),
    )


def _texts_in(value: Any) -> list[str]:
    """Every text inside of nested lists and objects, names of members too."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for item in (*value.keys(), *value.values()) for text in _texts_in(item)]
    return [text for item in value for text in _texts_in(item)] if isinstance(value, list | tuple) else []


def _replaced(value: Any, change: Any) -> Any:
    """The same with each text in a value changed; names of members stay, since templates ask for them."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _replaced(item, change) for name, item in value.items()}
    return [_replaced(item, change) for item in value] if isinstance(value, list | tuple) else value
