"""`tightfit.prune`: from a folder to a folder, with the report of what that saves and costs."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.errors import InputError, SourceError
from tightfit.models.compress.pruning.anatomy import Anatomy, Ratios, Removal, removal_of
from tightfit.models.compress.pruning.fitting import Fitting, Goal, fitting_removal
from tightfit.models.compress.pruning.importance import BY, By, kept_parts, scores_of
from tightfit.models.compress.pruning.masking import Pattern, Scope, check_masks, removed_weights
from tightfit.models.compress.pruning.slicing import sliced
from tightfit.models.compress.report import NEW_TOKENS, CompressionReport, Side, measured
from tightfit.models.compress.source import Source, open_source, weight_bytes
from tightfit.models.compress.texts import row_length, token_rows
from tightfit.models.export import demand_new
from tightfit.models.loading import position_limit
from tightfit.models.masks import drop_masks, masks_bytes, put_masks, read_masks
from tightfit.names import MASKS
from tightfit.units import format_bytes

LENGTH = 256  # tokens of a row, where nobody says
CALIBRATION_ROWS, TEXT_ROWS = 32, 64  # the most rows that are read of a text
NO_MEMORY_SAVED = (
    "Masks save no memory: zeros take as many bytes as other numbers, and `tightfit train` holds a byte a weight more."
)

WITHOUT_A_TEXT = (
    "Small weights may write large numbers: --calibration FILE ranks parts by what they do on a text, and --text FILE "
    "shows the perplexity before and after."
)
AS_MISTRAL = (
    "Written as a Mistral without a window, which computes the same: transformers loads no Llama whose query heads do "
    "not divide its hidden channels."
)


def prune(
    source: str | Path,
    *,
    output: str | Path,
    layers: float | None = None,
    ffn: float | None = None,
    heads: float | None = None,
    width: float | None = None,
    sparsity: float | None = None,
    pattern: Pattern = "magnitude",
    scope: Scope = "layer",
    by: By | None = None,
    calibration: str | Path | None = None,
    to_fit: int | str | None = None,
    inference: bool = False,
    seq_len: int | None = None,
    batch_size: int = 1,
    new_tokens: int = NEW_TOKENS,
    device: Any = None,
    text: str | Path | None = None,
    permanent: bool = False,
) -> CompressionReport:
    """Prune the model in a folder, and write a smaller or sparser one, which `transformers` loads.

    Args:
        source: A run's folder or a Hugging Face folder.
        output: The folder to write.
        layers: The share of whole layers to take out.
        ffn: The share of each MLP's channels to take out.
        heads: The share of each layer's key heads to take out, with their query heads.
        width: The share of hidden channels to take out.
        sparsity: The share of single weights to set to zero. masks.safetensors then names them, and `tightfit.train`
            keeps them at zero.
        pattern: Which weights: `"magnitude"`, `"wanda"` or `"2:4"`.
        scope: The lowest magnitudes of each matrix (`"layer"`) or of all matrices (`"global"`).
        by: How parts are ranked: `"norm"` of the weights, `"activation"` or `"gradient"` on the text `calibration`.
            None: by activation where there is such a text, else by norm.
        calibration: The path of a text, or `"default"`.
        to_fit: A budget (`"3GiB"`, `"0.5x"`): take out the least that lets a training step fit, by dry runs. The shares
            are then the most that may go (0.75 of layers, channels and heads if none is given).
        inference: What has to fit is a generation of `new_tokens` tokens after `batch_size` prompts, not a training
            step.
        seq_len: Tokens of a row.
        batch_size: Rows of a batch.
        new_tokens: Tokens to generate.
        device: The device to fit. None: this CPU.
        text: Held-out text, for the perplexity before and after.
        permanent: Give the masks of `source` up: the zeros stay, and the next training may move them.

    Returns:
        A report of the model before and after.

    Raises:
        SourceError: The folder has no model that can be pruned.
        InputError: An argument is wrong.
        CannotFit: The most that may go is not enough.

    Example:
        >>> import pathlib, tempfile, tightfit
        >>> from tightfit.models.decoder import Decoder
        >>> from tightfit.models.decoder_config import DecoderConfig
        >>> from tightfit.models.saving import save_model
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> shape = DecoderConfig(hidden_size=32, num_layers=2, num_heads=4, vocab_size=64, max_position_embeddings=64)
        >>> save_model(Decoder(shape), folder / "run")
        >>> report = tightfit.prune(folder / "run", layers=0.5, ffn=0.25, output=folder / "pruned")
        >>> report.after.parameters < report.before.parameters
        True
        >>> report.after.step_peak_bytes == report.after.measured_step_peak_bytes
        True
    """
    job = _Job(
        open_source(source), Path(output), Ratios(layers, ffn, heads, width), sparsity, pattern, scope,
        _checked_by(by, calibration, pattern, sparsity), calibration, text, seq_len, batch_size, new_tokens,
    )  # fmt: skip
    goal = None
    if to_fit is not None:
        if seq_len is None:
            raise InputError("--to-fit needs the length of the rows that are to fit: give --seq-len")
        goal = Goal(to_fit, seq_len, batch_size, inference, new_tokens, device)
    elif inference or device is not None:
        option = "--inference" if inference else "--device"
        raise InputError(f"{option} is for --to-fit, which is not given: give both, or neither")
    job.check(goal, permanent)
    return job.permanent() if permanent else job.run(goal)


def _checked_by(by: str | None, calibration: Any, pattern: str, sparsity: float | None) -> By:
    """How parts are ranked. Raises `InputError` for a name that is unknown, or a text that is missing."""
    if by is not None and by not in BY:
        raise InputError(f"--by {by!r} is not known: choose {', '.join(BY[:-1])} or {BY[-1]}")
    found: By = "norm" if calibration is None else "activation"
    for known in BY:
        found = known if known == by else found
    if calibration is None and found != "norm":
        raise InputError(f"--by {found} is measured on real text: give --calibration FILE")
    if calibration is None and sparsity is not None and pattern == "wanda":
        raise InputError("--pattern wanda is measured on real text: give --calibration FILE")
    return found


@dataclass(frozen=True)
class _Job:
    """One pruning, as it was asked for."""

    source: Source
    output: Path
    ratios: Ratios
    sparsity: float | None
    pattern: Pattern
    scope: Scope
    by: By
    calibration: str | Path | None
    text: str | Path | None
    seq_len: int | None
    batch_size: int
    new_tokens: int

    def check(self, goal: Goal | None, permanent: bool) -> None:
        """Check the arguments before a weight is read. Raises `InputError` and its like."""
        for name in ("seq_len", "batch_size", "new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} {value} is below 1: give at least 1")
        if self.sparsity is not None:
            check_masks(self.sparsity, self.pattern, self.scope)
        demand_new(self.output)
        self.source.refuse_quantised("prune")
        has_masks = (self.source.folder / MASKS).is_file()
        asked = bool(self.ratios) or self.sparsity is not None or goal is not None
        if permanent and asked:
            raise InputError("--permanent makes masks permanent and prunes nothing: leave the other options out")
        if permanent and not has_masks:
            raise SourceError(f"{self.source.folder}: has no {MASKS}: there is nothing to make permanent")
        if not permanent and not asked:
            raise InputError("nothing to prune: give --layers, --ffn, --heads, --width, --sparsity or --to-fit")
        if not permanent and has_masks:
            raise SourceError(
                f"{self.source.folder}: has a {MASKS}, which another pruning would not keep: make it permanent first, "
                "with --permanent"
            )

    def run(self, goal: Goal | None) -> CompressionReport:
        removal, anatomy, fitted = self._planned(goal)
        model: Any = self.source.transformers_model()
        if self.seq_len is not None and self.seq_len > (position_limit(model) or self.seq_len):
            raise InputError(f"--seq-len {self.seq_len} is longer than the model's {position_limit(model)} positions")
        rows, held_out = self._rows(model, self.calibration, CALIBRATION_ROWS), self._rows(model, self.text, TEXT_ROWS)
        before = self._measured(model, held_out, self.source.weight_bytes)
        notes = [] if fitted is None or goal is None else [_fitted_in_words(fitted, goal)]
        if removal and anatomy is not None:
            kept = kept_parts(scores_of(model, anatomy, self.by, rows), anatomy, removal)
            model = sliced(model, anatomy, removal, kept)
            notes.append(f"Taken out, ranked by {self.by}: {removal.in_words(anatomy)}.")
            notes += [WITHOUT_A_TEXT] if rows is None and held_out is None else []
            if model.config.model_type != anatomy.model_type:
                notes.append(AS_MISTRAL)
        beside: dict[str, bytes] = {}
        removed: dict[str, Tensor] = {}
        if self.sparsity is not None:
            removed = removed_weights(model, self.sparsity, self.pattern, scope=self.scope, by=self.by, rows=rows)
            zero_weights(model, removed)
            beside = {MASKS: masks_bytes(removed)}
            notes += [_masks_in_words(removed, self.pattern), NO_MEMORY_SAVED]
        self.source.write(model, self.output, beside=beside)
        after = self._measured(model, held_out, weight_bytes(self.output), removed)
        return CompressionReport(self._method(goal), before, after, tuple(notes))

    def permanent(self) -> CompressionReport:
        """The source without its masks, and the zeros in its weights."""
        model: Any = self.source.transformers_model()
        removed = read_masks(self.source.folder)
        held_out = self._rows(model, self.text, TEXT_ROWS)
        zero_weights(model, removed)  # of a training that did not keep the masks, too
        before = self._measured(model, held_out, self.source.weight_bytes, removed)
        drop_masks(model)
        self.source.write(model, self.output)
        notes = (
            f"The masks are gone: {_count(removed)} are zero in {self.output}, and the next training may move them. "
            "No byte of memory is saved by that but those of the masks.",
        )
        after = self._measured(model, held_out, weight_bytes(self.output))
        return CompressionReport("prune --permanent", before, after, notes)

    def _planned(self, goal: Goal | None) -> tuple[Removal, Anatomy | None, Fitting | None]:
        """The planned removal, found before a weight is read."""
        if goal is None and not self.ratios:
            return Removal(), None, None
        config, dtype = self.source.transformers_shape()
        anatomy = Anatomy.of(config)
        if goal is None:
            return removal_of(anatomy, self.ratios), anatomy, None
        if goal.seq_len > (getattr(config, "max_position_embeddings", None) or goal.seq_len):
            raise InputError(
                f"--seq-len {goal.seq_len} is longer than the model's {config.max_position_embeddings} positions"
            )
        fitted = fitting_removal(config, dtype, anatomy, self.ratios, goal)
        return fitted.removal, anatomy, fitted

    def _rows(self, model: nn.Module, file: str | Path | None, count: int) -> Tensor | None:
        if file is None:
            return None
        option = "--calibration" if file is self.calibration else "--text"
        length = self.seq_len or LENGTH
        return token_rows(file, self.source.tokenizer, model, option=option, length=length, rows=count)

    def _measured(
        self, model: nn.Module, text: Tensor | None, disk_bytes: int, removed: dict[str, Tensor] | None = None
    ) -> Side:
        """A side of the report. With masks the step is that of a training which keeps them."""
        options: dict[str, Any] = {
            "batch_size": self.batch_size,
            "seq_len": row_length(model, self.seq_len or LENGTH),
            "new_tokens": self.new_tokens,
            "disk_bytes": disk_bytes or None,
        }
        if not removed:
            return measured(model, text=text, **options)
        side = measured(model, text=text, step=False, **options)
        put_masks(model, removed)
        step = measured(model, inference=False, **options)
        return replace(
            side, step_peak_bytes=step.step_peak_bytes, measured_step_peak_bytes=step.measured_step_peak_bytes
        )

    def _method(self, goal: Goal | None) -> str:
        given = [f"--{name} {ratio:g}" for name, ratio in vars(self.ratios).items() if ratio is not None]
        if goal is not None:
            given.insert(0, f"--to-fit {goal.budget}{' --inference' if goal.inference else ''}")
        if self.sparsity is not None:
            given.append(f"--sparsity {self.sparsity:g} --pattern {self.pattern}")
            if self.pattern == "magnitude":
                given.append(f"--scope {self.scope}")
        return f"prune {' '.join(given)} --by {self.by}"


@torch.no_grad()
def zero_weights(model: nn.Module, removed: dict[str, Tensor]) -> None:
    """Set the weights that masks name to zero."""
    parameters = dict(model.named_parameters())
    for name, mask in removed.items():
        parameters[name].masked_fill_(mask, 0)


def _fitted_in_words(fitted: Fitting, goal: Goal) -> str:
    whole = f"The whole model needs {format_bytes(fitted.whole_peak_bytes)} for {goal.in_words()}"
    if not fitted.removal:
        return f"{whole}, within {format_bytes(fitted.budget_bytes)}: nothing was taken out."
    return (
        f"{whole}; with the least taken out that fits {format_bytes(fitted.budget_bytes)}, "
        f"{format_bytes(fitted.peak_bytes)} ({fitted.dry_runs} dry runs)."
    )


def _masks_in_words(removed: dict[str, Tensor], pattern: Pattern) -> str:
    return f"{_count(removed)} are zero, by {pattern}; {MASKS} says which."


def _count(removed: dict[str, Tensor]) -> str:
    zeros, known = sum(int(mask.sum()) for mask in removed.values()), sum(mask.numel() for mask in removed.values())
    return f"{zeros:,} of {known:,} weights of {len(removed)} matrices"
