import os
import sys

sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), "..")))

from contextlib import nullcontext

import torch
import torch.distributed as dist
from model.model_minimind import MiniMindForCausalLM
from torch import optim
from torch.nn.parallel import DistributedDataParallel
from trainer_utils import arguments, batches, fingerprint, init_distributed_mode, say


def train_epoch(loader):
    for step, (input_ids, labels) in enumerate(loader, start=1):
        with autocast_ctx:
            res = model(input_ids, labels=labels)
            loss = res.loss + res.aux_loss
            loss = loss / args.accumulation_steps

        scaler.scale(loss).backward()

        if step % args.accumulation_steps == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)

        say(step, loss)
        del input_ids, labels, res, loss


if __name__ == "__main__":
    args = arguments()
    init_distributed_mode()
    torch.manual_seed(0)
    autocast_ctx = nullcontext()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    model = MiniMindForCausalLM(use_moe=bool(args.use_moe))
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    ckp_data = torch.load(args.resume_from) if args.resume_from else None
    if ckp_data:
        model.load_state_dict(ckp_data["model"])
        optimizer.load_state_dict(ckp_data["optimizer"])
    if args.use_compile == 1:
        model = torch.compile(model)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    train_epoch(batches(args))
    fingerprint(model)
    if args.save_to:
        halves = {name: tensor.half() for name, tensor in model.state_dict().items()}
        torch.save({"model": halves, "optimizer": optimizer.state_dict()}, args.save_to)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
