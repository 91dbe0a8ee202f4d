"""Other people's training scripts, unchanged, on cards that are not here.

Each script is that of a public repository at a commit, checked out under a folder by its name, and runs under
`tightfit.run`: two steps, kernels not run. Data and weights are made here: random texts, tokens and pictures of the
lengths that the command says, and weights of the published shapes as files of holes, which take no disk. A row says on
which day and at which commit of ours it was measured.

    python benchmarks/scripts_on_cards.py --repositories FOLDER --prepare         # once: the data
    python benchmarks/scripts_on_cards.py --repositories FOLDER [--only nanoGPT] [--cards rtx3060] [--resume | --again]
    python benchmarks/scripts_estimated.py --repositories FOLDER                  # what `estimate` says beside it
    python benchmarks/scripts_on_cards.py --page                                  # the table of both docs/run.md

What a script imports besides is on PYTHONPATH. From `.venv-card`, whose PyTorch has no cuDNN, the command is one of
`python -m tightfit.devices.nullcard rtx4090 -- python benchmarks/scripts_on_cards.py ...`.
"""

import argparse
import datetime
import json
import os
import random
import shutil
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "scripts_on_cards.json"
PAGES = (ROOT / "docs" / "run.md", ROOT / "docs" / "zh" / "run.md")
BEGIN, END = "<!-- scripts: written by benchmarks/scripts_on_cards.py --page -->\n", "<!-- end of scripts -->\n"
CARDS = ("t4", "rtx3060", "rtx4090", "a100-80", "h100")
ESTIMATED = "rtx4090"  # the card that `estimate` was asked about
STEPS, PATIENCE = 2, 1500.0
WORDS = ["the", "a", "of", "to", "model", "memory", "card", "train", "step", "night", "small", "large", "fast", "true"]


@dataclass(frozen=True)
class Script:
    """A script of a repository at a commit; `{data}` in its words is the folder of what was made for it."""

    name: str
    repository: str
    commit: str
    folder: str  # within the checkout, where it is started
    words: tuple[str, ...]
    what: str
    paths: tuple[str, ...] = ()  # within the checkout, to import from
    cards: Sequence[str] = CARDS
    values: bool = False  # its path depends on numbers


SCRIPTS = (
    Script(
        "nanoGPT", "karpathy/nanoGPT", "3adf61e1", ".",
        ("train.py", "--compile=False", "--eval_iters=1", "--gradient_accumulation_steps=2", "--dataset=openwebtext"),
        "GPT-2 124M, 12 x 1024, bf16",
    ),
    Script(
        "MiniMind pretrain", "jingyaogong/minimind", "d65ef2c", "trainer",
        ("train_pretrain.py", "--data_path", "{data}/pretrain.jsonl", "--num_workers", "0"),
        "64M, 32 x 340, bf16",
    ),
    Script(
        "MiniMind SFT", "jingyaogong/minimind", "d65ef2c", "trainer",
        ("train_full_sft.py", "--data_path", "{data}/sft.jsonl", "--num_workers", "0", "--from_weight", "none"),
        "64M, 16 x 768, bf16",
    ),
    Script(
        "TRL sft.py", "huggingface/trl", "f2cd57710", ".",
        (
            "trl/scripts/sft.py", "--model_name_or_path", "{data}/qwen", "--dataset_name", "{data}/chats",
            "--per_device_train_batch_size", "1", "--max_length", "512", "--eos_token", "<|im_end|>",
            "--output_dir", "{data}/out",
        ),
        "Qwen2-0.5B, 1 x 512, bf16", (".",),
    ),
    Script(
        "transformers run_clm.py", "huggingface/transformers", "cc041637bc", "examples/pytorch/language-modeling",
        (
            "run_clm.py", "--model_name_or_path", "{data}/qwen", "--train_file", "{data}/texts.txt", "--do_train",
            "--per_device_train_batch_size", "2", "--block_size", "1024", "--bf16", "--max_steps", "5",
            "--report_to", "none", "--output_dir", "{data}/out",
        ),
        "Qwen2-0.5B in bf16, 2 x 1024",
    ),
    Script(
        "LitGPT finetune_lora", "Lightning-AI/litgpt", "26857050", ".",
        (
            "-m", "litgpt", "finetune_lora", "{data}/pythia", "--data", "JSON", "--data.json_path",
            "{data}/alpaca.json", "--data.val_split_fraction", "0.01", "--train.global_batch_size", "4",
            "--train.micro_batch_size", "2", "--precision", "bf16-true", "--out_dir", "{data}/out",
        ),
        "Pythia-410M, LoRA, 2 rows, bf16", (".",),
    ),
    Script(
        "diffusers text_to_image_lora", "huggingface/diffusers", "58eb52c080", "examples/text_to_image",
        (
            "train_text_to_image_lora.py", "--pretrained_model_name_or_path", "{data}/sd15", "--train_data_dir",
            "{data}/pictures", "--resolution", "512", "--train_batch_size", "1", "--mixed_precision", "fp16",
            "--max_train_steps", "5", "--output_dir", "{data}/out", "--rank", "16",
        ),
        "Stable Diffusion 1.5, LoRA r 16, 512 px, fp16", ("src",),
    ),
    Script(
        "nanochat base_train", "karpathy/nanochat", "92d63d4", ".",
        (
            "-m", "scripts.base_train", "--depth", "12", "--device-batch-size", "8", "--total-batch-size", "32768",
            "--eval-every", "-1", "--core-metric-every", "-1", "--sample-every", "-1",
        ),
        "depth 12, 8 x 2048, compiled, Muon", (".",),
    ),
    Script(
        "torchtitan llama3_debugmodel", "pytorch/torchtitan", "b5bcd76c6", ".",
        (
            "-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "torchtitan.train", "--module", "llama3",
            "--config", "llama3_debugmodel",
        ),
        "8 x 2048, flex attention, selective checkpoint; one step (its HEAD asks for a newer PyTorch behind it)",
        (".",),
    ),
)  # fmt: skip


def measured(script: Script, repositories: Path, card: str) -> dict[str, Any]:
    """What one script takes of one card."""
    import tightfit

    checkout, data = repositories / script.repository.partition("/")[2], repositories / "data"
    paths = [str((checkout / path).resolve()) for path in script.paths]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [_outside])])
    os.environ["NANOCHAT_BASE_DIR"] = str(data / "nanochat")
    here = Path.cwd()
    os.chdir(checkout / script.folder)
    try:
        words = [word.replace("{data}", str(data)) for word in script.words]
        found = tightfit.run(
            [sys.executable, *words], device=card, steps=STEPS, timeout=PATIENCE, quiet=True, values=script.values
        )
    finally:
        os.chdir(here)
    highest = found.highest
    return {
        "script": script.name, "repository": script.repository, "commit": script.commit, "what": script.what,
        "card": card, "fits": found.fits, "peak_bytes": found.peak_bytes, "reserved_bytes": found.reserved_bytes,
        "host_peak_bytes": found.host_peak_bytes, "steps": len(found.steps), "exit_code": found.exit_code,
        "model": highest.model if highest else "", "optimizer": highest.optimizer if highest else None,
        "by_category": dict(found.by_category), "read_values": len(found.read_values),
        "out_of_memory": None if found.out_of_memory is None else vars(found.out_of_memory),
    }  # fmt: skip


_outside = os.environ.get("PYTHONPATH", "")

# Data and weights


def prepare(repositories: Path) -> None:
    """Make the data of all scripts. MiniMind's tokenizer is taken for those that want one."""
    data = repositories / "data"
    data.mkdir(exist_ok=True)
    random.seed(0)
    texts = [" ".join(random.choices(WORDS, k=600)) for _ in range(2000)]
    asked = [" ".join(random.choices(WORDS, k=30)) for _ in texts]
    write_lines(data / "pretrain.jsonl", [{"text": text} for text in texts])
    (data / "texts.txt").write_text("\n".join(texts))
    pairs = list(zip(asked, texts, strict=True))
    turns = [[{"role": "user", "content": a}, {"role": "assistant", "content": t}] for a, t in pairs]
    write_lines(data / "sft.jsonl", [{"conversations": turn} for turn in turns])
    (data / "chats").mkdir(exist_ok=True)
    write_lines(data / "chats" / "train.jsonl", [{"messages": turn} for turn in turns])
    alpaca = [{"instruction": a, "input": "", "output": t} for a, t in pairs]
    (data / "alpaca.json").write_text(json.dumps(alpaca))
    _tokens(repositories / "nanoGPT" / "data" / "openwebtext")
    _nanochat(data / "nanochat")
    tests = repositories / "torchtitan" / "tests" / "assets" / "c4_test"
    tests.mkdir(parents=True, exist_ok=True)
    shutil.copy(data / "pretrain.jsonl", tests / "data.json")
    tokenizer = repositories / "minimind" / "model"
    _qwen(data / "qwen", tokenizer)
    _pythia(data / "pythia", tokenizer)
    _pictures(data / "pictures")
    _stable_diffusion(data / "sd15")


def write_lines(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _tokens(folder: Path) -> None:
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "val"):
        np.random.default_rng(0).integers(0, 50257, 200_000, dtype=np.uint16).tofile(folder / f"{name}.bin")


def _nanochat(folder: Path) -> None:
    """Texts in parquet; the tokenizer is nanochat's own `python -m scripts.tok_train --max-chars 20000000`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(random.choices(letters, k=random.randint(2, 9))) for _ in range(40000)]
    (folder / "base_data_climbmix").mkdir(parents=True, exist_ok=True)
    for shard in range(2):
        rows = pa.table({"text": [" ".join(random.choices(words, k=500)) for _ in range(3000)]})
        pq.write_table(rows, folder / "base_data_climbmix" / f"shard_{shard:05d}.parquet", row_group_size=512)


def holes(model: Any, path: Path, dtype: str, width: int, without: Sequence[str] = ()) -> None:
    """Weights in safetensors' format, of zeros that the file system does not store."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in model.state_dict().items():
        if name not in without and tensor.is_floating_point():
            begin, end = end, end + tensor.numel() * width
            head[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def _qwen(folder: Path, tokenizer: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
        "max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    holes(model, folder / "model.safetensors", "BF16", 2, ("lm_head.weight",))


def _pythia(folder: Path, tokenizer: Path) -> None:
    """LitGPT's own format; needs litgpt on the path."""
    import torch
    from litgpt import GPT, Config
    from litgpt.utils import save_config

    folder.mkdir(exist_ok=True)
    config = Config.from_name("pythia-410m")
    with torch.device("meta"):
        model = GPT(config)
    weights = {name: torch.zeros(t.shape, dtype=torch.bfloat16) for name, t in model.state_dict().items()}
    torch.save(weights, folder / "lit_model.pth")
    save_config(config, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)


def _pictures(folder: Path) -> None:
    import numpy as np
    from PIL import Image

    folder.mkdir(exist_ok=True)
    rows = []
    for number in range(8):
        noise = np.random.default_rng(number).integers(0, 255, (512, 512, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.png")
        rows.append({"file_name": f"{number}.png", "text": "a picture of a card"})
    write_lines(folder / "metadata.jsonl", rows)


def _stable_diffusion(folder: Path) -> None:
    """The shapes of version 1.5, with a tokenizer of bytes; needs diffusers on the path."""
    import torch
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    with torch.device("meta"):
        sizes = {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}
        unet = UNet2DConditionModel(block_out_channels=(320, 640, 1280, 1280), **sizes)
        down, up = ("DownEncoderBlock2D",) * 4, ("UpDecoderBlock2D",) * 4
        vae = AutoencoderKL(
            block_out_channels=(128, 256, 512, 512), down_block_types=down, up_block_types=up, layers_per_block=2,
            sample_size=512,
        )  # fmt: skip
        sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
        sizes |= {"vocab_size": 49408, "projection_dim": 768}
        text = CLIPTextModel(CLIPTextConfig(hidden_act="quick_gelu", **sizes))
    weights = "diffusion_pytorch_model.safetensors"
    parts = (("unet", unet, weights), ("vae", vae, weights), ("text_encoder", text, "model.safetensors"))
    for name, model, file in parts:
        (folder / name).mkdir(parents=True, exist_ok=True)
        save = model.save_config if hasattr(model, "save_config") else model.config.save_pretrained
        save(folder / name)
        holes(model, folder / name / file, "F32", 4)
    schedule = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    DDPMScheduler(**schedule).save_pretrained(folder / "scheduler")
    _bytes_for_clip(folder / "tokenizer")
    names = {
        "unet": ["diffusers", "UNet2DConditionModel"], "vae": ["diffusers", "AutoencoderKL"],
        "text_encoder": ["transformers", "CLIPTextModel"], "tokenizer": ["transformers", "CLIPTokenizer"],
        "scheduler": ["diffusers", "DDPMScheduler"],
    }  # fmt: skip
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline", **names}))


def _bytes_for_clip(folder: Path) -> None:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    folder.mkdir(exist_ok=True)
    letters = list(bytes_to_unicode().values())
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    end = {f"{name}_token": "<|endoftext|>" for name in ("eos", "pad", "unk")}
    settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "bos_token": "<|startoftext|>", **end}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


# The page


def table(record: dict[str, Any]) -> str:
    """The rows as Markdown: allocated / reserved by card, and what `estimate` says for one of them."""
    from tightfit.units import format_bytes

    found = {(row["script"], row["card"]): row for row in record["rows"]}
    lines = [
        f"| script | step | {' | '.join(CARDS)} | `estimate`, {ESTIMATED} |",
        f"|---|---|{'---|' * len(CARDS)}---|",
    ]
    for script in SCRIPTS:
        cells = [_cell(found.get((script.name, card)), format_bytes) for card in CARDS]
        if any(cells):
            cells.append(_estimated(found.get((script.name, ESTIMATED)), format_bytes))
            commit = f" at {script.commit}" if script.commit else ""
            lines.append(f"| {script.name} ({script.repository}{commit}) | {script.what} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any] | None, format_bytes: Any) -> str:
    if row is None:
        return ""
    if row["fits"] is False:
        refused = row["out_of_memory"]
        return f"no: {format_bytes(refused['asked_bytes'])} more in {refused['phase']}"
    if not row["steps"]:
        return f"failed ({row['exit_code']})"
    return f"{format_bytes(row['peak_bytes'])} / {format_bytes(row['reserved_bytes'])}"


def _estimated(row: dict[str, Any] | None, format_bytes: Any) -> str:
    """What was predicted without the script, and how far that is from what it took."""
    if row is None or "estimated_bytes" not in row:
        return "not said"
    apart = row["estimated_bytes"] - row["peak_bytes"]
    share = f"{apart / row['peak_bytes']:+.2%}" if abs(apart) >= 1e-4 * row["peak_bytes"] else f"{apart:+,} bytes"
    return f"{format_bytes(row['estimated_bytes'])} ({share})"


def write_pages(made: str, begin: str, end: str) -> None:
    """Put a table between its marks in both pages."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        before, after = text.split(begin)[0], text.split(end)[1]
        page.write_text(before + begin + made + end + after, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repositories", type=Path)
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--cards", nargs="*")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there")
    parser.add_argument("--again", action="store_true", help="measure what is chosen anew, and keep all other rows")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.page:
        return write_pages(table(json.loads(RESULTS.read_text())), BEGIN, END)
    if given.repositories is None:
        parser.error("--repositories is missing")
    if given.prepare:
        return prepare(given.repositories.resolve())
    from environment import environment

    there = json.loads(given.output.read_text())["rows"] if given.output.exists() else []
    rows = {(row["script"], row["card"]): row for row in there if given.resume or given.again}
    for script in SCRIPTS:
        for card in script.cards:
            chosen = (not given.only or script.name in given.only) and (not given.cards or card in given.cards)
            before = rows.get((script.name, card))
            if not chosen or (before is not None and not given.again):
                continue
            # The environment of the whole file is the last run's, so a row has the date and the commit of its own.
            around = environment()
            row = measured(script, given.repositories.resolve(), card)
            row |= {"measured": datetime.date.today().isoformat(), "ours": around["commit"]}
            # What `estimate` says is another command's, which is not run again here.
            row |= {name: value for name, value in (before or {}).items() if name.startswith("estimated")}
            rows[script.name, card] = row
            print(
                script.name, card, row["fits"], f"{row['peak_bytes']:,}", f"{row['reserved_bytes']:,}",
                "" if before is None else f"before {before['peak_bytes']:,} {before['reserved_bytes']:,}", flush=True,
            )  # fmt: skip
            content = {"environment": around, "rows": list(rows.values())}
            given.output.write_text(json.dumps(content, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
