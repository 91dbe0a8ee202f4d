"""Ranks that talk by gloo, forked from a process with the imports, beside one process.

Prints a line of JSON: for each case what one process computed, and what each rank did. Run as
`python divided_ranks.py FOLDER CASES`, with the cases as JSON.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule

import tightfit
from made_up_devices import even
from tightfit.errors import CannotFit
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.planner.blocks.find import find_blocks
from tightfit.ranks.context_parallel import in_context_parallel
from tightfit.ranks.shards import whole as gathered
from tightfit.ranks.tensor_parallel import in_tensor_parallel
from tightfit.ranks.world import World
from tightfit.ranks.wrapping import in_fsdp2, mesh_of
from tightfit.step import StepSettings, forward_backward, model_loss, update


def model_of(case):
    torch.manual_seed(0)
    if case["model"] == "decoder":
        usual = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "vocab_size": 64}
        config = DecoderConfig(**{**usual, **case["shape"]})
        return Decoder(config)
    if case["model"] == "beside":
        return Beside()
    import transformers

    config = getattr(transformers, f"{case['model']}Config")(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        head_dim=8, vocab_size=64, pad_token_id=3, use_cache=False, **case["shape"],
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).train()


class Beside(nn.Module):
    """A model whose blocks read, beside hidden states, rows of a table and a scale that are trained."""

    def __init__(self):
        super().__init__()
        self.embedding, self.table, self.head = nn.Embedding(64, 32), nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = nn.ModuleList(Attends() for _ in range(2))
        self.scale = nn.Linear(1, 32)

    def forward(self, input_ids, labels):
        x, rows = self.embedding(input_ids), self.table(input_ids).tanh()
        scale = self.scale(torch.ones(1, 1, 1))
        for layer in self.layers:
            x = layer(x, rows, scale)
        loss = F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x, rows, scale):
        q, k, v = (each(x + rows).unflatten(-1, (4, 8)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return (
            x
            + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)) * rows * scale
        )


def batch_of(step, case):
    """A batch; where ranks have rows of their own, one whose labels all count: then the mean of the ranks' losses is
    that of the whole."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 64, (8 if case["own_rows"] else 4, 16), generator=generator)
    ignored = torch.rand(ids.shape, generator=generator) < 0.2
    return {"input_ids": ids, "labels": ids if case["own_rows"] else ids.masked_fill(ignored, -100)}


def world_of(case, size):
    return World(size, case["parallel"], case["nodes"])


def divided(model, mesh, case):
    if case["parallel"] == "tp":
        return in_tensor_parallel(model, mesh)
    engine = in_context_parallel if case["parallel"] == "cp" else in_fsdp2
    return engine(model, find_blocks(model, None), mesh, precision=case["precision"])


def train(model, case):
    """The losses of some steps, the gradients of the first one by name, and the norms before clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients, norms = [], {}, []
    device = next(model.parameters()).device
    for step in range(case["steps"]):
        batch = {name: tensor.to(device) for name, tensor in batch_of(step, case).items()}
        shares = case["own_rows"] and dist.is_initialized()
        if shares:
            batch = {name: tensor.chunk(dist.get_world_size())[dist.get_rank()] for name, tensor in batch.items()}
        parts = as_parts(split_batch(batch, case["micro_batches"]), model_loss)
        precision = "fp32" if isinstance(model, FSDPModule) else case["precision"]  # FSDP2 casts by itself
        loss = forward_backward(model, parts, model_loss, precision)
        if shares:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        losses.append(float(loss))
        gradients = gradients or {name: gathered(p.grad).clone() for name, p in model.named_parameters()}  # not clipped
        norms.append(update(model, optimizer, StepSettings(grad_clip=case["clip"])))
    return losses, gradients, [None if norm is None else float(gathered(norm)) for norm in norms]


def part_of(whole, part, rank, size):
    """The rank's part of a gradient that one process has whole."""
    side = next((side for side in range(whole.dim()) if whole.shape[side] != part.shape[side]), None)
    return (whole if side is None else whole.chunk(size, side)[rank]).to(part.device)


def saves_all(model, case, rank):
    """Whether rank 0 gets the whole state dict, and the others an empty one."""
    state, before = model.full_state_dict(), model_of(case).state_dict()
    if rank:
        return not state
    return list(state) == list(before) and all(torch.equal(state[name].cpu(), before[name]) for name in before)


def work(rank, size, folder, cases):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    told = told_of(rank, size, folder, cases, "cpu")
    Path(f"{folder}/told{rank}.json").write_text(json.dumps(told))


def told_of(rank, size, folder, cases, device):
    """What a rank tells of each case that is prepared in a folder."""
    told = []
    for number, case in enumerate(cases):
        mesh = mesh_of(world_of(case, size), device)
        whole = torch.load(f"{folder}/whole{number}.pt", weights_only=True)
        model = divided(model_of(case).to(device), mesh, case)
        saved = saves_all(model, case, rank) if case["parallel"] == "tp" else None
        losses, gradients, norms = train(model, case)
        errors = {
            name: float((part_of(whole["gradients"][name], mine, rank, size) - mine).abs().max())
            for name, mine in gradients.items()
        }
        row = {"whole": whole["losses"], "losses": losses, "worst": max(errors.values())}
        row["norms"], row["whole_norms"] = norms, whole["norms"]
        row["saved"] = saved
        row["largest"] = max(float(gradient.abs().max()) for gradient in whole["gradients"].values())
        if case["budget"] is not None:
            plan = tightfit.Plan.from_json(f"{folder}/plan{number}.json")
            model = model_of(case).to(device)
            with plan.apply(model):
                plan.shard(model, mesh)
                planned, of_plan, _ = train(model, {**case, "micro_batches": plan.micro_batches})
            row["planned"] = planned
            row["equal"] = [name for name, mine in gradients.items() if torch.equal(mine, of_plan[name])]
            row["names"] = list(gradients)
        told.append(row)
    return told


def prepare(case, number, folder, size, device=None):
    losses, gradients, norms = train(model_of(case), case)
    torch.save({"losses": losses, "gradients": gradients, "norms": norms}, f"{folder}/whole{number}.pt")
    if case["budget"] is not None:
        asked = {"device": device or even(), "precision": case["precision"], "world_size": size}
        asked |= {"parallel": case["parallel"], "nodes": case["nodes"], "levers": ["recompute"]}
        plan, budget, batch = None, case["budget"], batch_of(0, case)
        if case["own_rows"]:
            batch = {name: tensor.chunk(size)[0] for name, tensor in batch.items()}
        for _ in range(3):  # the least that is named may be the first rank's
            try:
                plan = tightfit.plan(model_of(case), batch, budget, **asked)
                break
            except CannotFit as error:  # on a card, where cuBLAS's workspace is most of so small a step
                budget = error.least_bytes
        assert plan is not None, f"no plan within {budget}"
        assert any(choice.action != "keep" for choice in plan.choices), "the plan has something to recompute"
        plan.to_json(f"{folder}/plan{number}.json")


def main(folder, size, cases):
    torch.set_num_threads(1)
    for number, case in enumerate(cases):
        prepare(case, number, folder, size)
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work(rank, size, folder, cases)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(codes), f"ranks ended with {codes}"
    print(json.dumps([json.loads(Path(f"{folder}/told{rank}.json").read_text()) for rank in range(size)]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
