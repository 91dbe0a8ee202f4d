"""Trains a 1B decoder on a CPU in less memory than its weights take, and compares every bit with resident training.

Two works: adapters on frozen weights, and all weights (`offloaded_adamw`, whose states are in the file too). Each at
three residencies: no block streamed, some, and all but a few. Each training is a process of its own. Of those that
stream most blocks, the system bounds the memory: `RLIMIT_DATA`, which counts what is private and writable (heap,
allocator, stacks), touched or not, and no page of a file. It is below the bytes of the weights.

    python benchmarks/streamed.py [--small] [--work adapters all] [--residency NAME ...] [--steps N]
        [--resume] [--folder DIR] [--output FILE]

All weights, resident, with their states do not fit a machine of 16 GB. That training is PyTorch's own: weights and
gradients are in memory, moments in mapped files, and one weight after the other is updated by `torch.optim.adamw`.
"""

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

import tightfit
from environment import environment
from tightfit.levers.stream import install_streams, settle
from tightfit.memory.allocator import measured_peak
from tightfit.memory.counters import highest_rss, this_process
from tightfit.memory.process import give_back_at_once
from tightfit.models.adapters import add_adapter
from tightfit.models.decoder import Decoder, RotaryTable
from tightfit.models.decoder_config import DecoderConfig
from tightfit.optim import OffloadedAdamW
from tightfit.planner.levers.stream import spread
from tightfit.training.config.schema import AdapterConfig
from tightfit.training.loop import resident_tensors

RESULTS = Path(__file__).parent / "results" / "streamed.json"
# TinyLlama's blocks (its config.json on the hub); the head is the embedding here.
SHAPE: dict[str, Any] = {
    "hidden_size": 2048, "num_layers": 22, "num_heads": 32, "num_kv_heads": 4, "intermediate_size": 5632,
    "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "num_layers": 16,
    "num_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 64,
}
LENGTH = 16  # tokens of a step, one row
# Blocks that stay in memory, as shares of all: of all weights, a resident block takes five times its bytes.
RESIDENT = {"adapters": {"none": 1.0, "half": 0.5, "most": 0.1}, "all": {"none": 1.0, "most": 0.1, "every one": 0.0}}
LIMIT_SHARE = 0.9  # of the weights' bytes: the bound where all blocks but a few are streamed


def initial_weights(shape: Mapping[str, Any], file: Path) -> int:
    """Write the weights that every training begins with, and return their bytes."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**shape))
    torch.save(model.state_dict(), file)
    return sum(parameter.nbytes for parameter in model.parameters())


def loaded(shape: Mapping[str, Any], file: Path) -> Decoder:
    """The decoder over the mapped file of its weights, which takes no memory."""
    config = DecoderConfig(**shape)
    with torch.device("meta"):
        model = Decoder(config)
    model.rotary = RotaryTable(config)
    with torch.serialization.set_default_mmap_options(2 if sys.platform != "linux" else 1):  # MAP_SHARED
        model.load_state_dict(torch.load(file, mmap=True), assign=True)
    model.head.weight = model.embedding.weight
    return model


class MappedAdamW(torch.optim.Optimizer):
    """PyTorch's AdamW with its moments in mapped files, weight by weight."""

    def __init__(self, parameters: list[nn.Parameter], folder: Path):
        super().__init__(list(parameters), {})
        self.folder = folder

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for number, weight in enumerate(self.param_groups[0]["params"]):
            state = self.state[weight]
            for key in () if state else ("exp_avg", "exp_avg_sq"):
                file = str(self.folder / f"{number}.{key}")
                moment = torch.from_file(file, shared=True, size=weight.numel(), dtype=weight.dtype)  # zeros
                state[key] = moment.view_as(weight)
            state.setdefault("step", torch.tensor(0.0))
            adamw(
                [weight], [weight.grad], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]], foreach=False,
                amsgrad=False, beta1=0.9, beta2=0.999, lr=LEARNING_RATE, weight_decay=1e-2, eps=1e-8, maximize=False,
            )  # fmt: skip


LEARNING_RATE = 1e-4


def run(case: Mapping[str, Any]) -> dict[str, Any]:
    """Train in this process. Returns losses, a hash of the final weights, and what was predicted and measured."""
    give_back_at_once()
    work, folder = case["work"], Path(case["folder"])
    decoder = loaded(case["shape"], Path(case["weights"]))
    model: nn.Module = decoder
    count = len(decoder.layers)
    names = [f"layers.{number}" for number in range(count)]
    if work == "adapters":
        torch.manual_seed(1)
        model = add_adapter(decoder, AdapterConfig())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:  # zero at first, and then half of the adapters have no gradient
                    parameter.normal_(std=0.01)
        names = [f"base_model.model.{name}" for name in names]
    streamed = spread(names, count - round(case["resident"] * count))
    if streamed:
        install_streams(model, streamed, tier=folder, trained=work == "all")
        settle(model)
    for parameter in model.parameters():
        if not parameter.untyped_storage().resizable() and not _is_of(parameter, model, streamed):
            parameter.data = parameter.data.clone()  # out of the file of the initial weights
    is_own = work == "all" and not streamed

    def built(parameters: Any) -> torch.optim.Optimizer:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if is_own:
            return MappedAdamW(trained, folder)
        return (OffloadedAdamW if work == "all" else torch.optim.AdamW)(trained, lr=LEARNING_RATE)

    def batch(step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(case["shape"]["vocab_size"], (1, LENGTH), generator=generator)
        return {"input_ids": ids, "labels": ids}

    found = None if is_own else tightfit.estimate(model, batch(0), optimizer=built, device="cpu")
    optimizer, losses, seconds = built(model.parameters()), [], []

    def one(batch: Mapping[str, torch.Tensor]) -> None:
        loss = model(**batch).loss
        losses.append(loss.item())
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()

    limit = case["limit_bytes"]
    if limit is not None:
        limit += private_bytes() if case["is_small"] else 0  # Python and its libraries are larger than a small model
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    with watched() as anonymous:
        for step in range(case["steps"]):
            begun = time.perf_counter()
            one(batch(step))
            seconds.append(time.perf_counter() - begun)
            print(f"  step {step}: {seconds[-1]:.1f} s, loss {losses[-1]:.6f}", file=sys.stderr, flush=True)
    host_peak, anonymous_peak, trained, digest = highest_rss(), anonymous(), losses[:], hashed(model)
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    device_peak = None
    if not is_own:  # of one step more, since the record itself takes memory
        last = batch(case["steps"])
        device_peak = measured_peak(lambda: one(last), resident_tensors(model, optimizer, last))
    return {
        "losses": trained,
        "weights_sha256": digest,
        "streamed_blocks": len(streamed),
        "limit_bytes": limit,
        "predicted_peak_bytes": None if found is None else found.peak_bytes,
        "measured_peak_bytes": device_peak,
        "predicted_host_peak_bytes": None if found is None else found.host_peak_bytes,
        "measured_host_peak_bytes": host_peak,
        "measured_anonymous_peak_bytes": anonymous_peak,
        "step_seconds": sorted(seconds)[len(seconds) // 2],
    }


def _is_of(parameter: nn.Parameter, model: nn.Module, streamed: list[str]) -> bool:
    """True if a parameter is in one of the streamed blocks, and was not left in memory as too small."""
    return any(parameter is own for name in streamed for own in model.get_submodule(name).parameters())


def hashed(model: nn.Module) -> str:
    """A hash of all weights."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.detach().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def private_bytes() -> int:
    """What `RLIMIT_DATA` bounds, now."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData"))


@contextmanager
def watched() -> Iterator[Callable[[], int]]:
    """Gives a function that returns the highest resident memory that is no file's, of many samples."""
    highest, ended = [0], threading.Event()

    def sample() -> None:
        memory = this_process().memory_info()
        highest[0] = max(highest[0], memory.rss - memory.shared)

    def watch() -> None:
        while not ended.wait(0.005):
            sample()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: (sample(), highest[0])[1]
    finally:
        ended.set()
        thread.join()


def in_own_process(case: Mapping[str, Any]) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__)), "--case", json.dumps(case)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case}: the training ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a decoder of 15M parameters")
    parser.add_argument("--work", nargs="+", choices=RESIDENT, default=list(RESIDENT))
    parser.add_argument("--residency", nargs="+", default=["none", "half", "most", "every one"], help="none first")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="of the files")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the file that are of as many steps")
    parser.add_argument("--case", metavar="JSON", help="one training in this process")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    if given.case is not None:
        print(json.dumps(run(json.loads(given.case))))
        return
    shape = SMALL if given.small else SHAPE
    results = json.loads(given.output.read_text("utf-8"))["results"] if given.output.exists() else {}
    # What all trainings begin with is read once each: it need not take room where the tiers' files are.
    with tempfile.TemporaryDirectory(dir=given.folder) as folder, tempfile.TemporaryDirectory() as beginning:
        weights = Path(beginning) / "weights"
        nbytes = initial_weights(shape, weights)
        for work in given.work:
            rows: dict[str, Any] = {}
            how = {"weights_bytes": nbytes, "blocks": shape["num_layers"], "steps": given.steps, "tokens": LENGTH}
            before = results.get(work, {})
            if given.resume and all(before.get(key) == value for key, value in how.items()):
                rows.update(before["rows"])
            results[work] = {**how, "limit": "RLIMIT_DATA", "environment": environment(), "rows": rows}
            for name, share in RESIDENT[work].items():
                if name not in given.residency or name in rows:
                    continue
                # Of all weights, two blocks with their states and the embedding with its own take as much as they do.
                is_bounded = share == 0 or (share <= 0.1 and (given.small or work == "adapters"))
                case = {
                    "work": work, "shape": shape, "resident": share, "steps": given.steps, "weights": str(weights),
                    "folder": folder, "limit_bytes": int(LIMIT_SHARE * nbytes) if is_bounded else None,
                    "is_small": given.small,
                }  # fmt: skip
                print(f"{work}, {name} streamed:", file=sys.stderr, flush=True)
                row = rows[name] = in_own_process(case)
                row["commit"] = environment()["commit"]
                row["losses_equal"] = torch.equal(torch.tensor(row["losses"]), torch.tensor(rows["none"]["losses"]))
                row["weights_equal"] = row["weights_sha256"] == rows["none"]["weights_sha256"]
                given.output.parent.mkdir(parents=True, exist_ok=True)
                given.output.write_text(json.dumps({"results": results}, indent=1) + "\n", "utf-8")
    print(json.dumps({"results": results}, indent=1))


if __name__ == "__main__":
    main()
