"""Files are read by what they hold, in the layouts and spellings that people have, and what is not read is said."""

import csv
import io
import json

import pytest
from reading import CALL, TOOL, chatml, decoded, learnt, lines, read, refused, rows

from tightfit.training.data.tokenizer import train_tokenizer

CHATS = [
    {"messages": [{"role": "user", "content": f"q {n}"}, {"role": "assistant", "content": f'a, "{n}"\nü'}]}
    for n in range(9)
]
PAIRS = [{"instruction": f"q {n}", "input": "", "output": f'a, "{n}"\nü'} for n in range(9)]
EXPECTED = [chatml([("user", f"q {n}"), ("assistant", f'a, "{n}"\nü')]) for n in range(9)]


def table(records, delimiter=","):
    written = io.StringIO()
    writer = csv.writer(written, delimiter=delimiter)
    writer.writerow(records[0])
    writer.writerows(record.values() for record in records)
    return written.getvalue()


def spread(records):
    return "\n".join(json.dumps(record, indent=2) for record in records)


@pytest.mark.keeps("file-read-holds-json")
@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", lines),
        ("a.json", lines),
        ("a.jl", lines),
        ("a.jsonl.txt", lines),
        ("a.txt", lines),
        ("a", lines),
        ("a.json", json.dumps),
        ("a.json", lambda records: "\ufeff " + json.dumps(records, indent=1)),
        ("a.jsonl", json.dumps),
        ("a.txt", lambda records: json.dumps(records, indent=4)),
        ("a.json", spread),
        ("a.csv", table),
        ("a.tsv", lambda records: table(records, "\t")),
        ("a.csv", lambda records: table(records, ";")),
        ("a.txt", table),
        ("a.csv", lambda records: "\ufeff" + table(records).replace("instruction", "Instruction", 1)),
    ],
)
@pytest.mark.parametrize("records", [CHATS, PAIRS], ids=["chats", "alpaca"])
def test_a_file_is_read_by_what_it_holds(tmp_path, tokenizer, name, write, records):
    if records is CHATS and (write is table or name.endswith("sv")):
        records = [{"messages": json.dumps(each["messages"])} for each in records]
        name = name.replace("txt", "csv")  # one column looks like a text
    (tmp_path / name).write_text(write(records), newline="")
    store = read(tmp_path / name, tokenizer)
    assert (store.kind, decoded(store, tokenizer)) == ("conversations", EXPECTED)


def test_parquet_of_each_kind_is_read_under_any_name(tmp_path, tokenizer, datasets):
    for number, records in enumerate((CHATS, PAIRS)):
        rows(datasets, records).to_parquet(tmp_path / f"{number}.data")
        assert decoded(read(tmp_path / f"{number}.data", tokenizer), tokenizer) == EXPECTED


@pytest.mark.keeps("file-read-holds-json")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "[1] A book, which begins with a note."),
        ("a.txt", '{"no": JSON at all'),
        ("a.txt", "question, answer"),
        ("a.txt", "Question, answer\nand so on, and on, and on"),
        ("a.txt", "{ braces } in prose"),
        ("a.log", "12:00 [{x}] started"),
    ],
)
def test_prose_is_a_text(tmp_path, tokenizer, name, text):
    (tmp_path / name).write_text(text)
    store = read(tmp_path / name, tokenizer)
    assert (store.kind, decoded(store, tokenizer)) == ("text", [f"{text}<|im_end|>"])


@pytest.mark.keeps("file-read-holds-json")
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", '{"a": 1, "b": 2}', "its fields are a, b: wanted text"),
        ("a.json", '{"version": 1,\n "data": [{"text": "a"}]}', "the list in 'data' alone would be read"),
        ("a.json", "[1, 2]", "neither a list of records nor one record a line"),
        ("a.json", "prose", "neither a list of records nor one record a line"),
        ("a.json", '[{"text": "a"},\n {"text": "b"\n', "line 3, column 1: not valid JSON"),
        ("a.json", '[{"text": "a"},\n {"text": "b"}\n', "the list does not end"),
        ("a.json", '[{"text": "a"}]\n{"text": "b"}', "line 2, column 1: not valid JSON: something behind the end"),
        ("a.json", '[{"text": "a"}, ]', "line 1, column 17: not valid JSON"),
        ("a.json", '[{"text": "a"}\n {"text": "b"}]', "line 2, column 2: not valid JSON"),
        ("a.json", '[{"text": "a"},\n {"id": 1,\n  "text": 3}]', "line 3, column 3: \"text\" is int"),
        ("a.json", '[\n{"text": "a", "text": "b"}]', "line 2, column 15: the key 'text' stands twice"),
        ("a.csv", "a,b\n1,2\n", "its columns are a, b: wanted text"),
        ("a.csv", "text,n\na,1\nb\n", "line 3: 1 fields, and the first line names 2"),
        ("a.csv", 'text,n\n"a,1\n', "line 2: not a row of a table"),
        ("a.csv", "text,text\na,b\n", "two columns have the same name"),
        ("a.csv", "messages\nhello\n", '"messages" is str, wanted a list of turns'),
        ("a.csv", "prompt,completion\nq,\n", '"completion" is empty'),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_in_one_line_with_its_place(tmp_path, tokenizer, name, content, said):
    (tmp_path / name).write_text(content)
    assert said in refused(tmp_path / name, tokenizer)


@pytest.mark.keeps("file-read-holds-json")
@pytest.mark.parametrize(
    ("begin", "said"),
    [(b"PK\x03\x04", "Excel"), (b"%PDF-1.4", "a PDF"), (b"\xfd7zXZ\0", "xz"), (b"ARROW1\0\0", "Arrow")],
)
def test_a_file_of_another_kind_is_named(tmp_path, tokenizer, begin, said):
    (tmp_path / "a.csv").write_bytes(begin + b"\0" * 40)
    assert said in refused(tmp_path / "a.csv", tokenizer)


def test_a_list_longer_than_what_is_read_at_once_keeps_every_record(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("tightfit.training.data.record_files._CHUNK_BYTES", 7)
    (tmp_path / "a.json").write_text(json.dumps(CHATS, indent=1, ensure_ascii=False))
    assert decoded(read(tmp_path / "a.json", tokenizer), tokenizer) == EXPECTED


Q, A = "q", "a"
CHAT = chatml([("user", Q), ("assistant", A)])


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [{"from": "Human", "value": Q}, {"from": "GPT", "value": A}]},
        {"conversation": [{"role": "user", "value": Q}, {"role": "chatgpt", "text": A}]},
        {"items": [{"from": "human", "value": Q}, {"from": "bing", "value": A}]},
        {"dialogue": [{"speaker": "prompter", "text": Q}, {"speaker": "assistant", "text": A}]},
        {"contents": [{"role": "user", "parts": [{"text": Q}]}, {"role": "model", "parts": [{"text": A}]}]},
        {"messages": json.dumps([{"role": "user", "content": Q}, {"role": "assistant", "content": A}])},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": Q}]},
                {"role": "assistant", "content": ["a"]},
            ]
        },
        {"messages": None, "instruction": Q, "output": A},
        {"instruction": Q, "input": "", "output": A},
        {"instruction": "", "input": Q, "output": A},
        {"question": Q, "answer": A},
        {"query": Q, "response": A},
        {"problem": Q, "solution": A},
        {"inputs": Q, "targets": A},
        {"prompt": [{"role": "user", "content": Q}], "completion": [{"role": "assistant", "content": A}]},
        {"prompt": Q, "completion": [{"role": "assistant", "content": A}]},
        {"prompt": Q, "response": A},
        {"prompt": [{"role": "user", "content": Q}], "completion": A, "label": True},
    ],
)
def test_every_spelling_of_a_question_and_an_answer_is_a_chat(tmp_path, tokenizer, record):
    (tmp_path / "a.jsonl").write_text(lines([record]))
    store = read(tmp_path / "a.jsonl", tokenizer)
    assert decoded(store, tokenizer) == [CHAT]
    assert learnt(store, tokenizer) == ["a<|im_end|>"]


def test_prompt_and_completion_are_one_text_of_which_the_completion_is_learnt(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text(lines([{"prompt": "one and", "completion": " two"}, PAIRS[0]]))
    store = read(tmp_path / "a.jsonl", tokenizer)
    assert decoded(store, tokenizer) == ["one and two<|im_end|>", EXPECTED[0]]
    assert learnt(store, tokenizer)[0] == " two<|im_end|>"


@pytest.mark.parametrize(
    ("record", "turns"),
    [
        ({"instruction": "i", "input": "more", "output": "o"}, ["u:i\nmore", "a:o"]),
        ({"instruction": "i", "context": "more", "response": "o"}, ["u:i\nmore", "a:o"]),
        ({"question": "i", "context": "more", "answer": "o"}, ["u:i\nmore", "a:o"]),
        ({"instruction": "i", "output": "o", "system": "s", "history": [["h", "k"]]},
         ["s:s", "u:h", "a:k", "u:i", "a:o"]),
        ({"messages": CHATS[0]["messages"], "system_prompt": "s"}, ["s:s", "u:q 0", 'a:a, "0"\nü']),
        ({"messages": [{"role": "system", "content": "s"}, *CHATS[0]["messages"]], "system": "s"},
         ["s:s", "u:q 0", 'a:a, "0"\nü']),
        ({"messages": CHATS[0]["messages"], "system": None}, ["u:q 0", 'a:a, "0"\nü']),
        ({"systemInstruction": {"parts": [{"text": "s"}]}, "contents": [{"role": "model", "parts": [{"text": "x"}]}]},
         ["s:s", "a:x"]),
    ],
)  # fmt: skip
def test_what_stands_beside_the_turns_is_part_of_the_chat(tmp_path, tokenizer, record, turns):
    roles = {"u": "user", "a": "assistant", "s": "system"}
    (tmp_path / "a.jsonl").write_text(lines([record]))
    notes = []
    store = read(tmp_path / "a.jsonl", tokenizer, notes)
    assert decoded(store, tokenizer) == [chatml([(roles[turn[0]], turn[2:]) for turn in turns])]
    assert learnt(store, tokenizer) == ["".join(f"{turn[2:]}<|im_end|>" for turn in turns if turn[0] == "a")]
    assert notes == []


TWO = [{"role": "system", "content": "one"}, *CHATS[0]["messages"]]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"messages": TWO, "system": "another"}, "say different things: keep one of them"),
        ({"prompt": "a", "completion": "b", "system": "s"}, "which no chat template is used for"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "system": "s"}, "which no chat template is used for"),
        ({**CHATS[0], "images": ["a.png"]}, '"images" is beside the turns, and only text is learnt'),
        ({**CHATS[0], "image": "a.png"}, '"image" is beside the turns'),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 'is "image_url"'),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "is without text"),
        ({**CHATS[0], "chat_template_kwargs": [1]}, '"chat_template_kwargs" is list'),
        ({**CHATS[0], "chat_template_kwargs": {"messages": []}}, '"chat_template_kwargs" is messages'),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}, 'the "weight" of a turn is 0.5'),
        (
            {"messages": [{"role": "assistant", "content": "a", "weight": 0}]},
            "no turn of the assistant is to be learnt",
        ),
        ({"conversations": [{"from": "function_call", "value": "look"}]}, '"value" is text that is not valid JSON'),
        ({"conversations": [{"from": "function_call", "value": "[3]"}]}, '"value" is no call'),
        ({"question": "a", "answer": 3}, '"answer" is int, wanted a string'),
        ({"question": "a", "answer": ""}, '"answer" is empty'),
        ({"instruction": "a", "output": "b", "history": ["c"]}, 'a turn of "history" is str'),
    ],
)
def test_what_a_chat_cannot_hold_is_refused(tmp_path, tokenizer, record, said):
    (tmp_path / "a.jsonl").write_text(lines([record]))
    assert said in refused(tmp_path / "a.jsonl", tokenizer)


FLAGS = [("weight", 0), ("train", False), ("loss", False), ("trainable", False), ("weight", 0.0), ("train", "false")]


def folder_with(tmp_path, template):
    folder = tmp_path / "own"
    train_tokenizer(["a text"], 300, chat=True).save(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return str(folder)


PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)


@pytest.mark.keeps("turns-marked-learnt-answers")
@pytest.mark.parametrize(("name", "value"), FLAGS)
@pytest.mark.parametrize("template", [None, PLAIN], ids=["marked", "plain"])
def test_a_turn_that_is_not_to_be_learnt_is_not(tmp_path, name, value, template):
    folder = folder_with(tmp_path, template)
    yes = {"weight": 1, "train": True, "loss": True, "trainable": None}
    ask = {"role": "user", "content": "q", name: None}
    answers = [("no", value), ("yes", yes[name]), ("never", value)]
    turns = [turn for said, flag in answers for turn in (ask, {"role": "assistant", "content": said, name: flag})]
    (tmp_path / "a.jsonl").write_text(lines([{"messages": turns}]))
    notes = []
    store = read(tmp_path / "a.jsonl", folder, notes)
    assert learnt(store, folder) == ["yes<|im_end|>"]
    assert ["no" in text and "never" in text for text in decoded(store, folder)] == [True]
    assert notes == []


@pytest.mark.keeps("turns-marked-learnt-answers")
def test_an_answer_with_a_bad_label_is_left_out_and_counted(tmp_path, tokenizer):
    records = [{"prompt": f"q {n}", "completion": f"a {n}", "label": n % 3 != 0} for n in range(9)]
    records += [
        {**CHATS[0], "kto_tag": False},
        {"prompt": "q", "completion": "a", "label": 0},
        {**CHATS[1], "label": "1"},
    ]
    (tmp_path / "a.jsonl").write_text(lines(records))
    notes = []
    store = read(tmp_path / "a.jsonl", tokenizer, notes)
    assert decoded(store, tokenizer) == [f"q {n}a {n}<|im_end|>" for n in range(9) if n % 3] + [EXPECTED[1]]
    assert notes == [f"{tmp_path / 'a.jsonl'}: left out as bad answers: 5 records whose label is false"]


@pytest.mark.keeps("turns-marked-learnt-answers")
def test_names_that_nothing_reads_are_said_once_with_their_counts_from_the_cache_too(tmp_path, tokenizer):
    records = [{**each, "id": n, "score": n % 2 or None} for n, each in enumerate(CHATS)]
    records[0] = {"messages": [{**turn, "mood": "good", "weight": 1} for turn in CHATS[0]["messages"]], "id": 0}
    path = tmp_path / "a.jsonl"
    path.write_text(lines(records))
    expected = [
        f'{path}: not used of the records: "id" (in 9 records), "score" (in 4 records), "weight" (in 1 record)',
        f'{path}: not used, since the chat template does not mention it: "mood" (in 1 record)',
    ]
    for _ in range(2):
        notes = []
        read(tmp_path / "a.jsonl", tokenizer, notes)
        assert notes == expected


def test_files_of_a_folder_that_are_not_read_are_said(tmp_path, tokenizer):
    (tmp_path / "a.json").write_text(json.dumps(CHATS))
    (tmp_path / "dataset_info.json").write_text('{"features": {}}')
    (tmp_path / "page.html").write_text("<p>")
    (tmp_path / ".hidden").write_text("x")
    notes = []
    assert decoded(read(tmp_path, tokenizer, notes), tokenizer) == EXPECTED
    assert notes == [f"{tmp_path}: not used of the folder: dataset_info.json, page.html"]


def test_a_folder_of_parquet_and_other_records_is_refused(tmp_path, tokenizer, datasets):
    rows(datasets, PAIRS).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text(lines(PAIRS))
    assert "a dataset and records beside it (b.jsonl)" in refused(tmp_path, tokenizer)


def test_what_a_record_has_the_template_read_is_read(tmp_path):
    folder = folder_with(tmp_path, "{{ mood or 'none' }}" + PLAIN)
    values = [{"mood": "good", "other": 1}, json.dumps({"mood": "bad"}), None]
    (tmp_path / "a.jsonl").write_text(lines([{**CHATS[0], "chat_template_kwargs": value} for value in values]))
    notes = []
    store = read(tmp_path / "a.jsonl", folder, notes)
    assert [text[: text.index("<")] for text in decoded(store, folder)] == ["good", "bad", "none"]
    assert notes == [
        f'{tmp_path / "a.jsonl"}: not used, since the chat template does not mention it: "other" (in 1 record)'
    ]


CALLED = chatml(
    [("user", "q"), ("assistant", f"\n<tool_call>\n{json.dumps({'type': 'function', 'function': CALL})}\n</tool_call>")]
)


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]},
        {"role": "assistant", "content": None, "function_call": {**CALL, "arguments": json.dumps(CALL["arguments"])}},
        {"role": "assistant", "tool_calls": [
            {"type": "function", "function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}]},
        {"role": "function_call", "content": json.dumps(CALL)},
        {"from": "function-call", "value": json.dumps([CALL])},
    ],
)  # fmt: skip
def test_every_spelling_of_a_call_is_one(tmp_path, tokenizer, turn):
    (tmp_path / "a.jsonl").write_text(lines([{"messages": [{"role": "user", "content": "q"}, turn]}]))
    assert decoded(read(tmp_path / "a.jsonl", tokenizer), tokenizer) == [CALLED]


@pytest.mark.keeps("turns-marked-learnt-answers")
def test_nulls_that_arrow_adds_to_arguments_are_not_learnt(tmp_path, tokenizer, datasets):
    def record(arguments, properties):
        call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
        tool = {**TOOL, "parameters": {"type": "object", "properties": properties}}
        turns = [
            {"role": "user", "content": "q", "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
        return {"messages": turns, "tools": [tool]}  # fmt: skip

    records = [record({"at": "a"}, {"at": {"type": "string"}}), record({"to": ["b"]}, {"to": {"type": "array"}})]
    (tmp_path / "a.jsonl").write_text(lines(records))
    expected = decoded(read(tmp_path / "a.jsonl", tokenizer), tokenizer)
    assert "null" not in "".join(expected)
    made = rows(datasets, records)
    made.to_parquet(tmp_path / "a.parquet")
    made.save_to_disk(tmp_path / "saved")
    for name in ("a.parquet", "saved"):
        assert decoded(read(tmp_path / name, tokenizer), tokenizer) == expected
    made.to_json(tmp_path / "nulls.jsonl")
    notes = []
    read(tmp_path / "nulls.jsonl", tokenizer, notes)
    assert "null as the argument of a tool is learnt as it stands, in 2 records" in notes[0]


@pytest.mark.parametrize(
    "record",
    [
        {"question": "q", "chosen": "good", "rejected": "bad"},
        {"instruction": "q", "input": "", "chosen": "good", "rejected": "bad"},
        {"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "good"},
         "rejected": {"from": "gpt", "value": "bad"}},
    ],
)  # fmt: skip
def test_preferences_beside_a_question_are_chats(tmp_path, tokenizer, record):
    (tmp_path / "a.jsonl").write_text(lines([record, {**record, "system": "s"}]))
    store = read(tmp_path / "a.jsonl", tokenizer)
    plain = [chatml([("user", "q"), ("assistant", said)]) for said in ("good", "bad")]
    assert decoded(store, tokenizer) == [*plain, *(chatml([("system", "s")]) + each for each in plain)]
    assert learnt(store, tokenizer) == ["good<|im_end|>", "bad<|im_end|>"] * 2
