"""Turns of conversations, read from the spellings that people use: OpenAI's, ShareGPT's, Gemini's, and mixtures."""

import json
from collections.abc import Mapping
from typing import Any

from tightfit.training.data.bad_lines import BadLine
from tightfit.training.data.json_line import Path, column_of, whole_text
from tightfit.training.data.unused import Unused, alternatives

Message = dict[str, Any]
"""A turn: `role`, `content`, and what else a template reads (`tool_calls`, `reasoning_content`, `name`)."""

# ShareGPT's names, and those that other sets of conversations use, by the name that templates know. Upper case and
# hyphens make no difference.
ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "chatbot": "assistant",
    "model": "assistant", "ai": "assistant", "bing": "assistant", "tool": "tool", "observation": "tool",
    "function": "tool", "ipython": "tool", "tool_response": "tool", "function_response": "tool",
    "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
ASSISTANT = "assistant"
_CALLS = ("function_call", "tool_call")  # roles whose text is the call
_SPEAKER = ("role", "from", "speaker", "author")
_SAID = ("content", "value", "text", "message", "parts")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # the first is what templates read
_TEXT_PARTS = ("text", "input_text", "output_text")
LEARNT = "train"  # of a turn, as it is kept: false where it is not learnt
_FLAGS = ("weight", LEARNT, "loss", "trainable")  # OpenAI's, axolotl's, ms-swift's, others'
_YES_OR_NO = {"1": True, "true": True, "1.0": True, "0": False, "false": False, "0.0": False}


def yes_or_no(value: Any) -> bool | None:
    """The truth that a flag says, as 0 and 1 too, and as text; None where it says neither."""
    return _YES_OR_NO.get(str(value).strip().lower()) if isinstance(value, bool | int | float | str) else None


class TurnReader:
    """Reads turns of an object that `line` spells. `unused` is told of what is not read."""

    def __init__(self, line: str, unused: Unused):
        self.line = line
        self._unused = unused
        self._names: set[str] = set()
        self._given: set[str] = set()
        self._has_nulls = False

    def bad(self, reason: str, path: Path = ()) -> BadLine:
        return BadLine(reason, column_of(self.line, path) if self.line else None)

    def tell(self) -> None:
        """Count what this object had that is not read, once it is known to be a record."""
        self._unused.columns.update(self._names)
        self._unused.given.update(self._given)
        self._unused.nulls += self._has_nulls

    def turns(self, value: Any, path: Path) -> list[Message]:
        """A list of turns, or one turn. Raises `BadLine`."""
        name = f'"{path[0]}"'
        value = [value] if isinstance(value, dict) else self._from_text(value)
        if not isinstance(value, list):
            raise self.bad(f"{name} is {type_of(value)}, wanted a list of turns", path)
        if not value:
            raise self.bad(f"{name} is empty: give at least one turn, or remove the line", path)
        return [self._turn(turn, (*path, number)) for number, turn in enumerate(value)]

    def said(self, value: Any, path: Path, name: str) -> str:
        """Text, or parts that are all text. Raises `BadLine`."""
        if isinstance(value, dict) and "parts" in value:  # an export of ChatGPT, Gemini's system instruction
            value, path = value["parts"], (*path, "parts")
        if isinstance(value, dict):
            value = [value]
        if not isinstance(value, list):
            return self.string(value, path, name)
        return "".join(self._part(part, (*path, number), name) for number, part in enumerate(value))

    def string(self, value: Any, path: Path, name: str) -> str:
        if not isinstance(value, str):
            raise self.bad(f"{name} is {type_of(value)}, wanted a string", path)
        return whole_text(value, self.line, path)

    def unfold(self, holder: dict[str, Any], key: str, path: Path) -> None:
        """A list that is spelled as JSON text inside of the JSON."""
        value = holder.get(key)
        if isinstance(value, str):
            holder[key] = value = self.parsed(value or "[]", (*path, key), "a list")
        if value is not None and not isinstance(value, list):
            raise self.bad(f'"{key}" is {type_of(value)}, wanted a list', (*path, key))
        self.check_inside(value, (*path, key))

    def parsed(self, value: str, path: Path, wanted: str) -> Any:
        """JSON text inside of the JSON."""
        try:
            return json.loads(value) if value.strip() else None
        except (ValueError, RecursionError):
            raise self.bad(f'"{path[-1]}" is text that is not valid JSON: write {wanted}', path) from None

    def check_inside(self, value: Any, path: Path) -> None:
        """That every text a template could write is whole."""
        if isinstance(value, str):
            whole_text(value, self.line, path)
        elif isinstance(value, dict):
            for key, item in value.items():
                whole_text(key, self.line, path)
                self.check_inside(item, (*path, key))
        elif isinstance(value, list):
            for number, item in enumerate(value):
                self.check_inside(item, (*path, number))

    def _from_text(self, value: Any) -> Any:
        """Turns that are spelled as JSON text, as in the cells of a table."""
        if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
            return value
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return value
        turns = found if isinstance(found, list) else [found]
        return turns if turns and all(isinstance(turn, dict) and _first(turn, _SPEAKER) for turn in turns) else value

    def _part(self, part: Any, path: Path, name: str) -> str:
        if isinstance(part, str):
            return whole_text(part, self.line, path)
        if not isinstance(part, dict):
            raise self.bad(f"a part of {name} is {type_of(part)}, wanted text", path)
        kind = part.get("type", "text")
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            found = f'"{kind}"' if kind not in _TEXT_PARTS else f"without text ({', '.join(map(str, part)) or 'empty'})"
            raise self.bad(f"a part of {name} is {found}, and only text is learnt: remove the line", path)
        self._names.update(str(key) for key, item in part.items() if key not in ("type", "text") and item is not None)
        return whole_text(part["text"], self.line, path)

    def _turn(self, turn: Any, path: Path) -> Message:
        if not isinstance(turn, dict):
            raise self.bad(f'a turn is {type_of(turn)}, wanted {{"role": ..., "content": ...}}', path)
        speaker = _first(turn, _SPEAKER)
        if speaker is None:
            raise self.bad('a turn has no "role" (or "from"): add it', path)
        role = turn[speaker]
        known = role.strip().lower().replace("-", "_") if isinstance(role, str) else ""
        if known not in ROLES:
            found = f'"{role}"' if isinstance(role, str) else type_of(role)
            raise self.bad(f"the role of a turn is {found}, wanted one of {', '.join(ROLES)}", (*path, speaker))
        said = _first(turn, _SAID) or next((key for key in _SAID if key in turn), "content")
        message: Message = {"role": ROLES[known]}
        rest = {key: item for key, item in turn.items() if key not in (speaker, said, *_FLAGS) and item is not None}
        message.update(rest)
        self._calls(message, turn.get(said) if known in _CALLS else None, (*path, said), path)
        content = None if known in _CALLS else turn.get(said)
        if content is None and not message.get("tool_calls"):
            missing = "null" if said in turn else "missing"
            raise self.bad(f'the "{said}" of a turn is {missing}, wanted text', (*path, said))
        if content is not None:
            message["content"] = self.said(content, (*path, said), f'the "{said}" of a turn')
        self.check_inside(message, path)
        self._note(message)
        reasoning = next((message[key] for key in _REASONING if key in message), None)
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        self._flag(turn, message, path)
        return message

    def _calls(self, message: Message, spelled: Any, said: Path, path: Path) -> None:
        """The calls of a turn as templates read them; `spelled` is the text of a turn that is a call."""
        self.unfold(message, "tool_calls", path)
        legacy = message.pop("function_call", None)  # OpenAI's, before there were several in a turn
        for value, where in ((spelled, said), (legacy, (*path, "function_call"))):
            if isinstance(value, str):
                value = self.parsed(value, where, "the call as JSON")
            if value is not None:
                calls = value if isinstance(value, list) else [value]
                if not all(isinstance(call, dict) and "name" in call for call in calls):
                    raise self.bad(f'"{where[-1]}" is no call: write {{"name": ..., "arguments": {{...}}}}', where)
                message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        if message.get("tool_calls"):
            message["tool_calls"] = [_with_arguments(call) for call in message["tool_calls"]]
            self._has_nulls |= any(_null_inside(_function(call).get("arguments")) for call in message["tool_calls"])

    def _flag(self, turn: Mapping[str, Any], message: Message, path: Path) -> None:
        """The flag that a turn is learnt, given by any of the names that trainers read."""
        for key in _FLAGS:
            value = turn.get(key)
            if value is None:
                continue
            answer = yes_or_no(value)
            if answer is None:
                raise self.bad(f'the "{key}" of a turn is {value!r}, wanted 0 or 1: it is learnt or not', (*path, key))
            if message["role"] == ASSISTANT and not answer:
                message[LEARNT] = False
            elif message["role"] != ASSISTANT and answer:  # turns that somebody else says are not learnt
                self._names.add(key)

    def _note(self, message: Message) -> None:
        """The names that only some templates read."""
        reasoning = alternatives(*_REASONING)
        names = (key for key in message if key not in ("role", "content"))
        self._given.update(
            reasoning if key in _REASONING else key for key in names if key not in ("tools", "functions")
        )


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """The first of some names that has a value."""
    return next((name for name in names if fields.get(name) is not None), None)


def type_of(value: Any) -> str:
    return type(value).__name__


def _function(call: Any) -> Mapping[str, Any]:
    inner = call.get("function", call) if isinstance(call, dict) else {}
    return inner if isinstance(inner, dict) else {}


def _with_arguments(call: Any) -> Any:
    """A call whose arguments are an object: as JSON text (OpenAI's), templates would write them as a text in quotes."""
    function = _function(call)
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    whole = {**function, "arguments": arguments}
    return {**call, "function": whole} if "function" in call else whole


def _null_inside(value: Any) -> bool:
    if isinstance(value, dict):
        return any(item is None or _null_inside(item) for item in value.values())
    return isinstance(value, list) and any(_null_inside(item) for item in value)
