"""A hand-written loop with Accelerate, gradient accumulation included, at 60% of its plain peak."""

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from tightfit.integrations.accelerate import apply_budget

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
config = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=300,
    max_position_embeddings=128,
)  # fmt: skip
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(torch.randint(300, (32, 96)), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

longest = torch.zeros(8, 96, dtype=torch.int64, device=accelerator.device)
applied = apply_budget(accelerator, model, optimizer, {"input_ids": longest, "labels": longest}, "0.6x", grad_clip=1.0)
print(applied.plan)

for tokens in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
