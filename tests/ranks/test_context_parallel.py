"""Context parallel: ranks that share each sequence, predicted, planned, and run by processes that talk by gloo."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import tightfit
from divided_beside_whole import case_of, demand_alike, run
from made_up_devices import even
from tightfit.errors import InputError, ModelError
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.ranks import context_parallel
from tightfit.ranks.context_parallel import in_context_parallel
from tightfit.ranks.messages import sent_bytes
from tightfit.ranks.sequence_parts import SequenceRanks
from tightfit.ranks.shared_attention import causal_in_pieces
from tightfit.ranks.sharing import ADDED_UP, GATHERED
from tightfit.runtime.internals import fake_process_group
from tightfit.runtime.operators import traits_of
from tightfit.step import TokenBatch

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed")

BATCH = TokenBatch(2, 64, 64)


def case(model="decoder", **settings):
    return case_of(model, parallel="cp", **settings)


@pytest.mark.slow  # two processes that train four ways
@pytest.mark.keeps("ranks-context-parallel-compute")
def test_two_ranks_compute_what_one_process_does_and_a_plan_changes_no_bit(tmp_path):
    cases = [
        case(clip=0.1),
        case(budget="0.85x"),
        case(shape={"qk_norm": True, "tie_embeddings": False, "num_kv_heads": 2}, micro_batches=2),
        case(precision="bf16", shape={"num_layers": 4}, budget="0.9x"),
        case("beside", clip=0.1),
    ]
    demand_alike(run(tmp_path, 2, cases), cases)


# Slow: imports transformers and runs four ranks beside each other, some 25 s of processor time.
@pytest.mark.keeps("ranks-context-parallel-compute")
@pytest.mark.slow
def test_four_ranks_compute_what_one_process_does_with_models_of_transformers(tmp_path):
    cases = [
        case("Llama", budget="0.8x", clip=0.1),
        case("Llama", shape={"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        case("Qwen3", micro_batches=2, clip=0.1),
        case("Mistral", shape={"sliding_window": 6}),
        case("Gemma3Text", shape={"sliding_window": 6}),
        case("Olmo2", budget="0.85x"),
    ]
    demand_alike(run(tmp_path, 4, cases), cases)


def decoder(**shape):
    torch.manual_seed(0)
    usual = {"hidden_size": 32, "num_layers": 3, "num_heads": 4, "vocab_size": 64, "max_position_embeddings": 64}
    return Decoder(DecoderConfig(**{**usual, **shape}))


def asked(model=None, batch=BATCH, **settings):
    settings = {"device": even(), "world_size": 2, "parallel": "cp", **settings}
    return tightfit.estimate(decoder() if model is None else model, batch, **settings)


@pytest.mark.keeps("rank-context-parallel-whose")
def test_activations_of_blocks_are_shared_too():
    shared, sharded = (asked(world_size=4, parallel=parallel) for parallel in ("cp", "fsdp2"))
    assert shared.by_category["parameters"] == sharded.by_category["parameters"]
    assert shared.by_category["activations"] < 0.5 * sharded.by_category["activations"]
    assert shared.parallel == "cp"
    assert len(shared.rank_peak_bytes) == 4


@pytest.mark.slow  # a plan of two ranks
@pytest.mark.keeps("rank-context-parallel-whose")
def test_a_plan_recomputes_what_was_gathered(tmp_path):
    found = tightfit.plan(decoder(), BATCH, "0.7x", device=even(), world_size=2, parallel="cp", levers=["recompute"])
    assert max(found.rank_peak_bytes) <= found.budget_bytes
    kept = {name for choice in found.choices if choice.action == "operators" for name, *_ in choice.kept}
    assert kept, "something is recomputed in a block"
    assert GATHERED not in kept
    assert found.reshard_after_forward is not None
    assert "with context parallel" in str(found)
    found.to_json(tmp_path / "plan.json")
    assert tightfit.Plan.from_json(tmp_path / "plan.json").hash == found.hash


@pytest.mark.keeps("rank-context-parallel-whose")
def test_messages_of_attention_are_waited_for_on_cards():
    alone = asked(decoder(hidden_size=512, num_heads=8), device="h100", world_size=1)
    found = asked(decoder(hidden_size=512, num_heads=8), device="h100")
    assert any("those of attention were waited for" in line for line in found.assumptions)
    assert found.peak_bytes < alone.peak_bytes
    # Of four ranks each sends its part to three others, and three quarters of the sums.
    assert sent_bytes(GATHERED, [100], 4) == 300
    assert sent_bytes(ADDED_UP, [400], 4) == 300


def test_a_lever_may_recompute_what_was_gathered_and_no_other_message():
    assert not traits_of(torch.ops.tightfit.gather_parts.default).is_foreign
    assert traits_of(torch.ops.tightfit.add_up_parts.default).is_foreign


@pytest.fixture
def mesh():
    with fake_process_group(0, 1):
        yield dist.init_device_mesh("cpu", (1,))


class Blocks(nn.Module):
    """A model of two blocks that does in them what it is given."""

    def __init__(self, mix, *, between=None):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Mixing(mix), Mixing(mix)])
        self.between = between or (lambda x: x)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = self.between(layer(x))
        return x.square().mean()


class Mixing(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.linear, self.mix = nn.Linear(8, 8), mix
        self.register_buffer("table", torch.ones(64, 8))
        self.register_buffer("count", torch.zeros(1))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.mix(self, self.linear(x))


def attend(block, x):
    heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
    return x + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)


def keep_a_tensor(block, x):
    block.kept = x.mean()
    return attend(block, x)


def attend_with_a_mask_of_its_own(block, x):
    heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).transpose(1, 2).flatten(2)


def of_blocks(mix, *, length=8, between=None):
    return asked(
        Blocks(mix, between=between),
        (torch.zeros(2, length, dtype=torch.int64),),
        loss=lambda model, batch: model(*batch),
    )


@pytest.mark.keeps("ranks-context-parallel-compute")
@pytest.mark.parametrize(
    ("mix", "says"),
    [
        (lambda block, x: x, "layers.0 calls no torch.nn.functional.scaled_dot_product_attention"),
        (
            lambda block, x: attend(block, x) + block.table[: x.shape[1]],
            "layers.0 reads a table of positions",
        ),
        (lambda block, x: attend(block, x) + torch.arange(x.shape[1])[:, None], "layers.0 counts positions itself"),
        (lambda block, x: attend(block, x.cumsum(1)), "layers.0 calls cumsum, in which tokens may meet"),
        (lambda block, x: block.attention(x, x, x)[0], "layers.0 calls multi_head_attention_forward"),
        (lambda block, x: (attend(block, x), x.mean()), "layers.0 returns 2 tensors"),
        (attend_with_a_mask_of_its_own, "layers.0 makes a mask of shape (4, 4) itself"),
        (keep_a_tensor, "layers.0 leaves tensors of a part of the tokens on kept"),
    ],
)
def test_blocks_in_which_tokens_meet_otherwise_are_refused_in_one_line(mix, says):
    with pytest.raises(ModelError) as refused:
        of_blocks(mix)
    assert says in str(refused.value)
    assert "take parallel='fsdp2'" in str(refused.value)
    assert "\n" not in str(refused.value)


def shift(block, x):
    return attend(block, x) + F.pad(x, (0, 0, 1, -1))


def shift_by_slices(block, x):
    return attend(block, torch.cat([x[:, 1:], x[:, :1]], 1))


def subtract_a_mean_over_tokens(block, x):
    return attend(block, x - x.mean(1, keepdim=True))


def mix_by_a_product(block, x):
    return attend(block, (x.transpose(1, 2) @ block.table[: x.shape[1], : x.shape[1]]).transpose(1, 2))


def normalise_over_tokens(block, x):
    return attend(block, F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2))


def drop_and_count(block, x):
    block.count.add_(1)
    return attend(block, F.dropout(x, 0.3))


def in_real_blocks(mix, mesh):
    torch.manual_seed(0)
    model = in_context_parallel(Blocks(mix), ["layers.0", "layers.1"], mesh)
    return model, model(torch.arange(16).view(2, 8))


@pytest.mark.keeps("ranks-context-parallel-compute")
@pytest.mark.parametrize(
    "mix", [shift, shift_by_slices, subtract_a_mean_over_tokens, mix_by_a_product, normalise_over_tokens]
)
def test_tokens_that_meet_by_functions_without_a_name_are_found_by_real_numbers(mix, mesh):
    with pytest.raises(ModelError, match=r"layers.0: a token changes what Mixing returns for another one beside att"):
        in_real_blocks(mix, mesh)


@pytest.mark.keeps("ranks-context-parallel-compute")
def test_trying_blocks_changes_no_buffer_and_no_random_number(mesh, monkeypatch):
    tried, found = in_real_blocks(drop_and_count, mesh)
    monkeypatch.setattr(context_parallel, "tokens_meet", lambda *given: False)
    plain, expected = in_real_blocks(drop_and_count, mesh)
    assert torch.equal(found, expected)
    assert tried.layers[0].count == plain.layers[0].count == 1


def test_a_length_that_ranks_cannot_share_is_refused_with_the_number():
    assert of_blocks(attend, length=12).peak_bytes
    with pytest.raises(ModelError, match="sequences have 10 tokens, and 2 ranks share a multiple of 4 evenly"):
        of_blocks(attend, length=10)


def test_blocks_that_do_not_read_each_other_are_refused():
    with pytest.raises(ModelError, match=r"layers.1 takes 16 tokens, and a rank has 4"):
        of_blocks(attend, between=lambda x: torch.cat([x, x, x, x], 1))


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ModelError, match="Linear has no repeated blocks"):
        tightfit.estimate(
            nn.Linear(8, 8), (torch.ones(2, 8, 8),), loss=lambda model, batch: model(*batch).sum(), device=even(),
            world_size=2, parallel="cp",
        )  # fmt: skip


def test_experts_whose_sums_are_returned_are_refused():
    with pytest.raises(ModelError, match=r"layers.0 returns 4 tensors"):
        asked(decoder(num_experts=4))


def test_a_model_is_divided_once(mesh):
    model = in_context_parallel(decoder(), [f"layers.{n}" for n in range(3)], mesh)
    with pytest.raises(ModelError, match="divided over ranks already"):
        in_context_parallel(model, [f"layers.{n}" for n in range(3)], mesh)


def test_a_block_that_runs_alone_is_refused(mesh):
    model = in_context_parallel(decoder(), [f"layers.{n}" for n in range(3)], mesh)
    with pytest.raises(ModelError, match=r"layers.1 runs alone, or a second time in backward"):
        model.layers[1](torch.ones(1, 8, 32), torch.ones(8, 8), torch.ones(8, 8))


@pytest.mark.slow  # a plan of every rounding lever
def test_levers_that_see_whole_sequences_are_refused_by_name_and_left_out_by_class():
    for levers in (["tile"], ["recompute", "capture"], ["exact", "offload"]):
        with pytest.raises(InputError, match="and parallel='cp' are both given"):
            tightfit.plan(decoder(), BATCH, "0.8x", device=even(), world_size=2, parallel="cp", levers=levers)
    found = tightfit.plan(decoder(), BATCH, "0.8x", device=even(), world_size=2, parallel="cp", levers="rounding")
    assert {lever.name for lever in found.levers} <= {"recompute", "micro_batch", "chunked_loss"}


def test_fit_has_no_rows_of_it():
    with pytest.raises(InputError, match="parallel='cp' has no rows in fit"):
        tightfit.fit("mm26", device="rtx4090", world_size=2, parallel="cp")


@pytest.mark.keeps("ranks-context-parallel-compute")
@pytest.mark.parametrize(("dtype", "key_heads"), [(torch.float64, 4), (torch.float32, 4), (torch.float32, 2)])
def test_two_pieces_are_what_the_whole_triangle_gives_a_rank(dtype, key_heads):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 48, 8, dtype=dtype) for heads in (4, key_heads, key_heads))
    how = {"scale": 0.3, "dropout_p": 0.0, "enable_gqa": key_heads != 4}
    plain = F.scaled_dot_product_attention(query, key, value, is_causal=True, **how)
    for number in range(3):
        ranks = SequenceRanks("none", number, 3)
        own = ranks.part(query, 2)
        found = causal_in_pieces(own, key, value, ranks, how)
        assert torch.allclose(found, ranks.part(plain, 2), atol=1e-6)


def test_attention_in_pieces_keeps_no_scores_on_a_card():
    grouped = {"hidden_size": 512, "num_heads": 8, "num_kv_heads": 2, "max_position_embeddings": 4096}
    batch = TokenBatch(1, 4096, 64)
    kept = {
        parallel: asked(decoder(**grouped), batch, device="h100", precision="bf16", world_size=4, parallel=parallel)
        for parallel in ("cp", "fsdp2")
    }
    shared, sharded = (kept[parallel].by_category["activations"] for parallel in ("cp", "fsdp2"))
    assert shared < 0.6 * sharded  # a rank's scores alone would be 8 x 1024 x 4096 numbers for each block
