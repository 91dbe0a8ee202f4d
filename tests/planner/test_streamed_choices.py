"""Streamed bytes and recompute are chosen under one budget: the link's seconds against those of recompute."""

import pytest

import tightfit
from tightfit import TokenBatch
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.planner.blocks.solve import peak
from tightfit.planner.blocks.streamed import BlockSeconds, waiting_seconds
from tightfit.planner.levers import Stream
from tightfit.planner.request import Request
from tightfit.planner.search.search import Search
from tightfit.planner.search.streaming import streamed_choices

LAYERS = 8
SHARE = 0.7  # of the plain peak
SHAPE = {"hidden_size": 256, "num_layers": LAYERS, "num_heads": 4, "vocab_size": 512, "max_position_embeddings": 256}
LINKS = {"a fast link": "rtx3060", "a slow link": "rtx3060,link=2GB/s", "a very slow link": "rtx3060,link=0.4GB/s"}


def asked(device: str) -> Request:
    """Small trained parts on frozen blocks, whose activations are as large as their weights."""
    model = tightfit.build_dry(lambda: Decoder(DecoderConfig(**SHAPE)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return Request.of(model, TokenBatch(4, 128, 512), device=device, levers=["exact", "stream"], optimizer="adamw")


def searched(request: Request) -> tuple[Search, list[Stream]]:
    plain = Search(request.checked(may_choose=True), "100GiB").plain
    search = Search(request, int(SHARE * plain.peak_bytes), known_plain=plain)
    return search, list(Stream.settings(search.step()))


def planned(search: Search, device: str) -> tightfit.Plan:
    how = {"device": device, "optimizer": "adamw", "levers": ["exact", "stream"]}
    return tightfit.plan(search.request.model, search.request.batch, search.budget_bytes, **how)


def fastest_with(search: Search, setting: Stream) -> float | None:
    """The seconds of the fastest traced choice with these streamed blocks; None where none fits."""
    search.best = None
    for choice in streamed_choices(search, search.request.plain, [setting]):
        search.take_within(search.budget_bytes, search.request.plain.with_lever(setting), choice.priced, [])
    return None if search.best is None else search.best.seconds


@pytest.mark.slow  # three plans
@pytest.mark.sampled(1)
@pytest.mark.keeps("streamed-and-recomputed-by-price")
@pytest.mark.parametrize("link", LINKS)
def test_the_plan_is_no_slower_than_with_a_block_more_or_fewer_streamed(link):
    search, settings = searched(asked(LINKS[link]))
    plan = planned(search, LINKS[link])
    lever = plan.lever(Stream)
    count = 0 if lever is None else len(lever.paths)
    assert plan.peak_bytes <= search.budget_bytes
    neighbours = [fastest_with(search, settings[n - 1]) for n in (count - 1, count + 1) if 0 < n <= LAYERS]
    assert neighbours
    assert all(seconds is None or plan.step_seconds <= 1.005 * seconds for seconds in neighbours)


@pytest.mark.slow  # a plan for each link
@pytest.mark.keeps("streamed-and-recomputed-by-price")
def test_the_faster_the_link_the_more_streams_and_the_less_is_recomputed():
    streamed, recomputed = [], []
    for device in LINKS.values():
        plan = planned(searched(asked(device))[0], device)
        lever = plan.lever(Stream)
        streamed.append(0 if lever is None else len(lever.paths))
        recomputed.append(sum(choice.recompute_seconds for choice in plan.choices))
    assert streamed[0] == LAYERS, "copies that nothing waits for leave the most room for activations"
    assert streamed[0] > streamed[1] >= streamed[2]
    assert recomputed[0] < recomputed[1]


@pytest.mark.slow  # traces what was priced
def test_prices_are_near_to_the_trace():
    search, settings = searched(asked(LINKS["a slow link"]))
    for choice in streamed_choices(search, search.request.plain, settings):
        combination = search.request.plain.with_lever(choice.setting)
        traced = search.trace_applied(combination, choice.priced.policies(choice.solution.choice))
        assert choice.seconds == pytest.approx(traced.seconds, rel=0.03)


def test_what_waits_for_the_link():
    def waits(blocks, ahead=1, in_parallel=True):
        return waiting_seconds(blocks, ahead=ahead, room=ahead + 1 if in_parallel else 1, in_parallel=in_parallel)

    resident, quick, late = BlockSeconds(1.0, 2.0), BlockSeconds(1.0, 2.0, 0.5), BlockSeconds(1.0, 2.0, 3.0)
    assert waits([resident] * 4) == 0
    assert waits([quick] * 4) == 0, "each copy has the time of a block"
    # Two are there at the start, and the last two of forward are when backward begins. Of four copies the third block's
    # is asked for by the second, and so on: each waits but for the second that its neighbour computes.
    assert waits([late] * 2) == 0
    assert waits([late] * 4) == pytest.approx(2 * 2.0 + 2 * 1.0)
    longer = BlockSeconds(1.0, 3.0, 3.0)
    assert waits([longer] * 4) == pytest.approx(2 * 2.0), "recompute gives the link time"
    assert waits([late, resident, resident, late, resident, resident]) == 0, "so do resident blocks between"
    assert waits([quick] * 4, in_parallel=False) == pytest.approx(6 * 0.5), "the last block stays for its backward"
    fetching = BlockSeconds(1.0, 2.0, None, 5.0)
    assert waits([fetching, resident]) == pytest.approx(3.0), "what was offloaded comes over the same link"


def test_a_lowered_chain_has_all_its_points_lowered():
    search, _ = searched(asked("rtx3060"))
    chain = search.baseline(search.request.plain).chain
    lowered = chain.lowered(1 << 20)
    for choice in ((0,) * LAYERS, (1,) * LAYERS):
        assert peak(lowered, choice) == peak(chain, choice) - (1 << 20)
