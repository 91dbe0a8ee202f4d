"""A folder of several shards whose weights go to their tier: the process never holds them together."""

import subprocess
import sys

import pytest

transformers = pytest.importorskip("transformers")
SHAPE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "vocab_size": 1000}
# Prints the weights' bytes, and the highest rise of memory that is private to the process (no page of a file).
CHILD = """
import sys, threading, time
import torch, tightfit, transformers
from pathlib import Path
from tightfit.memory.counters import this_process
from tightfit.memory.process import give_back_at_once
from tightfit.models.loading import build_model
from tightfit.training.config.schema import PretrainedModel
from transformers import LlamaForCausalLM

folder, dtype, tier = sys.argv[1:]
give_back_at_once()

def private():
    memory = this_process().memory_info()
    return memory.rss - memory.shared

before, highest, ended = private(), [0], threading.Event()

def watch():
    while not ended.wait(0.001):
        highest[0] = max(highest[0], private() - before)

thread = threading.Thread(target=watch)
thread.start()
model = build_model(PretrainedModel(path=folder, dtype=dtype)).requires_grad_(False)
built = highest[0]
handle = tightfit.stream(model, "model.layers.*", tier=tier)
ended.set()
thread.join()
print(sum(p.nbytes for p in model.parameters()), built, highest[0])
"""


@pytest.mark.keeps("folder-larger-than-memory")
@pytest.mark.parametrize("dtype", ["auto"])
def test_weights_go_from_their_shards_to_their_tier(tmp_path, dtype):
    folder = tmp_path / "model"
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    model.save_pretrained(folder, max_shard_size="32MB")
    del model
    assert len(list(folder.glob("*.safetensors"))) > 4
    run = [sys.executable, "-c", CHILD, str(folder), dtype, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    weights, built, highest = map(int, done.stdout.split()[-3:])
    assert weights > 200e6
    assert built < 0.2 * weights, "shards are mapped, not read"
    assert highest < 0.4 * weights, "a block at a time is copied to its tier"
