"""Tensor parallel: ranks that hold parts of the weights, predicted, planned, and run by processes that talk by gloo."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tightfit
from divided_beside_whole import case_of, demand_alike, run
from made_up_devices import even
from tightfit.devices.present import lookup
from tightfit.errors import InputError, ModelError
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.ranks.tensor_parallel import in_tensor_parallel
from tightfit.runtime.internals import fake_process_group
from tightfit.runtime.operators import traits_of
from tightfit.step import TokenBatch

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed")

BATCH = TokenBatch(2, 16, 64)


def case(model="decoder", **settings):
    return case_of(model, parallel="tp", **settings)


@pytest.mark.keeps("compute-losses-gradients-norms", "block-sends-receives-itself")
def test_two_ranks_compute_what_one_process_does_and_a_plan_changes_no_bit(tmp_path):
    cases = [
        case(clip=0.1),
        case(budget="0.88x"),
        case(shape={"qk_norm": True, "tie_embeddings": False}, micro_batches=2),
        case(shape={"dropout": 0.1}, precision="bf16", budget="0.9x"),
        case(shape={"num_experts": 4}),
    ]
    demand_alike(run(tmp_path, 2, cases), cases)


# Slow: imports transformers and runs four ranks beside each other, some 25 s of processor time.
@pytest.mark.keeps("compute-losses-gradients-norms")
@pytest.mark.slow
def test_four_ranks_compute_what_one_process_does_with_models_of_transformers(tmp_path):
    biases = {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    cases = [
        case("Llama", budget="0.88x", clip=0.1),
        case("Llama", shape=biases),
        case("Qwen3", micro_batches=2, clip=0.1),
        case("Mistral"),
        case("Gemma3Text"),
        case("Olmo2", budget="0.9x"),
    ]
    demand_alike(run(tmp_path, 4, cases), cases)


def decoder(**shape):
    torch.manual_seed(0)
    usual = {"hidden_size": 32, "num_layers": 3, "num_heads": 4, "vocab_size": 64, "max_position_embeddings": 16}
    return Decoder(DecoderConfig(**{**usual, **shape}))


def asked(model=None, **settings):
    settings = {"device": even(), "world_size": 2, "parallel": "tp", **settings}
    return tightfit.estimate(decoder() if model is None else model, BATCH, **settings)


@pytest.mark.keeps("rank-tensor-parallel-holds")
def test_a_rank_has_less_than_the_whole_and_all_have_the_same():
    whole, two, four = (asked(world_size=size).rank_peak_bytes for size in (1, 2, 4))
    assert len(two) == 2
    assert len(four) == 4
    assert len({*two}) == len({*four}) == 1
    assert four[0] < two[0] < whole[0]
    parts, every = (asked(world_size=size).by_category["parameters"] for size in (4, 1))
    assert every / 4 < parts < every / 3


@pytest.mark.keeps("rank-tensor-parallel-holds")
def test_a_plan_names_the_ranks_and_keeps_what_was_sent(tmp_path):
    found = tightfit.plan(decoder(), BATCH, "0.88x", device=even(), world_size=2, parallel="tp")
    assert found.parallel == "tp"
    assert max(found.rank_peak_bytes) <= found.budget_bytes
    assert any(choice.action == "operators" for choice in found.choices)
    assert found.reshard_after_forward is None
    assert {lever.name for lever in found.levers} <= {"recompute", "micro_batch"}
    assert "with tensor parallel" in str(found)
    found.to_json(tmp_path / "plan.json")
    assert tightfit.Plan.from_json(tmp_path / "plan.json").hash == found.hash


@pytest.mark.keeps("rank-tensor-parallel-holds")
def test_messages_on_cards_are_waited_for():
    model = decoder(hidden_size=512, num_heads=8)
    alone = tightfit.estimate(model, BATCH, device=lookup("h100"))
    found = asked(model, device="h100")
    assert any("and each was waited for" in line for line in found.assumptions)
    assert found.step_seconds > 0
    assert found.peak_bytes < alone.peak_bytes


class Own(nn.Module):
    """A model that says itself what is divided."""

    def __init__(self, plan=None):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        if plan is not None:
            self.tp_plan = plan

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).square().mean()


def of_own(plan, **settings):
    batch = (torch.randn(4, 16),)
    settings = {
        "loss": lambda model, batch: model(*batch),
        "device": even(),
        "world_size": 2,
        "parallel": "tp",
        **settings,
    }
    return tightfit.estimate(Own(plan), batch, **settings)


@pytest.mark.keeps("compute-losses-gradients-norms")
def test_a_model_of_ones_own_says_what_is_divided():
    assert of_own({"up": "colwise", "down": "rowwise"}).peak_bytes < of_own({"up": "replicate"}).peak_bytes


@pytest.mark.keeps("cannot-divided-rank-predicted")
@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: of_own(None), "Own has no plan for tensor parallel"),
        (lambda: of_own({"up": "diagonal"}), "Own divides up by the style 'diagonal', with which no rank is predicted"),
        (lambda: of_own({"up.weight": "colwise"}), "Own divides up.weight by the style 'colwise'"),
        (lambda: of_own({"up": "embedding_rowwise"}), "Own divides up by the style 'embedding_rowwise'"),
        (lambda: of_own({"up": "colwise"}, world_size=3), "Own divides up.weight by its 64 rows, which 3 ranks cannot"),
        (
            lambda: asked(decoder(num_kv_heads=2), world_size=4),
            "Decoder has num_kv_heads 2, which 4 ranks cannot share",
        ),
    ],
)
def test_models_that_ranks_cannot_share_are_refused_in_one_line(ask, says):
    with pytest.raises(ModelError) as refused:
        ask()
    assert says in str(refused.value)
    assert "take parallel='fsdp2'" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.keeps("cannot-divided-rank-predicted")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"optimizer": "muon"}, "optimizer muon reads whole matrices"),
        ({"optimizer": torch.optim.AdamW([nn.Parameter(torch.ones(1))])}, "each rank makes its own"),
        ({"ddp": {"static_graph": True}}, "give parallel='ddp' too"),
        ({"step_in_backward": True}, "step_in_backward and world_size are both given"),
    ],
)
def test_settings_that_no_rank_is_predicted_with_are_refused_in_one_line(settings, says):
    with pytest.raises(InputError, match=says):
        asked(**settings)


@pytest.mark.slow  # a plan of every rounding lever
@pytest.mark.keeps("cannot-divided-rank-predicted")
def test_levers_that_would_divide_otherwise_are_refused_by_name_and_left_out_by_class():
    for levers in (["chunked_loss"], ["recompute", "tile"], ["exact", "offload"]):
        with pytest.raises(InputError, match="and parallel='tp' are both given"):
            tightfit.plan(decoder(), BATCH, "0.9x", device=even(), world_size=2, parallel="tp", levers=levers)
    found = tightfit.plan(decoder(), BATCH, "0.9x", device=even(), world_size=2, parallel="tp", levers="rounding")
    assert not any(lever.name == "chunked_loss" for lever in found.levers)


@pytest.mark.keeps("cannot-divided-rank-predicted")
def test_fit_has_no_rows_of_it():
    with pytest.raises(InputError, match="parallel='tp' has no rows in fit"):
        tightfit.fit("mm26", device="rtx4090", world_size=2, parallel="tp")


@pytest.mark.keeps("compute-losses-gradients-norms")
def test_a_model_is_divided_once_and_with_its_tie():
    with fake_process_group(1, 2):
        mesh = dist.init_device_mesh("cpu", (2,))
        model = in_tensor_parallel(decoder(), mesh)
        assert model.head.weight is model.embedding.weight
        assert model.head.weight.shape == (32, 32)
        with pytest.raises(ModelError, match="divided over ranks already"):
            in_tensor_parallel(model, mesh)


@pytest.mark.keeps("block-sends-receives-itself")
def test_collectives_write_into_their_first_argument():
    # Their schemas do not say so. A recorder that does not know it recomputes what was there before the message.
    for operator in (torch.ops.c10d.allreduce_, torch.ops.c10d._allgather_base_, torch.ops.c10d.broadcast_):
        assert [position for position, _ in traits_of(operator.default).written] == [0]
    assert not traits_of(torch.ops.c10d.send.default).written
