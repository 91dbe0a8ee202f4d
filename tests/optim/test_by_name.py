"""Every optimizer has a name, which works wherever an optimizer is named, and resumes bit for bit."""

import sys

import pytest
import torch
from small_training import assert_same_weights, batches, loss_of, net, resumed_equals_uninterrupted, train

from tightfit.errors import ConfigError, DeviceError, InputError
from tightfit.names import FOREIGN, OPTIMIZERS
from tightfit.optim import Muon8bit, MuonWithAdamW, OffloadedAdamW
from tightfit.optim.by_name import build_optimizer
from tightfit.optim.companding import GROUP, signed_decoded
from tightfit.optim.flash import in_memory_order
from tightfit.optim.in_backward import steps_in_backward
from tightfit.training.config import TrainingConfig, parse_config
from tightfit.training.optimizer import OptimizerRecipe, set_learning_rate

FOR_BF16 = [name for name, facts in OPTIMIZERS.items() if facts.needs_bf16]
LOW_BIT = ("adamw8bit", "adamw4bit")
low_bit = pytest.mark.parametrize("name", ["adamw8bit", pytest.param("adamw4bit", marks=pytest.mark.slow)])  # compiles
FREE = sorted(OPTIMIZERS.keys() - set(LOW_BIT))


class Wide(torch.nn.Module):
    """Matrices large enough for states of 8 and 4 bits."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(31, 128)
        self.first, self.second = torch.nn.Linear(128, 128), torch.nn.Linear(128, 5)

    def forward(self, ids):
        return self.second(self.first(self.embedding(ids)).tanh())


def wide():
    torch.manual_seed(3)
    return Wide()


@pytest.mark.keeps("optimizer-name-resumes-bit")
@pytest.mark.parametrize("name", FREE)
def test_it_trains_and_resumes_bit_for_bit(name):
    dtype = torch.bfloat16 if name in FOR_BF16 else torch.float32
    resumed_equals_uninterrupted(recipe(name), lambda: net(dtype))


@pytest.mark.parametrize("name", FOR_BF16)
def test_one_for_bf16_weights_is_refused_where_there_are_none(name):
    with pytest.raises(InputError, match=rf"^optimizer {name} is for bf16 weights.*model.to\(torch.bfloat16\)"):
        recipe(name)(net())
    with pytest.raises(InputError, match=f"optimizer {name}"):
        build_optimizer(name, net().parameters())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within PyTorch's compiler, which 4-bit states step with
@low_bit
def test_low_bit_states_train_and_resume_bit_for_bit(name):
    resumed_equals_uninterrupted(recipe(name), wide)


def recipe(name):
    return lambda model: OptimizerRecipe(TrainingConfig(optimizer=name))(model.parameters())


@low_bit
def test_a_missing_package_is_one_line_with_what_to_install(name, monkeypatch):
    for package in ("bitsandbytes", "torchao.optim"):
        monkeypatch.setitem(sys.modules, package, None)  # as Python remembers what is not there
    with pytest.raises(InputError, match=rf"^optimizer {name} needs .*: pip install 'tightfit\[lowbit\]'$"):
        build_optimizer(name, net().parameters())


def test_a_device_without_the_kernels_is_one_line():
    meta = [torch.nn.Parameter(torch.zeros(2, device="meta"))]
    for name in LOW_BIT:
        with pytest.raises(DeviceError, match=f"optimizer {name} does not run on meta: it runs on cpu, cuda, xpu"):
            build_optimizer(name, meta)
    with pytest.raises(DeviceError, match=r"optimizer adamw_fused does not run on meta: it runs on .*cpu"):
        build_optimizer("adamw_fused", meta)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("adanw", "optimizer 'adanw' is not known: did you mean 'adamw'?"),
        ("offloaded_adam", "optimizer 'offloaded_adam' is not known: did you mean 'offloaded_adamw'?"),
        ("apollo", "optimizer 'apollo' has no name here, since a checkpoint cannot save the projectors"),
        ("galore", "optimizer 'galore' has no name here"),
        ("xyz", "optimizer 'xyz' is not known: choose one of adamw, "),
        (
            "offloaded_adamw:1.5",
            "optimizer 'offloaded_adamw:1.5': the share of the states on the host goes from 0 to 1",
        ),
        ("offloaded_adamw:half", "optimizer 'offloaded_adamw:half': 'half' is no number: write offloaded_adamw:0.5"),
        ("adamw:0.5", "optimizer 'adamw:0.5': only offloaded_adamw and offloaded_adamw_fused take a share of states"),
    ],
)
def test_a_wrong_name_is_one_line_from_python_and_from_yaml(name, line):
    with pytest.raises(InputError) as from_python:
        build_optimizer(name, net().parameters())
    assert str(from_python.value).startswith(line)
    with pytest.raises(ConfigError) as from_yaml:
        parse_config({"training": {"optimizer": name}}, source="run.yaml")
    assert f"training.optimizer: {line}" in str(from_yaml.value)


def test_the_share_in_the_name_reaches_the_optimizer():
    optimizer = OptimizerRecipe(TrainingConfig(optimizer="offloaded_adamw:0.5"))(net().parameters())
    assert isinstance(optimizer, OffloadedAdamW)
    assert optimizer.fraction == 0.5


def test_names_of_other_trainers_mean_ours():
    for foreign, own in FOREIGN.items():
        assert parse_config({"optim": foreign}).training.optimizer == own
    assert parse_config({"optim": "muon"}).training.optimizer == "muon"


def test_a_step_in_backward_is_a_key_that_excludes_clipping_and_fp16():
    training = parse_config({"training": {"step_in_backward": True, "grad_clip": None}}).training
    model = net()
    optimizer = OptimizerRecipe(training)(model.parameters())
    assert steps_in_backward(optimizer)
    train(model, optimizer, steps=2)
    with pytest.raises(ConfigError, match="step_in_backward and grad_clip 1 exclude each other"):
        parse_config({"training": {"step_in_backward": True}})
    with pytest.raises(ConfigError, match="step_in_backward and precision fp16 exclude each other"):
        parse_config({"training": {"step_in_backward": True, "grad_clip": None, "precision": "fp16"}})


def test_muon_takes_the_matrices_and_adamw_the_rest():
    model = net()
    optimizer = MuonWithAdamW(model.parameters(), lr=1e-2)
    algorithms = {p.ndim: group["algorithm"] for group in optimizer.param_groups for p in group["params"]}
    assert algorithms == {2: "muon", 1: "adamw"}
    plain = net()
    matrices = [p for p in plain.parameters() if p.ndim == 2]
    others = [p for p in plain.parameters() if p.ndim != 2]
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=1e-2, eps=1e-8, adjust_lr_fn="match_rms_adamw")
    references = muon, torch.optim.AdamW(others, lr=1e-2)
    for ids in batches(5):
        for each in (model, plain):
            each.zero_grad()
            loss_of(each, ids).backward()
        for each in (optimizer, *references):
            each.step()
    assert_same_weights(model, plain)


def test_muon_in_8_bits_is_pytorchs_muon_on_the_momentum_that_its_codes_hold():
    torch.manual_seed(0)
    matrices = [torch.nn.Parameter(torch.randn(shape)) for shape in ((40, 33), (7, 300))]
    matrices.append(torch.nn.Parameter(torch.randn(30, 20).t()))  # another order of memory
    optimizer = Muon8bit(matrices, lr=1e-2)
    copies = [torch.nn.Parameter(p.detach().clone()) for p in matrices]
    reference = torch.optim.Muon(copies, lr=1e-2, weight_decay=1e-2, eps=1e-8, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for parameter, copy in zip(matrices, copies, strict=True):
            parameter.grad = torch.randn_like(parameter)
            copy.grad = parameter.grad.clone()
            if state := optimizer.state[parameter]:
                reference.state[copy]["momentum_buffer"].copy_(momentum_of(state, parameter))
        optimizer.step()
        reference.step()
        for parameter, copy in zip(matrices, copies, strict=True):
            assert torch.equal(parameter.grad, copy.grad), "a step leaves gradients as they are"
            assert torch.equal(parameter, copy)
            error = momentum_of(optimizer.state[parameter], parameter) - reference.state[copy]["momentum_buffer"]
            assert 0 < error.norm() < 0.01 * reference.state[copy]["momentum_buffer"].norm()


def momentum_of(state, parameter):
    """Muon's momentum (m x n) in fp32, as it is decoded, in the memory order of its parameter."""
    codes, scales = in_memory_order(state["momentum_buffer"]), state["momentum_scale"].repeat_interleave(GROUP)
    decoded = signed_decoded(codes, scales[: codes.numel()])
    return torch.empty_like(parameter).copy_(decoded.as_strided(parameter.shape, parameter.stride()))


def test_muon_in_8_bits_counts_updates_below_the_last_bit_of_bf16_weights():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(16, 16, dtype=torch.bfloat16))
    optimizer = Muon8bit([weight], lr=1e-5, weight_decay=0.0)
    for _ in range(400):
        weight.grad = torch.eye(16, dtype=torch.bfloat16)
        optimizer.step()
    assert (weight.diagonal() < 1).all()


def test_muon_in_8_bits_refuses_what_it_cannot_hold():
    with pytest.raises(InputError, match=r"^Muon8bit: a parameter is float16: use bf16 or fp32$"):
        Muon8bit([torch.nn.Parameter(torch.ones(2, 2, dtype=torch.float16))])


def test_a_learning_rate_that_lies_in_a_tensor_is_written_into_it():
    rate = torch.tensor(0.5)
    optimizer = torch.optim.AdamW(net().parameters(), lr=rate)
    set_learning_rate(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.25
