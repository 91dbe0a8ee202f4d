"""The optimizers in a whole training, planned, measured and watched."""

from pathlib import Path

import pytest
import torch
from small_training import batches, loss_of, net

from quick_trainings import leave_out_pictures
from tightfit import monitor
from tightfit.optim import OffloadedAdamW, step_in_backward
from tightfit.training.api import train
from tightfit.training.config import parse_config

CORPUS = "".join(f"The house of {place} has {count} doors.\n" for count in range(80) for place in ("Rome", "Bath"))
SMALL = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 300, "max_position_embeddings": 32}
IN_BACKWARD = {"step_in_backward": True, "grad_clip": None}


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_pictures(monkeypatch)


def run(folder: Path, memory=None, **training):
    folder.mkdir(exist_ok=True)
    (folder / "corpus.txt").write_text(CORPUS)
    return train(
        parse_config(
            {
                "model": SMALL,
                "data": {"source": str(folder / "corpus.txt"), "sequence_length": 32, "vocab_size": 300},
                "training": {"max_steps": 4, "batch_size": 8, "device": "cpu", **training},
                "memory": memory or {},
                "output": {"folder": str(folder / "run")},
            }
        )
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "training",
    [
        {"optimizer": "offloaded_adamw:0.5"},
        {"optimizer": "offloaded_adamw", "precision": "fp16", "gradient_accumulation_steps": 2},
        IN_BACKWARD,
        {**IN_BACKWARD, "optimizer": "offloaded_adamw", "gradient_accumulation_steps": 4},
    ],
    ids=str,
)
def test_a_planned_training_has_the_losses_of_plain_adamw_and_keeps_its_budget(tmp_path, training):
    plain = run(tmp_path / "plain", **{**training, "optimizer": "adamw", "step_in_backward": False})
    frugal = run(tmp_path / "frugal", {"budget": "0.8x", "levers": "exact"}, **training)
    assert frugal.last_loss == plain.last_loss
    assert frugal.measured_peak_bytes == pytest.approx(frugal.predicted_peak_bytes, rel=1e-3)
    assert frugal.measured_peak_bytes <= frugal.budget_bytes


@pytest.mark.parametrize("stepping", [False, True])
def test_a_monitor_watches_it(stepping):
    model = net()
    optimizer = OffloadedAdamW(model.parameters())
    if stepping:
        step_in_backward(optimizer, model)
    with monitor(model, optimizer) as watch:
        for ids in batches(3):
            loss_of(model, ids).backward()
            held = watch.live()
            optimizer.step()
            optimizer.zero_grad()
    states = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor))
    assert watch.by_category["optimizer states"] >= states
    assert (held["gradients"] == 0) == stepping
