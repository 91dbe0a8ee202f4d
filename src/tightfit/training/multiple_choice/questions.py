"""Questions with their choices, read from JSON lines or from the CSV layouts of C-Eval and MMLU."""

import csv
import io
import json
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tightfit.errors import DataError
from tightfit.training.data.corpus import read_text

JSON_LINES, CSV = (".jsonl", ".ndjson"), (".csv",)
LETTERS = string.ascii_uppercase
SPLITS = ("_test", "_val", "_dev")  # endings of file names in C-Eval and MMLU; the subject is what stands before
WANTED = 'write {"question": "...", "choices": ["...", "..."], "answer": 0} on each line'


@dataclass(frozen=True)
class ChoiceQuestion:
    """`answer` is the index of the right choice; `place` says where the question was read."""

    text: str
    choices: tuple[str, ...]
    answer: int
    place: str


@dataclass(frozen=True)
class QuestionFile:
    """The questions of one file. `lettered` ones are asked with their choices listed as A, B, C, ... (the prompt of
    C-Eval and MMLU), the others with the text of each choice as the continuation.
    """

    name: str
    questions: tuple[ChoiceQuestion, ...]
    lettered: bool


def read_subjects(path: str | Path) -> list[QuestionFile]:
    """The subjects of a file, or of every file in a folder, by name. Raises `DataError` with file and line.

    `.jsonl` and `.ndjson` hold one `{"question", "choices", "answer"}` a line. `.csv` is C-Eval's layout if its first
    row names the columns (`question`, `A`, `B`, ..., `answer`), else MMLU's (question, choices, letter).
    """
    path = Path(path)
    if not path.is_dir():
        return [read_subject(path)]
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in JSON_LINES + CSV and file.is_file())
    if not files:
        inner = sorted({file.parent.name for file in path.glob("*/*") if file.suffix.lower() in JSON_LINES + CSV})
        hint = f"give one of its folders: {', '.join(inner)}" if inner else "put .jsonl or .csv files in it"
        raise DataError(f"{path}: holds no questions: {hint}")
    return [read_subject(file) for file in files]


def read_subject(path: Path) -> QuestionFile:
    """The questions of one file. Raises `DataError`."""
    is_json = path.suffix.lower() in JSON_LINES
    if not is_json and path.suffix.lower() not in CSV:
        raise DataError(f"{path}: questions are read from .jsonl, .ndjson and .csv files: give one of these")
    text = read_text(path).removeprefix("\ufeff")
    questions = tuple(_of_json_lines(text, path) if is_json else _of_csv(text, path))
    if not questions:
        raise DataError(f"{path}: holds no question: {WANTED if is_json else 'give one question a row'}")
    return QuestionFile(subject_name(path), questions, lettered=not is_json)


def subject_name(path: Path) -> str:
    """`val/art_studies_val.csv` -> `art_studies`."""
    split = next((ending for ending in SPLITS if path.stem.endswith(ending)), "")
    return path.stem.removesuffix(split) or path.stem


def subject_of(records: Sequence[Mapping[str, Any]], name: str = "questions") -> QuestionFile:
    """Questions given in Python, as mappings of the keys that a line of JSON has. Raises `DataError`."""
    made = [_question(record, f"question {number}") for number, record in enumerate(records, start=1)]
    if not made:
        raise DataError("score_choices: no question was given: give at least one")
    return QuestionFile(name, tuple(made), lettered=False)


def _of_json_lines(text: str, path: Path) -> Iterator[ChoiceQuestion]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{place}, column {error.pos + 1}: not valid JSON: {error.msg}") from None
        except RecursionError:
            raise DataError(f"{place}: lists are nested too deep: {WANTED}") from None
        yield _question(record, place)


def _question(record: Any, place: str) -> ChoiceQuestion:
    """A question from a mapping, every part of it checked."""
    if not isinstance(record, Mapping):
        raise DataError(f"{place}: is {_kind(record)}, wanted an object: {WANTED}")
    missing = [key for key in ("question", "choices", "answer") if key not in record]
    if missing:
        raise DataError(f"{place}: no {missing[0]!r}: {WANTED}")
    choices = record["choices"]
    if not isinstance(choices, list | tuple):
        raise DataError(f"{place}: 'choices' is {_kind(choices)}, wanted a list of texts")
    texts = tuple(_text(choice, place, f"choice {number}") for number, choice in enumerate(choices, start=1))
    return _checked(_text(record["question"], place, "'question'"), texts, record["answer"], place, letter_first=False)


def _of_csv(text: str, path: Path) -> Iterator[ChoiceQuestion]:
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    columns: list[str] | None = None
    width = 0
    while True:
        number = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise DataError(f"{path}, line {number}: not valid CSV: {error}") from None
        if row is None:
            return
        if not any(cell.strip() for cell in row):
            continue
        place = f"{path}, line {number}"
        if not width:
            width = len(row)
            if "question" in [cell.strip().lower() for cell in row]:
                columns = _header(row, place)
                continue
        if len(row) != width:
            raise DataError(f"{place}: has {len(row)} columns, the first row has {width}: quote cells with commas")
        yield _named_row(row, columns, place) if columns else _mmlu_row(row, place)


def _header(row: Sequence[str], place: str) -> list[str]:
    """The names of the columns: `question`, the letters from A on, `answer`; others are ignored."""
    names = [name if (name := cell.strip()) in LETTERS else name.lower() for cell in row]
    letters = [name for name in names if name and name in LETTERS]
    if "answer" not in names or len(letters) < 2 or letters != list(LETTERS[: len(letters)]):
        raise DataError(f"{place}: columns are {', '.join(row)}: wanted question, A, B, ..., answer")
    return names


def _named_row(row: Sequence[str], columns: Sequence[str], place: str) -> ChoiceQuestion:
    cells = dict(zip(columns, row, strict=True))
    texts = tuple(cells[name] for name in columns if name and name in LETTERS)
    return _checked(cells["question"], texts, cells["answer"], place, letter_first=True)


def _mmlu_row(row: Sequence[str], place: str) -> ChoiceQuestion:
    if len(row) < 4:
        raise DataError(f"{place}: has {len(row)} columns: wanted question, at least two choices, letter of the answer")
    return _checked(row[0], tuple(row[1:-1]), row[-1], place, letter_first=True)


def _checked(text: str, choices: tuple[str, ...], answer: Any, place: str, *, letter_first: bool) -> ChoiceQuestion:
    text, choices = text.strip(), tuple(choice.strip() for choice in choices)
    if not text:
        raise DataError(f"{place}: the question is empty: write one, or remove the line")
    if not 2 <= len(choices) <= len(LETTERS):
        raise DataError(f"{place}: has {len(choices)} choices: give 2 to {len(LETTERS)}")
    for number, choice in enumerate(choices, start=1):
        if not choice:
            raise DataError(f"{place}: choice {number} is empty: write its text, or leave it out")
    for part in (text, *choices):
        _demand_whole(part, place)
    return ChoiceQuestion(text, choices, _answer(answer, choices, place, letter_first=letter_first), place)


def _answer(answer: Any, choices: tuple[str, ...], place: str, *, letter_first: bool) -> int:
    """The index that an index, a letter or a choice's own text means. A choice whose text is a letter counts before
    that letter, except in the CSV layouts, whose answers are letters.
    """
    if isinstance(answer, int) and not isinstance(answer, bool):
        if not 0 <= answer < len(choices):
            raise DataError(f"{place}: answer {answer} is no index of {len(choices)} choices: they begin at 0")
        return answer
    if not isinstance(answer, str):
        raise DataError(f"{place}: 'answer' is {_kind(answer)}, wanted an index, a letter or the text of a choice")
    said = answer.strip()
    letter = LETTERS.find(said.upper()) if len(said) == 1 else -1
    by_letter = letter if 0 <= letter < len(choices) else None
    by_text = choices.index(said) if said in choices else None
    first, second = (by_letter, by_text) if letter_first else (by_text, by_letter)
    found = first if first is not None else second
    if found is None:
        _refuse_answer(said, choices, place)
    return found


def _refuse_answer(said: str, choices: tuple[str, ...], place: str) -> NoReturn:
    if not said:
        raise DataError(f"{place}: the answer is empty: a test split may have none, give one that has answers")
    last = LETTERS[len(choices) - 1]
    raise DataError(f"{place}: answer {said!r} is no letter from A to {last}, and no choice's text")


def _text(value: Any, place: str, what: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{place}: {what} is {_kind(value)}, wanted a text")
    return value


def _demand_whole(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{place}: half of a surrogate pair, which is no character: remove it") from None


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a text", type(None): "null"}.get(type(value), str(value))
