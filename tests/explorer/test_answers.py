"""Answers: the figures of `estimate` and `plan`, part by part, as plain data and drawn as HTML."""

import gc
import json
import pickle
import re
import sys

import pytest

import tightfit
from tightfit.explorer import drawings
from tightfit.explorer.answers import answered, build
from tightfit.explorer.messages import Failure, Refusal
from tightfit.explorer.page import Answer, _fields, answers, places
from tightfit.explorer.question import PageQuestion
from tightfit.explorer.serving import settings
from tightfit.explorer.uploads import Reading, Upload
from tightfit.planner.outcome import CurveRecord, EstimateRecord, PlanRecord
from tightfit.recipes.records import Largest, Outcome, Recipe, RecipesRecord

TINY = "model: {hidden_size: 32, num_layers: 2, num_heads: 2, vocab_size: 64}"
LLAMA = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip


def tiny(**more):
    return PageQuestion(upload=Upload("run.yaml", TINY), sequence_length=512, batch_size=8, device="rtx4090", **more)


@pytest.fixture(autouse=True)
def without_recipes(monkeypatch):
    """The search for recipes has tests of its own."""
    monkeypatch.setitem(vars(tightfit), "fit", None)


@pytest.fixture(scope="module")
def parts():
    before = vars(tightfit).get("fit", ())
    tightfit.fit = None
    found = list(answered(tiny(budget="0.9x")))
    del tightfit.fit
    if before != ():
        tightfit.fit = before
    return found


def filled(parts):
    answer = Answer(is_complete=True)
    for part in parts:
        answer.take(part)
    return answer


@pytest.mark.slow  # a plan with its curve for a card, twice
def test_the_parts_are_the_figures_of_estimate_and_plan_as_plain_data(parts):
    assert [type(part) for part in parts] == [EstimateRecord, PlanRecord, CurveRecord]
    question = tiny(budget="0.9x")
    model, batch = build(question.described), tightfit.TokenBatch(8, 512, 64)
    asked = {"optimizer": "adamw_fused", "precision": "bf16", "device": "rtx4090"}
    assert parts[0].peak_bytes == tightfit.estimate(model, batch, **asked).peak_bytes
    assert parts[1].peak_bytes == tightfit.plan(model, batch, "0.9x", levers="rounding", **asked).peak_bytes
    assert parts[1].peak_bytes <= parts[1].budget_bytes < parts[0].peak_bytes
    assert pickle.loads(pickle.dumps(parts)) == parts


@pytest.mark.slow  # a plan with its curve for a card
def test_the_page_shows_the_bar_against_the_card_first_and_every_part(parts):
    head, timeline, recipes, curve = places(tiny(budget="0.9x"), filled(parts))
    assert "Fits RTX 4090 with" in head
    assert head.index("Plain step") < head.index("Planned step")
    shares = [float(share) for share in re.findall(r'<i class="[^"]*" style="width:([\d.]+)%', head)]
    assert shares
    assert all(0 <= share <= 100 for share in shares)
    widths = sum(shares[: len(shares) // 2])
    taken = parts[0].reserved_bytes + parts[0].context_bytes
    assert widths == pytest.approx(100 * taken / (drawings.ROOM * parts[0].device_bytes), abs=0.02)
    assert timeline.count("<svg") == 2
    assert curve.count('class="plan"') + curve.count('class="star"') == len(parts[2].points)
    assert recipes == ""


@pytest.mark.slow  # searches for the least, and for recipes that fit
def test_what_cannot_fit_says_the_least_and_keeps_the_bar():
    estimate, refusal, curve = answered(tiny(budget="0.01x"))
    assert isinstance(refusal, Refusal)
    assert refusal.least_bytes == curve.points[-1].peak_bytes or refusal.least_bytes > 0
    head, *_ = places(tiny(budget="0.01x"), filled([estimate, refusal, curve]))
    assert "Does not fit RTX 4090" in head
    assert "the least is" in head
    assert 'class="track"' in head


def test_an_uploaded_config_json_is_built_and_its_code_is_not_run(tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    monkeypatch.chdir(tmp_path)
    fields = LLAMA | {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    upload = Upload("config.json", json.dumps(fields))
    question = PageQuestion(upload=upload, sequence_length=32, rank=2, base="fp32", targets="q_proj")
    estimate = next(answered(question))
    assert isinstance(estimate, EstimateRecord)
    assert "evil" not in sys.modules
    (too_long,) = answered(PageQuestion(upload=upload, sequence_length=65))
    assert too_long == Failure("sequence 65 is longer than the model's 64 positions: lower it")
    (reading,) = answered(upload)
    assert isinstance(reading, Reading)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"model_type": "nosuch"}, "config.json"),
        ({"model_type": "vit"}, "is not a language model"),
        ({"num_attention_heads": 5}, ""),
        ({"hidden_size": -3}, ""),
        ({"hidden_act": "nosuch"}, "nosuch"),
    ],
)
def test_a_model_that_cannot_be_built_is_one_line(fields, line):
    (failure,) = answered(PageQuestion(upload=Upload("config.json", json.dumps(LLAMA | fields)), sequence_length=16))
    assert isinstance(failure, Failure)
    assert line in failure.line
    assert "\n" not in failure.line
    assert len(failure.line) <= 500


def test_nothing_of_an_upload_is_markup_on_the_page():
    upload = Upload.of("<img src=x>.yaml", b"model: {'<script>': 1}")
    ((head, *_),) = answers(None, upload, {})
    assert "<script>" not in head
    assert "<img" not in head
    assert "&lt;script&gt;" in head


def test_recipes_are_a_table_best_first():
    outcomes = (
        Outcome(
            Recipe("bf16", optimizer="adamw8bit"),
            True,
            2**34,
            2**34,
            step_seconds=0.5,
            tokens_per_second=4096.0,
            longest_sequence=Largest(4096),
            largest_batch=Largest(7, True),
        ),
        Outcome(Recipe("fp32"), False, 2**36, 2**36),
    )
    table = drawings.recipes(RecipesRecord(outcomes, "RTX 4090", 2**34))
    assert table.index("bf16 weights, 8-bit AdamW") < table.index("fp32 weights, AdamW")
    for text in ("1 of 2 recipes fit 16.00 GiB on RTX 4090", "~4,096", ">7<", "needs 64.00 GiB", "500.0 ms"):
        assert text in table


@pytest.mark.parametrize("number", [0, -5, 1.5, 10**9, None])
@pytest.mark.parametrize("name", ["sequence_length", "batch_size"])
def test_a_number_that_cannot_be_takes_the_place_of_the_last_verdict(name, number):
    (only,) = answers(None, None, {name: number})
    assert name.replace("_", " ").split()[0] in only[0] or "tokens" in only[0]
    assert only[1:] == ("", "", "", "", "")


@pytest.mark.slow  # Gradio is imported
@pytest.mark.filterwarnings("ignore")  # of Gradio and of what it imports
def test_the_fields_hand_on_what_was_typed():
    gr = pytest.importorskip("gradio")
    with settings(), gr.Blocks():
        fields = _fields(gr, PageQuestion())
    for name in ("sequence_length", "batch_size", "rank"):
        assert [fields[name].preprocess(number) for number in (0, -5, 1.5)] == [0, -5, 1.5]
    cards = [label for label, _ in fields["device"].choices]
    assert any("rtx4090" in label and "RTX 4090" in label for label in cards), "found by key and by name"
    del fields
    gc.collect()  # Gradio's event loop warns when it goes, and does so here
