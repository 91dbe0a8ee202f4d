"""Hugging Face's Trainer within a memory budget: the same losses, the peak that was planned, one line where not."""

import dataclasses

import pytest
import torch
import transformers
from tiny_trainings import PeakOfSteps, arguments, llama, losses, norms, padded, samples

from tightfit.errors import BudgetError, CannotFit, InputError, LeverError
from tightfit.integrations.hf import FrugalTrainer, MemoryBudget
from tightfit.planner.levers import CapturedBlocks, ChunkedLoss
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.units import format_bytes

ARGUMENTS = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in ARGUMENTS else "gradient_checkpointing"
MANY_WORDS = 4000  # a vocabulary whose logits weigh so much that only the chunked loss brings the peak down far


def train(folder, model=None, callbacks=(), data=None, **settings):
    """A training without tightfit, but for its callbacks."""
    trainer = transformers.Trainer(
        model=llama() if model is None else model,
        args=arguments(folder, **settings),
        train_dataset=data or samples(),
        data_collator=padded,
        callbacks=list(callbacks),
    )
    trainer.train()
    return trainer


def frugal(folder, budget, model=None, callbacks=(), memory=None, data=None, **settings):
    """A `FrugalTrainer`, not begun."""
    return FrugalTrainer(
        model=llama() if model is None else model,
        args=arguments(folder, **settings),
        train_dataset=data or samples(),
        data_collator=padded,
        callbacks=list(callbacks),
        memory_budget=budget,
        **(memory or {}),
    )


# The plan is made for a batch with padding; batches without any take attention without a mask, which is said once.
@pytest.mark.keeps("half-plain-peak-twenty")
@pytest.mark.filterwarnings("ignore::tightfit.levers.recompute.OtherOperators")
def test_at_half_the_plain_peak_the_losses_are_identical_and_the_peak_is_within_the_budget(tmp_path):
    plain_peak, peak, budget = PeakOfSteps(last=3), PeakOfSteps(), MemoryBudget("0.5x")
    once = {"data": samples(48), "max_steps": 6}  # an epoch, so the longest sample is among them
    plain = train(tmp_path, callbacks=[plain_peak], **once)
    within = train(tmp_path, callbacks=[budget, peak], **once)
    assert losses(within) == losses(plain)
    assert norms(within) == norms(plain)
    assert len(losses(plain)) == 6
    plan = budget.plan
    assert plan.budget_bytes == plan.plain_peak_bytes // 2
    assert peak.bytes <= plan.budget_bytes
    assert plan.peak_bytes == pytest.approx(peak.bytes, rel=0.02)
    assert plan.budget_bytes < plain_peak.bytes <= plan.plain_peak_bytes


class StopAfter(transformers.TrainerCallback):
    def __init__(self, steps):
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.steps


@pytest.mark.keeps("trainings-transformers-lightning-too")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # within PyTorch's compiler
def test_blocks_are_captured_where_the_steps_to_come_repay_it(tmp_path):
    alike = {"data": [row for row in samples() if len(row["input_ids"]) == 40] * 8, "max_steps": 10_000_000}
    plain = train(tmp_path, callbacks=[StopAfter(2)], **alike)
    budget = MemoryBudget("0.7x", levers="exact")
    within = train(tmp_path, callbacks=[budget, StopAfter(2)], **alike)
    assert budget.plan.lever(CapturedBlocks) is not None
    assert losses(within) == losses(plain)
    assert norms(within) == norms(plain)


@pytest.mark.keeps("micro-batches-keep-gradient")
@pytest.mark.slow  # a large vocabulary, so that the logits weigh
def test_micro_batches_and_chunked_loss_keep_the_gradient_of_ragged_accumulated_batches(tmp_path):
    settings = {"max_steps": 3, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    plain = train(tmp_path, llama(vocab_size=MANY_WORDS), **settings)
    peak, memory = PeakOfSteps(last=3), {"memory_levers": ["chunked_loss", "micro_batch"]}
    trainer = frugal(tmp_path, "0.515x", llama(vocab_size=MANY_WORDS), callbacks=[peak], memory=memory, **settings)
    trainer.train()
    plan = trainer.memory_plan
    assert plan.micro_batches == 8
    assert plan.lever(ChunkedLoss) is not None
    assert losses(trainer) == pytest.approx(losses(plain), rel=1e-5)
    assert norms(trainer) == pytest.approx(norms(plain), rel=1e-4)
    assert peak.bytes <= plan.peak_bytes <= plan.budget_bytes


def nearly_alike():
    """A few short samples, then some of 63 and 64 tokens: of batches of the same shape one has far more labels."""
    return samples(4, shortest=19, longest=20) + [
        {"input_ids": row["input_ids"][:64]} for row in samples(100, shortest=63, longest=65)
    ]


@pytest.mark.keeps("chunked-loss-measured-peak")
@pytest.mark.slow  # a large vocabulary, so that the logits weigh
@pytest.mark.parametrize(
    ("levers", "budget"), [(["chunked_loss", "micro_batch"], "0.515x"), (["chunked_loss", "recompute"], "0.65x")]
)
def test_a_plan_with_chunked_loss_holds_for_the_batch_with_the_most_labels(tmp_path, levers, budget):
    settings = {"max_steps": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    peak, memory = PeakOfSteps(last=4), {"memory_levers": levers}
    trainer = frugal(tmp_path, budget, llama(vocab_size=MANY_WORDS), [peak], memory, nearly_alike(), **settings)
    trainer.train()
    plan = trainer.memory_plan
    assert plan.lever(ChunkedLoss) is not None
    inputs = 2 * 3 * 4 * 64 * 8  # bytes of ids, mask and labels of both batches, which are there before a step begins
    assert plan.peak_bytes == pytest.approx(peak.bytes + inputs, rel=0.002)
    assert peak.bytes + inputs - UNSEEN_BYTES <= plan.peak_bytes
    assert peak.bytes + inputs <= plan.budget_bytes


@pytest.mark.keeps("micro-batches-keep-gradient")
@pytest.mark.slow  # two whole trainings
def test_where_the_trainer_takes_means_micro_batches_count_by_their_valid_tokens(tmp_path):
    class Meaning(transformers.LlamaForCausalLM):
        accepts_loss_kwargs = False

    def model():
        tiny = llama()
        tiny.__class__ = Meaning
        return tiny

    plain = train(tmp_path, model(), max_steps=3)
    trainer = frugal(tmp_path, "0.4x", model(), memory={"memory_levers": ["micro_batch"]}, max_steps=3)
    trainer.train()
    assert trainer.memory_plan.micro_batches > 1
    assert losses(trainer) == pytest.approx(losses(plain), rel=1e-5)
    assert norms(trainer) == pytest.approx(norms(plain), rel=1e-4)


class OwnMean:
    """A loss of the trainer's own, which asks no other class."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        loss = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), inputs["labels"].flatten())
        return (loss, outputs) if return_outputs else loss


class Contrasting(OwnMean):
    """Each sample against all of its batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, -1]
        return torch.nn.functional.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


@pytest.mark.keeps("weight-micro-batch-batch")
@pytest.mark.slow  # two trainings and a plan
def test_a_loss_of_the_users_own_that_is_a_mean_is_one_over_micro_batches_too(tmp_path):
    class Plain(OwnMean, transformers.Trainer):
        pass

    class Within(OwnMean, FrugalTrainer):
        pass

    made = {"args": arguments(tmp_path, max_steps=3), "train_dataset": samples(), "data_collator": padded}
    plain = Plain(model=llama(), **made)
    within = Within(model=llama(), memory_budget="0.4x", memory_levers=["micro_batch"], **made)
    plain.train()
    within.train()
    assert within.memory_plan.micro_batches > 1
    assert losses(within) == pytest.approx(losses(plain), rel=1e-5)
    assert norms(within) == pytest.approx(norms(plain), rel=1e-4)


@pytest.mark.keeps("weight-micro-batch-batch")
@pytest.mark.slow  # two trainings and a plan
def test_a_loss_over_pairs_of_samples_is_not_split(tmp_path):
    class Within(Contrasting, FrugalTrainer):
        pass

    made = {"args": arguments(tmp_path, max_steps=1), "train_dataset": samples(), "data_collator": padded}
    with pytest.raises(LeverError, match="micro_batch: Within cannot split its batches: the losses of samples do not"):
        Within(model=llama(), memory_budget="0.4x", memory_levers=["micro_batch"], **made).train()
    rounding = Within(model=llama(), memory_budget="0.7x", memory_levers="rounding", **made)
    rounding.train()
    assert rounding.memory_plan.micro_batches == 1


@pytest.mark.slow  # four trainings
def test_mixed_precision_and_no_clipping_are_respected(tmp_path):
    settings = {"max_steps": 3, "bf16": True, "max_grad_norm": 0.0, "optim": "adamw_torch"}
    peak, budget = PeakOfSteps(last=3), MemoryBudget("0.6x")
    plain, within = train(tmp_path, **settings), train(tmp_path, callbacks=[budget, peak], **settings)
    assert losses(within) == losses(plain)
    assert budget.plan.precision == "bf16"
    assert peak.bytes <= budget.plan.budget_bytes


@pytest.mark.keeps("tightfit-takes-user-own")
@pytest.mark.slow  # two whole trainings
def test_the_users_own_checkpointing_is_taken_over_and_said_and_given_back(tmp_path, caplog):
    plain, model, budget = train(tmp_path, max_steps=3), llama(), MemoryBudget("0.6x")
    within = train(tmp_path, model, callbacks=[budget], max_steps=3, **{CHECKPOINTING: True})
    assert losses(within) == losses(plain)
    assert any(choice.action != "keep" for choice in budget.plan.choices)
    assert "gradient checkpointing is taken over" in caplog.text
    peak = PeakOfSteps(last=3)
    train(tmp_path, callbacks=[peak], max_steps=3, **{CHECKPOINTING: True})
    assert 0.9 * budget.own_peak_bytes < peak.bytes <= budget.own_peak_bytes < budget.plan.plain_peak_bytes
    assert f"its peak was {format_bytes(budget.own_peak_bytes)}, the plan's is" in caplog.text
    assert within.state.log_history[0]["memory_own_peak_bytes"] == budget.own_peak_bytes
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


@pytest.mark.parametrize("budget", ["lots", "1000%", "0GiB"])
def test_what_is_no_budget_is_refused_where_it_is_written(tmp_path, budget):
    with pytest.raises(BudgetError, match=budget):
        MemoryBudget(budget)
    with pytest.raises(BudgetError, match=budget):
        frugal(tmp_path, budget)


@pytest.mark.slow  # a whole training
def test_plan_and_memory_are_in_the_logs(tmp_path):
    history = train(tmp_path, callbacks=[budget := MemoryBudget("0.6x")], max_steps=2).state.log_history
    assert history[0]["memory_planned_peak_bytes"] == budget.plan.peak_bytes <= history[0]["memory_budget_bytes"]
    assert all(entry["memory_rss_bytes"] > 0 for entry in history)


@pytest.mark.slow  # plans, and proves gradients
def test_a_plan_is_verified_on_request_before_the_training(tmp_path, caplog):
    trainer = frugal(tmp_path, "0.5x", memory={"memory_verify": True}, max_steps=1)
    trainer.train()
    assert "bit-equal" in caplog.text


@pytest.mark.keeps("nothing-fits-model-distributed")
@pytest.mark.slow  # the least is searched
def test_a_budget_below_the_least_is_one_line_and_nothing_is_trained(tmp_path):
    model = llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = frugal(tmp_path, "1MiB", model)
    with pytest.raises(CannotFit, match="the least is") as refusal:
        trainer.train()
    assert "\n" not in str(refusal.value)
    assert trainer.state.global_step == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_model_without_repeated_blocks_is_told_so(tmp_path):
    model = llama(num_hidden_layers=1)
    model.model.layers = torch.nn.ModuleList([torch.nn.Identity()])
    model.config.num_hidden_layers = 0
    with pytest.raises(CannotFit, match="has no repeated block to recompute"):
        frugal(tmp_path, "0.3x", model).train()


@pytest.mark.keeps("nothing-fits-model-distributed")
def test_a_compiled_or_distributed_model_is_one_line(tmp_path):
    trainer = frugal(tmp_path, "0.5x", torch.compile(llama(), backend="eager"))
    with pytest.raises(LeverError, match=r"the model is compiled by torch\.compile"):
        trainer.train()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        trainer = frugal(tmp_path, "0.5x", torch.nn.parallel.DistributedDataParallel(llama()))
        with pytest.raises(LeverError, match="wrapped in DistributedDataParallel"):
            trainer.train()
    finally:
        torch.distributed.destroy_process_group()


# The plan is made for a batch with padding; batches without any take attention without a mask, which is said once.
@pytest.mark.slow  # two trainings and a plan
@pytest.mark.filterwarnings("ignore::tightfit.levers.recompute.OtherOperators")
def test_shards_of_one_process_are_trained_within_the_budget(tmp_path):
    plain = train(tmp_path)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sharded = llama()
        torch.distributed.fsdp.fully_shard(sharded, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        trainer = frugal(tmp_path, "0.7x", sharded)
        trainer.train()
        assert losses(trainer) == losses(plain)
        (callback,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, MemoryBudget))
        assert (callback.plan.world_size, callback.plan.parallel) == (1, "fsdp2")
        assert callback.plan.peak_bytes <= callback.plan.budget_bytes
    finally:
        torch.distributed.destroy_process_group()


def test_a_callback_refuses_to_split_batches_and_names_who_can(tmp_path):
    with pytest.raises(LeverError, match="FrugalTrainer"):
        train(tmp_path, callbacks=[MemoryBudget("0.5x", levers=["micro_batch"])])


@pytest.mark.slow  # a whole training
def test_samples_of_unknown_length_need_the_longest_named(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(samples(16))

    def trainer(**memory):
        return FrugalTrainer(
            model=llama(),
            args=arguments(tmp_path, max_steps=1),
            train_dataset=Stream(),
            data_collator=padded,
            memory_budget="0.5x",
            **memory,
        )

    with pytest.raises(InputError, match="max_length="):
        trainer().train()
    longest = trainer(memory_max_length=96)
    longest.train()
    assert "input_ids (8, 96)" in longest.memory_plan.batch


@pytest.mark.keeps("dry-runs-log-nothing")
@pytest.mark.slow  # two whole trainings
def test_what_a_loss_logs_counts_and_collects_is_of_the_training_alone(tmp_path):
    class Noting(FrugalTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            outputs = model(**inputs, **kwargs)
            self.seen = getattr(self, "seen", 0) + 1
            self.collected["losses"].append(outputs.loss.detach())
            self.log({"auxiliary": outputs.loss.item()})
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    made = {"args": arguments(tmp_path, max_steps=2), "train_dataset": samples(), "data_collator": padded}
    trainer = Noting(model=llama(), memory_budget="0.6x", memory_levers="rounding", **made)
    trainer.collected = {"losses": []}
    trainer.train()
    noted = [entry["auxiliary"] for entry in trainer.state.log_history if "auxiliary" in entry]
    assert trainer.seen == len(noted) == 2 * trainer.memory_plan.micro_batches
    assert noted == [loss.item() for loss in trainer.collected["losses"]]


@pytest.mark.slow  # a whole training
def test_after_a_training_that_failed_the_model_is_as_it_was(tmp_path):
    class Breaks(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            raise KeyboardInterrupt

    model = llama()
    with pytest.raises(KeyboardInterrupt):
        frugal(tmp_path, "0.5x", model, callbacks=[Breaks()]).train()
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.keeps("dry-runs-log-nothing")
@pytest.mark.slow  # two plans, two trainings
def test_after_a_training_that_failed_the_model_can_be_planned_for_anew(tmp_path, caplog):
    class Breaks(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            raise KeyboardInterrupt

    model, left = llama(), MemoryBudget("0.5x")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, model, callbacks=[left, Breaks()])
    assert any("forward" in module.__dict__ for module in model.modules())
    train(tmp_path, model, callbacks=[MemoryBudget("0.6x")], max_steps=1)
    assert "an earlier training left on the model is taken off" in caplog.text
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_two_budgets_in_one_training_are_one_line(tmp_path):
    with pytest.raises(LeverError, match="two memory budgets: leave out all but one"):
        frugal(tmp_path, "0.5x", callbacks=[MemoryBudget("0.5x")]).train()
