"""Rows of several documents: positions restart at each, and no document sees another."""

import pytest
import torch

from tightfit import estimate, plan, verify
from tightfit.errors import ModelError
from tightfit.models.kv_cache import KVCache
from tightfit.step import StepSettings
from tightfit.training.objective import CausalLMLoss
from tiny import allocator_peak, decoder

PATHS = [
    {},
    {"attention": "chunked", "attention_chunk_size": 16},
    {"attention_window": 6},
    {"attention_dropout": 0.3},
    {"qk_norm": True, "num_kv_heads": None},
]
LENGTH = 40


def positions(*lengths):
    """Of a row that holds documents of these lengths, one after the other."""
    return torch.cat([torch.arange(length) for length in lengths])


def ids(length, seed=0):
    return torch.randint(0, 600, (length,), generator=torch.Generator().manual_seed(seed))


def run(model, rows, positions_of_rows):
    """The logits of the middle document, and each parameter's gradient of that document's loss."""
    model.zero_grad()
    logits = model(torch.stack(rows), position_ids=torch.stack(positions_of_rows)).logits
    torch.nn.functional.cross_entropy(logits[:, 15:27].flatten(0, 1), torch.stack(rows)[:, 16:28].flatten()).backward()
    return logits[:, 15:28].detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.keeps("packed-document-logits-gradients")
@pytest.mark.parametrize("settings", PATHS, ids=str)
def test_a_document_does_not_move_by_a_bit_when_its_neighbours_tokens_or_lengths_change(settings):
    model = decoder(num_layers=2, hidden_size=32, **settings).eval()
    document, other = ids(13), (ids(LENGTH, 99), positions(LENGTH))
    found = []
    for seed, before, after in ((1, [15], [12]), (2, [15], [12]), (3, [4, 11], [5, 7]), (4, [1, 14], [12])):
        row = torch.cat([ids(15, seed), document, ids(12, seed + 10)])
        found.append(run(model, [row, other[0]], [positions(*before, 13, *after), other[1]])[0])
    for logits in found[1:]:
        assert torch.equal(logits[0], found[0][0])


@pytest.mark.keeps("packed-document-logits-gradients")
@pytest.mark.parametrize("settings", PATHS, ids=str)
def test_a_packed_document_is_the_document_alone_within_rounding(settings):
    model = decoder(num_layers=2, hidden_size=32, **settings).eval()
    documents = [ids(15, 1), ids(13, 2), ids(12, 3)]
    packed = model(torch.cat(documents)[None], position_ids=positions(15, 13, 12)[None]).logits[0]
    alone = torch.cat([model(document[None]).logits[0] for document in documents])
    assert torch.allclose(packed, alone, atol=1e-5)


@pytest.mark.keeps("packed-document-logits-gradients")
def test_a_documents_gradient_does_not_depend_on_its_neighbours():
    model = decoder(num_layers=2, hidden_size=32)
    document, place = ids(13), positions(15, 13, 12)
    rows = [torch.cat([ids(15, seed), document, ids(12, seed)]) for seed in (1, 2)]
    first, second = (run(model, [row], [place])[1] for row in rows)
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("settings", PATHS[:3], ids=str)
def test_rows_of_one_document_are_rows_without_positions(settings):
    model = decoder(num_layers=2, hidden_size=32, **settings)
    row = ids(LENGTH)[None]
    packed = model(row, position_ids=positions(LENGTH)[None]).logits
    assert torch.allclose(packed, model(row).logits, atol=1e-5)


@pytest.mark.keeps("short-convolution-step-packed")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("settings", "precision"),
    [
        ({}, "fp32"),
        ({}, "bf16"),
        ({"attention": "chunked", "attention_chunk_size": 40}, "fp32"),
    ],
    ids=str,
)
def test_a_packed_step_is_predicted_and_planned_and_no_bit_changes(settings, precision):
    model, loss = decoder(num_layers=2, **settings), CausalLMLoss()
    rows = torch.stack([ids(40, seed) for seed in range(2)])
    places = torch.stack([positions(10 + i, 30 - i) for i in range(2)])
    batch = {"input_ids": rows, "labels": rows, "position_ids": places}
    predicted = estimate(model, batch, loss=loss, precision=precision).peak_bytes
    measured = allocator_peak(model, batch, loss=loss, settings=StepSettings(precision=precision))
    assert predicted == pytest.approx(measured, rel=1e-3)
    if not settings and precision == "fp32":
        made = plan(model, batch, int(0.8 * predicted), loss=loss, levers="exact")
        assert verify(model, batch, made, loss=loss).ok


def test_positions_beside_a_cache_or_of_other_rows_are_refused():
    model, row = decoder(num_layers=1), ids(8)[None]
    with torch.no_grad(), pytest.raises(ModelError, match="position_ids and a cache exclude each other"):
        model(row, cache=KVCache(model.config, 8), position_ids=positions(8)[None])
    with pytest.raises(ModelError, match=r"position_ids \(8,\) are for other rows than input_ids \(1, 8\)"):
        model(row, position_ids=positions(8))


@torch.no_grad()
def test_a_compiled_block_of_packed_rows_is_one_graph_for_all_lengths_of_documents():
    model, row, compiled = decoder(num_layers=1, hidden_size=32), ids(LENGTH)[None], []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    places = [positions(15, 13, 12)[None], positions(3, 30, 7)[None], positions(20, 20)[None]]
    plain = [model(row, position_ids=each).logits for each in places]
    model.layers[0].forward = torch.compile(model.layers[0].forward, backend=backend, fullgraph=True)
    for expected, each in zip(plain, places, strict=True):
        assert torch.allclose(model(row, position_ids=each).logits, expected, atol=1e-5)
    assert len(compiled) == 1
