"""Answers: the figures of `estimate` and `plan`, part by part, as plain data and drawn as HTML."""

import gc
import json
import pickle
import re
import sys

import pytest

import tightfit
from tightfit.cli.explorer import drawings
from tightfit.cli.explorer.answers import answered, build
from tightfit.cli.explorer.messages import NoAnswer, NoPlan, Progress, Waited
from tightfit.cli.explorer.page import PartialAnswer, _fields, answers, places, shown_so_far
from tightfit.cli.explorer.question import PageQuestion
from tightfit.cli.explorer.serving import settings
from tightfit.cli.explorer.uploads import Upload, UploadedModel
from tightfit.planner.outcome import CurveRecord, EstimateRecord, PlanRecord
from tightfit.planner.records import CurvePoint, StepFigures
from tightfit.planner.report.plan_tables import device_footprint, does_not_fit
from tightfit.recipes.records import LargestSize, Outcome, Recipe, RecipesRecord

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
    answer = PartialAnswer(is_complete=True)
    for part in parts:
        answer.take(part)
    return answer


@pytest.mark.keeps("page-shows-figures-estimate")
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
    assert re.search(r"Fits [\d.]+ MiB on RTX 4090 with", head)
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


def test_a_budget_has_a_line_on_each_bar():
    estimate = next(answered(tiny()))
    assert isinstance(estimate, EstimateRecord)
    found = drawings.bars(estimate, None, "12GiB")
    at = 100 * 12 * 2**30 / (drawings.ROOM * estimate.device_bytes)
    assert f'<em class="budget" style="left:{at:.3f}%">' in found
    assert found.count('<em class="card"') == found.count('class="track"') == 1
    assert 'class="budget"' not in drawings.bars(estimate, None, "100%")


def test_no_axis_of_the_trade_off_begins_below_zero():
    far_apart = [CurvePoint("no lever", 900, 1.0), CurvePoint("8 micro-batches", 10, 18.4)]
    drawn = drawings.curve(CurveRecord(tuple(far_apart), ()), None, 500)
    assert '<span class="zero">0.00x</span>' in drawn
    assert "<span>0 B</span>" in drawn


@pytest.mark.slow  # searches for the least, and for recipes that fit
def test_what_cannot_fit_says_the_least_and_keeps_the_bar():
    estimate, refusal, curve = answered(tiny(budget="0.01x"))
    assert isinstance(refusal, NoPlan)
    assert refusal.least_bytes == curve.points[-1].peak_bytes or refusal.least_bytes > 0
    head, *_ = places(tiny(budget="0.01x"), filled([estimate, refusal, curve]))
    assert re.search(r"Does not fit [\d.]+ \w+ on RTX 4090", head)
    assert "the least is" in head
    assert 'class="track"' in head


@pytest.mark.keeps("code-upload-run-path")
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
    assert too_long == NoAnswer("sequence 65 is longer than the model's 64 positions: lower it")
    (reading,) = answered(upload)
    assert isinstance(reading, UploadedModel)


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
    assert isinstance(failure, NoAnswer)
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
            longest_sequence=LargestSize(4096),
            largest_batch=LargestSize(7, True),
        ),
        Outcome(Recipe("fp32"), False, 2**36, 2**36),
    )
    table = drawings.recipes(RecipesRecord(outcomes, "RTX 4090", 2**34))
    assert table.index("bf16 weights, 8-bit AdamW") < table.index("fp32 weights, AdamW")
    assert table.index("500.0 ms") < table.index("The nearest that do not fit") < table.index("64.00 GiB")
    for text in ("1 of 2 recipes fit 16.00 GiB on RTX 4090", "~4,096", ">7<", "500.0 ms"):
        assert text in table


def test_recipes_that_fit_come_first_then_the_nearest_three_and_the_rest_is_folded():
    def table(fitting, others):
        rows = [Outcome(Recipe("bf16"), True, 2**30, 2**30, levers=("chunked_loss",))] * fitting
        rows += [Outcome(Recipe("fp32"), False, 2**30, (7 + n) * 2**30) for n in range(others)]
        return drawings.recipes(RecipesRecord(tuple(rows), "RTX 4090", 2**34))

    def rows(text):
        return text.count("<tr") - text.count("<thead>")

    fitting, nearest, rest = re.split("<h3>|<details>", table(2, 9))
    assert [rows(each) for each in (fitting, nearest, rest)] == [2, 3, 6]
    assert "changes" not in nearest.partition("<thead>")[0]
    assert "levers chunked loss" in fitting
    assert "<summary>6 more, from 10.00 GiB</summary>" in rest
    assert "<details>" not in table(2, 3)
    assert "<h3>" not in table(2, 0)
    assert rows(table(0, 3)) == 3


def figures(peak, reserved):
    return StepFigures(peak, 1.0, {"activations": peak}, {}, {}, "forward", "", "", {}, (), reserved_bytes=reserved)


def of_card(*, fits, peak=20 * 2**30, reserved=24 * 2**30):
    """A step on a card of 23 GiB."""
    more = {"context_bytes": 2**29, "fits": fits}
    return EstimateRecord(figures(peak, reserved), 1, "bf16", "adamw", "RTX 4090", 23 * 2**30, (), **more)


@pytest.mark.keeps("verdict-page-bar-say")
@pytest.mark.parametrize("fits", [True, False])
def test_the_verdict_and_the_bar_say_the_same(fits):
    """The allocator gives back what it must, so a step may fit that reserves more where there is more."""
    estimate = of_card(fits=fits)
    head, *_ = places(PageQuestion(), PartialAnswer(estimate=estimate, is_complete=True))
    assert ("Does not fit" in head) is not fits
    assert ("more than the card has" in head) is not fits
    assert ("23.00 GiB in all, 0 B left" in head) is fits
    assert (": does not fit, 24.50 GiB of 23.00 GiB" in does_not_fit(estimate)) is not fits
    (line,) = device_footprint(estimate)
    assert line.endswith(f"that is {'23.00' if fits else '24.50'} GiB of 23.00 GiB.")


def test_while_it_plans_the_page_says_what_it_does_and_for_how_long():
    answer = PartialAnswer()
    assert "Starting" in places(PageQuestion(), answer)[0]
    answer.take(Progress("Step 1 of 4: running the plain step dry"))
    answer.take(Waited(7))
    assert "Step 1 of 4: running the plain step dry (7 s)" in places(PageQuestion(), answer)[0]
    answer.take(of_card(fits=True))
    answer.take(Progress("Step 4 of 4: 3 of 42 recipes; bf16 weights"))
    head, _, recipes, _ = shown = places(PageQuestion(), answer)
    assert "3 of 42 recipes" in head
    assert "3 of 42 recipes" in recipes
    assert "Fits" not in head, "no verdict before the plan"
    answer.is_complete = True
    assert not any("Step 4" in each for each in places(PageQuestion(), answer))
    assert len(shown) == 4


@pytest.mark.keeps("verdict-page-bar-say")
def test_there_is_nothing_to_run_where_nothing_fits_and_nothing_before_a_plan():
    question = tiny()
    described = question.described
    answer = PartialAnswer(estimate=of_card(fits=False))
    assert shown_so_far(question, described, answer)[4:] == ("", "")
    answer.take(NoPlan("it cannot fit", 2**40))
    for text in shown_so_far(question, described, answer)[4:]:
        assert text.startswith("# Nothing to run: this step does not fit rtx4090 within 100%")
        assert all(line.startswith("#") for line in text.splitlines())


@pytest.mark.slow  # a plan with its curve for a card
def test_a_budget_that_is_a_share_of_the_plain_peak_is_that_of_the_recipes_in_bytes(monkeypatch):
    asked = []

    def fit(*args, **how):
        asked.append(how)
        how["notice"]("1 of 2 recipes; a recipe")
        return RecipesRecord((Outcome(Recipe(), True, 1, 1),), "RTX 4090", 2**30)

    monkeypatch.setitem(vars(tightfit), "fit", fit)
    said = []
    found = list(answered(tiny(budget="0.9x"), said.append))
    assert isinstance(found[-1], RecipesRecord)
    assert asked[0]["budget"] == found[1].budget_bytes
    assert [each.line[:11] for each in said] == [
        "Step 1 of 4",
        "Step 2 of 4",
        "Step 3 of 4",
        "Step 4 of 4",
        "Step 4 of 4",
    ]


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


def test_a_question_that_the_reader_has_left_writes_nothing_more_when_its_worker_ends():
    """A newer question, or its mistake, stands in the same places."""
    left = []

    class Ends:
        def ask(self, question, has_left):
            left.append(True)  # while it works; it ends without a word then
            yield from ()

    found = list(answers(Ends(), None, {}, lambda: bool(left)))
    assert len(found) == 1, "what is said when it begins"
