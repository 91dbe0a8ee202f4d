"""Estimates and plans for a CUDA device that is not there."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tightfit import Plan, TokenBatch, estimate, maximise, plan, verify
from tightfit.devices.present import lookup
from tightfit.errors import CannotFit, DeviceError
from tightfit.levers.micro_batch import as_parts
from tightfit.levers.recompute import RECOMPUTE_ALL
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.planner.levers import CapturedBlocks, find
from tightfit.planner.request import Request, Tracer
from tightfit.planner.search.fastest import fastest
from tightfit.planner.search.search import Search
from tightfit.runtime.internals import installed_release
from tightfit.step import StepSettings, model_loss
from tightfit.tracing.build import build_dry
from tightfit.tracing.cuda import CudaRole
from tightfit.tracing.cuda.allocator import MIB, round_size
from tightfit.tracing.cuda.replay import fits_device, play
from tightfit.tracing.cuda.workspace import CONTEXT_BYTES
from tightfit.tracing.record import Category, Phase, StepTrace
from tightfit.tracing.repeated import DryStep
from tightfit.tracing.step import trace_step

WIDTH, VOCABULARY = 256, 2000


def decoder() -> nn.Module:
    return Decoder(DecoderConfig(hidden_size=WIDTH, num_layers=4, num_heads=4, vocab_size=VOCABULARY))


def llama() -> nn.Module:
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512}
    config = transformers.LlamaConfig(hidden_size=WIDTH, vocab_size=VOCABULARY, **sizes)
    return transformers.LlamaForCausalLM(config).train()


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=WIDTH, n_layer=4, n_head=4, vocab_size=VOCABULARY, n_positions=512)
    return transformers.GPT2LMHeadModel(config).train()


BATCH = TokenBatch(8, 512, VOCABULARY)


@pytest.mark.parametrize("build", [decoder, llama, gpt2])
@pytest.mark.parametrize("device", ["rtx4090", "h200"])
def test_models_are_estimated_for_cards_that_are_not_there(build, device):
    model = build_dry(build)
    made = estimate(model, BATCH, precision="bf16", device=device)
    assert sum(p.nbytes for p in model.parameters()) * 3 < made.peak_bytes <= (made.reserved_bytes or 0)
    assert made.context_bytes == CONTEXT_BYTES
    assert "The allocator reserves" in str(made)


@pytest.mark.keeps("plan-card-stays-within")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("build", "precision"), [(decoder, "fp32"), (decoder, "bf16"), (llama, "bf16"), (gpt2, "fp32")]
)
def test_a_plan_for_cuda_fits_there_and_changes_no_bit_here(build, precision):
    torch.manual_seed(0)
    model = build()
    made = plan(model, TokenBatch(8, 256, VOCABULARY), "0.85x", precision=precision, device="rtx4090")
    assert made.peak_bytes <= made.budget_bytes
    assert any(choice.action != "keep" for choice in made.choices)
    report = verify(model, TokenBatch(2, 64, VOCABULARY), made)
    assert report.ok, str(report)


def test_an_estimate_for_a_cpu_knows_of_no_allocator():
    made = estimate(build_dry(decoder), BATCH, device="cpu")
    assert made.reserved_bytes is None
    assert "reserves" not in str(made)


def test_a_device_without_a_known_capability_is_refused():
    unknown = replace(lookup("rtx4090"), compute_capability=None)
    request = Request.of(decoder(), BATCH, device="rtx4090").checked()
    with pytest.raises(DeviceError, match="capability"):
        _ = request.but(device=unknown).role


# The allocator under the trace


@cache
def traced(precision: Any = "bf16") -> StepTrace:
    model, parts = build_dry(decoder), as_parts([BATCH.tensors()], model_loss)
    settings = StepSettings(precision)
    return trace_step(model, parts, model_loss, settings=settings, role=CudaRole((8, 9), 128))


def test_the_allocator_hands_out_what_storages_and_scratch_need_and_little_more():
    trace = traced()
    for index, level in enumerate(trace.levels):
        needed = sum(s.bytes for s in trace.alive_at(index)) + round_size(trace.operators[index].workspace_bytes)
        assert needed - 1024 <= level  # by how much sizes are rounded, up to twice since torch 2.15
    assert trace.peak_bytes <= (trace.reserved_bytes or 0)


def test_a_step_fits_a_device_with_room_for_what_it_reserves_and_none_with_less_than_it_uses():
    trace = traced()
    assert fits_device(trace, trace.reserved_bytes or 0)
    assert not fits_device(trace, trace.peak_bytes - 1)


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_growing_segments_reserve_otherwise_where_the_environment_asks_for_them(monkeypatch, variable):
    trace = traced()
    fixed = play(trace).reserved_bytes
    monkeypatch.setenv(variable, "max_split_size_mb:512, expandable_segments:True")
    growing = play(trace).reserved_bytes
    assert fixed == trace.reserved_bytes
    # Since torch 2.15 the workspaces of products come and go. That growing segments hold more then is what was seen.
    assert (growing > fixed) if installed_release() >= (2, 15) else (growing < fixed)


def test_workspaces_of_cublas_are_there_in_both_threads(monkeypatch):
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")  # from torch 2.15 on they stay only where that is set
    trace = traced.__wrapped__()  # with this setting, whatever was traced before
    resident = [s for s in trace.storages if s.category is Category.WORKSPACE and s.died is None]
    assert sum(s.bytes for s in resident) == 2 * (8 * MIB + 128 * 1024)


def test_counters_of_steps_stay_on_the_host():
    states = [s for s in traced("fp32").storages if s.category is Category.OPTIMIZER_STATE and s.bytes]
    parameters = len(list(build_dry(decoder).parameters()))
    assert len(states) == 2 * parameters


# Budgets


@pytest.mark.keeps("plan-card-stays-within")
@pytest.mark.slow  # two plans for a card
def test_a_budget_beyond_the_device_is_bounded_by_what_the_device_holds():
    card = lookup("rtx4090")
    model = build_dry(decoder)
    plain = estimate(model, BATCH, precision="bf16", device="rtx4090")
    small = replace(card, memory_bytes=CONTEXT_BYTES + plain.peak_bytes * 95 // 100)
    request = Request.of(model, BATCH, precision="bf16", device="rtx4090").checked()
    found = fastest(Search(request.but(device=small), "1TiB"))
    assert found.policies
    assert fits_device(found.trace, small.memory_bytes - CONTEXT_BYTES)


@pytest.mark.slow  # a plan for a card
def test_a_share_of_the_device_includes_the_context():
    model, card = build_dry(decoder), lookup("rtx4090")
    share = 100 * (CONTEXT_BYTES + tiny_peak(model)) / card.memory_bytes
    with pytest.raises(CannotFit):
        plan(model, BATCH, f"{share / 2:.4f}%", precision="bf16", device="rtx4090")


def tiny_peak(model: nn.Module) -> int:
    return estimate(model, BATCH, precision="bf16", device="rtx4090").peak_bytes


@pytest.mark.keeps("budget-bytes-card-plan")
def test_a_budget_in_bytes_says_what_the_device_holds_beside_the_tensors_and_one_in_per_cent_bounds_it():
    model = build_dry(gpt2)
    card = "rtx4090,memory=2GiB"
    peak = estimate(model, BATCH, device=card).peak_bytes
    made = plan(model, BATCH, peak + 2**20, device=card)
    assert made.room is not None
    assert made.room.device_bytes == 2 * 2**30
    assert made.room.taken_bytes > made.budget_bytes >= made.peak_bytes
    assert not made.room.is_bounded
    said = " ".join(str(made).split())
    assert "a budget in bytes limits the tensors alone (max_memory_allocated)" in said
    assert ",memory=" in said
    shared = plan(model, BATCH, "90%", device=card)
    assert shared.room is not None
    assert shared.room.is_bounded
    assert "the budget limits all of that" in " ".join(str(shared).split())
    assert Plan.from_dict(made.to_dict()) == made


def test_an_estimate_of_what_does_not_fit_says_so_in_its_first_line():
    small = estimate(build_dry(gpt2), BATCH, device="rtx4090,memory=1GiB")
    assert not small.fits
    assert "does not fit" in str(small).splitlines()[0]
    large = estimate(build_dry(gpt2), BATCH, device="rtx4090")
    assert large.fits
    assert "does not fit" not in str(large)


@pytest.mark.slow  # several plans near the device's limit
def test_where_the_device_has_no_room_that_is_the_reason_and_not_the_budget():
    model = build_dry(gpt2)
    found = maximise(
        lambda size: (model, TokenBatch(size, 512, VOCABULARY)), "8GiB", what="batch_size", multiple_of=8,
        device="rtx4090,memory=2GiB",
    )  # fmt: skip
    assert found.above is not None
    assert found.above.taken_bytes is not None
    assert found.above.least_bytes < found.plan.budget_bytes
    assert found.above.taken_bytes > 2 * 2**30
    assert "for which RTX 4090 with memory=2GiB has no room" in found.sentence


@pytest.mark.keeps("block-recomputed-whole-card")
@pytest.mark.parametrize("precision", ["bf16", "fp32"])  # flash, and memory-efficient attention
def test_a_block_recomputed_whole_recomputes_its_attention(precision):
    search = Search(Request.of(build_dry(decoder), BATCH, precision=precision, device="h100").checked(), "1x")
    every = search.tracer.part(search.request.plain, dict.fromkeys(search.paths, RECOMPUTE_ALL), search.plain)
    again = [op.name for op in every.operators if op.phase is Phase.RECOMPUTE and "attention" in op.name]
    assert len(again) == len(search.paths) == 4


def test_a_plan_runs_each_step_once_where_the_model_does_not_change(monkeypatch):
    """A lever that writes into its own attributes in a first step looks like a model that changes: twice the time."""
    recorded: list[DryStep] = []
    asked: list[Any] = []
    record, trace = DryStep.recorded, Tracer.whole

    def recording(self: DryStep) -> list[int]:
        recorded.append(self)
        return record(self)

    def tracing(self: Tracer, combination: Any, policies: Any, *others: Any) -> StepTrace:
        if self.numbers is not None:
            asked.append((self.numbers, combination, frozenset(policies.items()), others[:1] or ((),)))
        return trace(self, combination, policies, *others)

    monkeypatch.setattr(DryStep, "recorded", recording)
    monkeypatch.setattr(Tracer, "whole", tracing)
    for _ in range(2):  # after an import a step is recorded again
        recorded.clear()
        asked.clear()
        found = plan(decoder(), BATCH, "0.7x", device="rtx4090", levers=["recompute"], precision="bf16")
    assert any(choice.action == "operators" for choice in found.choices)
    captured = sum(find(combination.levers, CapturedBlocks) is not None for _, combination, *_ in asked)
    assert len(asked) == len({*asked}) > captured + 1
    assert len(recorded) == len(asked) + captured, "in their first step blocks are captured"
