"""Lightning within a memory budget, under both of its names."""

import dataclasses

import pytest
import pytorch_lightning as pl
import torch
from tiny_trainings import StepPeak, llama, padded
from torch import nn

from tightfit.errors import BudgetError, CannotFit, InputError, LeverError
from tightfit.integrations.lightning import FrugalModule, MemoryBudget, checkpoint_blocks
from tightfit.integrations.lightning_step import steps_to_come

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*number of training batches.*"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
]


def packages():
    """Lightning's modules, by each of the names that are installed."""
    found = [pl]
    try:
        import lightning.pytorch as unified
    except ImportError:
        return found
    return [*found, unified]


def module_class(package):
    class Regression(package.LightningModule):
        """Four blocks with dropout, so that the random state counts."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            block = {"dim_feedforward": 256, "batch_first": True, "dropout": 0.1}
            self.layers = nn.ModuleList([nn.TransformerEncoderLayer(64, 4, **block) for _ in range(4)])
            self.seen = []

        def training_step(self, batch):
            hidden = batch["inputs"]
            for layer in self.layers:
                hidden = layer(hidden)
            loss = (hidden - batch["targets"]).square().mean()
            self.log("loss", loss)
            return loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.seen.append(outputs["loss"].item())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Regression


def batches(count=20, size=8, length=48):
    generator = torch.Generator().manual_seed(1)
    samples = [
        {n: torch.randn(length, 64, generator=generator) for n in ("inputs", "targets")} for _ in range(count * size)
    ]
    return torch.utils.data.DataLoader(samples, batch_size=size)


def fit(package, model, *callbacks, folder=None, resume=None, loader=None, **settings):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = package.Trainer(
        callbacks=list(callbacks),
        enable_checkpointing=False,
        default_root_dir=folder,
        **{"max_epochs": 1, **quiet, **settings},
    )
    torch.manual_seed(2)
    trainer.fit(model, loader or batches(), ckpt_path=resume)
    return trainer


def peak_of_steps(package, epoch=0):
    class Peak(package.Callback):
        """The highest peak of steps 2 to 4 of an epoch."""

        bytes = 0

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if 1 <= batch_idx <= 3 and trainer.current_epoch == epoch:
                self.measured = StepPeak(pl_module, trainer.optimizers[0])
                self.measured.begin()

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if 1 <= batch_idx <= 3 and trainer.current_epoch == epoch:
                self.bytes = max(self.bytes, self.measured.end())

    return Peak()


@pytest.mark.keeps("half-plain-peak-twenty")
@pytest.mark.parametrize("package", packages(), ids=lambda package: package.__name__)
def test_at_half_the_plain_peak_the_losses_are_identical_and_the_peak_is_within_the_budget(package):
    plain, within = module_class(package)(), module_class(package)()
    budget, peak = MemoryBudget("0.5x"), peak_of_steps(package)
    fit(package, plain, limit_train_batches=6)
    fit(package, within, budget, peak, limit_train_batches=6)
    assert within.seen == plain.seen
    assert len(plain.seen) == 6
    assert budget.plan.budget_bytes == budget.plan.plain_peak_bytes // 2
    assert peak.bytes <= budget.plan.budget_bytes
    assert budget.plan.peak_bytes == pytest.approx(peak.bytes, rel=0.05)
    assert not any("forward" in module.__dict__ for module in within.modules())


@pytest.mark.keeps("trainings-transformers-lightning-too")
def test_the_updates_to_come_are_counted():
    class Counted(pl.Callback):
        def __init__(self):
            self.steps = []

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.steps.append(steps_to_come(trainer))
            trainer.should_stop = len(self.steps) == 6

    counted = {}
    for name, settings in {
        "epochs": {"max_epochs": 2, "limit_train_batches": 3, "accumulate_grad_batches": 2},
        "steps": {"max_epochs": -1, "max_steps": 3},
        "neither": {"max_epochs": -1},
    }.items():
        callback = Counted()
        fit(pl, module_class(pl)(), callback, **settings)
        counted[name] = callback.steps
    assert counted["epochs"] == [4, 4, 3, 2, 2, 1]
    assert counted["steps"] == [3, 2, 1]
    assert counted["neither"] == [None] * 6


@pytest.mark.slow  # four trainings
def test_precision_accumulation_and_clipping_are_respected():
    settings = {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    plain, within = module_class(pl)(), module_class(pl)()
    budget, peak = MemoryBudget("0.7x"), peak_of_steps(pl)
    fit(pl, plain, **settings)
    fit(pl, within, budget, peak, **settings)
    assert within.seen == plain.seen
    assert (budget.plan.precision, budget.plan.micro_batches) == ("bf16", 2)
    assert peak.bytes <= budget.plan.budget_bytes


@pytest.mark.keeps("lightning-checkpoint-holds-plan")
@pytest.mark.slow  # two whole trainings
def test_a_checkpoint_holds_the_plan_and_a_resumed_training_keeps_it(tmp_path, monkeypatch):
    first = MemoryBudget("0.6x")
    fit(pl, module_class(pl)(), first, limit_train_batches=4).save_checkpoint(tmp_path / "last.ckpt")

    def planned_again(*args):
        raise AssertionError("planned again")

    monkeypatch.setattr("tightfit.integrations.lightning.plan_for_all", planned_again)
    resumed, model = MemoryBudget("0.6x"), module_class(pl)()
    trainer = pl.Trainer(
        max_epochs=2, callbacks=[resumed], logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, accelerator="cpu", limit_train_batches=4,
    )  # fmt: skip
    trainer.fit(model, batches(), ckpt_path=tmp_path / "last.ckpt")
    assert resumed.plan == first.plan
    assert len(model.seen) == 4


class Plans(pl.Callback):
    """The plan in force when each batch begins, and the measured peak of its step."""

    def __init__(self, budget):
        self.budget, self.plans, self.peaks = budget, [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.plans.append(self.budget.plan)
        self.measured = StepPeak(pl_module, trainer.optimizers[0])
        self.measured.begin()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.peaks.append(self.measured.end())


@pytest.mark.keeps("lightning-plan-made-again")
@pytest.mark.slow  # two plans and two trainings
def test_a_larger_batch_is_planned_for_before_it_runs():
    generator, lengths = torch.Generator().manual_seed(1), (16, 32, 48, 40)
    data = [{n: torch.randn(8, t, 64, generator=generator) for n in ("inputs", "targets")} for t in lengths]
    loader = torch.utils.data.DataLoader(data, batch_size=None)
    plain, within, budget = module_class(pl)(), module_class(pl)(), MemoryBudget("9MiB")
    seen = Plans(budget)
    fit(pl, plain, loader=loader)
    fit(pl, within, budget, seen, loader=loader)
    assert within.seen == plain.seen

    first, second, third, fourth = seen.plans
    assert {choice.action for choice in first.choices} == {"keep"}
    assert first.plain_peak_bytes < first.budget_bytes < second.plain_peak_bytes < third.plain_peak_bytes
    assert fourth is third, "a shorter batch needs no other plan"
    assert max(seen.peaks) <= budget.plan.budget_bytes == 9 * 2**20
    assert [plan.peak_bytes for plan in (second, third)] == pytest.approx(seen.peaks[1:3], rel=0.05)


class ByHand:
    """Accumulates two batches by hand."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 2 == 0:
            optimizer.zero_grad()

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        return optimizer.step(closure=closure) if batch_idx % 2 else closure()


class OneBehind:
    """Steps with the gradients of the batch before."""

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        optimizer.step()
        closure()


class LookingBefore:
    """Notes its gradients before they are dropped."""

    def on_before_zero_grad(self, optimizer):
        self.seen.append([float(p.grad.norm()) for p in self.parameters() if p.grad is not None])


class LookingAfter:
    """Notes its gradients after the step."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.seen.append([float(p.grad.norm()) for p in self.parameters()])


@pytest.mark.slow  # two trainings and a plan
@pytest.mark.keeps("lightning-module-accumulates-hand")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("own", [ByHand, OneBehind, LookingBefore, LookingAfter], ids=lambda own: own.__name__)
def test_a_module_that_handles_its_gradients_or_looks_at_them_computes_the_same_within_the_budget(own):
    made = type("Own", (own, module_class(pl)), {})
    plain, within, budget, peak = made(), made(), MemoryBudget("0.7x"), peak_of_steps(pl)
    fit(pl, plain, limit_train_batches=6)
    fit(pl, within, budget, peak, limit_train_batches=6)
    assert within.seen == plain.seen
    assert peak.bytes <= budget.plan.budget_bytes


@dataclasses.dataclass
class Pair:
    inputs: torch.Tensor
    targets: torch.Tensor

    def __getitem__(self, name):
        return getattr(self, name)


class Opaque:
    """A batch of which nobody knows what it holds."""

    def __init__(self, held):
        self.held = held

    def __getitem__(self, name):
        return self.held[name]

    def to(self, *args, **kwargs):
        return self


def collated(kind):
    """Two batches of a class."""
    rows = [next(iter(batches(count=1))) for _ in range(2)]
    return torch.utils.data.DataLoader([kind(row) for row in rows], batch_size=None, collate_fn=lambda row: row)


@pytest.mark.keeps("lightning-module-accumulates-hand")
@pytest.mark.slow  # a whole training
def test_a_batch_that_is_a_dataclass_is_planned_for():
    plain, within, budget = module_class(pl)(), module_class(pl)(), MemoryBudget("0.5x")
    fit(pl, plain, loader=collated(lambda row: Pair(**row)))
    fit(pl, within, budget, loader=collated(lambda row: Pair(**row)))
    assert within.seen == plain.seen
    assert budget.plan.peak_bytes <= budget.plan.budget_bytes


@pytest.mark.keeps("nothing-fits-model-distributed")
def test_a_batch_whose_tensors_cannot_be_seen_is_one_line_and_nothing_is_trained():
    model = module_class(pl)()
    with pytest.raises(InputError, match="no tensors were found in a batch of class Opaque: return a dict"):
        fit(pl, model, MemoryBudget("0.5x"), loader=collated(Opaque))
    assert model.seen == []


class Unfrozen:
    """Trains its last layer first, and all from the second epoch on."""

    def on_train_epoch_start(self):
        self.layers[:-1].requires_grad_(self.current_epoch > 0)


class Steady:
    """Trains all its layers."""


@pytest.mark.keeps("lightning-plan-made-again")
@pytest.mark.slow  # two plans and a training
@pytest.mark.parametrize(
    ("own", "callbacks", "budget"),
    [
        (Unfrozen, [], "9MiB"),
        (Unfrozen, [], "0.9x"),
        (Steady, [lambda: pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})], "9MiB"),
    ],
    ids=["unfrozen", "unfrozen, by the plain peak", "accumulation"],
)
def test_where_the_step_changes_a_plan_is_made_for_the_new_one(own, callbacks, budget):
    made = type("Own", (own, module_class(pl)), {})
    plain, within, budget, peak = made(), made(), MemoryBudget(budget), peak_of_steps(pl, epoch=1)
    settings = {"max_epochs": 2, "limit_train_batches": 4}
    fit(pl, plain, *[callback() for callback in callbacks], **settings)
    fit(pl, within, budget, peak, *[callback() for callback in callbacks], **settings)
    assert within.seen == plain.seen
    assert len(plain.seen) == 8
    assert budget.plan.peak_bytes == pytest.approx(peak.bytes, rel=0.05)
    assert peak.bytes <= budget.plan.budget_bytes


class CausalLM(pl.LightningModule):
    """A Llama over padded batches; each step's peak."""

    def __init__(self):
        super().__init__()
        self.model = llama()
        self.seen, self.peaks = [], []

    def training_step(self, batch):
        return self.model(**batch, use_cache=False).loss

    def on_train_batch_start(self, batch, batch_idx):
        self.measured = StepPeak(self, self.trainer.optimizers[0])
        self.measured.begin()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.peaks.append(self.measured.end())
        self.seen.append(outputs["loss"].item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


LENGTHS = [(40, 40), (30, 12), (120, 120), (120, 50), (120, 120)]  # of the samples of batches: masks come and go


class Picky(CausalLM):
    """Skips batches without a word."""

    def training_step(self, batch):
        return super().training_step(batch) if batch["input_ids"].any() else None


def fit_lengths(model, *callbacks):
    data = [padded([{"input_ids": [*range(1, n + 1)]} for n in lengths]) for lengths in LENGTHS]
    pl.Trainer(
        max_epochs=1, callbacks=list(callbacks), logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, accelerator="cpu",
    ).fit(model, torch.utils.data.DataLoader(data, batch_size=None))  # fmt: skip
    return model


@pytest.mark.keeps("lightning-plan-made-again")
@pytest.mark.slow  # two plans for each model
@pytest.mark.parametrize("kind", [CausalLM, Picky])
def test_the_first_masked_batch_of_a_size_is_planned_for_before_it_runs(kind):
    plain = fit_lengths(kind())
    budget = MemoryBudget(int(0.7 * max(plain.peaks[1:])))
    within = fit_lengths(kind(), budget)
    assert within.seen == plain.seen
    assert max(within.peaks[1:]) <= budget.plan.budget_bytes


@pytest.mark.slow  # the least is searched
def test_a_budget_below_the_least_is_one_line_and_nothing_is_trained():
    model = module_class(pl)()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CannotFit, match="the least is"):
        fit(pl, model, MemoryBudget("1MiB"))
    assert model.seen == []
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.keeps("nothing-fits-model-distributed")
def test_manual_optimization_and_compiled_modules_are_one_line():
    model = module_class(pl)()
    model.automatic_optimization = False
    with pytest.raises(LeverError, match="automatic_optimization=False"):
        fit(pl, model, MemoryBudget("0.5x"))
    with pytest.raises(LeverError, match=r"compiled by torch\.compile"):
        fit(pl, torch.compile(module_class(pl)(), backend="eager"), MemoryBudget("0.5x"))


class WithoutOptimizer:
    def configure_optimizers(self):
        return None


class TakingBatches:
    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return super().training_step(batch)


@pytest.mark.keeps("nothing-fits-model-distributed")
@pytest.mark.filterwarnings("ignore:.*returned `None`, this fit will run with no optimizer")
@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
@pytest.mark.parametrize(
    ("own", "said"),
    [(WithoutOptimizer, "configure_optimizers returned no optimizer"), (TakingBatches, "fetches its batches itself")],
)
def test_a_module_without_an_optimizer_or_that_takes_its_batches_itself_is_one_line(own, said):
    model = type("Own", (own, module_class(pl)), {})()
    with pytest.raises(LeverError, match=said) as refusal:
        fit(pl, model, MemoryBudget("0.5x"))
    assert "\n" not in str(refusal.value)
    assert model.seen == []


def test_a_length_below_one_token_is_one_line():
    with pytest.raises(InputError, match="max_length=0: give the longest sequence in tokens"):
        MemoryBudget("0.5x", max_length=0)
    with pytest.raises(BudgetError, match="'lots' is not an amount of memory"):
        MemoryBudget("lots")


class SkippingTheFirst:
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 0 else super().training_step(batch)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if outputs:
            super().on_train_batch_end(outputs, batch, batch_idx)


@pytest.mark.keeps("lightning-module-accumulates-hand")
@pytest.mark.slow  # two trainings and a plan
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_where_the_first_batch_is_skipped_the_next_one_is_planned_for():
    made = type("Own", (SkippingTheFirst, module_class(pl)), {})
    plain, within, budget, peak = made(), made(), MemoryBudget("0.5x"), peak_of_steps(pl)
    fit(pl, plain, limit_train_batches=4)
    fit(pl, within, budget, peak, limit_train_batches=4)
    assert within.seen == plain.seen
    assert len(plain.seen) == 3
    assert peak.bytes <= budget.plan.budget_bytes


@pytest.mark.slow  # three trainings
def test_gradient_checkpointing_is_one_line_and_changes_no_loss():
    class Frugal(FrugalModule, module_class(pl)):
        pass

    plain, model, peaks = module_class(pl)(), Frugal(), [peak_of_steps(pl), peak_of_steps(pl)]
    names = list(model.state_dict())
    model.gradient_checkpointing = True
    assert model.gradient_checkpointing
    fit(pl, plain, peaks[0])
    fit(pl, model, peaks[1])
    assert model.seen == plain.seen
    assert peaks[1].bytes < 0.6 * peaks[0].bytes
    assert list(model.state_dict()) == names
    model.gradient_checkpointing = False
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.keeps("tightfit-takes-user-own")
@pytest.mark.slow  # a whole training
def test_a_plan_takes_over_the_modules_own_checkpointing(caplog):
    class Frugal(FrugalModule, module_class(pl)):
        pass

    model, budget = Frugal(), MemoryBudget("0.5x")
    model.gradient_checkpointing = True
    fit(pl, model, budget, limit_train_batches=2)
    assert "gradient checkpointing is taken over" in caplog.text
    assert model.gradient_checkpointing
    assert budget.plan.peak_bytes <= budget.plan.budget_bytes


def test_without_repeated_blocks_gradient_checkpointing_is_refused():
    with pytest.raises(LeverError, match="no repeated blocks"):
        checkpoint_blocks(nn.Linear(2, 2))


def test_a_model_without_repeated_blocks_is_told_so():
    model = module_class(pl)()
    model.layers = nn.ModuleList([nn.Linear(64, 64)])
    with pytest.raises(CannotFit, match="has no repeated block to recompute"):
        fit(pl, model, MemoryBudget("0.3x"))
    assert model.seen == []
