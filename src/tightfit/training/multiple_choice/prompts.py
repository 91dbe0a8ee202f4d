"""From a question and a choice to the tokens of a context and of its continuation.

The arithmetic is that of lm-evaluation-harness (EleutherAI, `lm_eval/api/model.py`, `_encode_pair`), so that scores can
be compared: spaces at the end of the context belong to the continuation, both are encoded together, and the
continuation's tokens are those beyond the context's own.
"""

import re
from typing import Literal, NamedTuple, Protocol

from tightfit.errors import DataError, InputError
from tightfit.training.multiple_choice.questions import LETTERS, ChoiceQuestion, QuestionFile

Prompt = Literal["auto", "letters", "text"]
PROMPTS: tuple[Prompt, ...] = ("auto", "letters", "text")
_CHINESE = re.compile("[\u4e00-\u9fff]")


class Codec(Protocol):
    """The methods of a tokenizer that are needed. `encode` adds no special token."""

    @property
    def end_of_text(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...


class ScoredChoice(NamedTuple):
    """One choice: the log-likelihood of `continuation` after `context` is asked for, both token ids. `characters` is
    the length of the choice's text, by which the score is normalised.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    characters: int


def is_lettered(subject: QuestionFile, prompt: Prompt) -> bool:
    """True if the choices stand in the context as a list. Raises `InputError` for a prompt that is unknown."""
    if prompt not in PROMPTS:
        raise InputError(f"prompt {prompt!r} is unknown: use {', '.join(PROMPTS[:-1])} or {PROMPTS[-1]}")
    return subject.lettered if prompt == "auto" else prompt == "letters"


def requests_of(question: ChoiceQuestion, codec: Codec, *, lettered: bool) -> list[ScoredChoice]:
    """One request for each choice. Raises `DataError`."""
    context = lettered_context(question) if lettered else question.text
    answers = LETTERS[: len(question.choices)] if lettered else question.choices
    return [ScoredChoice(*encode_pair(codec, context, f" {a}", question.place), len(a)) for a in answers]


def lettered_context(question: ChoiceQuestion) -> str:
    """The prompt of C-Eval and MMLU: the question, a line for each choice, and the word before the answer."""
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, question.choices, strict=False)]
    ending = "答案：" if _CHINESE.search(question.text) else "Answer:"
    return "\n".join((question.text, *lines, ending))


def encode_pair(codec: Codec, context: str, continuation: str, place: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids of a context, and of what follows it. Without a context the end of a text stands before.

    Raises `DataError` where the continuation adds no token to its context.
    """
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    before = codec.encode(context) or [codec.end_of_text]
    whole = codec.encode(context + continuation)
    following = whole[len(before) :] if context else whole
    if not following:
        raise DataError(f"{place}: the tokenizer gives the choice {continuation.strip()!r} no token of its own")
    return tuple(before), tuple(following)
