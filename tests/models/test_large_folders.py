"""A folder of several shards whose weights go to their tier: the process never holds them together."""

import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")
SHAPE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "vocab_size": 1000}
# Prints the weights' bytes, and the highest rise of memory that is private to the process (no page of a file).
CHILD = """
import sys, threading
import torch, tightfit, transformers
from pathlib import Path
from tightfit.memory.counters import this_process
from tightfit.memory.process import give_back_at_once
from tightfit.models import converted
from tightfit.models.loading import build_model
from tightfit.training.config.schema import PretrainedModel
from transformers import LlamaForCausalLM

folder, dtype, tier, room = sys.argv[1:]
names = {"float32": "fp32", "bfloat16": "bf16"}
give_back_at_once()

def private():
    memory = this_process().memory_info()
    return memory.rss - memory.shared

before, highest, ended = private(), [0], threading.Event()

def watch():
    while not ended.wait(0.001):
        highest[0] = max(highest[0], private() - before)

thread = threading.Thread(target=watch, daemon=True)
thread.start()
if int(room):  # a host with no more memory
    converted.free_host_bytes = lambda: int(room)
model = build_model(PretrainedModel(path=folder, dtype=names[dtype])).requires_grad_(False)
built = highest[0]
handle = tightfit.stream(model, "model.layers.*", tier=tier)
ended.set()
thread.join()
converted.free_host_bytes = lambda: 1 << 40
with torch.no_grad():
    equal = all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(
            model.state_dict().values(),
            LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).state_dict().values(),
            strict=True,
        )
    )
print(sum(p.nbytes for p in model.parameters()), built, highest[0], int(equal), model.config.dtype)
"""


@pytest.mark.slow  # a folder of 300 MB, read by an interpreter of its own
@pytest.mark.sampled(1)
@pytest.mark.keeps("folder-larger-than-memory")
@pytest.mark.parametrize(("dtype", "room"), [("float32", 0), ("bfloat16", 0.6)])
def test_weights_go_from_their_shards_to_their_tier(tmp_path, dtype, room):
    """Also in another dtype than the stored one, where the host has less memory than the weights."""
    folder = tmp_path / "model"
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    model.save_pretrained(folder, max_shard_size="32MB")
    weights = sum(weight.numel() for weight in model.parameters()) * getattr(torch, dtype).itemsize
    assert len(list(folder.glob("*.safetensors"))) > 4
    del model
    run = [sys.executable, "-c", CHILD, str(folder), dtype, str(tmp_path), str(int(room * weights))]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    *figures, kind = done.stdout.split()[-5:]
    nbytes, built, highest, equal = map(int, figures)
    assert nbytes == weights
    assert built < 0.25 * weights, "shards are mapped, not read"
    assert highest < 0.4 * weights, "a block at a time is copied to its tier"
    assert equal
    assert kind == f"torch.{dtype}"
