"""A rank's memory on cards, against torchtitan's published table: reserved GiB of Llama 3.1 8B with FSDP2, eager.

Source: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3, the rows that are not compiled.
The blocks have torchtitan's selective checkpoints: every second product and attention are kept. The loss is in fp32.
The model is our reference decoder in that shape. What is reserved is replayed in one pool, and FSDP2 uses several
streams.

    python benchmarks/rank_on_cards.py [--output results.json]
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from environment import environment
from tightfit.devices.present import lookup
from tightfit.levers.micro_batch import as_parts, as_tensors, split_batch
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.planner.request import role_of
from tightfit.ranks.playing import PlayedRank, own_copy
from tightfit.ranks.world import World
from tightfit.step import StepSettings, TokenBatch
from tightfit.tracing.build import build_dry
from tightfit.tracing.step import trace_step
from tightfit.tracing.twin import twin_of

PUBLISHED = {8: 82.4, 128: 67.0}  # ranks, GiB
LAYERS, LENGTH, VOCABULARY = 32, 8192, 128256
LLAMA = DecoderConfig(
    hidden_size=4096, num_layers=LAYERS, num_heads=32, num_kv_heads=8, intermediate_size=14336, vocab_size=VOCABULARY,
    max_position_embeddings=LENGTH, tie_embeddings=False,
)  # fmt: skip
aten = torch.ops.aten
ATTENTION = {getattr(aten, f"_scaled_dot_product_{name}_attention").default for name in ("efficient", "flash", "cudnn")}


def selective() -> Any:
    products: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = operator in ATTENTION
        if operator is aten.mm.default:
            products[context.is_recompute] += 1
            kept = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def model() -> Decoder:
    made = Decoder(LLAMA)
    for number, layer in enumerate(made.layers):
        made.layers[number] = checkpoint_wrapper(layer, context_fn=selective)
    return made


def loss(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = module(batch["input_ids"]).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(0, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    output = parser.parse_args().output
    twin = twin_of(build_dry(model))
    parts = as_parts(split_batch(as_tensors(TokenBatch(2, LENGTH, VOCABULARY)), 1), loss)
    rows = []
    for ranks, published in PUBLISHED.items():
        rank = PlayedRank(World(ranks), 0, [f"layers.{number}" for number in range(LAYERS)], "bf16")
        trace = trace_step(
            own_copy(twin), parts, loss, settings=StepSettings(grad_clip=1.0), role=role_of(lookup("h100")), rank=rank
        )
        assert trace.reserved_bytes is not None, "a card has an allocator that reserves"
        reserved = trace.reserved_bytes / 2**30
        rows.append(
            {"ranks": ranks, "published_gib": published, "reserved_gib": reserved, "error": reserved / published - 1}
            | {"allocated_gib": trace.peak_bytes / 2**30}
        )
        print(rows[-1], flush=True)
    if output is not None:
        output.write_text(json.dumps({"environment": environment(), "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
