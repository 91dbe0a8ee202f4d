"""MiniMind's own trainer scripts, unmodified, with and without `tightfit minimind`: losses, saved states, peaks.

    git clone https://github.com/jingyaogong/minimind
    python benchmarks/minimind.py --checkout minimind --output benchmarks/results/minimind.json

For each trainer, dense and with experts, some steps in fp32 on the CPU: as `python SCRIPT` runs it, and within a part
of its plain peak. What they print, and what they save to resume from (weights in fp16, the optimizer's states in fp32),
is compared byte for byte. The plain peak is measured as well, in a short run under `tightfit profile`. Each run has a
process and a copy of the scripts of its own; the checkout is only read. The text is Python's documentation of itself.
glibc is told to give freed memory back to the system (MALLOC_MMAP_THRESHOLD_), so that the resident memory of a process
can be read beside its tensors. Cases that are not asked for keep the figures that the output has of them.
"""

import argparse
import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accuracy_page import RESULTS, rows
from environment import environment, git
from tightfit.integrations.minimind import MemoryFlags, run_minimind
from tightfit.training.monitoring.script import profile_script

OUTPUT = RESULTS / "minimind.json"
PARTS = ("trainer", "model", "dataset")  # of a checkout
WATCHED_STEPS = 4  # of which the second, or the second two in one, is watched
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(256 * 1024)}  # bytes: what is larger has pages of its own; see mallopt(3)
LENGTH = 128
SAMPLE_CHARACTERS = 3 * LENGTH  # more than the tokens of a sequence, for some samples; others are shorter
SHARED = ("--device", "cpu", "--num_workers", "0", "--epochs", "1", "--log_interval", "1", "--max_seq_len", str(LENGTH))
SIZE = ("--hidden_size", "128", "--num_hidden_layers", "16", "--from_weight", "none")
STUDENT = ("--student_hidden_size", "128", "--student_num_layers", "16", "--from_student_weight", "none")
TEACHER = ("--teacher_hidden_size", "128", "--teacher_num_layers", "4", "--from_teacher_weight", "none")


@dataclass(frozen=True)
class Case:
    """A trainer script with its flags, the samples it takes, its steps, and the part of its plain peak allowed."""

    script: str
    batch_size: int
    flags: tuple[str, ...]
    sample: Callable[[str], dict[str, Any]]
    steps: int = 8
    budget: str = "0.5x"

    def arguments(self, data: Path) -> list[str]:
        return [*SHARED, "--batch_size", str(self.batch_size), *self.flags, "--data_path", str(data)]


def pretraining(text: str) -> dict[str, Any]:
    return {"text": text}


def conversation(text: str) -> dict[str, Any]:
    return {"conversations": dialogue(text[:80], text[80:])}


def preference(text: str) -> dict[str, Any]:
    half = len(text) // 2
    return {"chosen": dialogue(text[:80], text[80:half]), "rejected": dialogue(text[:80], text[half:])}


def dialogue(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def cases() -> dict[str, Case]:
    found = {}
    for kind, moe, size in (("dense", "0", 8), ("MoE", "1", 16)):
        flags = (*SIZE, "--use_moe", moe)
        accumulated = (*flags, "--accumulation_steps", "2")
        students = (*STUDENT, *TEACHER, "--student_use_moe", moe, "--teacher_use_moe", "1")
        found |= {
            f"pretrain, {kind}": Case("train_pretrain.py", size, accumulated, pretraining, steps=20),
            f"full_sft, {kind}": Case("train_full_sft.py", size, flags, conversation),
            f"lora, {kind}": Case("train_lora.py", size, flags, conversation),
            f"dpo, {kind}": Case("train_dpo.py", size // 2, flags, preference, budget="0.6x"),
            f"distillation, {kind}": Case("train_distillation.py", size, students, conversation, budget="0.75x"),
        }
    return found


def texts(count: int) -> Iterator[str]:
    """Pieces of the documentation that every Python carries; an article's last piece is shorter."""
    from pydoc_data.topics import topics

    articles = [topics[name] for name in sorted(topics)]
    pieces = [a[i : i + SAMPLE_CHARACTERS] for a in articles for i in range(0, len(a), SAMPLE_CHARACTERS)]
    return (pieces[i % len(pieces)] for i in range(count))


def written(case: Case, steps: int, path: Path) -> Path:
    """A file of as many samples as the steps take."""
    samples = map(case.sample, texts(steps * case.batch_size))
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
    return path


@contextlib.contextmanager
def copied(checkout: Path) -> Iterator[Path]:
    """The trainer folder of a copy, which may be written to."""
    with tempfile.TemporaryDirectory() as folder:
        for part in PARTS:
            shutil.copytree(checkout / part, Path(folder) / part)
        yield Path(folder) / "trainer"


def printed(output: str) -> list[str]:
    """The lines on steps, without the time that they took."""
    lines = (line for line in output.splitlines() if line.startswith("Epoch:"))
    return [re.sub(r", epoch_time:.*", "", line) for line in lines]


def saved(trainer: Path) -> str:
    """Digest of what the script saved to resume from: weights and the optimizer's states, to the last bit."""
    (path,) = (trainer.parent / "checkpoints").glob("*_resume.pth")
    state = torch.load(path, weights_only=True)
    digest = hashlib.sha256()
    for name, tensor in [*state["model"].items(), *optimizer_states(state["optimizer"])]:
        digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def optimizer_states(state: dict[str, Any]) -> Iterable[tuple[str, torch.Tensor]]:
    return ((f"{i}.{name}", t.reshape(-1)) for i, values in state["state"].items() for name, t in values.items())


def plain(checkout: Path, case: Case, data: Path) -> dict[str, Any]:
    """`python SCRIPT`."""
    with copied(checkout) as trainer:
        command = [sys.executable, case.script, *case.arguments(data)]
        done = subprocess.run(command, cwd=trainer, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{case.script} failed by itself:\n{done.stderr}")
        return {"printed": printed(done.stdout), "saved": saved(trainer)}


def within(checkout: Path, case: Case, data: Path) -> dict[str, Any]:
    """`tightfit minimind SCRIPT --memory_budget ...`."""
    with copied(checkout) as trainer, told_from(trainer) as output:
        run = run_minimind(Path(case.script), case.arguments(data), MemoryFlags(memory_budget=case.budget))
        if run.error is not None or run.plan is None:
            raise SystemExit(f"{case.script} failed within its budget: {run.error!r}")
        return {
            "printed": printed(output.getvalue()),
            "saved": saved(trainer),
            "budget_bytes": run.plan.budget_bytes,
            "plain_predicted_bytes": run.plan.plain_peak_bytes,
            "predicted_bytes": run.plan.peak_bytes,
            "worst_predicted_bytes": run.plan.worst_peak_bytes,
            "measured_bytes": run.record.peak_bytes,
            "parameters": run.record.parameters,
            "micro_batches": run.plan.micro_batches,
            "step_seconds": run.record.step_seconds,
            "resident_highest_bytes": resident_highest(),
        }


def watched(checkout: Path, case: Case, data: Path) -> dict[str, Any]:
    """`tightfit profile SCRIPT`."""
    with copied(checkout) as trainer, told_from(trainer):
        run = profile_script(Path(case.script), case.arguments(data))
        if run.error is not None:
            raise SystemExit(f"{case.script} failed under the monitor: {run.error!r}")
        record = run.watch.record()
        return {
            "plain_measured_bytes": record.peak_bytes,
            "plain_step_seconds": record.step_seconds,
            "plain_resident_highest_bytes": resident_highest(),
        }


@contextlib.contextmanager
def told_from(folder: Path) -> Iterator[io.StringIO]:
    """Inside, the process stands in a folder, and what it prints is kept."""
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        yield output
    os.chdir("/")


def resident_highest() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def apart(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """The answer of a function that has a fresh process to itself."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def measure(checkout: Path, name: str) -> dict[str, Any]:
    """The figures of one case."""
    case = cases()[name]
    with tempfile.TemporaryDirectory() as folder:
        data = written(case, case.steps, Path(folder) / "data.jsonl")
        few = written(case, WATCHED_STEPS, Path(folder) / "few.jsonl")
        alone = plain(checkout, case, data)
        figures = apart(within, checkout, case, data)
        return {
            "case": name,
            "script": case.script,
            "flags": " ".join(case.arguments(Path("DATA"))),
            "budget": case.budget,
            "steps": len(alone["printed"]),
            "same_output": figures.pop("printed") == alone["printed"],
            "same_saved_states": figures.pop("saved") == alone["saved"],
            **figures,
            **apart(watched, checkout, case, few),
        }


def table(record: dict[str, Any]) -> str:
    """The table of docs/guests/minimind.md, in MiB."""
    sizes = ("plain_predicted_bytes", "plain_measured_bytes", "budget_bytes", "predicted_bytes", "measured_bytes")
    lines = []
    for found in record["results"]:
        same = "the same" if found["same_output"] and found["same_saved_states"] else "NOT the same"
        figures = " | ".join(f"{found[size] / 2**20:.2f}" for size in sizes)
        lines.append(f"| {found['case']} | {found['steps']} | {figures} | {same} |")
    return rows("| trainer | steps | plain, predicted | measured | budget | planned | measured | results |", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkout", type=Path, required=True, help="a clone of MiniMind")
    parser.add_argument("--cases", help="with semicolons between; all by default")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    os.environ.update(GIVEN_BACK)  # for the processes that are started from here
    asked = options.cases.split(";") if options.cases else list(cases())
    record = json.loads(options.output.read_text()) if options.output.is_file() else {"results": []}
    for name in asked:
        found = measure(checkout, name)
        shown = {key: value for key, value in found.items() if key.endswith("_bytes") or key.startswith("same")}
        print(name, shown, flush=True)
        kept = {row["case"]: row for row in [*record["results"], found]}
        record = {
            "environment": environment(),
            "minimind": {
                "commit": git("rev-parse", "HEAD", folder=checkout),
                "modified": bool(git("status", "--porcelain", "--untracked-files=no", "--", *PARTS, folder=checkout)),
            },
            "malloc": GIVEN_BACK,
            "results": [kept[case] for case in cases() if case in kept],
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record), end="")


if __name__ == "__main__":
    main()
