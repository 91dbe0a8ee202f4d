"""Templates that are published, as trl carries them: with marks for training, and without."""

from pathlib import Path

import pytest
import trl
from chat_tokenizers import made
from test_chats import TURNS, conversation, encoded, learnt_texts

from tightfit.training.data.bad_lines import BadLine

FOLDER = Path(trl.__file__).parent / "chat_templates"
PLAIN_TURNS = TURNS[1:]  # some templates have no system turn
MARKED = ["qwen2_5_training", "qwen3_training", "llama3_training", "phi3_training", "gemma_training", "lfm2_training"]
UNMARKED = ["qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3", "llama3_1", "phi3", "gemma", "glm4moe"]


def template(name):
    path = FOLDER / f"{name}.jinja"
    if not path.is_file():
        pytest.skip(f"this trl has no {path.name}")
    return path.read_text("utf-8")


@pytest.mark.keeps("chat-template-writes-writes")
@pytest.mark.parametrize("name", MARKED)
def test_a_published_template_writes_and_marks_what_transformers_does(name):
    ours, theirs, _ = made(template(name))
    turns = [*PLAIN_TURNS[:3], {"role": "assistant", "content": "Yes, and 12345."}]
    expected = theirs.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    found = encoded(ours, turns)
    assert found.ids.tolist() == expected["input_ids"]
    assert found.learnt.astype(int).tolist() == expected["assistant_masks"]
    assert found.learnt.any()


@pytest.mark.parametrize("name", UNMARKED)
def test_of_a_published_template_without_marks_every_answer_is_learnt_behind_its_prompt(name):
    ours, theirs, tokenizer = made(template(name))
    items = ours.encode(ours.texts(conversation(PLAIN_TURNS)))
    texts = [text for item in items for text in learnt_texts(tokenizer, item)]
    assert len(texts) == 2
    assert "Well: 12345." in texts[0]
    assert "🙂 spaces   and\n\nlines" in texts[1]
    assert "Hello there" not in "".join(texts)
    assert "And äöü" not in "".join(texts)
    for item, turn in zip(items, (1, 3) if len(items) == 2 else (1,), strict=True):
        prompt = ours.prompt(PLAIN_TURNS[:turn])
        assert item.ids[: len(prompt)].tolist() == prompt
    whole = theirs.apply_chat_template(PLAIN_TURNS, tokenize=False)
    assert theirs.decode(items[-1].ids) == whole


@pytest.mark.slow  # every published template
def test_no_published_template_gets_past_the_errors_that_are_meant_for_it():
    """Conversations that many templates are not made for are a bad line for those, and nothing worse."""
    odd = [
        [{"role": "assistant", "content": "first"}],
        [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}],
        [{"role": "tool", "content": "a"}, {"role": "assistant", "content": ""}],
    ]
    tried, reasons = 0, []
    for path in sorted(FOLDER.glob("*.jinja")):
        ours, _, _ = made(path.read_text("utf-8"))
        for turns in odd:
            tried += 1
            try:
                ours.encode(ours.texts(conversation(turns)))
            except BadLine as bad:
                reasons.append(bad.reason)
    assert 0 < len(reasons) < tried
    assert not any("\n" in reason for reason in reasons)
