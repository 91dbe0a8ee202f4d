"""Guests that run out of memory go on as if they had not: `recover=True`."""

import logging

import pytest
import torch
import transformers
from tiny_trainings import arguments, llama, losses, norms, padded, samples

from injected_out_of_memory import OutOfMemoryAt
from tightfit.errors import CannotFit
from tightfit.integrations import hf, planning
from tightfit.integrations.hf import FrugalTrainer, MemoryBudget
from tightfit.integrations.lightning import MemoryBudget as MemoryBudgetOfLightning

pl = pytest.importorskip("pytorch_lightning")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*number of training batches.*"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
]

STEPS = 2
SHAPE = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "attention_dropout": 0.1}


class Injected(transformers.TrainerCallback):
    """Memory runs out at some operators of the first optimizer step."""

    def __init__(self, *numbers):
        self.mode = OutOfMemoryAt(*numbers)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self.mode.__enter__()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.mode.__exit__(None, None, None)


def trained(folder, *callbacks, **settings):
    """A `Trainer` that accumulates two batches in each of its steps."""
    chosen = {"max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **settings}
    model = llama(**SHAPE)
    trainer = transformers.Trainer(
        model=model,
        args=arguments(folder, **chosen),
        train_dataset=samples(12, 10, 16),
        data_collator=padded,
        callbacks=list(callbacks),
    )
    trainer.train()
    return trainer


def assert_same(trainer, wanted):
    assert losses(trainer) == losses(wanted)
    assert norms(trainer) == norms(wanted)
    for one, other in zip(trainer.model.parameters(), wanted.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    injected = Injected()
    return trained(tmp_path_factory.mktemp("plain"), injected), injected.mode.count


@pytest.fixture(scope="module")
def plans():
    return []


@pytest.fixture
def planned_once(monkeypatch, plans):
    """Plans are for the same model and batches in all of these trainings."""

    def remembering(step, batches, wish):
        if not plans:
            plans.append(planning.plan_for_all(step, batches, wish))
        return plans[0]

    monkeypatch.setattr(hf, "plan_for_all", remembering)


def assert_recovers(folder, budget, share, uninterrupted, caplog, told=1):
    wanted, count = uninterrupted
    injected = Injected(int(share * count))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        trainer = trained(folder, MemoryBudget(budget, recover=True), injected)
    assert injected.mode.raised == 1
    assert_same(trainer, wanted)
    assert sum("out of memory" in record.message for record in caplog.records) == told
    assert "training_step" not in vars(trainer)
    inner = trainer.optimizer.optimizer
    assert ("step" in vars(inner)) == ("step" in vars(wanted.optimizer.optimizer))


@pytest.mark.keeps("hugging-face-lightning-trainers")
def test_a_trainers_step_is_recovered_bit_for_bit(tmp_path, planned_once, uninterrupted, caplog):
    """Accumulation, dropout, clipping and the schedule included, in backward and in the optimizer's step."""
    for share in (0.6, 0.97):  # in the second batch of two: the first runs again too
        assert_recovers(tmp_path, "1x", share, uninterrupted, caplog)


@pytest.mark.keeps("hugging-face-lightning-trainers")
@pytest.mark.slow  # twenty trainings
def test_a_trainers_step_is_recovered_wherever_memory_runs_out(tmp_path, uninterrupted, caplog):
    # The first operator copies a buffer before the step. It is repeated: nothing is undone, and no plan is tightened.
    assert_recovers(tmp_path, "0.9x", 0, uninterrupted, caplog, told=0)
    for twentieth in range(1, 20):
        assert_recovers(tmp_path, "0.9x", twentieth / 20, uninterrupted, caplog)


@pytest.mark.slow  # plans several times
def test_a_frugal_trainer_splits_its_batches_further(tmp_path, uninterrupted):
    wanted, _ = uninterrupted
    trainer = FrugalTrainer(
        model=llama(**{**SHAPE, "attention_dropout": 0.0}),
        args=arguments(tmp_path, max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2),
        train_dataset=samples(12, 10, 16),
        data_collator=padded,
        callbacks=[Injected(200)],
        memory_budget="1x",
        memory_levers=["micro_batch"],
        memory_recover=True,
    )
    trainer.train()
    assert trainer.memory_plan.micro_batches == 4
    assert trainer.memory_plan.budget_bytes == trainer.memory_plan.plain_peak_bytes
    assert losses(trainer) == pytest.approx(losses(wanted), rel=1e-2), "the same batches, without dropout"


def test_without_a_tighter_plan_or_the_argument_the_training_ends_in_one_line(tmp_path, planned_once, monkeypatch):
    injected = Injected(100)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        trained(tmp_path, MemoryBudget("1x"), injected)
    injected.mode.__exit__(None, None, None)

    def nothing_fits(*arguments):
        raise CannotFit("nothing fits", least_bytes=10**12)

    budget, injected = MemoryBudget("1x", recover=True), Injected(100)
    begin = budget.on_train_begin

    def begin_once(*arguments, **options):
        begin(*arguments, **options)
        monkeypatch.setattr(hf, "plan_for_all", nothing_fits)

    budget.on_train_begin = begin_once
    with pytest.raises(CannotFit, match="no tighter plan is left") as raised:
        trained(tmp_path, budget, injected)
    injected.mode.__exit__(None, None, None)
    assert "\n" not in str(raised.value)


class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 16))]
        layers += [torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 16))]
        self.blocks = torch.nn.ModuleList(layers)
        self.seen = []

    def training_step(self, batch, batch_idx):
        hidden = batch
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return (hidden - batch.flip(0)).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"]))
        torch.rand(1)  # hooks and collators may draw between two batches of a step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class InjectedBatch(pl.Callback):
    """Memory runs out at an operator of the third batch, counted after what callbacks do before it."""

    def __init__(self, *numbers):
        self.mode = OutOfMemoryAt(*numbers)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 3:
            self.mode.__enter__()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 3:
            self.mode.__exit__(None, None, None)


def fitted(*callbacks):
    model = Lit()
    generator = torch.Generator().manual_seed(3)
    loader = torch.utils.data.DataLoader([torch.randn(16, generator=generator) for _ in range(384)], batch_size=64)
    trainer = pl.Trainer(
        callbacks=list(callbacks), max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, accelerator="cpu", accumulate_grad_batches=2, gradient_clip_val=0.5,
    )  # fmt: skip
    torch.manual_seed(2)
    trainer.fit(model, loader)
    return model, trainer


@pytest.mark.keeps("hugging-face-lightning-trainers")
def test_a_lightning_step_is_recovered_bit_for_bit():
    """The batch that fails is the second of two that are accumulated: the first runs again too."""
    counting = InjectedBatch()
    wanted, _ = fitted(counting)
    for share in (0.2, 0.9):
        budget = MemoryBudgetOfLightning("1x", recover=True)
        injected = InjectedBatch(int(share * counting.mode.count))
        model, trainer = fitted(budget, injected)
        assert injected.mode.raised == 1
        assert model.seen == wanted.seen
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted.parameters(), strict=True))
        assert "step" not in vars(trainer.optimizers[0])
        assert "_make_closure" not in vars(trainer.fit_loop.epoch_loop.automatic_optimization)
