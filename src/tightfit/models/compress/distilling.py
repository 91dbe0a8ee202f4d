"""Distillation: a student trained towards its teacher, which runs beside it or has written a store before."""

import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.devices.present import lookup_present
from tightfit.devices.spec import DeviceSpec
from tightfit.errors import ConfigError, ModelError
from tightfit.memory.allocator import storage_bytes
from tightfit.memory.settings import set_allocator
from tightfit.models.compress.heads import demand_plain_logits, head_of
from tightfit.models.compress.losses import PROJECTION, DistillationLoss, HeldOutLoss, StoredDistillationLoss
from tightfit.models.compress.report import CompressionReport, Side, measured
from tightfit.models.compress.source import open_source
from tightfit.models.compress.store_writing import StoreFigures
from tightfit.models.compress.stored_samples import StoredSamples
from tightfit.models.compress.stores import complete_store
from tightfit.models.compress.students import StudentShape, student_shape_of, with_student
from tightfit.models.compress.teachers import (
    demand_same_tokenizer,
    demand_same_vocabulary,
    load_teacher,
    teacher_digest,
    teacher_folder,
    teacher_tokenizer,
)
from tightfit.models.loading import position_limit, vocabulary_size
from tightfit.tracing.surroundings import held_by
from tightfit.training.api import run_training, threads
from tightfit.training.boundaries import demand_boundaries
from tightfit.training.config import Config, load_config, parse_config
from tightfit.training.config.schema import DistilConfig
from tightfit.training.data.prepare import PreparedData, check_fits, prepare_data
from tightfit.training.objective import Objective
from tightfit.training.purpose import Purpose
from tightfit.training.reporter import Reporter, SilentReporter
from tightfit.training.result import TrainResult

HELD_OUT_ROWS = 64  # the most rows that the report's perplexities are of


@dataclass(frozen=True)
class DistilResult:
    """The outcome of a distillation. `training` is None where only the store was written, `store` where the teacher ran
    beside the student. `teacher_bytes` are the teacher's weights that were in memory during the steps. `held_out` are
    some rows of text (rows, tokens) that neither the training nor the store has read, None where none were held out.
    """

    training: TrainResult | None
    store: StoreFigures | None
    teacher_bytes: int
    teacher: Path | None = None
    held_out: Tensor | None = field(default=None, repr=False, compare=False)

    @cached_property
    def report(self) -> CompressionReport | None:
        """The teacher before, the student after: parameters, bytes, peaks, speed, perplexity. None where no student was
        trained. Both are loaded from their folders and run, one after the other, when this is first read.
        """
        if self.training is None:
            return None
        student = Path(self.training.folder)
        before = Side() if self.teacher is None else self._side(self.teacher)
        sides = (
            f"Before is the teacher ({self.teacher or 'which the store stands for'}), after the student ({student})."
        )
        return CompressionReport("distil", before, self._side(student), (sides,))

    def _side(self, folder: Path) -> Side:
        source = open_source(folder)
        length = None if self.held_out is None else self.held_out.shape[1]
        return measured(source.model(), text=self.held_out, seq_len=length, disk_bytes=source.weight_bytes or None)

    def to_dict(self) -> dict[str, Any]:
        """The figures by name, as JSON, without the report."""
        store = None
        if self.store is not None:
            store = {**asdict(self.store), "bytes_per_token": self.store.bytes_per_token}
        training = None if self.training is None else json.loads(self.training.to_json())
        return {"training": training, "store": store, "teacher_bytes": self.teacher_bytes}


def distil(
    config: str | Path | Config,
    overrides: Sequence[str] = (),
    *,
    teacher: str | Path | None = None,
    teacher_dtype: str | None = None,
    divergence: str | None = None,
    beta: float | None = None,
    temperature: float | None = None,
    hard_weight: float | None = None,
    hidden_weight: float | None = None,
    store: str | Path | None = None,
    store_method: str | None = None,
    k: int | None = None,
    seed: int | None = None,
    student_layers: float | None = None,
    student_ffn: float | None = None,
    student_heads: float | None = None,
    student_width: float | None = None,
    student_by: str | None = None,
    store_only: bool = False,
    resume: bool = False,
    reporter: Reporter | None = None,
) -> DistilResult:
    """Train a student towards a teacher, as a configuration says: that of `tightfit.train`, and the section `distil`.

    The logits of all tokens never exist, neither the student's nor the teacher's. The validation loss is the
    cross-entropy of the text held out. Everything else is as in `tightfit.train`: files, signals, `reporter`.

    Args:
        config: The path of a YAML file, or a `Config`.
        overrides: Texts `key=value`, laid over the configuration.
        teacher: A run's folder, a Hugging Face folder or a name. This and the keywords up to `student_by` are keys of
            the section `distil`; None leaves what the configuration says.
        teacher_dtype: The dtype of the teacher's weights.
        divergence: As for `tightfit.ops.distillation_loss`, like `beta`, `temperature` and `hard_weight`.
        hidden_weight: The weight of the loss between hidden states.
        store: A folder. The teacher first writes parts of its distributions there, within the same budget, and leaves
            memory. A complete store is used as it is; an interrupted one goes on. None: the teacher runs beside the
            student in each step, and its weights and its forward are part of the plan for `memory.budget`.
        store_method: How tokens are chosen for the store.
        k: The number of tokens that are stored of each distribution.
        seed: The seed of sampled tokens.
        student_layers: The share of the teacher's layers that the student loses. With it or one of the next three, the
            student begins as the teacher without these parts, written to `output.folder`/student.
        student_ffn: The share of each MLP's channels that it loses.
        student_heads: The share of each layer's key heads that it loses, with their query heads.
        student_width: The share of hidden channels that it loses.
        student_by: How parts are ranked.
        store_only: End when the store is complete.
        resume: As for `tightfit.train`, like `reporter`.

    Returns:
        The training's result (None with `store_only`), the store's figures (None without a store), the bytes of the
        teacher that were in memory during the steps, and a report of teacher and student.

    Raises:
        InputError: The configuration, the teacher, its tokenizer or the store is wrong.
        CannotFit: The budget has no room.

    Example:
        >>> import tempfile, tightfit
        >>> from pathlib import Path
        >>> from tightfit.training.config import parse_config
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "corpus.txt").write_text("To be, or not to be, that is the question.\\n" * 200)
        >>> shape = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 300}
        >>> data = {"source": str(folder / "corpus.txt"), "sequence_length": 32, "vocab_size": 300}
        >>> training = {"max_steps": 2, "batch_size": 4, "device": "cpu"}
        >>> raw = {"model": shape, "data": data, "training": training, "output": {"folder": str(folder / "teacher")}}
        >>> _ = tightfit.train(parse_config(raw))
        >>> student = [f"output.folder={folder}/student", f"data.tokenizer={folder}/teacher", "model.hidden_size=16"]
        >>> result = tightfit.distil(parse_config(raw), student, teacher=folder / "teacher", temperature=2.0)
        >>> result.teacher_bytes > 0
        True
    """
    named = {
        "teacher": None if teacher is None else str(teacher),
        "teacher_dtype": teacher_dtype,
        "divergence": divergence,
        "beta": beta,
        "temperature": temperature,
        "hard_weight": hard_weight,
        "hidden_weight": hidden_weight,
        "store": None if store is None else str(store),
        "store_method": store_method,
        "k": k,
        "seed": seed,
        "student_layers": student_layers,
        "student_ffn": student_ffn,
        "student_heads": student_heads,
        "student_width": student_width,
        "student_by": student_by,
    }
    keywords = [f"distil.{name}={json.dumps(value)}" for name, value in named.items() if value is not None]
    settings = _resolved(config, [*overrides, *keywords])
    distillation = Distillation(_section(settings), student_shape_of(settings))
    if distillation.cut is not None and distillation.folder is not None:
        settings = with_student(settings, distillation.cut, distillation.folder)
    if store_only:
        distillation.cut = None  # a store needs no student
        return _store_alone(settings, distillation, reporter or SilentReporter())
    teacher_at = distillation.folder  # a teacher that is not there is said before anything is measured or read
    found = run_training(settings, distillation, reporter=reporter, resume=resume)
    return DistilResult(found, distillation.figures, distillation.teacher_bytes, teacher_at, distillation.held_out)


def _resolved(config: str | Path | Config, overrides: Sequence[str]) -> Config:
    if isinstance(config, Config):
        return parse_config(config.model_dump(mode="json"), overrides)
    return load_config(config, overrides)


def _section(config: Config) -> DistilConfig:
    """Raises `ConfigError` where there is no section `distil`, or nothing to learn from."""
    section = config.distil
    if section is None or (section.teacher is None and section.store is None):
        raise ConfigError("distil.teacher is not given: give a run's folder, a Hugging Face folder or a name")
    return section


def _store_alone(config: Config, distillation: "Distillation", reporter: Reporter) -> DistilResult:
    section, training = distillation.section, config.training
    if section.store is None:
        raise ConfigError("--store-only writes distil.store, which is not given: give it a folder")
    if config.memory.allocator is not None:
        set_allocator(config.memory.allocator)
    device = lookup_present(None if training.device == "auto" else training.device, notice=reporter.on_note)
    with threads(training.num_threads):
        data = prepare_data(config.data, config.model, objective=training.objective, notice=reporter.on_note)
        distillation.prepared(data, config, device, reporter)
    return DistilResult(None, distillation.figures, 0)


@dataclass
class Distillation(Purpose):
    """A training's purpose: to follow a teacher. Mutable: `figures` of the store, once it is complete."""

    section: DistilConfig
    cut: StudentShape | None = None
    figures: StoreFigures | None = None
    teacher_bytes: int = 0
    held_out: Tensor | None = None
    _teacher: nn.Module | None = field(default=None, repr=False)
    _digest: str = ""
    _vocabulary: int = 0  # of the teacher that has written the store

    name = "a distillation"

    @cached_property
    def folder(self) -> Path | None:
        """The teacher's folder, None where a complete store is to do without. Raises `ModelError`."""
        return None if self.section.teacher is None else teacher_folder(self.section.teacher)

    def prepared(self, data: PreparedData, config: Config, device: DeviceSpec, reporter: Reporter) -> PreparedData:
        """The data, with the teacher's entries if they come from a store."""
        if data.validation.is_even and len(data.validation):
            self.held_out = data.validation.batch(range(min(len(data.validation), HELD_OUT_ROWS)))["input_ids"]
        if data.objective == "dpo":
            raise ConfigError("training.objective dpo learns from preference pairs: distil takes causal or sft data")
        if self.folder is not None:
            demand_same_tokenizer(data.tokenizer, teacher_tokenizer(self.folder), self.folder)
            self._digest = teacher_digest(self.folder)
            if self.cut is not None:
                self.cut.write(self.folder, self._digest, data.training, data.fingerprint, reporter)
        if self.section.store is None:
            return data
        store, self.figures = complete_store(
            config, data, device, self._digest or None, lambda: self._loaded(data, config), reporter.on_note
        )
        self._let_go()
        self._digest = store.identity.teacher
        self._vocabulary = store.identity.vocabulary
        return replace(data, training=StoredSamples(data.training, store))

    @property
    def identity(self) -> Mapping[str, str]:
        return {"distil.teacher": self._digest}

    def begin(self, model: nn.Module, data: PreparedData, config: Config) -> None:
        head = head_of(model)
        demand_plain_logits(model, "the student")
        if self.section.store is not None:
            if len(head.weight) != self._vocabulary:
                raise ModelError(
                    f"the student's head has {len(head.weight)} tokens and the teacher's {self._vocabulary}: set "
                    f"model.vocab_size to {self._vocabulary}, or choose a student with the teacher's vocabulary"
                )
            return
        self._teacher = self._loaded(data, config)
        self.teacher_bytes = storage_bytes(held_by([self._teacher]))
        demand_same_vocabulary(head, head_of(self._teacher))
        if self.section.hidden_weight:
            self._project(model, head, head_of(self._teacher), config.training.seed)

    def loss(self, data: PreparedData, config: Config) -> Objective:
        if self.section.store is not None:
            return StoredDistillationLoss(self.section)
        assert self._teacher is not None, "a training begins before its loss is taken"
        return DistillationLoss(self._teacher, self.section)

    def held_out_loss(self, data: PreparedData, config: Config) -> Objective:
        return HeldOutLoss()

    def to(self, device: str) -> None:
        if self._teacher is not None:
            self._teacher.to(device)

    def end(self, model: nn.Module) -> None:
        if hasattr(model, PROJECTION):
            delattr(model, PROJECTION)
        self._let_go()

    def _loaded(self, data: PreparedData, config: Config) -> nn.Module:
        """The teacher on the CPU, after the questions that a model has to answer before it reads the data."""
        assert self.folder is not None, "a teacher is given where one is needed"
        teacher = load_teacher(self.folder, self.section.teacher_dtype)
        demand_plain_logits(teacher, "the teacher")
        check_fits(data.tokenizer, vocabulary_size(teacher), config.data.sequence_length, position_limit(teacher))
        if config.data.packing != "none":
            demand_boundaries(teacher, vocabulary=data.tokenizer.vocab_size, longest=config.data.sequence_length)
        return teacher

    def _let_go(self) -> None:
        """The teacher's memory, back to Python and the device."""
        self._teacher = None
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    @staticmethod
    def _project(model: nn.Module, head: nn.Linear, teacher: nn.Linear, seed: int) -> None:
        """A projection of the student's last hidden states, where the teacher's have another width."""
        widths = head.in_features, teacher.in_features
        if widths[0] == widths[1]:
            return
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed the cards too
            projection = nn.Linear(*widths, bias=False, dtype=head.weight.dtype)
        model.add_module(PROJECTION, projection)
