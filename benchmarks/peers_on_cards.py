"""Memory of one training at equal work in every way that others offer, on cards that are not here; our plans beside it.

    PY=.venv-card/bin/python; $PY -m tightfit.devices.nullcard rtx4090 -- $PY -m benchmarks.peers_on_cards \\
        --packages FOLDER [--cards t4] [--only TEXT ...] [--without TEXT ...] [--again]
        # FOLDER: of `pip install --no-deps --target FOLDER ...`, see PACKAGES
    python -m benchmarks.peers_on_cards --page                # docs/benchmarks.md

Each way runs three steps in a process of its own under `tightfit.run`: PyTorch's own allocator counts, no kernel runs.
After the ways of others on the RTX 4090, a plan is made for the peak of each, by the gentlest levers that reach it, and
run there too. A way that does not run is kept with its own words. Rows are written one by one; those that the file has
are not run again.
"""

import argparse
import datetime
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.packages_on_cards import versions, watched
from benchmarks.peer_trainings import PEERS, NotHere, Peer, adamw, checkpointed, head_of, installed
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "peers_on_cards.json"
CARDS, WITH_PLANS = ("rtx4090", "t4", "rtx3060", "a100-80", "h100"), "rtx4090"
STEPS = 3
APART = 1.01
# SmolLM2-360M, as its configuration was published
SHAPE = {
    "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 15,
    "num_key_value_heads": 5, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
SIZE, LENGTH, PARTS = 8, 1024, 4
PACKAGES = (
    "transformers", "accelerate", "trl", "bitsandbytes", "torchao", "triton", "liger-kernel", "cut-cross-entropy",
    "deepspeed", "unsloth", "unsloth_zoo", "axolotl", "torchtitan",
)  # fmt: skip
# Our levers, the gentlest first, each with the optimizer of its plan.
LEVERS: dict[str, tuple[tuple[str, ...], str]] = {
    "exact": (("exact",), "adamw_fused"),
    "exact, with offload": (("exact", "offload"), "adamw_fused"),
    "rounding": (("rounding",), "adamw_fused"),
    "rounding, with offload": (("rounding", "offload"), "adamw_fused"),
    "rounding, streamed": (("rounding", "stream"), "offloaded_adamw_fused"),
}


def new() -> nn.Module:
    """The model in fp32. No cache of keys and values: training has no use for it."""
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=False, **SHAPE)).train()


def model(device: str = "cuda") -> nn.Module:
    """The same on a device, its numbers of no account."""
    with torch.device("meta"):
        own = new()
    own.to_empty(device=device).tie_weights()  # pyright: ignore - of transformers
    return own


def batch() -> dict[str, Tensor]:
    ids = torch.randint(1, SHAPE["vocab_size"], (SIZE, LENGTH))
    return {"input_ids": ids, "labels": ids}


# Ways of others. Each is a training of a few steps more than are watched.


def loop(
    make: Callable[[], nn.Module],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    loss: Callable[[nn.Module, Mapping[str, Tensor]], Tensor] = lambda model, batch: model(**batch).loss,
    around: Callable[[nn.Module], AbstractContextManager[Any]] = lambda model: nullcontext(),
) -> None:
    """The loop that everybody writes."""
    own = make()
    data, updates = {name: tensor.cuda() for name, tensor in batch().items()}, optimizer(own.parameters())
    saving = around(own)
    for _ in range(STEPS + 2):
        with torch.autocast("cuda", torch.bfloat16), saving:
            found = loss(own, data)
        found.backward()
        updates.step()
        updates.zero_grad()


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def by_peer(peer: Peer) -> None:
    """One of peer_trainings.py, its own AdamW fused."""

    def make() -> nn.Module:
        own = model()
        peer.apply(own)
        return own

    loop(make, fused if peer.optimizer is adamw else peer.optimizer, peer.loss)


def on_the_host(own: nn.Module) -> AbstractContextManager[Any]:
    return torch.autograd.graph.save_on_cpu(pin_memory=True)


def by_trl(own: nn.Module) -> AbstractContextManager[Any]:
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    return get_act_offloading_ctx_manager(own)


def checkpointed_model() -> nn.Module:
    own = model()
    checkpointed(own)
    return own


def replaced_checkpoint(replace: Callable[[], None], **how: Any) -> None:
    """A package's function in place of the checkpoint that transformers calls."""

    def make() -> nn.Module:
        replace()
        own = model()
        own.gradient_checkpointing_enable(how or None)  # pyright: ignore - of transformers
        return own

    loop(make, fused)


def by_torchtitan(policy: str) -> nn.Module:
    """Its own policies find the blocks under the name that transformers has for them too."""
    import torchtitan.distributed.activation_checkpoint as found

    own, kind = model(), getattr(found, policy)
    kind(kind.Config()).apply(own.model)
    return own


def of_unsloth() -> None:
    installed("unsloth")
    from unsloth_zoo.gradient_checkpointing import patch_unsloth_smart_gradient_checkpointing

    patch_unsloth_smart_gradient_checkpointing(torch.bfloat16)


def of_axolotl() -> None:
    import transformers
    from axolotl.monkeypatch.gradient_checkpointing import hf_grad_checkpoint_offload_wrapper

    transformers.modeling_utils.checkpoint = hf_grad_checkpoint_offload_wrapper


def cut_cross_entropy(own: nn.Module, data: Mapping[str, Tensor]) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    hidden = own.model(input_ids=data["input_ids"]).last_hidden_state  # pyright: ignore - of transformers
    weight = head_of(own).weight
    return linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), data["labels"], shift=1)


def paged(parameters: Any) -> torch.optim.Optimizer:
    return installed("bitsandbytes").optim.PagedAdamW8bit(parameters)


def trainer(mixin: str = "", **flags: Any) -> None:
    """Transformers' Trainer with some of its flags; `mixin` is axolotl's for it."""
    import transformers

    settings = {"per_device_train_batch_size": SIZE, "bf16": True, "max_steps": STEPS + 2, "max_grad_norm": 0.0}
    settings |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_nan_inf_filter": False}
    rows = [{name: tensor[0].tolist() for name, tensor in batch().items()}] * (SIZE * (STEPS + 2))
    kind = transformers.Trainer
    with tempfile.TemporaryDirectory() as folder:
        given = transformers.TrainingArguments(folder, **settings | flags)
        if mixin:
            from axolotl.core.trainers.mixins.activation_checkpointing import ActivationOffloadingMixin

            given.activation_offloading = {"streams": True}.get(mixin, mixin)
            kind = type("Trainer", (ActivationOffloadingMixin, transformers.Trainer), {})
        kind(model(), given, train_dataset=rows, data_collator=transformers.default_data_collator).train()


def zero(**stage: Any) -> None:
    """DeepSpeed's engine, its own bf16 with fp32 states; the model begins on the host."""
    deepspeed = installed("deepspeed")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    own = model("cpu")
    settings = {"train_micro_batch_size_per_gpu": SIZE, "bf16": {"enabled": True}, "zero_optimization": stage}
    settings |= {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=own, model_parameters=own.parameters(), config=settings)
    data = {name: tensor.cuda() for name, tensor in batch().items()}
    for _ in range(STEPS + 2):
        engine.backward(engine(**data).loss)
        engine.step()


HOST = {"device": "cpu"}
LESS = {"per_device_train_batch_size": SIZE // PARTS, "gradient_accumulation_steps": PARTS}
FLAGS: dict[str, dict[str, Any]] = {
    "no flag": {},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "optim=adafactor": {"optim": "adafactor"},
    "optim=adamw_8bit": {"optim": "adamw_8bit"},
    "optim=paged_adamw_8bit": {"optim": "paged_adamw_8bit"},
    "optim=adamw_torch_4bit": {"optim": "adamw_torch_4bit"},
    f"gradient_accumulation_steps={PARTS}": LESS,
    "use_liger_kernel": {"use_liger_kernel": True},
    "torch_empty_cache_steps=1": {"torch_empty_cache_steps": 1},
    "torch_compile": {"torch_compile": True},
    "checkpointing, Liger, adamw_8bit, accumulation": {
        "gradient_checkpointing": True, "use_liger_kernel": True, "optim": "adamw_8bit", **LESS,
    },
}  # fmt: skip
# Of peer_trainings.py: what is done in another way below, takes minutes to compile, or builds its kernels.
WITHOUT = ("save_on_cpu", "DeepSpeed CPU Adam", *(f"torch.compile, activation_memory_budget {b}" for b in (0.75, 0.25)))
OTHERS: dict[str, Callable[[], None]] = {
    **{name: partial(by_peer, peer) for name, peer in PEERS.items() if name not in WITHOUT},
    "torchtitan FullAC": partial(loop, partial(by_torchtitan, "FullAC"), fused),
    "torchtitan SelectiveAC": partial(loop, partial(by_torchtitan, "SelectiveAC"), fused),
    "save_on_cpu, pinned": partial(loop, model, fused, around=on_the_host),
    "cut-cross-entropy": partial(loop, model, fused, cut_cross_entropy),
    "bitsandbytes PagedAdamW8bit": partial(loop, model, paged),
    "TRL's activation offloading": partial(loop, model, fused, around=by_trl),
    "TRL's activation offloading, checkpoint of every block": partial(loop, checkpointed_model, fused, around=by_trl),
    "Unsloth's offloaded checkpoint": partial(replaced_checkpoint, of_unsloth),
    "axolotl, activation_offloading: legacy": partial(replaced_checkpoint, of_axolotl, use_reentrant=True),
    "axolotl, activation_offloading: true": partial(trainer, "streams", gradient_checkpointing=True),
    "axolotl, activation_offloading: hidden_states": partial(
        trainer, "hidden_states", gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}
    ),
    **{f"HF Trainer, {name}": partial(trainer, **flags) for name, flags in FLAGS.items()},
    "DeepSpeed ZeRO-2": partial(zero, stage=2),
    "DeepSpeed ZeRO-2, optimizer on the host": partial(zero, stage=2, offload_optimizer=HOST),
    "DeepSpeed ZeRO-3": partial(zero, stage=3),
    "DeepSpeed ZeRO-3, all on the host": partial(zero, stage=3, offload_optimizer=HOST, offload_param=HOST),
}


# Ours


def planned(card: str, kind: str, budget: int) -> Any:
    """A plan with the levers of a kind, 0: for the least peak that they reach. And the model that it was made of."""
    import tightfit
    from tightfit.errors import CannotFit
    from tightfit.planner.search.candidates import UNSEEN_BYTES
    from tightfit.tracing.build import build_dry

    levers, optimizer = LEVERS[kind]
    shape = tightfit.TokenBatch(SIZE, LENGTH, SHAPE["vocab_size"])
    twin = build_dry(new)
    ask = partial(tightfit.plan, twin, shape, levers=list(levers), optimizer=optimizer, precision="bf16", device=card)
    if budget:
        return ask(budget + UNSEEN_BYTES)
    try:
        return ask(1)
    except CannotFit as error:
        return ask(error.least_bytes + UNSEEN_BYTES)


def ours(card: str, kinds: list[str], budget: int) -> None:
    """Plan by the gentlest levers that reach the budget, say what was planned, and train so."""
    from tightfit.errors import CannotFit
    from tightfit.levers.micro_batch import as_parts, split_batch
    from tightfit.levers.stream import settle
    from tightfit.optim.by_name import build_optimizer
    from tightfit.planner.levers import Stream
    from tightfit.step import StepSettings, forward_backward, model_loss, update

    for kind in kinds:
        try:
            plan = planned(card, kind, budget)
            break
        except CannotFit:
            if kind == kinds[-1]:
                raise
    step, plain = plan.planned, plan.plain
    said = {
        "kind": kind, "budget_bytes": plan.budget_bytes, "predicted_bytes": plan.peak_bytes,
        "predicted_reserved_bytes": step.reserved_bytes, "micro_batches": plan.micro_batches,
        "levers": [lever.name for lever in plan.levers], "seconds_of_plain": step.step_seconds / plain.step_seconds,
    }  # fmt: skip
    print(json.dumps({"plan": said}), file=sys.stderr, flush=True)
    own = model("cuda" if plan.lever(Stream) is None else "cpu")
    data = {name: tensor.cuda() for name, tensor in batch().items()}
    with plan.apply(own):
        settle(own, torch.device("cuda"))
        updates = build_optimizer(plan.optimizer, own.parameters())
        for _ in range(STEPS + 2):
            forward_backward(own, as_parts(split_batch(data, plan.micro_batches), model_loss), model_loss, "bf16")
            update(own, updates, StepSettings("bf16"))


LEAST = {f"least peak, {kind}": [kind] for kind in LEVERS}


# In the process that asks


def cases(card: str, rows: Mapping[tuple[str, str], Mapping[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """The ways on a card, in their order: those of others, the least peaks of ours, and ours at the peaks of others."""
    for name in OTHERS:
        yield name, [name]
    for name, kinds in LEAST.items():
        yield name, [card, kinds, 0]
    if card == WITH_PLANS:
        for peak, name in reversed(list(apart({name: rows.get((card, name), {}) for name in OTHERS}))):
            yield f"at the peak of {name}", [card, reaching(peak, card, rows), peak]


def reaching(peak: int, card: str, rows: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[str]:
    """The levers to try for a peak: not those whose least peak is known to be above it."""
    least = {kind: rows.get((card, f"least peak, {kind}"), {}).get("plan", {}) for kind in LEVERS}
    return [kind for kind in LEVERS if least[kind].get("predicted_bytes", 0) <= peak] or list(LEVERS)


def apart(found: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[int, str]]:
    """The rising peaks of what fits, without those that are hardly above the one before: they share its plan."""
    last = 0.0
    for peak, name in sorted((row["peak_bytes"], name) for name, row in found.items() if row.get("fits")):
        if peak > APART * last:
            last = peak
            yield peak, name


def measured(name: str, case: list[Any], card: str, packages: Path) -> dict[str, Any]:
    """What one way takes of a card, or why it does not run."""
    found, said, why = watched(["-m", "benchmarks.peers_on_cards", "--case", json.dumps(case)], packages, card, STEPS)
    notes = [json.loads(line) for line in said if line.startswith('{"plan"')]
    refused = found.out_of_memory
    row = {
        "way": name, "card": card, "ours": len(case) > 1, "fits": found.fits, "steps": len(found.steps),
        "peak_bytes": found.peak_bytes, "reserved_bytes": found.reserved_bytes,
        "host_peak_bytes": found.host_peak_bytes, "by_category": dict(found.by_category), **(notes or [{}])[0],
    }  # fmt: skip
    if not found.fits:
        row["why"] = why
        row["refused"] = None if refused is None else {"bytes": refused.asked_bytes, "phase": refused.phase}
    return row


def content(around: Mapping[str, Any], rows: list[Any]) -> dict[str, Any]:
    """The file of results: besides the rows, what there is to run."""
    shape = {"what": "a model of SmolLM2-360M's shape", "size": SIZE, "length": LENGTH, **SHAPE}
    names = {"cards": CARDS, "ways": list(OTHERS), "least": list(LEAST), "left_out": WITHOUT}
    return {"environment": around, "shape": shape, **names, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--cards", nargs="*", choices=CARDS, default=CARDS)
    parser.add_argument("--only", nargs="*", default=[""], metavar="TEXT", help="ways in whose names this occurs")
    parser.add_argument("--without", nargs="*", default=[], metavar="TEXT", help="or does not occur")
    parser.add_argument("--again", action="store_true", help="those that the output holds too")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.case:
        case = json.loads(given.case)
        try:
            return OTHERS[case[0]]() if len(case) == 1 else ours(*case)
        except NotHere as reason:
            raise SystemExit(f"NotHere: {reason}") from None
    if given.page:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        import benchmarks_page

        return benchmarks_page.main()
    if given.packages is None:
        parser.error("--packages is missing")
    from benchmarks.environment import environment

    known = json.loads(given.output.read_text("utf-8"))["rows"] if given.output.exists() else []
    rows = {(row["card"], row["way"]): row for row in known}
    for card in given.cards:
        for name, case in cases(card, rows):
            chosen = any(text in name for text in given.only) and not any(text in name for text in given.without)
            if not chosen or ((card, name) in rows and not given.again):
                continue
            # The environment of the whole file is the last run's, so a row has the date and the commit of its own.
            around = environment() | {"packages": versions(list(PACKAGES), given.packages)}
            row = rows[card, name] = measured(name, case, card, given.packages.resolve())
            row |= {"measured": datetime.date.today().isoformat(), "ours_at": around["commit"]}
            print(
                card, name, row["fits"], f"{row['peak_bytes']:,}", row.get("plan", ""), row.get("why", ""), flush=True
            )
            given.output.write_text(json.dumps(content(around, list(rows.values())), indent=1) + "\n", "utf-8")
    return None


if __name__ == "__main__":
    main()
