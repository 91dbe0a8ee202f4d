"""A tiny Llama trained by Hugging Face's Trainer at 60% of the plain training's peak."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from tightfit.integrations.hf import FrugalTrainer

config = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=300,
    max_position_embeddings=128,
)  # fmt: skip
samples = [{"input_ids": torch.randint(300, (length,))} for length in range(32, 96)]


def collate(rows):
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True, padding_value=-1)
    return {"input_ids": ids.clamp(min=0), "attention_mask": ids.ge(0).long(), "labels": ids.masked_fill(ids < 0, -100)}


with tempfile.TemporaryDirectory() as folder:
    trainer = FrugalTrainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(folder, max_steps=5, report_to=[], save_strategy="no", use_cpu=True),
        train_dataset=samples,
        data_collator=collate,
        memory_budget="0.6x",  # or "22GiB", or "80%" of the device
    )
    trainer.train()
print(trainer.memory_plan)
