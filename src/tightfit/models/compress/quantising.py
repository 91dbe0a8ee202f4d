"""`tightfit.quantise`: a model with its linear layers in few bits, measured before and after, in a folder."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from tightfit.errors import DataError, InputError, QualityError, SourceError
from tightfit.memory.allocator import measured_peak
from tightfit.models.compress.report import CompressionReport, Side, measured, perplexity
from tightfit.models.compress.source import WEIGHTS, Source, open_source
from tightfit.models.compress.texts import held_out_of, token_rows
from tightfit.models.decoder import Decoder
from tightfit.models.dtypes import convert_weights
from tightfit.models.export import demand_new, new_folder
from tightfit.models.mode import evaluating
from tightfit.models.quantised import hash_of, write_quantised
from tightfit.models.quantised_record import QUANTISED_WEIGHTS, QuantisedRecord
from tightfit.names import refuse_other
from tightfit.ops.weights.torchao_weights import (
    GROUP_SIZE,
    Method,
    demand_products,
    objection,
    observer,
    quantise_layers,
    torchao_version,
)
from tightfit.planner.any_code.traced import trace
from tightfit.tracing.surroundings import plain_tensors
from tightfit.training.data.corpus import DEFAULT_SOURCE
from tightfit.units import format_bytes
from tightfit.version import package_version

MAX_LOSS = 0.1  # share by which perplexity may rise, where nobody says
CALIBRATION_ROWS, TEXT_ROWS = 16, 4
SLOWER = 1.2  # times as long, from which on a note says so: less is noise
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def quantise(
    source: str | Path,
    *,
    to: str,
    output: str | Path,
    calibration: str | Path | None = None,
    text: str | Path | None = None,
    max_loss: float = MAX_LOSS,
    force: bool = False,
    batch_size: int = 1,
    seq_len: int | None = None,
) -> "QuantisationReport":
    """Quantise the linear layers of a model, measure it before and after, and write it to a new folder.

    Embeddings, norms and the output head are not quantised. With int4 they become bf16, because PyTorch's product of
    4-bit weights is fast with bf16 only. The folder has safetensors and JSON; `tightfit generate`, `score` and
    `estimate --inference` read it. It is complete or not there.

    Args:
        source: A run's folder or a Hugging Face folder.
        to: `"int8"` (weights only), `"int8_dynamic"` (activations too, scaled as they come), `"int8_static"`
            (activations too, scaled by what `calibration` shows) or `"int4"` (weights only).
        output: The folder to write.
        calibration: The text whose activations are measured: a text file, JSON lines, a folder of them.
        text: The text on which perplexity is measured. None: what a run has held out, else a corpus that every machine
            has.
        max_loss: The share by which perplexity may rise; beyond it nothing is written.
        force: Write in any case.
        batch_size: The number of prompts whose reading is measured.
        seq_len: The tokens of each prompt.

    Returns:
        A report of the model before and after.

    Raises:
        InputError: An argument is wrong.
        SourceError: The folder has no model that can be quantised.
        QualityError: Perplexity rises too far.

    Example:
        >>> import pathlib, tempfile
        >>> import tightfit
        >>> from tightfit.training.data.tokenizer import train_tokenizer
        >>> from tightfit.models.decoder import Decoder
        >>> from tightfit.models.decoder_config import DecoderConfig
        >>> from tightfit.models.saving import save_model
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> model = Decoder(DecoderConfig(hidden_size=32, num_layers=1, num_heads=2, vocab_size=300))
        >>> save_model(model, folder / "run")
        >>> train_tokenizer(["a text to learn from"], 300).save(folder / "run")
        >>> report = tightfit.quantise(folder / "run", to="int8", output=folder / "small", seq_len=16)
        >>> report.after.disk_bytes < report.before.disk_bytes
        True
    """
    found, target = open_source(source), Path(output)
    method = _method(to, calibration)
    _check_limits(max_loss, target)
    found.refuse_quantised("quantise")
    version = torchao_version()
    demand_products(method)
    _demand_tokenizer(found, needs_one=text is not None or method == "int8_static", force=force)
    model = found.model()
    _dtype(model)  # before anything takes long
    chosen = choose_layers(model, method)
    judged_on, held_out = _held_out(found, model, text, seq_len)
    scales = None
    if method == "int8_static":
        assert calibration is not None, "checked with the method"
        rows = _rows(found, model, calibration, "--calibration", seq_len, CALIBRATION_ROWS)
        scales = calibrated(model, chosen.paths, rows)
        chosen = chosen.without(unseen(scales, chosen.paths))

    before = measured(
        model, text=held_out, disk_bytes=found.weight_bytes, batch_size=batch_size, seq_len=seq_len, step=False
    )
    if method == "int4":
        convert_weights(model, torch.bfloat16)
    dtype = _dtype(model)
    peaks = _peaks(model, lambda: quantise_layers(model, method, chosen.paths, scales))
    reached = None if held_out is None else perplexity(model, held_out)
    loss = None if reached is None or before.perplexity is None else reached / before.perplexity - 1
    check_quality(loss, max_loss, method, force)
    after = measured(model, disk_bytes=0, batch_size=batch_size, seq_len=seq_len, step=False)

    record = QuantisedRecord(
        method=method,
        kind="decoder" if isinstance(model, Decoder) else "transformers",
        dtype=dtype,
        versions={"tightfit": package_version(), "torch": torch.__version__, "torchao": version},
        source={"folder": found.folder.resolve().name, "sha256": _hashes(found)},
        layers={},
        left=dict(chosen.left),
        settings=_settings(method, calibration, before.perplexity, reached),
    )
    with new_folder(target) as part:
        record = write_quantised(model, part, record)
        for name, content in found.tokenizer_files().items():
            (part / name).write_bytes(content)
    after = replace(after, disk_bytes=(target / QUANTISED_WEIGHTS).stat().st_size, perplexity=reached)
    notes = (*_notes(record, model, loss, max_loss), *judged_on, *_slower(before, after), _while_it_ran(*peaks))
    return QuantisationReport(f"quantise to {method}", before, after, notes, *peaks)


@dataclass(frozen=True)
class QuantisationReport(CompressionReport):
    """A model before and after. `peak_bytes` and `measured_peak_bytes` are those of the quantisation itself, with the
    model that it changes in place.
    """

    peak_bytes: int | None = None
    measured_peak_bytes: int | None = None


def _peaks(model: nn.Module, quantising: Callable[[], None]) -> tuple[int, int]:
    """The peak of a change of a model, predicted by a dry run and then measured as it is made."""
    predicted = trace(quantising, device="cpu").peak_bytes
    return predicted, measured_peak(quantising, [*model.parameters(), *model.buffers(), *plain_tensors(model)])


@dataclass(frozen=True)
class Chosen:
    """The linear layers to quantise by path, and by path why others stay as they are."""

    paths: tuple[str, ...]
    left: Mapping[str, str]

    def without(self, left: Mapping[str, str]) -> "Chosen":
        return Chosen(tuple(path for path in self.paths if path not in left), {**self.left, **left})


def choose_layers(model: nn.Module, method: Method) -> Chosen:
    """Every linear layer but the output head, layers whose weights another module holds too, and those that the method
    cannot take. Raises `SourceError` where none is left.
    """
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    head = _head(model)
    paths, left = [], {}
    for path, module in model.named_modules():
        if type(module) is not nn.Linear:
            continue
        if module is head:
            left[path] = "the output head"
        elif holders[id(module.weight)] > 1:
            left[path] = "another module has the same weight"
        elif (reason := objection(module, method)) is not None:
            left[path] = reason
        else:
            paths.append(path)
    if not paths:
        raise SourceError(
            f"{type(model).__name__} has no linear layer that {method} can take"
            f"{''.join(f': {path}: {reason}' for path, reason in list(left.items())[:1])}: use another method"
        )
    return Chosen(tuple(paths), left)


def check_quality(loss: float | None, max_loss: float, method: str, force: bool) -> None:
    """Raise `QualityError` where perplexity rose by more than a share, or is no number."""
    if loss is None or force or loss <= max_loss:
        return
    raise QualityError(
        f"{method}: perplexity rises by {loss:.1%}, and --max-loss allows {max_loss:.1%}: nothing was written; take "
        "another method, or --force"
        if math.isfinite(loss)
        else f"{method}: perplexity is no number any more: nothing was written; take another method"
    )


def _dtype(model: nn.Module) -> str:
    """`fp32` or `bf16`, in which the model is built again. Raises `SourceError`."""
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if len(kinds) > 1 or not kinds <= DTYPES.keys():
        raise SourceError(
            f"{type(model).__name__} has weights of {', '.join(sorted(str(kind) for kind in kinds))}, and a quantised "
            "model has the rest in one dtype, fp32 or bf16: convert them first"
        )
    return DTYPES[kinds.pop()]


def _head(model: nn.Module) -> nn.Module | None:
    find: Any = getattr(model, "get_output_embeddings", None)
    return model.head if isinstance(model, Decoder) else None if find is None else find()


def _method(to: str, calibration: str | Path | None) -> Method:
    refuse_other(to)
    if to == "int8_static" and calibration is None:
        raise InputError(
            "int8_static needs a text to measure activations on: give --calibration FILE, or take int8_dynamic"
        )
    if to != "int8_static" and calibration is not None:
        raise InputError(f"--calibration is for int8_static, and {to} needs none: leave it out")
    return cast(Method, to)


def _demand_tokenizer(source: Source, *, needs_one: bool, force: bool) -> None:
    """Raise `DataError` or `InputError` where texts are needed, and the source has no tokenizer to read them."""
    if _has_tokenizer(source):
        return
    if needs_one:
        source.tokenizer  # noqa: B018 - it raises, and says why
    if not force:
        raise InputError(
            f"{source.folder}: has no tokenizer, so the loss of quality cannot be measured: put its tokenizer.json "
            "there, or give --force to write without knowing it"
        )


def _has_tokenizer(source: Source) -> bool:
    try:
        return source.tokenizer is not None
    except DataError:
        return False


def _rows(source: Source, model: nn.Module, text: str | Path, option: str, length: int | None, count: int) -> Tensor:
    return token_rows(text, source.tokenizer, model, option=option, length=length, rows=count)


def _held_out(
    source: Source, model: nn.Module, text: str | Path | None, length: int | None
) -> tuple[tuple[str, ...], Tensor | None]:
    """A note on which text perplexity is of, and its rows: the one that is given, else what a run has held out, else
    one that every machine has.
    """
    if not _has_tokenizer(source):
        return (), None
    own = held_out_of(source.folder, model, length, TEXT_ROWS) if text is None else None
    if own is not None:
        return (f"Perplexity is of what the run has held out of {own[0]}.",), own[1]
    named = "the text of Python's library: name your own with --text" if text is None else str(text)
    return (f"Perplexity is of {named}.",), _rows(source, model, text or DEFAULT_SOURCE, "--text", length, TEXT_ROWS)


def _check_limits(max_loss: float, target: Path) -> None:
    if not max_loss >= 0:
        raise InputError(f"--max-loss is {max_loss}: give a share of perplexity, 0 or more, such as 0.1 for 10%")
    demand_new(target)


def _hashes(source: Source) -> dict[str, str]:
    """SHA-256 of the files with the source's weights, by name."""
    return {path.name: hash_of(path) for kind in WEIGHTS for path in sorted(source.folder.glob(kind))}


def _settings(
    method: Method, calibration: str | Path | None, before: float | None, after: float | None
) -> dict[str, Any]:
    settings: dict[str, Any] = {"perplexity": [before, after]}
    if method == "int4":
        settings["group_size"] = GROUP_SIZE
    if calibration is not None:
        settings["calibration"] = str(calibration)
    return settings


def _notes(record: QuantisedRecord, model: nn.Module, loss: float | None, max_loss: float) -> tuple[str, ...]:
    held = sum(p.numel() for name, p in model.named_parameters() if name in record.layers)
    share = held / sum(p.numel() for p in model.parameters())
    notes = [
        f"{len(record.layers)} linear layers in few bits: {share:.1%} of the parameters; the rest in {record.dtype}."
    ]
    other: dict[str, int] = {}
    for reason in record.left.values():
        other[reason] = other.get(reason, 0) + 1
    notes += [f"Linear layers left at full width: {count} ({reason})." for reason, count in other.items()]
    if loss is None:
        notes.append("Perplexity was not measured: the folder has no tokenizer.")
    elif loss > max_loss:
        notes.append(f"Perplexity rises by {loss:.1%}, more than the {max_loss:.1%} allowed: written by force.")
    return tuple(notes)


def _while_it_ran(predicted: int, taken: int) -> str:
    return f"Quantising took {format_bytes(predicted)} at its peak by prediction, {format_bytes(taken)} measured."


def _slower(before: Side, after: Side) -> tuple[str, ...]:
    """A note where few bits cost time. Which machines have fast products of them differs."""
    one, other = before.tokens_per_second, after.tokens_per_second
    if not one or not other or one < SLOWER * other:
        return ()
    return (
        f"A forward takes {one / other:.1f} times as long on this machine: it has no fast product of such weights.",
    )


@torch.no_grad()
def calibrated(model: nn.Module, paths: Sequence[str], rows: Tensor) -> dict[str, Tensor]:
    """The scale of the inputs of each linear layer at `paths`, by path: the largest number in them is 127 scales.

    `rows` (rows, tokens) int64 go through the model one at a time, so that it takes the memory of one. A layer that no
    token reaches (an expert) has no scale, and is missing.
    """
    observers = {path: observer() for path in paths}
    handles = [model.get_submodule(path).register_forward_pre_hook(_seen_by(one)) for path, one in observers.items()]
    try:
        with evaluating(model):
            for row in rows:
                model(input_ids=row[None])
    finally:
        for handle in handles:
            handle.remove()
    return {path: one.calculate_qparams()[0] for path, one in observers.items() if hasattr(one, "min_val")}


def unseen(scales: Mapping[str, Tensor], paths: Sequence[str]) -> dict[str, str]:
    """Why layers without a scale are left as they are."""
    return {path: "no token of the calibration reached it" for path in paths if path not in scales}


def _seen_by(one: Any) -> Any:
    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        one(inputs[0])

    return hook
