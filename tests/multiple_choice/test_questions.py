import json

import pytest
from lettered_questions import ASKED, CEVAL, MMLU

from tightfit.errors import DataError
from tightfit.training.multiple_choice.questions import read_subject, read_subjects, subject_of


def written(folder, name, content):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, "utf-8")
    return path


def test_json_lines_answers_may_be_an_index_a_letter_or_a_text(tmp_path):
    lines = [{"question": " Which? ", "choices": ["one", " B ", "C"], "answer": a} for a in (1, "one", "C", "b", "B")]
    content = "\ufeff" + "\n\n".join(map(json.dumps, lines)) + "\r\n"
    subject = read_subject(written(tmp_path, "general.jsonl", content))
    assert [q.answer for q in subject.questions] == [1, 0, 2, 1, 1]
    assert subject.questions[0].choices == ("one", "B", "C")
    assert subject.questions[0].text == "Which?"
    assert subject.questions[1].place.endswith("general.jsonl, line 3")
    assert not subject.lettered


def test_a_choice_whose_text_is_a_letter_counts_before_that_letter():
    (question,) = subject_of([{"question": "?", "choices": ["B", "A"], "answer": "A"}]).questions
    assert question.answer == 1


def test_the_layouts_of_mmlu_and_c_eval_are_read_and_lettered(tmp_path):
    mmlu = read_subject(written(tmp_path, "arithmetic_test.csv", MMLU))
    assert (mmlu.name, mmlu.lettered) == ("arithmetic", True)
    assert [(q.choices[1], q.answer) for q in mmlu.questions] == [("5, or 4", 0), ("yes", 1)]
    ceval = read_subject(written(tmp_path, "numbers_val.csv", CEVAL))
    assert [(q.text, q.choices, q.answer) for q in ceval.questions] == [
        ("下列哪一项是质数？", ("4", "6", "7", "9"), 2),
        ("Which is a colour?", ("cat", "blue", "dog", "mat"), 1),
    ]


def test_in_csv_the_answer_is_a_letter_even_where_a_choice_is_one(tmp_path):
    (question,) = read_subject(written(tmp_path, "x.csv", "Which letter?,B,A,C,D,A\n")).questions
    assert question.answer == 0


def test_a_folder_has_a_subject_for_each_file(tmp_path):
    for name, content in (("b_val.csv", CEVAL), ("a_val.csv", MMLU), ("notes.txt", "no questions")):
        written(tmp_path, f"val/{name}", content)
    assert [s.name for s in read_subjects(tmp_path / "val")] == ["a", "b"]
    with pytest.raises(DataError, match=r"holds no questions: give one of its folders: val"):
        read_subjects(tmp_path)


GOOD = json.dumps(ASKED[0])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", GOOD + '\n{"question": }', r"x.jsonl, line 2, column 14: not valid JSON"),
        ("x.jsonl", "[" * 100_000, r"line 1: lists are nested too deep|line 1, column"),
        ("x.jsonl", "[]", "line 1: is a list, wanted an object"),
        ("x.jsonl", '{"question": "?"}', "line 1: no 'choices'"),
        ("x.jsonl", '{"question": "?", "choices": "ab", "answer": 0}', "'choices' is a text"),
        ("x.jsonl", '{"question": "?", "choices": ["a"], "answer": 0}', "has 1 choices"),
        ("x.jsonl", '{"question": "?", "choices": ["a", 3], "answer": 0}', "choice 2 is 3, wanted a text"),
        ("x.jsonl", '{"question": "?", "choices": ["a", " "], "answer": 0}', "choice 2 is empty"),
        ("x.jsonl", '{"question": " ", "choices": ["a", "b"], "answer": 0}', "the question is empty"),
        ("x.jsonl", '{"question": "?", "choices": ["a", "b"], "answer": 2}', "answer 2 is no index of 2 choices"),
        ("x.jsonl", '{"question": "?", "choices": ["a", "b"], "answer": true}', "'answer' is True"),
        ("x.jsonl", '{"question": "?", "choices": ["a", "b"], "answer": "c"}', "answer 'c' is no letter from A to B"),
        ("x.jsonl", '{"question": "\\ud800", "choices": ["a", "b"], "answer": 0}', "half of a surrogate pair"),
        ("x.jsonl", "\n", "holds no question"),
        ("x.csv", "id,question,A,B,D,answer\n", "wanted question, A, B, ..., answer"),
        ("x.csv", "id,question,A,B,answer\n0,?,a,b,\n", "line 2: the answer is empty: a test split may have none"),
        ("x.csv", "?,a,b,c,d,A\n?,a,b,c,d,e,A\n", "line 2: has 7 columns, the first row has 6"),
        ("x.csv", '?,"a\n', "line 1: not valid CSV"),
        ("x.csv", "?,a,A\n", "has 3 columns"),
        ("x.txt", "?", "questions are read from .jsonl, .ndjson and .csv files"),
    ],
)
def test_what_is_wrong_is_told_by_file_and_line(tmp_path, name, content, message):
    with pytest.raises(DataError, match=message) as caught:
        read_subject(written(tmp_path, name, content))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
