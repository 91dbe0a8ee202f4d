"""What a corpus is made of: texts, conversations and preference pairs, read from the spellings that people use."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tightfit.data.bad_lines import BadLine
from tightfit.data.json_line import Path, column_of, whole_text
from tightfit.data.store import Kind

Message = dict[str, Any]
"""A turn: `role`, `content`, and what else a template reads (`tool_calls`, `reasoning_content`, `name`)."""

# ShareGPT's names, and those that other sets of conversations use, by the name that templates know.
ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant", "tool": "tool",
    "observation": "tool", "function": "tool", "ipython": "tool",
}  # fmt: skip
ASSISTANT = "assistant"
_TURNS = ("conversations", "messages", "conversation")
_TOOLS = ("tools", "functions")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # the first is what templates read


@dataclass(frozen=True)
class Text:
    """A document."""

    text: str


@dataclass(frozen=True)
class Conversation:
    """Turns, and the tools that the assistant may call. Assistant turns from turn `learnt_from` on are learnt."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] | None = None
    learnt_from: int = 0


@dataclass(frozen=True)
class Completion:
    """A text and the answer to it, without a chat template. Only the answer is learnt."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Preference:
    """A better and a worse answer to the same prompt."""

    chosen: Conversation | Completion
    rejected: Conversation | Completion


Record = Text | Conversation | Preference


def kind_of(fields: Mapping[str, Any] | Sequence[str]) -> Kind | None:
    """What records with these fields are; None where they are nothing that is known."""
    if "text" in fields:
        return "text"
    if "chosen" in fields and "rejected" in fields:
        return "preferences"
    return "conversations" if any(name in fields for name in _TURNS) else None


def read_record(value: Any, kind: Kind, line: str = "") -> Record:
    """The record in an object that `line` spells. Raises `BadLine`, with the column in the line."""
    reader = _Reader(value if isinstance(value, dict) else {}, line)
    try:
        if kind == "text":
            return reader.text()
        return reader.conversation() if kind == "conversations" else reader.preference()
    except RecursionError:
        raise reader.bad("nested too deep to be read: remove the line") from None


class _Reader:
    """One object, its fields checked."""

    def __init__(self, fields: Mapping[str, Any], line: str):
        self.fields, self.line = fields, line

    def bad(self, reason: str, path: Path = ()) -> BadLine:
        return BadLine(reason, column_of(self.line, path) if self.line else None)

    def text(self) -> Text:
        if "text" not in self.fields:
            raise self.bad('no "text": write one {"text": ...} object a line' + self._other("text"))
        return Text(self._string(self.fields["text"], ("text",), '"text"'))

    def conversation(self) -> Conversation:
        name = next((name for name in _TURNS if name in self.fields), None)
        if name is None:
            raise self.bad('no "conversations" and no "messages": write a list of turns' + self._other("conversations"))
        messages = self._turns(self.fields[name], (name,))
        if not any(message["role"] == ASSISTANT for message in messages):
            raise self.bad("no turn of the assistant, so nothing to learn: add one, or remove the line", (name,))
        return Conversation(tuple(messages), self._tools(messages, (name, 0)))

    def preference(self) -> Preference:
        for name in ("chosen", "rejected"):
            if name not in self.fields:
                raise self.bad(f'no "{name}": write {{"chosen": ..., "rejected": ...}}' + self._other("preferences"))
        chosen, rejected = self.fields["chosen"], self.fields["rejected"]
        if isinstance(chosen, str) and isinstance(rejected, str):
            return self._texts(chosen, rejected)
        return self._answers(chosen, rejected)

    def _texts(self, chosen: str, rejected: str) -> Preference:
        if not isinstance(self.fields.get("prompt"), str):
            raise self.bad('"chosen" and "rejected" are texts, so "prompt" must be one: add it', ("chosen",))
        prompt = self._string(self.fields["prompt"], ("prompt",), '"prompt"')
        self._differ(chosen == rejected)
        return Preference(
            Completion(prompt, self._string(chosen, ("chosen",), '"chosen"')),
            Completion(prompt, self._string(rejected, ("rejected",), '"rejected"')),
        )

    def _answers(self, chosen: Any, rejected: Any) -> Preference:
        """Both are lists of turns; a prompt may be their common beginning, a list of its own, or the user's text."""
        pair = [self._turns(chosen, ("chosen",)), self._turns(rejected, ("rejected",))]
        self._differ(pair[0] == pair[1])
        prompt = self.fields.get("prompt")
        if isinstance(prompt, list):
            turns = self._turns(prompt, ("prompt",)) if prompt else []
            pair = [answer if answer[: len(turns)] == turns else [*turns, *answer] for answer in pair]
        elif prompt is not None:
            said = self._string(prompt, ("prompt",), '"prompt"')
            user: Message = {"role": "user", "content": said}
            pair = [[user, *answer] if answer[0]["role"] == ASSISTANT else answer for answer in pair]
        same = _common(*pair)
        for name, answer in zip(("chosen", "rejected"), pair, strict=True):
            if not any(message["role"] == ASSISTANT for message in answer[same:]):
                raise self.bad(f'"{name}" has no turn of the assistant that the other answer has not: add it', (name,))
        tools = self._tools(pair[0], ("chosen", 0))
        first, second = (Conversation(tuple(answer), tools, same) for answer in pair)
        return Preference(first, second)

    def _differ(self, is_equal: bool) -> None:
        if is_equal:
            raise self.bad('"chosen" and "rejected" are equal, so nothing is preferred: remove the line', ("rejected",))

    def _turns(self, value: Any, path: Path) -> list[Message]:
        name = f'"{path[0]}"'
        if not isinstance(value, list):
            raise self.bad(f"{name} is {_type(value)}, wanted a list of turns", path)
        if not value:
            raise self.bad(f"{name} is empty: give at least one turn, or remove the line", path)
        return [self._turn(turn, (*path, number)) for number, turn in enumerate(value)]

    def _turn(self, turn: Any, path: Path) -> Message:
        if not isinstance(turn, dict):
            raise self.bad(f'a turn is {_type(turn)}, wanted {{"role": ..., "content": ...}}', path)
        role_key = "role" if "role" in turn else "from"
        content_key = "content" if "content" in turn or "value" not in turn else "value"
        if role_key not in turn:
            raise self.bad('a turn has no "role" (or "from"): add it', path)
        role = turn[role_key]
        if not isinstance(role, str) or role not in ROLES:
            found = f'"{role}"' if isinstance(role, str) else _type(role)
            known = ", ".join(ROLES)
            raise self.bad(f"the role of a turn is {found}, wanted one of {known}", (*path, role_key))
        rest = {key: item for key, item in turn.items() if key not in (role_key, content_key) and item is not None}
        message: Message = {"role": ROLES[role], **rest}
        self._unfold(message, "tool_calls", path)
        content = turn.get(content_key)
        if content is None and not message.get("tool_calls"):
            missing = "null" if content_key in turn else "missing"
            raise self.bad(f'the "{content_key}" of a turn is {missing}, wanted text', (*path, content_key))
        if content is not None:
            message["content"] = self._string(content, (*path, content_key), f'the "{content_key}" of a turn')
        self._check_inside(message, path)
        reasoning = next((message[key] for key in _REASONING if key in message), None)
        return message if reasoning is None else {**message, "reasoning_content": reasoning}

    def _tools(self, messages: list[Message], first: Path) -> tuple[Any, ...] | None:
        """The tools beside the turns, or, as MiniMind has them, inside of the system's turn, which is the first."""
        places: list[tuple[Mapping[str, Any], Path]] = [(self.fields, ())]
        if messages[0]["role"] == "system":
            places.append((messages[0], first))
        for fields, path in places:
            for key in _TOOLS:
                if fields.get(key):
                    found = {key: fields[key]}
                    self._unfold(found, key, path)
                    return tuple(found[key]) or None
        return None

    def _unfold(self, holder: dict[str, Any], key: str, path: Path) -> None:
        """A list that is spelled as JSON text inside of the JSON."""
        value = holder.get(key)
        if isinstance(value, str):
            try:
                holder[key] = value = json.loads(value) if value.strip() else []
            except (ValueError, RecursionError):
                raise self.bad(f'"{key}" is text that is not valid JSON: write a list', (*path, key)) from None
        if value is not None and not isinstance(value, list):
            raise self.bad(f'"{key}" is {_type(value)}, wanted a list', (*path, key))
        self._check_inside(value, (*path, key))

    def _string(self, value: Any, path: Path, name: str) -> str:
        if not isinstance(value, str):
            raise self.bad(f"{name} is {_type(value)}, wanted a string", path)
        return whole_text(value, self.line, path)

    def _check_inside(self, value: Any, path: Path) -> None:
        """That every text a template could write is whole."""
        if isinstance(value, str):
            whole_text(value, self.line, path)
        elif isinstance(value, dict):
            for key, item in value.items():
                whole_text(key, self.line, path)
                self._check_inside(item, (*path, key))
        elif isinstance(value, list):
            for number, item in enumerate(value):
                self._check_inside(item, (*path, number))

    def _other(self, wanted: Kind) -> str:
        """A hint where the fields are those of another kind."""
        found = kind_of(self.fields)
        return f", or set data.format to {found}" if found not in (None, wanted) else ""


def _common(one: list[Message], other: list[Message]) -> int:
    """How many turns two answers begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _type(value: Any) -> str:
    return type(value).__name__
