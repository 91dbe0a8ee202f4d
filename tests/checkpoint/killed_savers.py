"""`python killed_savers.py FOLDER KILLS`: processes that save and prune without end, each killed at a random moment.

Each goes on from the checkpoint that is found, at the same or the next step. Prints how many were killed while they
saved or pruned.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from tightfit.training.checkpoint.store import Checkpoints

LONGEST_SECONDS = 0.25  # some saves


def main(folder: Path, kills: int) -> None:
    torch.set_num_threads(1)  # a process that is forked has no other threads
    chance, last, inside = random.Random(0), 0, 0
    checkpoints = Checkpoints(folder)
    for _ in range(kills):
        done = _killed(folder, last, chance)
        found = checkpoints.newest_intact()
        assert found.passed_over == (), found.passed_over
        step = found.checkpoint.step if found.checkpoint else 0
        assert step >= done, f"step {step} was found, and {done} was saved"
        if found.checkpoint:
            read = {name: torch.zeros_like(tensor) for name, tensor in _tensors(step).items()}
            found.checkpoint.read_into(read)
            assert all(torch.equal(read[name], tensor) for name, tensor in _tensors(step).items())
        last = step
        inside += folder.exists() and any(path.name.startswith(".") for path in folder.iterdir())
    assert last > 0
    sys.stdout.write(f"{inside}\n")


def _killed(folder: Path, step: int, chance: random.Random) -> int:
    """The last step that a process said it had saved before it was killed."""
    reader, writer = os.pipe()
    seconds, repeats = chance.uniform(0.01, LONGEST_SECONDS), random.Random(chance.random())
    child = os.fork()
    if child == 0:
        checkpoints = Checkpoints(folder)
        while True:
            step += repeats.choice([0, 1]) if step else 1
            checkpoints.save(step, _tensors(step), {"step": step})
            checkpoints.prune(2)
            os.write(writer, step.to_bytes(8, "little"))
    os.close(writer)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    return int.from_bytes(said[-8:], "little") if said else step


def _tensors(step: int) -> dict[str, torch.Tensor]:
    return {f"weight {i}": torch.full((128, 256), float(step + i)) for i in range(6)}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
