"""The state of a training: captured whole, restored to the bit, in the memory that was predicted."""

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tiny_training import settings
from torch import Tensor, nn

from tightfit.devices.present import lookup_present
from tightfit.errors import CheckpointError
from tightfit.memory.allocator import cpu_rise, storage_bytes
from tightfit.optim.by_name import named_states
from tightfit.step import StepSettings
from tightfit.training.checkpoint.store import Checkpoints
from tightfit.training.checkpoint.tensors import copy_bytes
from tightfit.training.config import TrainingConfig
from tightfit.training.fitting import fit
from tightfit.training.objective import CausalLMLoss
from tightfit.training.optimizer import OptimizerRecipe
from tightfit.training.state import TrainingState
from tightfit.training.stepper import Stepper

OPTIMIZERS = [
    "adamw", "adamw_fused", "adamw8bit", "flash_adamw", "offloaded_adamw", "offloaded_adamw:0.5",
    "offloaded_adamw_fused", "adam", "muon", "muon8bit", "adafactor", "sgd",
]  # fmt: skip
FOR_BF16 = ["adamw_bf16", "adamw_bf16_stochastic", "flash_adamw", "muon8bit", "offloaded_adamw"]
WIDTH = 80  # a matrix of 6,400 elements: 8-bit states begin at 4,096


class Net(nn.Module):
    """Matrices, vectors, dropout, statistics in buffers, and a parameter that no step reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.dropout(self.norm(self.first(x))))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).float().square().mean() * (1 + 0.01 * random.random() + 0.01 * numpy.random.rand())


def batch(step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return {"x": torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)}


def stepper(name: str, dtype: torch.dtype = torch.float32, *, precision: Any = "fp32", seed: int = 0) -> Stepper:
    torch.manual_seed(seed)
    in_backward = name.endswith(" in backward")
    training = TrainingConfig(
        optimizer=name.removesuffix(" in backward"), precision=precision, step_in_backward=in_backward, grad_clip=None
    )
    model = Net().to(dtype)
    optimizer = OptimizerRecipe(training)(model.parameters())
    return Stepper(model, optimizer, loss, StepSettings(precision, None if in_backward else 1.0), micro_batches=1)


def trained(made: Stepper, first: int, last: int) -> None:
    dtype = next(made.model.parameters()).dtype
    for step in range(first, last + 1):
        made.step(batch(step, dtype))


def everything(made: Stepper) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in made.state.capture().tensors.items()}


def resumes_to_the_bit(folder: Path, build: Any) -> None:
    """Three steps and three more, once in one go and once through a checkpoint."""
    whole = build(seed=0)
    trained(whole, 1, 3)
    state = whole.state.capture()
    Checkpoints(folder).save(3, state.tensors, state.record)
    trained(whole, 4, 6)
    expected = everything(whole)

    other = build(seed=9)  # other weights, other random numbers
    checkpoint = Checkpoints(folder).newest_intact().checkpoint
    assert checkpoint is not None
    other.state.restore(checkpoint)
    restored = everything(other)
    assert all(torch.equal(restored[name], checkpoint.read(name)) for name in restored)
    trained(other, 4, 6)

    found = everything(other)
    assert found.keys() == expected.keys()
    unequal = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not unequal


@pytest.mark.keeps("state-optimizer-name-restored")
@pytest.mark.parametrize("name", [*OPTIMIZERS, "adamw in backward", "muon in backward"])
def test_every_optimizer_goes_on_to_the_bit(tmp_path: Path, name: str):
    resumes_to_the_bit(tmp_path, lambda seed: stepper(name, seed=seed))


@pytest.mark.keeps("state-optimizer-name-restored")
@pytest.mark.parametrize("name", FOR_BF16)
def test_every_optimizer_of_bf16_weights_goes_on_to_the_bit(tmp_path: Path, name: str):
    resumes_to_the_bit(tmp_path, lambda seed: stepper(name, torch.bfloat16, seed=seed))


@pytest.mark.keeps("state-optimizer-name-restored")
def test_the_gradient_scaler_goes_on_where_it_was(tmp_path: Path):
    resumes_to_the_bit(tmp_path, lambda seed: stepper("adamw", precision="fp16", seed=seed))
    checkpoint = Checkpoints(tmp_path).newest_intact().checkpoint
    assert checkpoint is not None
    made = stepper("adamw", precision="fp16")
    assert made.scaler is not None
    made.state.restore(checkpoint)

    assert made.scaler.state_dict()["_growth_tracker"] == 3


@pytest.mark.slow  # torchao compiles its step
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_states_of_four_bits_go_on_to_the_bit(tmp_path: Path):
    resumes_to_the_bit(tmp_path, lambda seed: stepper("adamw4bit", seed=seed))


def saved(folder: Path, made: Stepper) -> Any:
    state = made.state.capture()
    Checkpoints(folder).save(1, state.tensors, state.record)
    return Checkpoints(folder).newest_intact().checkpoint


@pytest.mark.keeps("state-optimizer-name-restored")
@pytest.mark.parametrize(
    ("other", "line"),
    [
        ("sgd", "states of AdamW, and this training has SGD"),
        ("adamw8bit", "states of AdamW, and this training has AdamW8bit"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(tmp_path: Path, other: str, line: str):
    made = stepper("adamw")
    trained(made, 1, 1)
    checkpoint = saved(tmp_path, made)

    with pytest.raises(CheckpointError, match=line):
        stepper(other).state.restore(checkpoint)


@pytest.mark.keeps("state-optimizer-name-restored")
def test_the_state_of_another_model_is_refused_by_name(tmp_path: Path):
    made = stepper("adamw")
    checkpoint = saved(tmp_path, made)
    model = Net()
    model.idle = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW(model.parameters())

    with pytest.raises(CheckpointError, match=r"model.idle is float32 \[3\] in the checkpoint and float32 \[4\] here"):
        TrainingState(model, optimizer).restore(checkpoint)


def test_weights_that_are_not_trained_are_compared_and_not_saved(tmp_path: Path):
    model = Net()
    model.first.requires_grad_(False)
    state = TrainingState(model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad))
    captured = state.capture()
    assert not any("first" in name or "second" in name for name in captured.tensors)
    Checkpoints(tmp_path).save(1, captured.tensors, captured.record)
    checkpoint = Checkpoints(tmp_path).newest_intact().checkpoint
    assert checkpoint is not None

    state.restore(checkpoint)
    with torch.no_grad():
        model.first.weight[-1, -1] += 1

    with pytest.raises(CheckpointError, match="the weights under the adapters are not those"):
        state.restore(checkpoint)


def test_a_tied_weight_is_saved_once():
    names = [name for name in stepper("adamw").state.capture().tensors if name.endswith("weight")]

    assert names == ["model.first.weight", "model.norm.weight"]


@pytest.mark.keeps("loading-checkpoint-takes-bytes")
@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "muon", "adafactor", "offloaded_adamw"])
def test_loading_takes_the_bytes_of_the_states_and_no_more(tmp_path: Path, name: str):
    made = stepper(name)
    trained(made, 1, 1)
    checkpoint = saved(tmp_path, made)
    states = {id(tensor): tensor for _, key, tensor in named_states(made.optimizer) if key != "weight on the host"}
    other = stepper(name, seed=1)

    rise = cpu_rise(lambda: other.state.restore(checkpoint))

    randoms = sum(spec.nbytes for key, spec in checkpoint.specs.items() if key.startswith("random."))
    shared = sum(t.nbytes for n, t in made.state.capture().tensors.items() if n.endswith(("qmap1", "qmap2")))
    # bitsandbytes has its tables from the start. Random states are read one after another, at the end.
    assert storage_bytes(states.values()) - shared <= rise <= storage_bytes(states.values()) + 3 * randoms


@pytest.mark.keeps("loading-checkpoint-takes-bytes")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bytes_of_a_checkpoint_are_predicted(tmp_path: Path, name: str):
    config = settings(
        tmp_path,
        model={"hidden_size": 64, "num_layers": 1},
        training={"optimizer": name, "batch_size": 2},
        checkpoint={"every_steps": 1, "in_background": True},
    )
    from tightfit.models.loading import build_model
    from tightfit.training.data.prepare import prepare_data
    from tightfit.training.objective import counted

    data = prepare_data(config.data, config.model)
    model = build_model(config.model, seed=0)
    samples = counted(next(data.batches(2)))
    fitted = fit(model, samples, CausalLMLoss(), config, lookup_present("cpu"))
    training = config.training
    optimizer = OptimizerRecipe(training)(model.parameters())
    made = Stepper(model, optimizer, CausalLMLoss(), StepSettings("fp32", 1.0), micro_batches=1)
    made.step(samples)

    measured = copy_bytes(made.state.capture().tensors)

    assert fitted.copy_bytes == fitted.state_bytes == pytest.approx(measured, rel=1e-3)
    assert fitted.peak_bytes == fitted.planned.peak_bytes + fitted.copy_bytes
