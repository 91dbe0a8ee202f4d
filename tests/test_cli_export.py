"""`tightfit export`: from a run to transformers and back."""

import pytest
import torch
import transformers

from command_line import tightfit
from tightfit.models.generation import generate_text
from tightfit.models.saving import load_model, save_model
from tightfit.training.data.tokenizer import load_tokenizer, train_tokenizer
from tiny import decoder

pytestmark = pytest.mark.keeps("exported-decoder-logits-run")

TEXT = "The house of Rome has forty doors, and the mill of Bath has six."


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What a finished run leaves of model and tokenizer."""
    folder = tmp_path_factory.mktemp("run")
    save_model(decoder(num_layers=2), folder)
    train_tokenizer([TEXT] * 8, 300).save(folder)
    return folder


def test_a_run_is_exported_with_its_tokenizer_and_transformers_generates_the_same(run, tmp_path):
    result = tightfit("export", run, "--output", tmp_path / "out")
    assert (result.code, "LlamaForCausalLM" in result.out) == (0, True), result.err
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(TEXT)["input_ids"] == load_tokenizer(run).encode(TEXT)
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == load_tokenizer(run).end_of_text
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    theirs = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0]
    ours = generate_text(load_model(run), load_tokenizer(run), TEXT, max_new_tokens=8, temperature=0)
    assert tokenizer.decode(theirs, skip_special_tokens=True) == ours


def test_an_exported_model_becomes_a_run_again(run, tmp_path):
    tightfit("export", run, "--output", tmp_path / "out")
    result = tightfit("export", tmp_path / "out", "--to", "decoder", "--output", tmp_path / "back")
    assert (result.code, "Decoder of" in result.out) == (0, True), result.err
    for one, other in zip(load_model(run).parameters(), load_model(tmp_path / "back").parameters(), strict=True):
        assert torch.equal(one, other)
    assert load_tokenizer(tmp_path / "back").encode(TEXT) == load_tokenizer(run).encode(TEXT)


def test_a_folder_that_holds_files_or_no_run_is_one_line(run, tmp_path):
    assert "is not an empty folder: give one that is not there yet" in tightfit("export", run, "--output", run).error
    missing = tightfit("export", tmp_path / "none", "--output", tmp_path / "out")
    assert (missing.code, "give the folder of a finished run" in missing.error) == (2, True)


def test_the_files_beside_a_tokenizer_go_with_it(run, tmp_path):
    (run / "chat_template.jinja").write_text("{{ messages }}")
    tightfit("export", run, "--output", tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
