"""A training on conversations: what is learnt, what the run's folder keeps, and the answers that it gives."""

import json

import pytest
import torch
from tiny_training import metrics, run, settings
from transformers import PreTrainedTokenizerFast

from command_line import tightfit
from tightfit.errors import ConfigError
from tightfit.training.data.prepare import prepare_data
from tightfit.training.data.tokenizer import load_tokenizer

PLACES = ["Rome", "Bath", "Kiel", "Lima", "Oslo"]
CHATS = [
    {"messages": [{"role": "user", "content": f"Where is {name} {n}?"},
                  {"role": "assistant", "content": f"In {place}."},
                  {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]}
    for n in range(8) for name, place in zip(["Ada", "Bo", "Cy", "Di", "Ed"], PLACES, strict=True)
]  # fmt: skip


def chats(folder, extra=""):
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in CHATS) + extra)
    return str(path)


@pytest.mark.keeps("turn-assistant-learnt-token")
def test_only_answers_have_labels_and_each_label_is_its_token(tmp_path):
    config = settings(tmp_path, data={"source": chats(tmp_path), "shuffle": False, "sequence_length": 64,
                                      "validation_fraction": 0.0}, model={"max_position_embeddings": 64})  # fmt: skip
    data = prepare_data(config.data, config.model)
    assert (data.kind, data.objective) == ("conversations", "sft")
    batch = data.training.batch(range(len(CHATS)))
    is_learnt = batch["labels"] != -100
    assert torch.equal(batch["labels"][is_learnt], batch["input_ids"][is_learnt])
    learnt = [data.tokenizer._tokenizer.decode(row[flags].tolist(), skip_special_tokens=False)
              for row, flags in zip(batch["input_ids"], is_learnt, strict=True)]  # fmt: skip
    assert learnt == [f"{each['messages'][1]['content']}<|im_end|>Yes.<|im_end|>" for each in CHATS]


def test_with_the_causal_objective_every_token_of_a_conversation_is_learnt(tmp_path):
    config = settings(tmp_path, data={"source": chats(tmp_path), "sequence_length": 32})
    answers = prepare_data(config.data, config.model)
    every = prepare_data(config.data, config.model, objective="causal")
    assert every.objective == "causal"
    assert every.fingerprint != answers.fingerprint
    count = [(data.training.batch([0])["labels"] != -100).sum() for data in (answers, every)]
    assert 0 < count[0] < count[1]


@pytest.mark.parametrize(("objective", "said"), [
    ("sft", "training.objective is sft, which learns from conversations, and the data is text"),
])  # fmt: skip
def test_an_objective_that_the_data_is_not_for_is_refused(tmp_path, objective, said):
    config = settings(tmp_path)
    with pytest.raises(ConfigError, match=said):
        prepare_data(config.data, config.model, objective=objective)


@pytest.mark.slow  # a whole training
def test_a_run_on_conversations_keeps_its_template_answers_and_loads_in_transformers(tmp_path):
    data = {"source": chats(tmp_path, "{\n[]\n"), "bad_lines": "skip", "sequence_length": 64, "vocab_size": 300}
    model = {"max_position_embeddings": 64}
    result = run(tmp_path, data=data, model=model, training={"max_steps": 60, "learning_rate": 2e-2})
    folder = tmp_path / "run"
    losses = [line["loss"] for line in metrics(tmp_path)]
    assert losses[-1] < losses[0] / 3
    assert "user\nWhere is" in result.sample
    tokenizer = load_tokenizer(folder)
    turns = CHATS[0]["messages"]
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    assert theirs.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=True)["input_ids"] == (
        tokenizer.chat.prompt(turns[:1])
    )
    assert theirs.eos_token_id == tokenizer.end_of_text == tokenizer.chat.end_of_turn()
    answer = tightfit("generate", folder, "--chat", "--prompt", "Where is Cy 3?", "--temperature", 0)
    assert answer.code == 0
    assert answer.out.startswith("In ")
    assert len(answer.out) < 40, "it ends its turn"
    run(tmp_path, data={"vocab_size": 300}, output={"overwrite": True})
    assert not (folder / "chat_template.jinja").exists()
    refused = tightfit("generate", folder, "--chat", "--prompt", "x")
    assert refused.code == 2
    assert "has no chat template" in refused.err
