import os
import sys

sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), "..")))

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from model.model_minimind import MiniMindForCausalLM
from torch import optim
from trainer_utils import arguments, batches, fingerprint, say


def token_log_probs(logits, labels):
    return torch.gather(F.log_softmax(logits, dim=2), dim=2, index=labels.unsqueeze(2)).squeeze(-1)


def preference_loss(reference, policy, mask, beta=0.1):
    margins = ((policy - reference) * mask).sum(dim=1)
    half = margins.shape[0] // 2
    return -F.logsigmoid(beta * (margins[:half] - margins[half:])).mean()


def train_epoch(loader, ref_model):
    for step, (chosen, _) in enumerate(loader, start=1):
        rejected = chosen.flip(1)
        x = torch.cat([chosen, rejected], dim=0)
        y, mask = x.roll(-1, 1), (x != 0).float()

        with autocast_ctx:
            with torch.no_grad():
                ref_outputs = ref_model(x)
                ref_logits = ref_outputs.logits
            ref_log_probs = token_log_probs(ref_logits, y)

            outputs = model(x)
            policy_log_probs = token_log_probs(outputs.logits, y)
            loss = preference_loss(ref_log_probs, policy_log_probs, mask) + outputs.aux_loss
            loss = loss / args.accumulation_steps

        loss.backward()
        if step % args.accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        say(step, loss)
        del x, y, mask, ref_outputs, ref_logits, ref_log_probs, outputs, policy_log_probs, loss


if __name__ == "__main__":
    args = arguments()
    torch.manual_seed(0)
    autocast_ctx = nullcontext()
    model = MiniMindForCausalLM(use_moe=bool(args.use_moe))
    ref_model = MiniMindForCausalLM(use_moe=bool(args.use_moe))
    ref_model.eval()
    ref_model.requires_grad_(False)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    train_epoch(batches(args), ref_model)
    fingerprint(model)
