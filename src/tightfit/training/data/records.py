"""The records of a corpus: texts, conversations and preference pairs, read from the spellings that people use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tightfit.training.data.store import Kind
from tightfit.training.data.turns import ASSISTANT, LEARNT, Message, TurnReader, type_of, yes_or_no
from tightfit.training.data.unused import Unused

_TURNS = ("conversations", "messages", "conversation")
_MORE_TURNS = ("dialogue", "dialog", "dialogs", "items", "contents", "turns", "chat")  # where they are lists of objects
TURN_LISTS = frozenset({*_TURNS, *_MORE_TURNS, "chosen", "rejected", "prompt", "completion"})
"""Fields that may hold turns."""
_TOOLS = ("tools", "functions")
_SYSTEM = ("system", "system_prompt", "systemInstruction", "system_instruction")
_QUESTIONS = ("instruction", "question", "query", "prompt", "problem", "input", "inputs")
_ANSWERS = ("output", "response", "answer", "completion", "solution", "target", "targets")
_MORE_INPUT = {"instruction": ("input", "context"), "question": ("context",)}  # what a question is about
_NOT_TEXT = ("images", "image", "videos", "video", "audios", "audio")
_LABELS = ("label", "kto_tag")
_VARIABLES = "chat_template_kwargs"
_TEMPLATES_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


@dataclass(frozen=True)
class Text:
    """A document."""

    text: str


@dataclass(frozen=True)
class Conversation:
    """Turns, and the tools that the assistant may call. Assistant turns from turn `learnt_from` on are learnt, without
    those in `unlearnt`. `variables` are what the chat template is given besides.
    """

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] | None = None
    learnt_from: int = 0
    unlearnt: frozenset[int] = frozenset()
    variables: Mapping[str, Any] = field(default_factory=dict)


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


Record = Text | Conversation | Completion | Preference


def kind_of(fields: Mapping[str, Any] | Sequence[str]) -> Kind | None:
    """The kind of records with these fields; None if it is unknown."""
    if "text" in fields:
        return "text"
    if "chosen" in fields and "rejected" in fields:
        return "preferences"
    has_turns = any(name in fields for name in _TURNS) or (isinstance(fields, Mapping) and _turns_name(fields))
    return "conversations" if has_turns or _pair(fields) else None


def wanted() -> str:
    """The names of fields that make a record, for errors."""
    return (
        "text, conversations or messages, a question and an answer (instruction and output, prompt and completion, "
        "question and answer), or chosen and rejected"
    )


def read_record(value: Any, kind: Kind, line: str = "", unused: Unused | None = None) -> Record | None:
    """The record in an object that `line` spells; None where its label says that it is a bad answer.

    `unused` is told of fields that are not read. Raises `BadLine`, with the column in the line.
    """
    reader = _Reader(value if isinstance(value, dict) else {}, line, Unused() if unused is None else unused)
    try:
        return reader.record(kind)
    except RecursionError:
        raise reader.bad("nested too deep to be read: remove the line") from None


def _turns_name(fields: Mapping[str, Any]) -> str | None:
    """The field that holds the turns."""
    name = next((name for name in _TURNS if fields.get(name) is not None), None)
    name = name or next((name for name in _TURNS if name in fields), None)
    return name or next((name for name in _MORE_TURNS if _is_objects(fields.get(name))), None)


def _is_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _pair(fields: Mapping[str, Any] | Sequence[str]) -> tuple[str, str] | None:
    """The fields of a question and its answer. Of several, those that have a value."""

    def first(names: Sequence[str], but: str = "") -> str | None:
        present = [name for name in names if name in fields and name != but]
        filled = [name for name in present if not isinstance(fields, Mapping) or fields[name] not in (None, "")]
        return next(iter(filled or present), None)

    question = first(_QUESTIONS)
    answer = first(_ANSWERS)
    return None if question is None or answer is None else (question, answer)


class _Reader(TurnReader):
    """One object, its fields checked."""

    def __init__(self, fields: Mapping[str, Any], line: str, unused: Unused):
        super().__init__(line, unused)
        self.fields = fields
        self._used: set[str] = set()

    def record(self, kind: Kind) -> Record | None:
        if kind == "text":
            record: Record = self.text()
        else:
            self._only_text()
            record = self.conversation() if kind == "conversations" else self.preference()
            if kind == "conversations" and not self._is_good():
                self._unused.left_out += 1
                return None
        self._names.update(
            str(name) for name, value in self.fields.items() if name not in self._used and value is not None
        )
        self.tell()
        return record

    def text(self) -> Text:
        if "text" not in self.fields:
            raise self.bad('no "text": write one {"text": ...} object a line' + self._other("text"))
        return Text(self.string(self._use("text"), ("text",), '"text"'))

    def conversation(self) -> Conversation | Completion:
        name = _turns_name(self.fields)
        pair = _pair(self.fields)
        if name is not None and self.fields[name] is None and pair is not None:
            name = None  # a union of columns
        if name is not None:
            return self._conversation(self.turns(self._use(name), (name,)), (name,))
        if pair is None:
            raise self.bad('no "conversations" and no "messages": write a list of turns' + self._other("conversations"))
        question, answer = pair
        return self._answered(question, answer)

    def preference(self) -> Preference:
        for name in ("chosen", "rejected"):
            if name not in self.fields:
                raise self.bad(f'no "{name}": write {{"chosen": ..., "rejected": ...}}' + self._other("preferences"))
        chosen, rejected = self._use("chosen"), self._use("rejected")
        if isinstance(chosen, str) and isinstance(rejected, str):
            turns = [self._from_text(each) for each in (chosen, rejected)]
            if not all(isinstance(each, list) for each in turns):
                return self._texts(chosen, rejected)
        return self._answers(chosen, rejected)

    def _answered(self, question: str, answer: str) -> Conversation | Completion:
        """A question and its answer, texts or lists of turns. `prompt` and `completion` are one text, cut in two."""
        asked, said = self._use(question), self._use(answer)
        if isinstance(asked, str) and isinstance(said, str) and (question, answer) == ("prompt", "completion"):
            self._no_system(question)
            return Completion(self.string(asked, (question,), f'"{question}"'), self._said_text(said, answer))
        before = self._asked(question, asked)
        if isinstance(said, str):
            said = self._said_text(said, answer)
            turns: list[Message] = [{"role": ASSISTANT, "content": said}]
        elif isinstance(said, list | dict):
            turns = self.turns(said, (answer,))
        else:
            raise self.bad(f'"{answer}" is {type_of(said)}, wanted a string', (answer,))
        # Of a prompt of turns only what answers it is learnt; the answers of `history` are as well.
        return self._conversation([*before, *turns], (answer,), learnt_from=len(before) * isinstance(asked, list))

    def _said_text(self, value: str, name: str) -> str:
        if not value:
            raise self.bad(f'"{name}" is empty, so nothing to learn: remove the line', (name,))
        return self.string(value, (name,), f'"{name}"')

    def _asked(self, name: str, value: Any) -> list[Message]:
        """The turns up to a question: those of `history`, and the question with what it is about."""
        if isinstance(value, list):
            return self.turns(value, (name,)) if value else []
        text = self.string(value, (name,), f'"{name}"')
        for more in _MORE_INPUT.get(name, ()):
            if more in self.fields and (about := self._use(more)):
                text += "\n" + self.string(about, (more,), f'"{more}"')
        turns: list[Message] = []
        if isinstance(self.fields.get("history"), list):
            for number, each in enumerate(self._use("history")):
                path = ("history", number)
                if not (isinstance(each, list) and len(each) == 2):
                    raise self.bad(f'a turn of "history" is {type_of(each)}, wanted [question, answer]', path)
                for index, role in enumerate(("user", ASSISTANT)):
                    turns.append({"role": role, "content": self.string(each[index], (*path, index), '"history"')})
        return [*turns, {"role": "user", "content": text}]

    def _conversation(self, messages: list[Message], path: tuple[str], *, learnt_from: int = 0) -> Conversation:
        messages, added = self._with_system(messages)
        learnt_from = learnt_from + added if learnt_from else 0
        turns = [message for message in messages[learnt_from:] if message["role"] == ASSISTANT]
        if not turns:
            raise self.bad("no turn of the assistant, so nothing to learn: add one, or remove the line", path)
        if all(LEARNT in message for message in turns):
            raise self.bad("no turn of the assistant is to be learnt: remove the line", path)
        tools = self._tools(messages, (*path, 0))
        return self._built(messages, tools, learnt_from)

    def _built(self, messages: list[Message], tools: tuple[Any, ...] | None, learnt_from: int) -> Conversation:
        unlearnt = frozenset(turn for turn, message in enumerate(messages) if LEARNT in message)
        plain = tuple({key: item for key, item in message.items() if key != LEARNT} for message in messages)
        return Conversation(plain, tools, learnt_from, unlearnt, self._variables())

    def _with_system(self, messages: list[Message]) -> tuple[list[Message], int]:
        """The turns behind the system's turn that stands beside them, and how many turns that adds."""
        name = next((name for name in _SYSTEM if self.fields.get(name)), None)
        if name is None:
            self._used.update(name for name in _SYSTEM if name in self.fields)
            return messages, 0
        said = self.said(self._use(name), (name,), f'"{name}"')
        if messages and messages[0]["role"] in ("system", "developer"):
            if messages[0].get("content") != said:
                raise self.bad(f'"{name}" and the system\'s turn say different things: keep one of them', (name,))
            return messages, 0
        return [{"role": "system", "content": said}, *messages], 1

    def _no_system(self, beside: str) -> None:
        name = next((name for name in _SYSTEM if self.fields.get(name)), None)
        if name is not None:
            reason = f'"{name}" stands beside the text "{beside}", which no chat template is used for: write "messages"'
            raise self.bad(reason, (name,))
        self._used.update(name for name in _SYSTEM if name in self.fields)

    def _texts(self, chosen: str, rejected: str) -> Preference:
        turns = _turns_name(self.fields)
        asked = turns or next((name for name in _QUESTIONS if self.fields.get(name) is not None), None)
        if asked is None or (asked == "prompt" and not isinstance(self.fields["prompt"], str | list)):
            raise self.bad('"chosen" and "rejected" are texts, so "prompt" must be one: add it', ("chosen",))
        self._differ(chosen == rejected)
        pair = [self._said_text(said, name) for said, name in ((chosen, "chosen"), (rejected, "rejected"))]
        if asked == "prompt" and isinstance(self.fields["prompt"], str):
            self._no_system("prompt")
            prompt = self.string(self._use("prompt"), ("prompt",), '"prompt"')
            return Preference(Completion(prompt, pair[0]), Completion(prompt, pair[1]))
        return self._of_turns([[{"role": ASSISTANT, "content": said}] for said in pair])

    def _answers(self, chosen: Any, rejected: Any) -> Preference:
        """Both are lists of turns; a prompt may be their common beginning, a list of its own, or the user's text."""
        pair = [self.turns(chosen, ("chosen",)), self.turns(rejected, ("rejected",))]
        self._differ(pair[0] == pair[1])
        return self._of_turns(pair)

    def _of_turns(self, pair: list[list[Message]]) -> Preference:
        name = _turns_name(self.fields) or next(
            (name for name in _QUESTIONS if self.fields.get(name) is not None), None
        )
        if name is not None:
            value = self._use(name)
            text = isinstance(value, str) and not isinstance(self._from_text(value), list)
            before = self._asked(name, value) if text else self.turns(value, (name,)) if value else []
            pair = [_continued(before, answer, is_text=text) for answer in pair]
        placed = [self._with_system(answer)[0] for answer in pair]
        same = _common(*placed)
        for name, answer in zip(("chosen", "rejected"), placed, strict=True):
            turns = [message for message in answer[same:] if message["role"] == ASSISTANT]
            if not any(LEARNT not in message for message in turns):
                raise self.bad(f'"{name}" has no turn of the assistant that the other answer has not: add it', (name,))
        tools = self._tools(placed[0], ("chosen", 0))
        first, second = (self._built(answer, tools, same) for answer in placed)
        return Preference(first, second)

    def _differ(self, is_equal: bool) -> None:
        if is_equal:
            raise self.bad('"chosen" and "rejected" are equal, so nothing is preferred: remove the line', ("rejected",))

    def _tools(self, messages: list[Message], first: tuple[str | int, ...]) -> tuple[Any, ...] | None:
        """The tools beside the turns, or, as MiniMind has them, inside of the system's turn, which is the first."""
        places: list[tuple[Mapping[str, Any], tuple[str | int, ...]]] = [(self.fields, ())]
        if messages[0]["role"] == "system":
            places.append((messages[0], first))
        self._used.update(key for key in _TOOLS if key in self.fields)
        for fields, path in places:
            for key in _TOOLS:
                if fields.get(key):
                    found = {key: fields[key]}
                    self.unfold(found, key, path)
                    if found[key]:
                        self._given.add("tools")
                    return tuple(found[key]) or None
        return None

    def _variables(self) -> Mapping[str, Any]:
        """Further variables of the record for the chat template, such as `enable_thinking`."""
        value = self._use(_VARIABLES) if _VARIABLES in self.fields else None
        if isinstance(value, str):
            value = self.parsed(value, (_VARIABLES,), "an object")
        if value is None:
            return {}
        if not isinstance(value, dict) or not _TEMPLATES_OWN.isdisjoint(value):
            found = type_of(value) if not isinstance(value, dict) else ", ".join(sorted(_TEMPLATES_OWN & value.keys()))
            raise self.bad(f'"{_VARIABLES}" is {found}, wanted an object of the template\'s own names', (_VARIABLES,))
        self.check_inside(value, (_VARIABLES,))
        self._given.update(value)
        return value

    def _only_text(self) -> None:
        """Turns that speak of pictures or sounds are nothing without them."""
        for name in _NOT_TEXT:
            if self.fields.get(name):
                raise self.bad(f'"{name}" is beside the turns, and only text is learnt: remove the line', (name,))
            self._used.update([name] if name in self.fields else [])

    def _is_good(self) -> bool:
        """False where KTO's label says that the answer is a bad one. Numbers are one only beside a completion."""
        for name in _LABELS:
            value = self.fields.get(name)
            is_label = isinstance(value, bool | str) or (isinstance(value, int) and "completion" in self.fields)
            if is_label and (answer := yes_or_no(value)) is not None:
                self._used.add(name)
                return answer
        return True

    def _use(self, name: str) -> Any:
        self._used.add(name)
        return self.fields[name]

    def _other(self, wanted: Kind) -> str:
        """A hint where the fields are those of another kind."""
        found = kind_of(self.fields)
        return f", or set data.format to {found}" if found not in (None, wanted) else ""


def _continued(before: list[Message], answer: list[Message], *, is_text: bool) -> list[Message]:
    """An answer behind its prompt, unless it begins with it; one whose prompt is a text begins with its own turns."""
    if is_text:
        return [*before, *answer] if answer[0]["role"] == ASSISTANT else answer
    return answer if answer[: len(before)] == before else [*before, *answer]


def _common(one: list[Message], other: list[Message]) -> int:
    """How many turns two answers begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
