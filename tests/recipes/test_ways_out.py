"""Ways out where a step does not fit: `CannotFit.ways_out`, and the table on the command line."""

import functools
import pickle
from dataclasses import replace

import pytest
import torch

import tightfit
from command_line import tightfit as run
from models_by_name import Flat
from tightfit.errors import CannotFit, InputError
from tightfit.recipes import choices, ways_out
from tightfit.recipes.batches import length_of, shortened, with_rows
from tightfit.recipes.table import describe_ways_out
from tightfit.recipes.ways import WaysOut
from tightfit.step import TokenBatch, model_loss
from tightfit.training.config import load_config
from tiny import allocator_peak, decoder, token_batch

SMALL = {"hidden_size": 64, "num_layers": 4}  # most weights are in the blocks


def refused(model, batch, budget, **how):
    with pytest.raises(CannotFit) as caught:
        tightfit.plan(model, batch, budget, **how)
    return caught.value


@pytest.fixture
def without_packages(monkeypatch):
    """Neither peft nor bitsandbytes, whose imports take seconds."""
    monkeypatch.setattr(choices, "find_spec", lambda name: None)


@pytest.fixture(scope="module")
def held_by_states():
    """A refusal of a step whose peak is in the optimizer's phase."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices, "find_spec", lambda name: None)
        error = refused(decoder(**SMALL), token_batch(1, 16), "0.87x")
        assert len(error.ways_out) > 1
        yield error


@pytest.mark.keeps("except-cannotfit-read-ways")
def test_they_are_looked_for_only_when_they_are_read(monkeypatch):
    asked = []
    monkeypatch.setattr(ways_out, "ways_out_of", lambda refusal: asked.append(refusal) or WaysOut())
    error = refused(decoder(**SMALL), token_batch(1, 16), "0.1x")
    assert not asked
    assert error.ways_out is error.ways_out
    assert len(asked) == 1
    assert list(CannotFit("of no plan", 7).ways_out) == []
    assert asked[1:] == [None]


@pytest.mark.slow  # prices ways out
def test_exact_ways_come_first_and_each_was_run_dry(held_by_states):
    found, limit = held_by_states.ways_out, held_by_states.refusal.search.budget_bytes
    kinds = [way.kind for way in found.fitting]
    assert kinds[0] == "exact"
    assert kinds == sorted(kinds, key=["exact", "rounding", "inexact", "size"].index)
    assert all(way.fits == (way.needed_bytes <= limit) for way in found)
    names = [way.name for way in found.fitting]
    assert names[0] == "step in backward"
    assert any(name.startswith("bf16 weights") for name in names)
    wider = [name for name in names if "levers" in name]
    assert all("stream" in name for name in wider), "no other lever lowers what the optimizer holds"


@pytest.mark.keeps("ways-out-plan-cannot")
def test_the_lines_of_an_exact_way_train_the_same_step_in_the_bytes_that_it_says(held_by_states):
    way, batch = held_by_states.ways_out[0], token_batch(1, 16)
    names = {"model": decoder(**SMALL), "batch": batch}
    exec(way.python, names)
    plan, optimizer, model = names["plan"], names["optimizer"], names["model"]
    assert plan.peak_bytes == way.peak_bytes == way.plan().peak_bytes
    measured = allocator_peak(decoder(**SMALL), batch, optimizer=optimizer_of(optimizer))
    assert way.peak_bytes == pytest.approx(measured, rel=1e-5)  # counters of steps, a few bytes each

    plain = decoder(**SMALL)
    reference = torch.optim.AdamW(plain.parameters())
    with plan.apply(model):
        model_loss(model, batch).backward()
    optimizer.step()
    model_loss(plain, batch).backward()
    reference.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def optimizer_of(optimizer):
    """A factory of optimizers like one that steps in backward."""
    from tightfit.optim import step_in_backward

    return lambda parameters: step_in_backward(type(optimizer), list(parameters)).optimizer


def test_the_lines_of_a_way_that_changes_numbers_fit_too(held_by_states):
    way = next(way for way in held_by_states.ways_out.fitting if way.name.startswith("bf16 weights"))
    names = {"model": decoder(**SMALL), "batch": token_batch(1, 16)}
    exec(way.python, names)
    peak = allocator_peak(names["model"], token_batch(1, 16), optimizer=way.asked.optimizer)
    assert peak <= way.peak_bytes + 1024
    assert peak <= names["plan"].budget_bytes
    assert way.changes.startswith("weights in 16 bits")
    assert way.exactness == "inexact"


def test_yaml_is_keys_of_the_configuration_and_json_has_no_model(held_by_states, tmp_path):
    for way in held_by_states.ways_out:
        (tmp_path / "way.yaml").write_text(way.yaml)
        load_config(str(tmp_path / "way.yaml"), ())
        assert "asked" not in way.to_dict()


def test_they_reach_another_process_without_the_model(held_by_states):
    copy = pickle.loads(pickle.dumps(held_by_states))
    assert list(copy.ways_out) == list(held_by_states.ways_out)
    with pytest.raises(InputError, match="comes from another process"):
        copy.ways_out[0].plan()


def test_the_table_reads_well_on_a_terminal_of_80_columns(held_by_states):
    text = describe_ways_out(held_by_states.ways_out, 80)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("Ways out within ")
    assert "1. step in backward" in text
    assert "1. --step-in-backward" in lines


@pytest.mark.slow  # every way is run dry
@pytest.mark.usefixtures("without_packages")
def test_levers_that_were_not_allowed_are_a_way_where_activations_are_too_large():
    error = refused(decoder(num_layers=2, hidden_size=32), token_batch(4, 32), "0.7x", levers=["tile"])
    finder = ways_out.Finder(error.refusal)
    finder.try_exact()
    way = next(way for way in finder.ways if way.name == "levers exact, tile, offload, stream")
    assert way.fits
    assert way.flags == "--levers exact,tile,offload,stream"
    assert way.plan().peak_bytes <= error.refusal.search.budget_bytes


@pytest.mark.slow  # seconds: a search for each of two sizes, and their allocator's peaks
def test_the_longest_sequence_and_the_largest_batch_that_fit_are_found():
    made, whole = functools.partial(decoder, num_layers=2), token_batch(4, 64)
    error = refused(made(), whole, "0.6x", levers=["tile"])
    finder = ways_out.Finder(error.refusal)
    finder.try_sizes()
    shorter, smaller = finder.ways
    assert (shorter.kind, smaller.kind) == ("size", "size")
    limit = error.refusal.search.budget_bytes
    for way, cut in ((shorter, shortened), (smaller, with_rows)):
        value = int(way.flags.split()[1])
        assert way.fits
        assert way.peak_bytes <= limit
        assert allocator_peak(made(), cut(whole, value)) >= way.peak_bytes - 1024  # plain, or with tiles
        assert allocator_peak(made(), cut(whole, value + value // 8 + 1)) > limit


def test_batches_are_cut_along_rows_and_tokens():
    batch = {"input_ids": torch.ones(4, 6, dtype=torch.int64), "weight": torch.ones(4), "scale": torch.tensor(2.0)}
    assert (length_of(batch), length_of((torch.ones(4),)), length_of(TokenBatch(2, 8, 9))) == (6, None, 8)
    shorter, fewer = shortened(batch, 3), with_rows(batch, 2)
    assert [shorter["input_ids"].shape, shorter["weight"].shape] == [(4, 3), (4,)]
    assert [fewer["input_ids"].shape, fewer["weight"].shape, fewer["scale"].shape] == [(2, 6), (2,), ()]
    assert (shortened(TokenBatch(2, 8, 9), 4), with_rows(TokenBatch(2, 8, 9), 1)) == ((2, 4, 9), (1, 8, 9))


@pytest.mark.usefixtures("without_packages")
def test_the_command_shows_the_smallest_card_under_its_error():
    outcome = run("plan", "--model", "models_by_name:decoder", "--seq-len", 16, "--budget", "1KB")
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.error.startswith("1000 B cannot fit: the least is ")
    assert "The smallest card that would do:" in outcome.err
    assert "1. --device " in outcome.err


@pytest.mark.usefixtures("without_packages")
def test_a_card_with_room_is_found_beyond_many_of_about_the_same_size(monkeypatch):
    (_, smallest), *_, largest = ways_out.cards_by_memory()
    tiny = [(f"of {n}", replace(smallest, name=f"of {n}", memory_bytes=4 * 2**20 + 4096 * n)) for n in range(6)]
    monkeypatch.setattr(ways_out, "cards_by_memory", lambda: [*tiny, largest])
    found = refused(decoder(**SMALL), token_batch(1, 16), 1000).ways_out
    assert [way.name for way in found.fitting] == [largest[1].name]


@pytest.mark.slow  # prices ways out of a large model
@pytest.mark.usefixtures("without_packages")
def test_weights_are_streamed_where_they_exceed_the_budget_alone():
    model = decoder(hidden_size=128, num_layers=8, vocab_size=64)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    found = refused(model, TokenBatch(1, 16, 64), weights // 2).ways_out
    way = next(way for way in found.fitting if "stream" in way.name)
    assert way.needed_bytes <= weights // 2
    plan = way.plan()
    assert plan.peak_bytes <= weights // 2
    assert "streamed" in str(plan)


def test_without_a_card_there_is_a_sentence_with_the_least(held_by_states):
    ways = tuple(replace(way, fits=False) for way in held_by_states.ways_out)
    least = min(ways, key=lambda way: way.needed_bytes)
    text = describe_ways_out(WaysOut(ways, 1000), 80)
    assert "no card of the list has room" in " ".join(text.split())
    assert least.name in " ".join(text.split())


class Fp32Only(Flat):
    """Refuses weights in any other dtype."""

    def forward(self, input_ids, labels):
        if self.head.weight.dtype != torch.float32:
            raise RuntimeError("fp32 only")
        return super().forward(input_ids, labels)


@pytest.mark.usefixtures("without_packages")
def test_a_model_that_rejects_a_way_costs_a_note_and_no_more():
    found = refused(Fp32Only(), TokenBatch(1, 16, 64), "0.7x").ways_out
    assert any("bf16 weights" in note and "fp32 only" in note for note in found.notes)
    assert found
