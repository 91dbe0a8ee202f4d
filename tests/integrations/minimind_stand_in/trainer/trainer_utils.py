"""What the scripts share: their flags, their data, and what they say of a step."""

import argparse
import hashlib
import os

import torch
import torch.distributed as dist

IGNORED, PAD = -100, 0


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--accumulation_steps", type=int, default=1)
    parser.add_argument("--grad_clip", type=float, default=1.0)
    parser.add_argument("--max_seq_len", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--use_moe", type=int, default=0)
    parser.add_argument("--use_compile", type=int, default=0)
    parser.add_argument("--save_to")
    parser.add_argument("--resume_from")
    return parser.parse_args()


def init_distributed_mode():
    if int(os.environ.get("RANK", -1)) != -1:
        dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")


def is_main_process():
    return not dist.is_initialized() or dist.get_rank() == 0


def batches(args):
    """Ids and labels of ragged lengths, padded to the greatest one allowed; different at every step and rank."""
    generator = torch.Generator().manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    for _ in range(args.steps):
        yield batch(args.batch_size, args.max_seq_len, generator)


def batch(size, length, generator, vocabulary=64):
    ids = torch.randint(1, vocabulary, (size, length), generator=generator)
    lengths = torch.randint(length // 2, length, (size, 1), generator=generator)
    padding = torch.arange(length) >= lengths
    return ids.masked_fill(padding, PAD), ids.masked_fill(padding, IGNORED)


def say(step, loss):
    if is_main_process():
        print(step, loss.item().hex())


def fingerprint(model):
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.detach().numpy().tobytes())
    if is_main_process():
        print("weights", digest.hexdigest())
