"""PEFT's comparison of methods, run on a null card by PEFT's own script, beside the bytes that PEFT has published.

    python -m benchmarks.published.peft predict --repository FOLDER --data FOLDER [--only lora] [--again]
    PY=.venv-card/bin/python; $PY -m tightfit.devices.nullcard l40s -- $PY -m benchmarks.published.peft run ...

The repository is a checkout of huggingface/peft. Each experiment of `method_comparison/MetaMathQA` (Llama-3.2-3B in
bf16, batches of 4) runs as it is, by `run.py`, on a null L40S for 30 steps; python's `-O` leaves out its check of a
loss, since numbers are not true. Published are the reserved bytes of 5,000 steps on an L40S, less those at the start.
The weights are files of holes, the texts random letters with a tokenizer of bytes. Of their lengths one is not
published, the longest, and it decides: `LONGEST` is what makes the dry run of one method (LoRA of rank 32) as
published; the others follow. run.py sorts 20 batches by length and empties the cache behind every tenth step, so the
longest meets an empty one. `predict` is the same step by a dry run. Both write benchmarks/results/published_peft.json.
"""

import argparse
import importlib.metadata
import json
import os
import random
import re
import statistics
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT, environment
from benchmarks.packages_on_cards import watched
from benchmarks.scripts_on_cards import holes, write_lines

RESULTS = ROOT / "benchmarks" / "results" / "published_peft.json"
COMPARISON = Path("method_comparison", "MetaMathQA")
CARD, STEPS, PATIENCE = "l40s", 30, 1800.0  # BOFT computes 18 s for each step
ROWS, LLAMA, TEMPLATE = 4, "llama-3.2-3b", "Question: {query} Think step by step.\nAnswer:"  # as run.py's
LONGEST = 656  # tokens of the longest of 5,000 batches
AT_START = 2 << 20  # run.py takes off what is reserved before: one segment, which it fills later
BUCKET = 20 * ROWS  # samples; run.py sorts so many by length


def prepare(data: Path) -> None:
    """Make the files that run.py asks a hub for, under the names it asks for, relative to the folder."""
    draw = random.Random(0)

    def letters(length: int) -> str:
        return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=length))

    def length() -> int:  # about 340 tokens a row, as published figures say (tokens a second, seconds, 20,000 rows)
        return min(max(int(draw.lognormvariate(5.7, 0.45)), 100), LONGEST - 64)

    rows = []
    for number in range(6 * BUCKET):
        place = number % (2 * BUCKET) - BUCKET  # the longest batch is in every second bucket, its rows differ
        tokens = LONGEST - 8 * place if place in range(ROWS) else length()
        query = letters(40)
        rows.append((query, letters(tokens - len(TEMPLATE.format(query=query)))))
    metamath = [{"type": "x", "query": q, "original_question": q, "response": r} for q, r in rows]
    for folder in ("meta-math/MetaMathQA", "openai/gsm8k/main", "HuggingFaceFW/finewiki"):
        (data / folder).mkdir(parents=True, exist_ok=True)
    write_lines(data / "meta-math/MetaMathQA/train.jsonl", metamath)
    answers = [{"question": letters(150), "answer": "The answer is: 1"} for _ in range(100)]
    for part in ("train", "test"):
        write_lines(data / f"openai/gsm8k/main/{part}.jsonl", answers)
    files = "".join(f"  - split: {part}\n    path: main/{part}.jsonl\n" for part in ("train", "test"))
    (data / "openai/gsm8k/README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
    write_lines(data / "HuggingFaceFW/finewiki/train.jsonl", [{"text": letters(900)} for _ in range(100)])
    _llama(data / "meta-llama" / "Llama-3.2-3B")


def _llama(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tightfit.models.published import find_published

    folder.mkdir(parents=True, exist_ok=True)
    known = find_published(LLAMA)
    assert known is not None, LLAMA
    (folder / "config.json").write_text(json.dumps(dict(known.config)))
    with torch.device("meta"):
        model = _model(folder)
    holes(model, folder / "model.safetensors", "BF16", 2, ("lm_head.weight",))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = {word: number for number, word in enumerate([*letters, "<|begin_of_text|>", "<|end_of_text|>"])}
    tokenizer = Tokenizer(models.BPE(vocab=names, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks).save_pretrained(folder)


def _model(folder: Path) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)


def published(repository: Path) -> dict[str, dict[str, Any]]:
    """PEFT's own records by experiment, such as `lora/llama-3.2-3B-rank32`."""
    found = {}
    for file in sorted((repository / COMPARISON / "results").glob("*.json")):
        record = json.loads(file.read_text("utf-8"))
        if record["train_info"]["status"] == "success":
            found[record["run_info"]["experiment_name"]] = record
    return found


def on_card(experiment: str, repository: Path, data: Path) -> dict[str, Any]:
    """Bytes that PEFT's script reserves on the null card, and its trained parameters."""
    here = Path.cwd()
    os.chdir(data)  # where its names of the hub are folders
    words = ["-O", str(repository / COMPARISON / "run.py"), f"experiments/{experiment}"]
    try:
        found, _, why = watched(words, repository / "src", CARD, STEPS, PATIENCE)
    finally:
        os.chdir(here)
    if len(found.steps) < STEPS:
        raise RuntimeError(f"{len(found.steps)} steps: {why}")
    return {
        "measured_bytes": found.reserved_bytes - AT_START,
        "measured_allocated_bytes": found.peak_bytes,
        "torchao": importlib.metadata.version("torchao"),  # MiSS needs one of before 0.15
    }


def predicted(experiment: str, repository: Path, data: Path) -> dict[str, Any]:
    """The longest step by a dry run: 4 rows of which one is padded, AdamW, clipped, an empty cache before it."""
    import torch

    from tightfit.devices.known import find
    from tightfit.models.adapters import add_adapter
    from tightfit.planner.request import role_of
    from tightfit.step import Part, StepSettings
    from tightfit.tracing.build import build_dry
    from tightfit.tracing.cuda.replay import play
    from tightfit.tracing.step import trace_step
    from tightfit.training.config import AdapterConfig

    file = repository / COMPARISON / "experiments" / experiment / "adapter_config.json"

    def build() -> Any:
        model = _model(data / "meta-llama" / "Llama-3.2-3B")
        return add_adapter(model, AdapterConfig(config=str(file), base="bf16")) if file.exists() else model

    ids = torch.randint(256, (ROWS, LONGEST), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[-1, -1] = 0
    held: dict[str, Any] = {}  # run.py's loop holds what forward returned until the next forward is done

    def loss(model: Any, batch: Any) -> torch.Tensor:
        held["outputs"] = model(**batch)
        return held["outputs"].loss

    known = find(CARD)
    assert known is not None, CARD
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    settings, role = StepSettings(grad_clip=1.0), role_of(known.spec)
    trace = trace_step(
        build_dry(build).train(), [Part(batch, 1.0)], loss, optimizer=torch.optim.AdamW, settings=settings, role=role
    )
    found = play(trace, emptied=True)
    return {"predicted_bytes": found.reserved_bytes - AT_START, "predicted_allocated_bytes": max(found.levels)}


def described(experiment: str, record: dict[str, Any]) -> dict[str, Any]:
    """What PEFT has published of a method."""
    packages = record["meta_info"]["package_info"]
    return {
        "experiment": experiment,
        "published_bytes": record["train_info"]["accelerator_memory_max"],
        "trained_parameters": record["train_info"]["num_trainable_params"],
        "date": record["run_info"]["created_at"][:10],
        "torch": packages["torch-version"],
        "peft": packages["peft-version"],
    }


def asked(name: str, row: dict[str, Any], ask: Any) -> dict[str, Any]:
    """An answer with its error; what fails is said in its place."""
    try:
        found = ask(row["experiment"])
    except Exception as error:  # named in the table, and counted
        text = re.sub(rf"/\S*/{COMPARISON}/", "", (str(error).splitlines() or [""])[0])
        return {f"{name}_failed": f"{type(error).__name__}: {text[:200]}"}
    return {**found, f"{name}_error": found[f"{name}_bytes"] / row["published_bytes"] - 1}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and worst errors, and how many are within 1%."""
    found: dict[str, Any] = {"methods": len(rows)}
    for name in ("measured", "predicted"):
        errors = [abs(row[f"{name}_error"]) for row in rows if f"{name}_error" in row]
        found |= {
            name: len(errors),
            f"{name}_median": statistics.median(errors) if errors else None,
            f"{name}_worst": max(errors, default=None),
            f"{name}_within_1%": sum(error <= 0.01 for error in errors),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("predict", "run"))
    parser.add_argument("--repository", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", default="", help="experiments in whose names this occurs")
    parser.add_argument("--again", action="store_true", help="those that the output answers too")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    repository, data = given.repository.resolve(), given.data.resolve()
    if not (data / "experiments").exists():  # by `predict`: it needs torch
        prepare(data)
        (data / "experiments").symlink_to(repository / COMPARISON / "experiments")
    name, ask = ("measured", on_card) if given.what == "run" else ("predicted", predicted)
    known = json.loads(given.output.read_text())["rows"] if given.output.exists() else []
    rows = {row["experiment"]: row for row in known}
    for experiment, record in published(repository).items():
        row = rows.setdefault(experiment, described(experiment, record))
        if given.only not in experiment or (f"{name}_bytes" in row and not given.again):
            continue
        row.pop(f"{name}_failed", None)
        row |= asked(name, row, lambda one: ask(one, repository, data))
        print(experiment, row["published_bytes"], row.get(f"{name}_error", row.get(f"{name}_failed")), flush=True)
        content = {
            "environment": environment(),
            "longest": LONGEST,
            "summary": summary([*rows.values()]),
            "rows": [*rows.values()],
        }
        given.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
