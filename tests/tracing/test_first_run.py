"""What a process has done before, and what it has not done yet, changes no dry run."""

import gc
import subprocess
import sys
import textwrap
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import tightfit
from round_device import round_device
from tightfit.optim import low_bit
from tightfit.tracing.build import build_dry


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(512, 512, dtype=torch.float32)

    def forward(self, x):
        large = torch.ones(64, 512, 512)
        return self.layer(x).sum() + large.sum()


def estimated():
    batch = (torch.zeros(512, 512, dtype=torch.float32),)
    answer = tightfit.estimate(Halves(), batch, optimizer="sgd", loss=lambda m, b: m(*b), device="h100-80")
    return answer.peak_bytes


def with_default(dtype, act):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return act()
    finally:
        torch.set_default_dtype(before)


def test_a_model_built_dry_has_the_default_dtype_of_its_time():
    made = [
        with_default(dtype, lambda: build_dry(lambda: nn.Linear(1024, 1024))).weight.dtype
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
    ]
    assert made == [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.keeps("process-ran-imported-before")
def test_an_estimate_under_another_default_dtype_remembers_nothing_of_the_first():
    first, second, third = (with_default(d, estimated) for d in (torch.float32, torch.bfloat16, torch.float32))
    assert first == third
    assert second < first  # the ones are half as wide


def levels_of_a_fresh_process(first_line):
    program = f"""
    {first_line}
    import sys
    import torch
    from torch import nn
    from tightfit.tracing.dry_run import DryRun
    from tightfit.tracing.ledger import Ledger
    from tightfit.tracing.modules import ModuleTracker
    from tightfit.memory.allocator import collector_off

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

        def forward(self, x):
            for number, layer in enumerate(self.layers):
                x = x + torch.relu(layer(x))
                if number == 2:
                    import torch._dynamo
            return x.sum()

    model = Blocks()
    for _ in range(2):
        with collector_off(), DryRun(Ledger(), ModuleTracker(model)) as dry:
            model(torch.randn(1024, 512)).backward()
        model.zero_grad()
        print(dry.levels)
    """
    program = textwrap.dedent(program).replace("import torch._dynamo", '__import__("torch._dynamo")')
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.keeps("process-ran-imported-before")
@pytest.mark.slow  # two interpreters that import the compiler
def test_an_import_within_the_first_step_keeps_nothing_alive():
    first, second = levels_of_a_fresh_process("")
    assert first == second
    assert [first, second] == levels_of_a_fresh_process("import torch._dynamo")


@pytest.fixture
def late(tmp_path, monkeypatch):
    """The name of a module that was not imported, which makes a table when it is, and has an optimizer."""
    name = "brings_a_table"
    text = "import torch\nTABLE = torch.zeros(2**20)\nclass Plain(torch.optim.SGD):\n    pass\n"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def by_a_package(name):
    def loss(model, batch):
        low_bit._package("adamw8bit", name)
        return model(*batch)

    return {"loss": loss, "optimizer": "sgd"}


def by_a_class(name):
    return {"loss": lambda model, batch: model(*batch), "optimizer": f"{name}:Plain"}


@pytest.mark.keeps("process-ran-imported-before")
@pytest.mark.parametrize("device", ["round", "h100-80"])
@pytest.mark.parametrize("imported", [by_a_package, by_a_class])
def test_a_table_that_a_package_makes_when_it_is_imported_is_not_the_steps(late, imported, device):
    model, batch = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), (torch.zeros(1, 4),)
    card = round_device() if device == "round" else device
    first, second = (tightfit.estimate(model, batch, device=card, **imported(late)) for _ in range(2))
    assert late in sys.modules
    assert first.peak_bytes == second.peak_bytes


def test_who_copies_the_methods_of_tensors_during_a_dry_run_keeps_nothing_of_the_model():
    """Dynamo does, which a step may import: the model of a process's first estimate stayed in memory for ever."""
    copied: dict[str, Any] = {}

    class Copies(Halves):
        def forward(self, x):
            copied.update(vars(torch.Tensor))
            return super().forward(x)

    model = Copies()
    weight = weakref.ref(model.layer.weight)
    tightfit.estimate(model, (torch.zeros(4, 512, dtype=torch.float32),), optimizer="sgd", loss=lambda m, b: m(*b))
    del model
    gc.collect()
    assert weight() is None
    assert copied["tolist"](torch.ones(2)) == [1.0, 1.0]
