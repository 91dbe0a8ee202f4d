"""Trainings of several ranks on cards. Between null cards nothing is sent: their bytes are what counts."""

import json
import os
import subprocess
import sys

import pytest
import torch
from recovering import config

from tightfit.devices.present import lookup_present
from tightfit.training.objective import CausalLMLoss
from tightfit.training.sharded.fitting import fit_shards
from tiny import VOCABULARY, decoder, token_batch

SETTINGS = """
model: {{hidden_size: 64, num_layers: 3, num_heads: 4, vocab_size: 400}}
data: {{source: default, max_documents: 20, sequence_length: 128, vocab_size: 400}}
training: {{max_steps: 2, batch_size: 16, precision: bf16, device: cuda, parallel: {parallel}}}
memory: {{budget: 0.8x}}
output: {{folder: {folder}}}
"""


def test_a_rank_of_fsdp2_is_planned_where_a_card_is_in_use():
    """CUDA and autograd's threads are in no fork."""
    torch.ones(1, device="cuda", requires_grad=True).sum().backward()
    settings = config(training={"device": "cuda", "parallel": "fsdp2", "batch_size": 4}, memory={"budget": "1x"})
    model, batch = decoder(), token_batch()
    assert batch["input_ids"].max() < VOCABULARY
    device = lookup_present("cuda")
    one, two = (fit_shards(model, batch, CausalLMLoss(), settings, device, ranks) for ranks in (1, 2))
    assert two.planned.peak_bytes < one.planned.peak_bytes


@pytest.mark.slow  # two and four processes, some 15 seconds each
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_ranks_have_the_predicted_peak(tmp_path, parallel, ranks):
    (tmp_path / "training.yaml").write_text(SETTINGS.format(parallel=parallel, folder=tmp_path / "run"))
    outside = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "TIGHTFIT_NULLCARD")}
    command = [sys.executable, "-m", "tightfit.nullcard", "rtx4090", "--count", str(ranks), "--", sys.executable]
    command += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m", "tightfit", "train"]
    ran = subprocess.run([*command, "training.yaml"], cwd=tmp_path, env=outside, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["measured_peak_bytes"] <= result["budget_bytes"]
    assert abs(result["measured_peak_bytes"] - result["predicted_peak_bytes"]) <= 1024
