"""The page of benchmarks says what the results say, and what is behind it counts right."""

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn

from tightfit.planner.blocks.solve import Chain, Option, added_seconds, peak, solve

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS.parent)
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


WHERE = {"machine": {"cpu": "a"}, "versions": {"torch": "b"}, "commit": "c", "dirty": False, "threads": 1}


@pytest.mark.keeps("pages-figures-match-files")
def test_the_page_says_what_the_results_files_say(benchmark):
    page = benchmark("benchmarks_page")
    assert page.PAGE.read_text("utf-8") == page.page(page.records()), "run: make benchmarks"


def test_what_was_not_measured_is_said_with_its_command(benchmark):
    page = benchmark("benchmarks_page")
    text = page.page({})
    assert text.count("Not measured at this commit: `python ") == len(page.SECTIONS)
    assert "| met |" not in text
    assert "| missed |" not in text


def test_a_target_is_met_at_its_figure_and_missed_below_with_the_cause(benchmark):
    targets = benchmark("benchmark_targets")

    def timed(ratio):
        ratios = {"plan exact": ratio, "pytorch checkpoint": 1.0}
        return {
            name: {"peak_bytes": 90, "median_seconds": 1 / own, "times_as_fast_as_checkpoint": own}
            for name, own in ratios.items()
        }

    def measured(ratio):
        return {"environment": WHERE, "results": [{"case": "CPU26", "variants": timed(ratio)}]}

    def verdict(ratio):
        text = targets.targets({"equal_memory": measured(ratio)})
        return next(line for line in text.splitlines() if "exact levers" in line)

    few = targets.never_slower({"equal_memory": measured(0.9)})
    assert few[0][2] is None, "one peer is no verdict"
    assert verdict(1.10).endswith("| 1.100x | met |  |")
    assert verdict(1.09).endswith(f"| 1.090x | missed | {targets.PRODUCTS} |")


def test_a_plan_is_compared_with_other_ways_at_whose_peak_one_was_made(benchmark):
    targets = benchmark("benchmark_targets")
    ways = {"plan exact": (95, 1.2), "near": (100, 1.0), "faster": (100, 1.5), "below": (90, 1.0), "far": (200, 1.0)}
    variants = {name: {"peak_bytes": p, "times_as_fast_as_checkpoint": s} for name, (p, s) in ways.items()}
    assert targets.beside_plans(variants) == pytest.approx({"near": 1.2, "faster": 0.8})


def test_peers_without_steps_have_peaks_and_no_times_and_those_that_do_not_run_their_reason(benchmark):
    page = benchmark("benchmarks_page")
    variants = {
        "plain": {"ours": False, "peak_bytes": 2**21},
        "plan exact at 1.0 MiB": {"ours": True, "peak_bytes": 2**20, "predicted_bytes": 2**20},
        "Liger": {"ours": False, "empty": "needs a card"},
    }
    results = [{"case": "CPU26", "variants": variants}]
    environment = {**WHERE, "load_average": 0.0}
    text = page.every_peer({"environment": environment, "rounds": 0, "left_out": ["slow one"], "results": results})
    assert "| plan exact at 1.0 MiB | ours | 1.0 MiB | 0.50x | +0.0000% |  |  |" in text
    assert "| plain | others | 2.0 MiB | 1.00x |  |  |  |" in text
    assert "- Liger: needs a card." in text
    assert "Not run yet: slow one." in text
    assert "steps were not timed" in text


# Peers on null cards


def on_card(way, peak, **more):
    shared = {"card": "rtx4090", "ours": False, "fits": True, "peak_bytes": peak, "reserved_bytes": peak}
    return {**shared, "way": way, **more}


def planned_at(budget, peak, way="at the peak of b"):
    plan = {"kind": "exact", "levers": ["recompute"], "micro_batches": 1, "seconds_of_plain": 1.25}
    return on_card(way, peak, ours=True, plan={**plan, "budget_bytes": budget, "predicted_bytes": peak})


def test_peaks_that_are_near_each_other_share_a_plan_and_what_does_not_fit_has_none(benchmark):
    apart = benchmark("benchmarks.peers_on_cards").apart
    found = {name: on_card(name, peak) for name, peak in (("c", 1030), ("a", 1000), ("b", 1009), ("d", 1040))}
    found["e"] = on_card("e", 500) | {"fits": False}
    found["f"] = on_card("f", 400) | {"fits": None}
    assert list(apart({**found, "g": {}})) == [(1000, "a"), (1030, "c")]


def test_levers_that_cannot_reach_a_peak_are_not_tried_for_it(benchmark):
    peers = benchmark("benchmarks.peers_on_cards")
    rows = {("rtx4090", "least peak, exact"): planned_at(901, 900)}
    assert peers.reaching(899, "rtx4090", rows) == [kind for kind in peers.LEVERS if kind != "exact"]
    assert peers.reaching(900, "rtx4090", rows) == list(peers.LEVERS)
    assert peers.reaching(899, "t4", rows) == list(peers.LEVERS), "another card's figure"


def test_a_plan_stands_beside_the_peak_that_it_was_made_for(benchmark):
    page, gib = benchmark("peers_on_cards_page"), 2**30
    plans = [planned_at(4 * gib + 1024, 4 * gib - 5), planned_at(gib, gib, way="least peak, exact")]
    assert page.plan_for(4 * gib, plans) is plans[0]
    assert page.plan_for(int(4.03 * gib), plans) is plans[0]
    assert page.plan_for(int(4.05 * gib), plans) is None, "a plan for less by more than 1% is no plan for it"
    assert page.plan_for(4 * gib - 1, plans) is None, "a plan for more may take more"


def test_what_did_not_run_has_its_words_and_what_was_not_run_is_said(benchmark):
    page, gib = benchmark("peers_on_cards_page"), 2**30
    ways = ["plain", "b", "broken", "later"]
    rows = [
        on_card("plain", 8 * gib),
        on_card("plain", gib, card="t4") | {"fits": False, "refused": {"bytes": gib, "phase": "forward"}, "why": ""},
        on_card("b", 4 * gib),
        on_card("broken", 0) | {"fits": None, "why": "ImportError: no kernel."},
        planned_at(4 * gib + 1024, 4 * gib + 2048),
    ]
    names = {"cards": ["rtx4090", "t4"], "ways": ways, "least": ["least peak, exact"], "left_out": ["slow"]}
    shape = {"what": "a model", "size": 1, "length": 2}
    text = page.on_null_cards({"environment": {**WHERE, "packages": {"p": "1"}}, "shape": shape, **names, "rows": rows})
    assert "| b | 4.00 GiB | 0.50x | exact: recompute | 4.00 GiB | 4.00 GiB (+0.000%) | 1.25x |" in text
    assert "| plain | 8.00 GiB | no: 1.00 GiB more in forward |" in text
    assert "1 of 1 plans took more than their budget" in text
    assert "- broken: ImportError: no kernel (rtx4090)." in text
    assert "Not run on any card: later; least peak, exact; slow." in text


# Estimators


def test_an_estimator_is_short_where_the_step_needed_more(benchmark):
    estimators = benchmark("estimators")
    said = [("a", 100, 90), ("b", 100_000, 99_999), ("c", 100, 130)]
    rows = [{"cell": name, "measured": m, "answers": {"tightfit": {"bytes": p}}} for name, m, p in said]
    found = estimators.summary(rows, "tightfit")
    assert found == pytest.approx({"cells": 3, "median": 0.1, "worst": 0.3, "short": 2, "notably_short": 1})


def test_the_guide_says_what_the_estimators_said(benchmark):
    figures = benchmark("benchmarks_page").records()["estimators"]["cpu"]
    ours, tracker, rule = (figures[who] for who in ("tightfit", "PyTorch MemTracker", "16 bytes a parameter"))
    text = " ".join((BENCHMARKS.parent / "docs" / "guide.md").read_text("utf-8").split())
    assert f"the same {ours['cells']} training steps on a CPU. Our worst error is {abs(ours['worst']):.6%}." in text
    assert f"is off by up to {abs(tracker['worst']):.2%}." in text
    assert f"is off by {rule['median']:.0%} in the median, and too low in {rule['short']} of {rule['cells']}" in text


def tiny_question(estimators, **changes):
    shape = estimators.Shape(2, 16, 2, 2, 64, 32, True)
    return estimators.Question(
        build=lambda: estimators.minimind(shape, changes.get("checkpointed", False)),
        make_batch=lambda: estimators.TokenBatch(2, 16, 32).tensors(),
        shape=shape,
        size=2,
        length=16,
        **changes,
    )


def test_ours_is_asked_about_the_step_that_is_measured(benchmark):
    estimators = benchmark("estimators")
    asked = tiny_question(estimators)
    assert abs(estimators.ours(asked) - estimators.measure(asked)) <= 64  # numbers that Python wraps


@pytest.mark.slow  # MemTracker imports distributed tensors and runs four steps under dispatch modes
def test_pytorchs_tracker_is_asked_about_the_step_that_is_measured(benchmark):
    estimators, peers = benchmark("estimators"), benchmark("peer_estimators")
    asked = tiny_question(estimators)
    measured = estimators.measure(asked)
    for who in ("PyTorch MemTracker", "PyTorch MemTracker under FakeTensorMode"):
        assert peers.ESTIMATORS[who].ask(asked) == pytest.approx(measured, rel=0.02)


def test_rules_count_the_bytes_that_their_sources_say(benchmark):
    estimators, peers = benchmark("estimators"), benchmark("peer_estimators")
    parameters = 32 * 16 + 2 * (4 * 16 * 16 + 3 * 16 * 64 + 2 * 16) + 16
    plain, autocast = tiny_question(estimators), tiny_question(estimators, precision="bf16")
    assert peers.sixteen_bytes(plain) == peers.anatomy(plain) == 16 * parameters
    assert peers.anatomy(autocast) == 18 * parameters
    tokens = 2 * 16
    activations = tokens * (34 * 16 * 2 + 8 + 16 + 2 * (32 + 16))
    assert peers.megatron(autocast) == int(18 * parameters + 1.05 * activations)
    counted = parameters + 32 * 16 + 16 * 16 + (8 - 2) * 16 * 2 + 16  # its own idea of embeddings, positions and norms
    attention = 34 + 5 * 2 * 16 / 16
    assert peers.cookbook(plain) == int(20 * counted + 16 * 2 * 16 * 2 * attention)


def test_llmem_is_asked_about_checkpointed_blocks_in_mixed_precision_only(benchmark):
    estimators, peers = benchmark("estimators"), benchmark("peer_estimators")
    for asked in (tiny_question(estimators), tiny_question(estimators, precision="bf16")):
        with pytest.raises(peers.NotAsked):
            peers.llmem(asked)
    found = peers.llmem(tiny_question(estimators, precision="bf16", checkpointed=True))
    # Every weight but the last has two states, and each tensor takes whole blocks of 2 MiB.
    weights, parameters = 1 + 2 * 7 + 1, 32 * 16 + 2 * (4 * 16 * 16 + 3 * 16 * 64 + 2 * 16) + 16
    blocks = 2 * (weights - 1) + 1 + (2 + 2) + 1 + 3
    assert found == 6 * parameters + blocks * peers.MIB_2


def test_what_fails_is_an_empty_cell_with_its_reason(benchmark, monkeypatch):
    estimators, peers = benchmark("estimators"), benchmark("peer_estimators")

    def absent(question):
        raise ModuleNotFoundError("No module named 'deepspeed'", name="deepspeed")

    broken = {"a": absent, "b": lambda question: 1 // 0, "c": lambda question: peers.only(question, "bf16")}
    asked = {who: peers.Estimator("", "", ask) for who, ask in broken.items()}
    monkeypatch.setattr(estimators, "ESTIMATORS", asked)
    monkeypatch.setattr(estimators, "cells", lambda: {"tiny": tiny_question(estimators)})
    assert estimators.answer("tiny", "a") == {"missing": "deepspeed is not installed"}
    assert estimators.answer("tiny", "b")["failed"].startswith("ZeroDivisionError")
    assert estimators.answer("tiny", "c") == {"not_asked": "made for bf16"}


def test_a_fake_model_keeps_shared_weights_shared(benchmark):
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = nn.Module()
    model.one, model.other = nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta")
    model.other.weight = model.one.weight
    with FakeTensorMode():
        faked = benchmark("peer_estimators").faked(model)
    assert faked.one.weight is faked.other.weight
    assert faked.one.weight.device == torch.device("cpu")


# Ablation


def knapsack():
    """Two blocks at a budget for 10 bytes: the best ratio takes 6 of them, and leaves no room for two of 5."""
    keeps = [Option(6, 6, 6, 1.0), Option(5, 5, 5, 4.0), Option(0, 0, 0, 8.0)]
    other = [Option(6, 6, 6, 4.0), Option(5, 5, 5, 4.0), Option(0, 0, 0, 8.0)]
    return Chain((tuple(keeps), tuple(other)), (0, 0), (0, 0), 0, 0)


class Priced:
    def __init__(self, chain, kinds):
        self.chain = chain
        self.choices = chain.options
        self.graphs = [type("Graph", (), {"kind": kind}) for kind in kinds]


def test_greedy_takes_the_best_ratio_first_and_the_exact_choice_the_least_seconds(benchmark):
    ablation = benchmark("ablation")
    chain = knapsack()
    exact = solve(chain, 10)
    greedy = ablation.greedy(Priced(chain, "ab"), 10)
    assert greedy == (0, 2)
    assert exact.choice == (1, 1)
    assert added_seconds(chain, exact.choice) == 8 < added_seconds(chain, greedy) == 9


def test_one_rule_treats_blocks_of_a_kind_alike(benchmark):
    ablation = benchmark("ablation")
    assert ablation.one_rule(Priced(knapsack(), "aa"), 10) == (1, 1)
    assert ablation.one_rule(Priced(knapsack(), "aa"), 6) == (2, 2)
    assert ablation.one_rule(Priced(knapsack(), "ab"), 6) == (0, 2)


def test_whole_blocks_are_the_first_ones_and_no_more_than_needed(benchmark):
    ablation = benchmark("ablation")
    chain = knapsack()
    assert ablation.whole_blocks(Priced(chain, "aa"), 12) == (0, 0)
    assert ablation.whole_blocks(Priced(chain, "aa"), 11) == (2, 0)
    assert ablation.whole_blocks(Priced(chain, "aa"), 5) == (2, 2)
    for bound in (5, 11, 12):
        assert peak(chain, ablation.whole_blocks(Priced(chain, "aa"), bound)) <= bound
