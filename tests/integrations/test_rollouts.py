"""trl's GRPOTrainer within a budget: planned before anything is generated, for completions of the full length."""

from types import SimpleNamespace

import datasets
import peft
import pytest
import torch
import trl
from test_trl import narrow_head, tokenizer  # noqa: F401 - a fixture
from tiny_trainings import PeakOfSteps, llama, losses
from transformers import LlamaForCausalLM

from tightfit.devices.present import lookup
from tightfit.errors import BudgetError, InputError, LeverError
from tightfit.integrations.hf import MemoryBudget
from tightfit.integrations.rollouts import rollout_batches

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.keeps("grpo-within-budget"),
]
LENGTH = 24


def reward(completions, **kwargs):
    return [float(len(set(text.split()))) for text in completions]


def prompts(count=16):
    return [{"prompt": " ".join(f"w{2 + (i * j) % 50}" for j in range(1, 5 + i % 6))} for i in range(count)]


def grpo(folder, *, callbacks=(), steps=3, lora=False, rows=None, **settings):
    given = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": LENGTH, "beta": 0.0}
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "bf16": False}
    # trl and transformers look a model up by its name: one without a name ends in their error about an empty one.
    llama(num_hidden_layers=6).save_pretrained(named := folder / "model")
    trainer = trl.GRPOTrainer(
        model=LlamaForCausalLM.from_pretrained(named),
        reward_funcs=reward,
        args=trl.GRPOConfig(
            output_dir=str(folder), max_steps=steps, logging_steps=1, learning_rate=1e-3, gradient_checkpointing=False,
            **{**given, **settings}, **quiet,
        ),
        train_dataset=datasets.Dataset.from_list(rows or prompts()),
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if lora else None,
        callbacks=list(callbacks),
    )  # fmt: skip
    trainer.train()
    return trainer


def trained(trainer):
    return [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("narrow_head")
@pytest.mark.parametrize("settings", [{}, {"lora": True}, {"beta": 0.1, "steps_per_generation": 2}], ids=str)
def test_it_trains_the_same_bits_within_its_budget(tmp_path, settings):
    plain = grpo(tmp_path / "plain", **settings)
    budget, peak = MemoryBudget("0.9x", levers="exact"), PeakOfSteps(2)
    planned = grpo(tmp_path / "planned", callbacks=[budget, peak], **settings)
    assert 0 < peak.bytes <= budget.plan.budget_bytes < budget.plan.plain_peak_bytes
    assert losses(planned) == losses(plain)
    assert all(torch.equal(one, other) for one, other in zip(trained(planned), trained(plain), strict=True))


class Engine(trl.GRPOTrainer):
    """A trainer as with vLLM in its process, which has no package here: what is planned for, and no more."""

    share, sleeps = 0.25, False

    def train(self, *args, **kwargs):
        self.use_vllm, self.args.vllm_mode = True, "colocate"
        self.args.vllm_gpu_memory_utilization, self.args.vllm_enable_sleep_mode = self.share, self.sleeps
        self._generate_and_score_completions = self.ended
        return super().train(*args, **kwargs)

    def ended(self, *args, **kwargs):
        raise KeyboardInterrupt


@pytest.mark.slow  # a training and its plan for each case
@pytest.mark.usefixtures("narrow_head")
@pytest.mark.parametrize("sleeps", [False, True])
def test_the_share_of_vllm_in_the_process_is_taken_off_unless_it_sleeps(tmp_path, monkeypatch, sleeps):
    monkeypatch.setattr(trl, "GRPOTrainer", Engine)
    monkeypatch.setattr(Engine, "sleeps", sleeps)
    budget = MemoryBudget("80%", levers="exact")
    with pytest.raises(KeyboardInterrupt):
        grpo(tmp_path, callbacks=[budget])
    whole = lookup(None).memory_bytes
    assert budget._plan_within(2**40).budget_bytes == 2**40  # a tighter plan's bound is of the step alone
    assert budget.plan.budget_bytes == int(0.8 * whole) - (0 if sleeps else int(0.25 * whole))


@pytest.mark.slow  # a training and its plan
@pytest.mark.usefixtures("narrow_head")
def test_a_share_of_the_plain_peak_is_not_for_vllm(tmp_path, monkeypatch):
    monkeypatch.setattr(trl, "GRPOTrainer", Engine)
    monkeypatch.setattr(Engine, "sleeps", True)  # held against the device, of which it is a quarter
    budget = MemoryBudget("0.9x", levers="exact")
    with pytest.raises(KeyboardInterrupt):
        grpo(tmp_path, callbacks=[budget])
    assert budget.plan.budget_bytes < int(0.25 * lookup(None).memory_bytes)


@pytest.mark.slow  # a plan for each case
@pytest.mark.sampled(1)
@pytest.mark.usefixtures("narrow_head")
@pytest.mark.parametrize("sleeps", [False, True])
def test_vllm_beyond_the_budget_is_one_line(tmp_path, monkeypatch, sleeps):
    monkeypatch.setattr(trl, "GRPOTrainer", Engine)
    monkeypatch.setattr(Engine, "sleeps", sleeps)
    why = "while vLLM generates.*lower vllm_gpu_memory_utilization" if sleeps else "leaves nothing for the training"
    with pytest.raises((LeverError, BudgetError), match=why):
        grpo(tmp_path, callbacks=[MemoryBudget("25%", levers="exact")])


class Settings(SimpleNamespace):
    """A trainer's, as far as a batch before anything is generated is made from them."""

    def __init__(self, beta=0.0, accumulated=1, every=1):
        args = SimpleNamespace(
            max_completion_length=LENGTH, per_device_train_batch_size=4, gradient_accumulation_steps=accumulated,
            steps_per_generation=every,
        )  # fmt: skip
        super().__init__(args=args, beta=beta, num_iterations=1, loss_type="dapo")

    def _tokenize_prompts(self, texts):
        return [text.split() for text in texts], None, {}


def test_the_batch_has_the_longest_prompt_and_whole_completions_with_and_without_padding():
    whole, padded = rollout_batches(Settings(), prompts(), None)
    assert whole["prompt_ids"].shape == (4, 9)
    assert whole["completion_ids"].shape == (4, LENGTH)
    assert whole["completion_mask"].all()
    assert not padded["completion_mask"].all()
    assert rollout_batches(Settings(), prompts(), 30)[0]["prompt_ids"].shape == (4, 30 - LENGTH)


@pytest.mark.parametrize(
    ("settings", "beside"),
    [({}, set()), ({"beta": 0.1}, {"ref_per_token_logps"}), ({"every": 2}, {"old_per_token_logps"})],
    ids=str,
)
def test_the_batch_has_the_log_probabilities_that_the_loss_reads(settings, beside):
    batch, *_ = rollout_batches(Settings(**settings), prompts(), None)
    assert {name for name in batch if name.endswith("logps")} == beside


@pytest.mark.parametrize(
    ("rows", "length", "reason"),
    [
        (prompts(), LENGTH, "leaves no prompt"),
        ([{"text": "w1"}], None, "no prompts of text alone"),
        ([{"prompt": "w1", "image": object()}], None, "no prompts of text alone"),
        (iter(prompts()), None, "give the longest sequence"),
    ],
)
def test_prompts_whose_lengths_are_unknown_are_one_line(rows, length, reason):
    with pytest.raises(InputError, match=reason):
        rollout_batches(Settings(), rows, length)
