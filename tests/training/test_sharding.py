"""FSDP2 in one process: what it is refused for, micro-batches in lockstep, a step, its state, the whole model again."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_training import settings

from injected_out_of_memory import OutOfMemoryAt
from tightfit.errors import CannotFit, ConfigError, ModelError
from tightfit.levers.micro_batch import valid_tokens
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.ranks.processes.ranks import Ranks
from tightfit.ranks.shards import free_gathered
from tightfit.ranks.wrapping import in_fsdp2
from tightfit.runtime.forked import in_a_fork
from tightfit.runtime.internals import forget_process_groups, process_group_exists
from tightfit.step import StepSettings
from tightfit.training.checkpoint.store import Checkpoints
from tightfit.training.config import AdapterConfig, Config, PretrainedModel
from tightfit.training.objective import CausalLMLoss, counted
from tightfit.training.sharded.model import WholeModel, demand_shardable, demand_shardable_model
from tightfit.training.sharded.saving import ShardedCheckpoints
from tightfit.training.sharded.steps import ShardedStepper, lockstep_parts
from tightfit.training.stepper import Stepper, share_of


class Second(Ranks):
    """The second of four."""

    rank, size = 1, 4


def training(folder: Path, **sections: dict[str, Any]) -> Config:
    steps = {"parallel": "fsdp2", **sections.pop("training", {})}
    return settings(folder, training=steps, **sections)


@pytest.mark.keeps("fsdp2-train-line-rank")
@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"training": {"precision": "fp16"}}, "precision is fp16.*: set it to bf16"),
        ({"training": {"objective": "dpo"}}, "objective is dpo.*: set training.parallel to ddp"),
        ({"training": {"optimizer": "adamw8bit"}}, "adamw8bit does not step shards: set it to one of adamw"),
        ({"memory": {"verify": True, "budget": "1GiB"}}, "verify compares whole models: set it to false"),
        ({"memory": {"recompute": {}}}, "recompute is set by hand.*: set memory.budget"),
        ({"memory": {"compile_blocks": True}}, "compile_blocks was compared on no rank.*: set it to false"),
        ({"checkpoint": {"in_background": True}}, "in_background is of one process that writes: set it to false"),
        ({"memory": {"levers": ["offload"], "budget": "1GiB"}}, "levers names offload.*: leave it out"),
    ],
)
def test_what_shards_do_not_do_is_refused_in_one_line(tmp_path: Path, sections: dict[str, Any], line: str):
    demand_shardable(training(tmp_path))
    with pytest.raises(ConfigError, match=f"^training.parallel is fsdp2, and .*{line}"):
        demand_shardable(training(tmp_path, **sections))


@pytest.mark.keeps("fsdp2-train-line-rank")
def test_what_a_model_says_is_refused_and_frozen_weights_are_not(tmp_path: Path):
    config, model = training(tmp_path), tiny()
    demand_shardable_model(model, config, "causal")
    with pytest.raises(ModelError, match="weights in bf16 are trained by adamw_bf16_stochastic"):
        demand_shardable_model(tiny().to(torch.bfloat16), config, "causal")
    with pytest.raises(ConfigError, match="objective is dpo"):
        demand_shardable_model(model, config, "dpo")
    frozen = tiny().to(torch.bfloat16).requires_grad_(False)
    frozen.head = torch.nn.Linear(16, 61, bias=False)
    demand_shardable_model(frozen, config, "causal")  # what is trained is in fp32


@pytest.mark.keeps("fsdp2-train-line-rank")
@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_a_base_in_few_bits_is_refused(tmp_path: Path, base: str):
    model = PretrainedModel(path="somewhere", adapter=AdapterConfig(base=base))
    config = training(tmp_path).model_copy(update={"model": model})
    with pytest.raises(ConfigError, match=f"model.adapter.base is {base}, and weights in few bits are not sharded"):
        demand_shardable(config)
    demand_shardable(config.model_copy(update={"model": PretrainedModel(path="here", adapter=AdapterConfig())}))


def tiny() -> Decoder:
    torch.manual_seed(3)
    return Decoder(DecoderConfig(hidden_size=16, num_layers=2, num_heads=2, vocab_size=61))


def batch(rows: int) -> dict[str, torch.Tensor]:
    ids = (torch.arange(rows * 12) * 31 % 61).view(rows, 12)
    labels = ids.clone()
    labels[:, : rows + 2] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize(("rows", "count", "sizes"), [(5, 2, [2, 3]), (3, 3, [1, 1, 1]), (2, 3, [1, 1, 1])])
def test_a_rank_has_as_many_micro_batches_as_the_others(rows: int, count: int, sizes: list[int]):
    whole = counted(batch(rows))
    parts = lockstep_parts(whole, count)
    assert [len(part["input_ids"]) for part in parts] == sizes
    assert sum(valid_tokens({"labels": p["labels"], "input_ids": p["input_ids"]}) for p in parts) == valid_tokens(whole)


def test_a_rank_without_samples_computes_one_and_learns_nothing():
    model = tiny()
    stepper = ShardedStepper(model, adamw(model), CausalLMLoss(), StepSettings(), 3, ranks=Second())
    part, _ = share_of(batch(2), stepper)  # the second and the fourth rank have one sample each
    assert stepper.count_for(part) == 1
    assert valid_tokens(part) > 0
    part, _ = share_of(batch(1), stepper)  # the fourth has it
    assert part["input_ids"].shape == (1, 12)
    assert valid_tokens(part) == 0
    assert CausalLMLoss()(model, part).item() == 0


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def in_shards(model: Decoder, **precision: Any) -> Decoder:
    return in_fsdp2(model, ["layers.0", "layers.1"], dist.init_device_mesh("cpu", (1,)), **precision)


@pytest.mark.sampled(1)
@pytest.mark.keeps("update-shards-runs-out")
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_an_update_of_shards_that_runs_out_of_memory_is_finished_bit_for_bit(options: dict[str, Any]):
    whole, notes = counted(batch(5)), []

    def stepper() -> ShardedStepper:
        model = in_shards(tiny())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
        made = ShardedStepper(model, optimizer, CausalLMLoss(), StepSettings("fp32", 0.5), 1, note=notes.append)
        made.attempt(whole, 1)
        return made

    plain = stepper()
    counted_in = OutOfMemoryAt()
    with patched(plain.optimizer, counted_in):
        plain.attempt(whole, 2)
    expected = [p.to_local() for p in plain.model.parameters()]
    assert not notes
    for number in sorted({0, counted_in.count // 3, counted_in.count // 2, counted_in.count - 1}):
        failing = stepper()
        with patched(failing.optimizer, OutOfMemoryAt(number)) as memory:
            outcome = failing.attempt(whole, 2)
        assert (memory.raised, failing.corrections.one_by_one, outcome.skipped) == (1, True, False)
        for parameter, value in zip(failing.model.parameters(), expected, strict=True):
            assert torch.equal(parameter.to_local(), value), number
    assert all(note.startswith("step 2: out of memory") and "one parameter at a time" in note for note in notes)


@contextmanager
def patched(optimizer: Any, memory: OutOfMemoryAt) -> Iterator[OutOfMemoryAt]:
    """Memory runs out inside the optimizer's own step."""
    step = optimizer.step

    def failing(*arguments: Any) -> Any:
        with memory:
            return step(*arguments)

    optimizer.step = failing
    yield memory
    optimizer.step = step


@pytest.mark.keeps("fsdp2-too-ranks-see")
@pytest.mark.usefixtures("group")
def test_a_sharded_step_is_the_plain_one_and_its_state_is_that_of_one_process(tmp_path: Path):
    plain, model = tiny(), tiny()
    twin = WholeModel(model, Ranks())
    in_shards(model)
    plain_one = Stepper(plain, adamw(plain), CausalLMLoss(), StepSettings("fp32", 0.5), 2)
    sharded = ShardedStepper(model, adamw(model), CausalLMLoss(), StepSettings("fp32", 0.5), 2)
    whole = counted(batch(5))
    for number in (1, 2, 3):
        expected, found = plain_one.step(whole), sharded.attempt(whole, number)
        assert found == expected
    filled = twin.filled(model)
    assert type(filled) is Decoder
    for (name, parameter), (other, found) in zip(plain.named_parameters(), filled.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(parameter, found)
    state = sharded.state.capture()
    ShardedCheckpoints(tmp_path, Ranks()).save(3, state.tensors, state.record)
    stored = Checkpoints(tmp_path).newest_intact().checkpoint
    assert stored is not None
    # A process alone goes on from it, and a sharded one too.
    again, shards = tiny(), tiny()
    in_shards(shards)
    steppers = [
        Stepper(again, adamw(again), CausalLMLoss(), StepSettings("fp32", 0.5), 2),
        ShardedStepper(shards, adamw(shards), CausalLMLoss(), StepSettings("fp32", 0.5), 2),
    ]
    for stepper in steppers:
        stepper.state.restore(stored)
    outcomes = {stepper.attempt(whole, 4) for stepper in [plain_one, sharded, *steppers]}
    assert len(outcomes) == 1


@pytest.mark.parametrize(
    ("raised", "expected", "line"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), CannotFit, "step 7: rank 0 is out of memory.*--resume"),
        (RuntimeError("a kernel's own"), RuntimeError, "a kernel's own"),
    ],
)
def test_out_of_memory_ends_a_sharded_training_in_one_line(raised: Exception, expected: type[Exception], line: str):
    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        raise raised

    model = tiny()
    stepper = ShardedStepper(model, adamw(model), loss, StepSettings(), 1, planned_bytes=123)
    with pytest.raises(expected, match=line) as error:
        stepper.attempt(counted(batch(2)), 7)
    assert getattr(error.value, "least_bytes", 123) == 123


@pytest.mark.usefixtures("group")
def test_logits_in_16_bits_are_converted_for_the_loss():
    model = in_shards(tiny(), precision="bf16")
    whole = counted(batch(5))
    assert CausalLMLoss()(model, whole).dtype == torch.bfloat16
    assert CausalLMLoss(in_fp32=True)(model, whole).dtype == torch.float32
    free_gathered(model)
    assert all(type(parameter).__name__ == "DTensor" for parameter in model.parameters())


@pytest.mark.usefixtures("group")
def test_a_fork_forgets_the_process_groups_of_its_parent():
    def in_fork() -> tuple[bool, bool, int]:
        before = process_group_exists()
        forget_process_groups()
        gone = process_group_exists()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return before, gone, dist.get_world_size()

    assert in_a_fork(in_fork) == (True, False, 1)
    assert process_group_exists()


def test_what_a_fork_raises_is_raised_here():
    def fails() -> None:
        raise ModelError("no such model")

    with pytest.raises(ModelError, match="no such model"):
        in_a_fork(fails)
    assert in_a_fork(lambda: [1, "two"]) == [1, "two"]
