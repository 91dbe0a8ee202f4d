"""Adapters on a base that FSDP2 shards: the base is split over the ranks, and only the adapters are trained."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_training import settings

from tightfit.models.saving import load_model
from tiny_adapters import saved_llama

HERE = Path(__file__).parents[2] / "src"


def written(folder: Path, below: Path, **sections: Any) -> Path:
    """A configuration that trains adapters on the model in `below`."""
    folder.mkdir()
    steps = {"log_every": 1, "schedule": "constant", **sections.get("training", {})}
    made = settings(folder, training=steps, checkpoint={"every_steps": 3}, memory=sections.get("memory", {}))
    plain = made.model_dump(mode="json")
    adapter = {"r": 4, "target_modules": ["q_proj", "v_proj"], "base": sections.get("base", "fp32")}
    plain["model"] = {"path": str(below), "adapter": adapter}
    (folder / "run.yaml").write_text(json.dumps(plain))
    return folder


def train(folder: Path, ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    parallel = "fsdp2" if ranks > 1 else "auto"
    head = [sys.executable, "-m", *(torchrun if ranks > 1 else []), "tightfit", "train", str(folder / "run.yaml")]
    return subprocess.run(
        [*head, *words, f"training.parallel={parallel}"], capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)},
    )  # fmt: skip


def steps(folder: Path, name: str) -> torch.Tensor:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return torch.tensor([json.loads(line)[name] for line in lines])


def adapters(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "run" / "adapter_model.safetensors")


def assert_same(expected: Path, found: Path) -> None:
    for name in ("loss", "grad_norm", "tokens"):
        torch.testing.assert_close(steps(found, name), steps(expected, name), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(adapters(found), adapters(expected), rtol=1e-3, atol=1e-5)


@pytest.mark.keeps("adapters-sharded-base-fp32")
@pytest.mark.slow  # four trainings in processes of their own, with the imports of transformers and peft
def test_sharded_adapters_train_as_in_one_process_and_resume_on_other_numbers_of_ranks(tmp_path: Path):
    base = saved_llama(tmp_path / "base")
    alone = written(tmp_path / "alone", base, training={"max_steps": 6})
    assert train(alone, 1).returncode == 0
    planned = written(tmp_path / "planned", base, training={"max_steps": 6}, memory={"budget": "0.85x"})
    first = train(planned, 2, "training.max_steps=3")
    assert first.returncode == 0, first.stderr
    ranks = json.loads((planned / "run" / "plan.json").read_text())
    assert (ranks["world_size"], ranks["parallel"]) == (2, "fsdp2")
    second = train(planned, 1, "--resume", "memory.budget=null")
    assert second.returncode == 0, second.stderr
    assert_same(alone, planned)
    trained = load_model(planned / "run")
    assert all(bool(p.count_nonzero()) for name, p in trained.named_parameters() if "lora_B" in name)
    saved_llama(base, initializer_range=0.5)  # other weights under the same adapters
    other = train(planned, 2, "--resume", "training.max_steps=9")
    assert other.returncode != 0
    assert "the weights under the adapters are not those that the checkpoint was trained on" in other.stderr


@pytest.mark.keeps("adapters-sharded-base-fp32")
@pytest.mark.slow  # two trainings, as above
def test_a_base_in_bf16_is_sharded_too(tmp_path: Path):
    base = saved_llama(tmp_path / "base")
    alone, together = (
        written(tmp_path / name, base, training={"max_steps": 4}, base="bf16") for name in ("alone", "together")
    )
    assert train(alone, 1).returncode == 0
    ended = train(together, 2)
    assert ended.returncode == 0, ended.stderr
    torch.testing.assert_close(steps(together, "loss"), steps(alone, "loss"), rtol=0.01, atol=0.04)
    torch.testing.assert_close(adapters(together), adapters(alone), rtol=0.02, atol=2e-4)
    assert {tensor.dtype for tensor in adapters(together).values()} == {torch.float32}
