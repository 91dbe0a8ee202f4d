"""What loads after structured pruning: `tightfit prune` beside Torch-Pruning (`pip install torch-pruning`).

Each takes a quarter of one kind of part out of a Llama with new weights, by norm. The pruned model is saved and loaded
by `transformers` as it is, and again after the widths that its weights have were put into its configuration.

    python benchmarks/pruning_packages.py --output benchmarks/results/pruning_packages.json
"""

import argparse
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from environment import environment
from taking_turns import write
from tightfit.models.compress.pruning.anatomy import Anatomy, Ratios, removal_of
from tightfit.models.compress.pruning.importance import kept_parts, scores_of
from tightfit.models.compress.pruning.slicing import sliced

SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 200,
}  # fmt: skip
QUARTER = 0.25
LIMIT = 40  # seconds of processor time for one model
CASES = ("ffn", "heads", "width")


def new_model() -> Any:
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SHAPE)).eval()
    model.config.use_cache = False
    return model


def by_tightfit(model: Any, case: str, ids: Tensor) -> Any:
    anatomy = Anatomy.of(model.config)
    removal = removal_of(anatomy, Ratios(**{case: QUARTER}))
    return sliced(model, anatomy, removal, kept_parts(scores_of(model, anatomy, "norm", None), anatomy, removal))


def by_torch_pruning(model: Any, case: str, ids: Tensor) -> Any:
    """As its examples do it for language models."""
    import torch_pruning as tp

    layers = model.model.layers
    attention = [getattr(layer.self_attn, f"{name}_proj") for layer in layers for name in "qkvo"]
    gates = [layer.mlp.gate_proj for layer in layers]
    options: dict[str, Any] = {"ignored_layers": [model.lm_head], "pruning_ratio": 0.0}
    if case == "ffn":
        options["ignored_layers"] += attention
        options["pruning_ratio_dict"] = dict.fromkeys(gates, QUARTER)
    elif case == "width":
        options["pruning_ratio_dict"] = {model.model.embed_tokens: QUARTER}
    else:
        options["num_heads"] = {
            module: heads
            for layer in layers
            for module, heads in (
                (layer.self_attn.q_proj, SHAPE["num_attention_heads"]),
                (layer.self_attn.k_proj, SHAPE["num_key_value_heads"]),
                (layer.self_attn.v_proj, SHAPE["num_key_value_heads"]),
            )
        }
        options |= {"prune_num_heads": True, "head_pruning_ratio": QUARTER}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pruner = tp.pruner.MetaPruner(
            model,
            ids,
            importance=tp.importance.GroupMagnitudeImportance(p=2),
            forward_fn=lambda model, ids: model(input_ids=ids).logits,
            output_transform=lambda logits: logits,
            round_to=8,
            **options,
        )
        pruner.step()
    return model


PACKAGES: dict[str, Callable[[Any, str, Tensor], Any]] = {"tightfit": by_tightfit, "Torch-Pruning": by_torch_pruning}


def measure(package: str, case: str) -> dict[str, Any]:
    model, ids = new_model(), torch.randint(SHAPE["vocab_size"], (1, 16))
    before = sum(parameter.numel() for parameter in model.parameters())
    began = time.process_time()
    model = PACKAGES[package](model, case, ids)
    found: dict[str, Any] = {"seconds": time.process_time() - began}
    found["parameters"] = [before, sum(parameter.numel() for parameter in model.parameters())]
    found["forward"] = outcome(lambda: list(model(input_ids=ids).logits.shape))
    found["loads"] = outcome(lambda: loads_with_equal_logits(model, ids))
    attention = model.model.layers[0].self_attn
    model.config.intermediate_size = model.model.layers[0].mlp.gate_proj.weight.shape[0]
    model.config.hidden_size = model.model.embed_tokens.weight.shape[1]
    model.config.num_attention_heads = attention.q_proj.weight.shape[0] // SHAPE["head_dim"]
    model.config.num_key_value_heads = attention.k_proj.weight.shape[0] // SHAPE["head_dim"]
    found["loads_with_widths_named"] = outcome(lambda: loads_with_equal_logits(model, ids))
    return found


def loads_with_equal_logits(model: Any, ids: Tensor) -> bool:
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)


def outcome(question: Callable[[], Any]) -> Any:
    """The answer, or the first line of the error: of another package, any may come."""
    try:
        return question()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


@torch.no_grad()
def outcomes() -> dict[str, Any]:
    import torch_pruning

    found = {case: {name: outcome_of(name, case) for name in PACKAGES} for case in CASES}
    return {"torch_pruning": torch_pruning.__version__, "cases": found}


def outcome_of(package: str, case: str) -> Any:
    def cut_off(*_: Any) -> None:
        raise TimeoutError(f"not done after {LIMIT} s of processor time")

    signal.signal(signal.SIGPROF, cut_off)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        with torch.enable_grad():  # Torch-Pruning reads the graph that autograd has
            return outcome(lambda: measure(package, case))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the JSON here too")
    options = parser.parse_args(arguments)
    write({"environment": environment(), "shape": SHAPE, **outcomes()}, options.output)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
