"""What other people's packages take of a card that is not here: each in a small training under `tightfit.run`.

    PY=.venv-card/bin/python; $PY -m tightfit.devices.nullcard rtx4090 -- $PY -m benchmarks.packages_on_cards \\
        --packages FOLDER [--only deepspeed] [--again]       # FOLDER: of `pip install --no-deps --target FOLDER ...`
    python -m benchmarks.packages_on_cards --page            # the table of both docs/run.md

Each training is a script of its own in a process of its own: three steps of a Llama of four layers (or of what the
package brings) on a null RTX 4090. A package that cannot be installed here, or asks for what a null card has not, is
said with its reason. Writes benchmarks/results/packages_on_cards.json, where a row says on which day and at which
commit of ours it was measured.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scripts_on_cards import write_pages

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "packages_on_cards.json"
BEGIN, END = "<!-- packages: written by benchmarks/packages_on_cards.py --page -->\n", "<!-- end of packages -->\n"
CARD, STEPS, PATIENCE = "rtx4090", 3, 600.0

LLAMA = """
import torch, transformers
config = transformers.LlamaConfig(
    hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
    vocab_size=8000, max_position_embeddings=1024, pad_token_id=0,
)
ids = torch.randint(1, 8000, (4, 512), device="cuda")
def llama():
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().train()
def train(model, optimizer, loss=lambda model: model(input_ids=ids, labels=ids).loss):
    for _ in range(5):
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
ZERO = """
import os, deepspeed
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
model = llama()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
    "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}, "zero_optimization": STAGE,
})
for _ in range(5):
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
"""
BLOCK = """
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(512), nn.Linear(512, 1536), nn.Linear(512, 512)
    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(4, 512, 3, 8, 64).unbind(2)
        return x + self.out(attend(q, k, v).reshape(4, 512, 512))
model = nn.Sequential(*(Block() for _ in range(4))).cuda().bfloat16()
x = torch.randn(4, 512, 512, device="cuda", dtype=torch.bfloat16)
train(model, torch.optim.AdamW(model.parameters()), lambda model: model(x).float().square().mean())
"""


@dataclass(frozen=True)
class Training:
    """A package in a training: the script behind `LLAMA`, and the distributions whose versions count."""

    name: str
    packages: str
    script: str


TRAININGS = (
    Training(
        "torch.compile",
        "triton",
        """
model = llama()
train(torch.compile(model), torch.optim.AdamW(model.parameters()))
""",
    ),
    Training(
        "torch.compile, reduce-overhead",
        "triton",
        """
model = llama()
train(torch.compile(model, mode="reduce-overhead"), torch.optim.AdamW(model.parameters()))
""",
    ),
    Training(
        "bitsandbytes, 8-bit AdamW",
        "bitsandbytes",
        """
import bitsandbytes
model = llama()
train(model, bitsandbytes.optim.AdamW8bit(model.parameters()))
""",
    ),
    Training(
        "bitsandbytes nf4 with peft",
        "bitsandbytes peft",
        """
import peft, bitsandbytes as bnb
from torch import nn
model = llama()
for module in list(model.modules()):
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear) and name != 'lm_head':
            made = dict(bias=False, quant_type='nf4', compute_dtype=torch.bfloat16)
            new = bnb.nn.Linear4bit(child.in_features, child.out_features, **made)
            new.weight = bnb.nn.Params4bit(child.weight.data.cpu(), quant_type='nf4')
            setattr(module, name, new.cuda())
model = peft.get_peft_model(model, peft.LoraConfig(target_modules='all-linear'))
train(model, torch.optim.AdamW(model.parameters()))
""",
    ),
    Training(
        "torchao, 4-bit AdamW",
        "torchao",
        """
from torchao.optim import AdamW4bit
model = llama()
train(model, AdamW4bit(model.parameters()))
""",
    ),
    Training(
        "torchao, AdamW offloaded to the host",
        "torchao",
        """
from torchao.optim import CPUOffloadOptimizer
model = llama()
train(model, CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True))
""",
    ),
    Training(
        "torchao, float8 training",
        "torchao",
        """
from torchao.float8 import convert_to_float8_training
model = convert_to_float8_training(llama())
train(model, torch.optim.AdamW(model.parameters()))
""",
    ),
    Training(
        "Liger",
        "liger-kernel triton",
        """
from liger_kernel.transformers import apply_liger_kernel_to_llama
apply_liger_kernel_to_llama()
model = llama()
train(model, torch.optim.AdamW(model.parameters()))
""",
    ),
    Training(
        "cut-cross-entropy",
        "cut-cross-entropy triton",
        """
from cut_cross_entropy import linear_cross_entropy
model = llama()
def loss(model):
    hidden = model.model(input_ids=ids).last_hidden_state
    return linear_cross_entropy(hidden, model.lm_head.weight, ids, shift=1, reduction="sum")
train(model, torch.optim.AdamW(model.parameters()), loss)
""",
    ),
    Training(
        "xformers attention",
        "xformers",
        """
from xformers.ops import memory_efficient_attention as attend
"""
        + BLOCK,
    ),
    Training("DeepSpeed ZeRO-1", "deepspeed", ZERO.replace("STAGE", "{'stage': 1}")),
    Training("DeepSpeed ZeRO-2", "deepspeed", ZERO.replace("STAGE", "{'stage': 2}")),
    Training("DeepSpeed ZeRO-3", "deepspeed", ZERO.replace("STAGE", "{'stage': 3}")),
    Training(
        "DeepSpeed ZeRO-2, optimizer on the host",
        "deepspeed",
        ZERO.replace("STAGE", "{'stage': 2, 'offload_optimizer': {'device': 'cpu'}}"),
    ),
    Training(
        "DeepSpeed ZeRO-3, all on the host",
        "deepspeed",
        ZERO.replace(
            "STAGE", "{'stage': 3, 'offload_optimizer': {'device': 'cpu'}, 'offload_param': {'device': 'cpu'}}"
        ),
    ),
    Training(
        "Accelerate",
        "accelerate",
        """
import accelerate
accelerator = accelerate.Accelerator(mixed_precision='bf16')
model = llama().float()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for _ in range(5):
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    Training(
        "Lightning",
        "lightning",
        """
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = llama().float()
    def training_step(self, batch, _):
        return self.model(input_ids=batch, labels=batch).loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
batches = torch.utils.data.DataLoader(ids.cpu().repeat(8, 1), batch_size=4)
trainer = lightning.Trainer(max_steps=5, precision='bf16-mixed', logger=False, enable_checkpointing=False)
trainer.fit(Module(), batches)
""",
    ),
    Training(
        "Megatron-core, GPT of four layers",
        "megatron-core",
        """
import os
os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='29519', RANK='0', WORLD_SIZE='1')
torch.distributed.init_process_group('nccl')
from megatron.core import parallel_state, tensor_parallel
parallel_state.initialize_model_parallel()
tensor_parallel.model_parallel_cuda_manual_seed(0)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
made = TransformerConfig(
    num_layers=4, hidden_size=512, num_attention_heads=8, bf16=True, params_dtype=torch.bfloat16,
    gradient_accumulation_fusion=False,
)
model = GPTModel(made, get_gpt_layer_local_spec(), 8000, 1024).cuda()
places = torch.arange(512, device='cuda').expand(4, 512)
mask = torch.ones(1, 1, 512, 512, device='cuda').triu(1).bool()
@torch.autocast('cuda', torch.bfloat16)
def loss(model):
    return model(ids, places, mask, labels=ids).mean()
train(model, torch.optim.AdamW(model.parameters()), loss)
""",
    ),
    Training(
        "Unsloth",
        "unsloth unsloth_zoo triton",
        """
import tempfile, tokenizers
folder = tempfile.mkdtemp()
import unsloth
llama().save_pretrained(folder)
words = {name: number for number, name in enumerate(["<unk>", "<s>", "</s>", "a"])}
tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
names = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>")
transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
model, _ = unsloth.FastLanguageModel.from_pretrained(folder, max_seq_length=512, load_in_4bit=False)
model = unsloth.FastLanguageModel.get_peft_model(model, r=16)
train(model, torch.optim.AdamW(model.parameters()))
""",
    ),
    Training(
        "GaLore",
        "galore-torch",
        """
from galore_torch import GaLoreAdamW
def make(model):
    wide = [p for p in model.parameters() if p.dim() == 2]
    low = {'rank': 64, 'update_proj_gap': 200, 'scale': 0.25, 'proj_type': 'std'}
    return GaLoreAdamW([{'params': [p for p in model.parameters() if p.dim() != 2]}, {'params': wide, **low}])
model = llama()
train(model, make(model))
""",
    ),
    Training(
        "APOLLO",
        "apollo-torch",
        """
from apollo_torch import APOLLOAdamW
def make(model):
    wide = [p for p in model.parameters() if p.dim() == 2]
    low = {'rank': 64, 'update_proj_gap': 200, 'scale': 1, 'proj_type': 'std', 'proj': 'random'}
    rest = [p for p in model.parameters() if p.dim() != 2]
    return APOLLOAdamW([{'params': rest}, {'params': wide, **low, 'scale_type': 'channel'}])
model = llama()
train(model, make(model))
""",
    ),
    Training(
        "Lion",
        "lion-pytorch",
        """
from lion_pytorch import Lion
make = lambda model: Lion(model.parameters())
model = llama()
train(model, make(model))
""",
    ),
    Training(
        "CAME",
        "came-pytorch",
        """
from came_pytorch import CAME
make = lambda model: CAME(model.parameters(), lr=1e-4)
model = llama()
train(model, make(model))
""",
    ),
    Training(
        "Prodigy",
        "prodigyopt",
        """
from prodigyopt import Prodigy
make = lambda model: Prodigy(model.parameters())
model = llama()
train(model, make(model))
""",
    ),
    Training(
        "schedule-free AdamW",
        "schedulefree",
        """
from schedulefree import AdamWScheduleFree
def make(model):
    optimizer = AdamWScheduleFree(model.parameters())
    optimizer.train()
    return optimizer
model = llama()
train(model, make(model))
""",
    ),
    Training(
        "Muon of PyTorch",
        "torch",
        """
def make(model):
    rest = [p for p in model.parameters() if p.dim() != 2]
    for p in rest:
        p.requires_grad_(False)
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])
model = llama()
train(model, make(model))
""",
    ),
)


def measured(training: Training, packages: Path, card: str = CARD) -> dict[str, Any]:
    """What one training takes of the card, or why it did not run."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(LLAMA + training.script + "\n")
        found, _, why = watched([str(script)], packages, card, STEPS)
    row: dict[str, Any] = {
        "training": training.name, "versions": versions(training.packages.split(), packages), "card": card,
        "steps": len(found.steps), "exit_code": found.exit_code, "peak_bytes": found.peak_bytes,
        "reserved_bytes": found.reserved_bytes, "host_peak_bytes": found.host_peak_bytes,
    }  # fmt: skip
    return row if found.steps else row | {"why": why}


def watched(
    words: list[str], packages: Path, card: str, steps: int, patience: float = PATIENCE
) -> tuple[Any, list[str], str]:
    """Python with these words on a card: the record, the lines that it said, and its last error among them."""
    import tightfit

    outside = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(packages), *filter(None, [outside])])
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            command = ["sh", "-c", f'"$0" "$@" 2>"{log}"', sys.executable, *words]
            found = tightfit.run(command, device=card, steps=steps, timeout=patience, quiet=True)
            said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    finally:
        os.environ["PYTHONPATH"] = outside
    errors = [line for line in said if re.match(r"(\[rank0\]: )?[\w.]*(Error|Exception|NotHere)\b", line)]
    return found, said, (errors or said or ["no word"])[-1].strip()[:200]


def versions(names: list[str], folder: Path) -> dict[str, str]:
    """The versions of distributions, in the folder or else in this interpreter."""
    there = {d.name.lower().replace("_", "-"): d.version for d in importlib.metadata.distributions(path=[str(folder)])}
    found = {}
    for name in names:
        version = there.get(name.lower().replace("_", "-"))
        if version is None:
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                version = "not installed"
        found[name] = version
    return found


def table(record: dict[str, Any]) -> str:
    """The rows as Markdown."""
    from tightfit.units import format_bytes

    lines = ["| training | versions | peak | reserved |", "|---|---|---|---|"]
    for row in record["rows"]:
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        if row["steps"]:
            cells = f"{format_bytes(row['peak_bytes'])} | {format_bytes(row['reserved_bytes'])}"
        else:
            cells = f"did not run: {row['why'].strip().partition('. ')[0].replace('|', '/')} | "
        lines.append(f"| {row['training']} | {versions} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--only", default="", help="trainings in whose names this occurs")
    parser.add_argument("--again", action="store_true", help="those that the output holds too")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.page:
        return write_pages(table(json.loads(RESULTS.read_text())), BEGIN, END)
    if given.packages is None:
        parser.error("--packages is missing")
    from benchmarks.environment import environment

    known = json.loads(given.output.read_text())["rows"] if given.output.exists() else []
    rows = {row["training"]: row for row in known}
    for training in TRAININGS:
        if given.only not in training.name or (rows.get(training.name, {}).get("steps") and not given.again):
            continue
        # The environment of the whole file is the last run's, so a row has the date and the commit of its own.
        around = environment()
        row = rows[training.name] = measured(training, given.packages.resolve())
        row |= {"measured": datetime.date.today().isoformat(), "ours": around["commit"]}
        print(training.name, row["steps"], f"{row['peak_bytes']:,}", row.get("why", ""), flush=True)
        ordered = [rows[training.name] for training in TRAININGS if training.name in rows]
        given.output.write_text(json.dumps({"environment": around, "rows": ordered}, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
