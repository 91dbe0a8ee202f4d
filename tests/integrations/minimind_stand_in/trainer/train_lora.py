import os
import sys

sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), "..")))

import torch
from model.model_minimind import MiniMindForCausalLM
from torch import nn, optim
from trainer_utils import arguments, batches, fingerprint, say


def add_adapters(model, rank=4):
    for module in list(model.modules()):
        if isinstance(module, nn.Linear) and module.in_features == module.out_features:
            module.lora = nn.Sequential(
                nn.Linear(module.in_features, rank, bias=False), nn.Linear(rank, module.out_features, bias=False)
            )
            plain = module.forward

            def with_adapter(x, first=plain, second=module.lora):
                return first(x) + second(x)

            module.forward = with_adapter


def train_epoch(loader, lora_params):
    for step, (input_ids, labels) in enumerate(loader, start=1):
        res = model(input_ids, labels=labels)
        loss = (res.loss + res.aux_loss) / args.accumulation_steps
        loss.backward()
        if step % args.accumulation_steps == 0:
            torch.nn.utils.clip_grad_norm_(lora_params, args.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        say(step, loss)
        del input_ids, labels, res, loss


if __name__ == "__main__":
    args = arguments()
    torch.manual_seed(0)
    model = MiniMindForCausalLM(use_moe=bool(args.use_moe))
    add_adapters(model)
    lora_params = []
    for name, param in model.named_parameters():
        param.requires_grad = "lora" in name
        if param.requires_grad:
            lora_params.append(param)
    optimizer = optim.AdamW(lora_params, lr=1e-2)
    train_epoch(batches(args), lora_params)
    fingerprint(model)
