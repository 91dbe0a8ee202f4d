import os
import sys

sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), "..")))

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from model.model_minimind import MiniMindForCausalLM
from torch import optim
from trainer_utils import arguments, batches, fingerprint, say


def train_epoch(loader, teacher_model, alpha=0.5, temperature=1.5):
    for step, (input_ids, labels) in enumerate(loader, start=1):
        loss_mask = (labels[..., 1:] != -100).float()

        with autocast_ctx:
            res = model(input_ids)
            student_logits = res.logits[..., :-1, :].contiguous()

        if teacher_model is not None:
            with torch.no_grad():
                teacher_logits = teacher_model(input_ids).logits[..., :-1, :].contiguous()

        shift_labels = labels[..., 1:].contiguous()
        flat_mask = loss_mask.view(-1)
        ce_loss = F.cross_entropy(
            student_logits.view(-1, student_logits.size(-1)), shift_labels.view(-1), ignore_index=-100, reduction="none"
        )
        ce_loss_raw = (ce_loss * flat_mask).sum() / (flat_mask.sum() + 1e-8)
        ce_loss = ce_loss_raw + res.aux_loss
        if teacher_model is not None:
            kept = flat_mask == 1
            distill_loss = temperature**2 * F.kl_div(
                F.log_softmax(student_logits.flatten(0, 1)[kept] / temperature, dim=-1),
                F.softmax(teacher_logits.flatten(0, 1)[kept] / temperature, dim=-1),
                reduction="batchmean",
            )
        loss = (alpha * ce_loss + (1 - alpha) * distill_loss) / args.accumulation_steps

        loss.backward()
        if step % args.accumulation_steps == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        say(step, loss)
        del input_ids, labels, loss_mask, res, student_logits, ce_loss, distill_loss, loss


if __name__ == "__main__":
    args = arguments()
    torch.manual_seed(0)
    autocast_ctx = nullcontext()
    model = MiniMindForCausalLM(use_moe=bool(args.use_moe))
    teacher_model = MiniMindForCausalLM(use_moe=True)
    teacher_model.eval()
    teacher_model.requires_grad_(False)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    train_epoch(batches(args), teacher_model)
    fingerprint(model)
