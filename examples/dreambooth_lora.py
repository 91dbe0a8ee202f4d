"""The loop of diffusers' `train_dreambooth_lora_flux.py` within a memory budget, on cached latents and prompts.

The model here is a FLUX.1 of two blocks, so that it runs anywhere: `FluxTransformer2DModel.from_pretrained` brings a
real one. Its batch and its loss are those of the script. On a card the budget may be "80%", or a size as "11GiB".
"""

import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig

import tightfit
from tightfit.models.diffusion import denoising_loss

torch.manual_seed(0)
transformer = FluxTransformer2DModel(
    num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
    pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=[4, 6, 6],
)  # fmt: skip
transformer.requires_grad_(False)
transformer.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
optimizer = torch.optim.AdamW([p for p in transformer.parameters() if p.requires_grad], lr=1e-3)
loss_of = denoising_loss(transformer)


def batches(count):
    """What the VAE and the text encoders have made of images of 128 pixels and their prompts."""
    for _ in range(count):
        yield {
            "latents": torch.randn(2, 16, 16, 16),
            "encoder_hidden_states": torch.randn(2, 64, 32),
            "pooled_projections": torch.randn(2, 32),
        }


# The three lines.
plan = tightfit.plan(transformer, next(batches(1)), "0.6x", loss=loss_of, optimizer=optimizer)
print(plan)
plan.apply(transformer)

with tightfit.monitor(transformer, optimizer) as watch:  # to measure the peak beside the budget
    for batch in batches(4):
        loss = loss_of(transformer, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("loss", loss.item())
print(f"measured peak {watch.peak_bytes}, budget {plan.budget_bytes}, without the plan {plan.plain_peak_bytes}")
