"""The text on which a compression is judged: what the run itself has held out."""

import yaml

from tightfit.models.compress.quantising import _held_out
from tightfit.models.compress.source import open_source
from tightfit.models.compress.texts import held_out_of
from tightfit.models.saving import save_model
from tightfit.training.data.tokenizer import train_tokenizer
from tiny import decoder


def test_a_run_is_judged_on_what_it_has_held_out_which_is_named(tmp_path):
    text = tmp_path / "poems.txt"
    text.write_text("".join(f"the {n} birds sing of the sea and the sky\n" for n in range(400)))
    model = decoder(hidden_size=32, num_layers=1, vocab_size=300, max_position_embeddings=64).eval()
    save_model(model, run := tmp_path / "run")
    train_tokenizer([text.read_text()], 300).save(run)
    data = {"source": str(text), "sequence_length": 32, "vocab_size": 300, "validation_fraction": 0.2}
    (run / "config.yaml").write_text(yaml.safe_dump({"data": data}))
    source = open_source(run)
    (note,), rows = _held_out(source, model, None, 16)
    assert note == f"Perplexity is of what the run has held out of {text}."
    assert rows.shape[1] == 16
    assert "birds" in source.tokenizer.decode(rows.flatten().tolist())
    (note,), _ = _held_out(source, model, text, 16)
    assert note == f"Perplexity is of {text}."
    text.unlink()
    assert held_out_of(run, model, 16, 4) is None
    (note,), rows = _held_out(source, model, None, 16)
    assert "Python's library: name your own with --text" in note
    assert "birds" not in source.tokenizer.decode(rows.flatten().tolist())
