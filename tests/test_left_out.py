"""Questions answered with packages left out (`tightfit.runtime.deferred`) and with everything loaded: the same bytes.

Beside those of `test_import_time.py`, which are compared in every run of the suite.
"""

import json
import os
import subprocess
import sys

import pytest

from tightfit.cli.light import ALL_LOADED

SMALL = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS = {
    "mixtral": SMALL | HEADS | {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba": SMALL | {"state_size": 8},
    "bert": SMALL | {"num_attention_heads": 4, "intermediate_size": 128, "is_decoder": True},
    "qwen2_moe": SMALL | HEADS | {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "falcon": SMALL | {"num_attention_heads": 4},
}
OWN = (
    "from torch import nn\n"
    "def model():\n"
    "    from tightfit.models.decoder import Decoder\n"
    "    from tightfit.models.decoder_config import DecoderConfig\n"
    "    return Decoder(DecoderConfig(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2, vocab_size=99))\n"
)
CASES = {
    "llama-bf16": "estimate --model llama-3.2-1b --precision bf16 --device h200",
    "fp16": "estimate --model tinyllama-1.1b --precision fp16 --device t4 --batch-size 4 --micro-batches 2",
    "qwen3": "estimate --model qwen3-0.6b --device a100-80 --optimizer muon",
    "gemma2": "estimate --model gemma-2-2b --precision bf16 --device h200 --grad-clip 1",
    "t5": "estimate --model t5-small --device rtx4090",
    "mm26": "estimate --model mm26 --device cpu --optimizer adafactor",
    "mixtral": "estimate --model mixtral.json --precision bf16 --device rtx4090",
    "qwen2-moe": "estimate --model qwen2_moe.json --device rtx4090",
    "mamba": "estimate --model mamba.json --device rtx4090",
    "bert": "estimate --model bert.json --device rtx4090",
    "falcon": "estimate --model falcon.json --device rtx4090 --optimizer offloaded_adamw",
    "eight-bits": "estimate --model gpt2 --device rtx4090 --optimizer adamw8bit",
    "function": "estimate --model own:model --device rtx4090",
    "plan": "plan --model qwen3-0.6b --device rtx4090 --precision bf16 --batch-size 16 --budget 0.8x",
    "plan-offload": "plan --model smollm2-135m --device rtx4090 --batch-size 64 --budget 0.8x --levers exact,offload",
    "plan-rounding": "plan --model gpt2 --device rtx4090 --batch-size 64 --budget 0.8x --levers rounding",
    "plan-compile": "plan --model mm26 --device cpu --batch-size 4 --budget 0.9x --levers recompute,compile",
    "maximise": "plan --model mm26 --device rtx4090 --budget 2GiB --maximise sequence_length",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the questions are asked: configurations, and a user's own function."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        (folder / f"{name}.json").write_text(json.dumps({"model_type": name, **config}))
    (folder / "own.py").write_text(OWN)
    return folder


def answer(case, folder, loaded=False):
    """What the command writes."""
    code = "from tightfit.cli import main; main()"
    arguments = [*CASES[case].split(), *([] if "maximise" in case else ["--seq-len", "128"]), "--json"]
    environment = {name: value for name, value in os.environ.items() if name != ALL_LOADED}
    environment |= {ALL_LOADED: "1"} if loaded else {}
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=folder, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@pytest.mark.slow  # two processes a case that import torch, one of them everything beside it: seven seconds each
@pytest.mark.parametrize("case", CASES)
def test_an_answer_has_the_same_bytes_with_packages_left_out(case, folder):
    assert answer(case, folder) == answer(case, folder, loaded=True)
