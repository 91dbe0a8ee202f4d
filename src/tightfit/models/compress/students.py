"""A student that is cut out of its teacher: the teacher's weights without some layers, channels and heads."""

import json
import re
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from torch import Tensor

from tightfit.errors import ConfigError, InputError
from tightfit.models.compress.pruning.anatomy import Anatomy, Ratios, removal_of
from tightfit.models.compress.pruning.importance import kept_parts, scores_of
from tightfit.models.compress.pruning.slicing import sliced
from tightfit.models.compress.source import open_source
from tightfit.models.compress.texts import row_length
from tightfit.models.decoder_config import DecoderConfig
from tightfit.training.config import Config
from tightfit.training.config.schema import PretrainedModel
from tightfit.training.data.samples import Samples
from tightfit.training.reporter import Reporter

KEY = "distil.student_"
FOLDER = "student"  # in output.folder
CALIBRATION_ROWS = 32  # samples that activations are measured on
RECORD = "student.json"  # what the student in a folder was cut out of, and how
_PLAIN = DecoderConfig()


@dataclass(frozen=True)
class StudentShape:
    """The shares that go, how parts are ranked, and the folder where the student begins, which is `model.path` of its
    training.
    """

    ratios: Ratios
    by: Literal["activation", "norm"]
    folder: Path
    dtype: str | None

    def write(self, teacher: Path, digest: str, samples: Samples, data: str, reporter: Reporter) -> None:
        """Write the student, unless the folder has it: of the teacher with that digest, by these shares, and by its
        activations on the first of these samples. `data` is their fingerprint. Raises `InputError` and its like.
        """
        said = {"teacher": digest, "data": data, "ratios": asdict(self.ratios), "by": self.by, "dtype": self.dtype}
        record = self.folder / RECORD
        if record.is_file():
            if json.loads(record.read_text("utf-8")) == said:
                return
            shutil.rmtree(self.folder)
        source = open_source(teacher)
        source.refuse_quantised("distil")
        shape, _ = source.transformers_shape()
        anatomy = Anatomy.of(shape)
        try:
            removal = removal_of(anatomy, self.ratios)
        except InputError as error:
            raise ConfigError(re.sub(r"--(?=[a-z])", KEY, str(error))) from None
        model = source.transformers_model(self.dtype)
        before = sum(parameter.numel() for parameter in model.parameters())
        rows = None if self.by == "norm" else first_rows(samples, row_length(model))
        model = sliced(model, anatomy, removal, kept_parts(scores_of(model, anatomy, self.by, rows), anatomy, removal))
        source.write(model, self.folder, beside={RECORD: json.dumps(said).encode()})
        after = sum(parameter.numel() for parameter in model.parameters())
        reporter.on_note(
            f"the student is cut out of the teacher: {after:,} of {before:,} parameters, without "
            f"{removal.in_words(anatomy)}, ranked by {self.by}"
        )


def first_rows(samples: Samples, longest: int) -> list[Tensor]:
    """The tokens of the first samples, without padding."""
    count = min(CALIBRATION_ROWS, len(samples))
    ids, lengths = samples.batch(range(count))["input_ids"], samples.lengths[:count].tolist()
    return [row[: min(length, longest)] for row, length in zip(ids, lengths, strict=True)]


def student_shape_of(config: Config) -> StudentShape | None:
    """The cut that a configuration asks for; None where it asks for none. Raises `ConfigError` where `model` names
    another student.
    """
    section, model = config.distil, config.model
    shares = {} if section is None else {f.name: getattr(section, f"student_{f.name}") for f in fields(Ratios)}
    if section is None or all(share is None for share in shares.values()):
        return None
    folder = Path(config.output.folder) / FOLDER
    given = f"{KEY}{next(name for name, share in shares.items() if share is not None)}"
    if isinstance(model, PretrainedModel):
        if model != PretrainedModel(path=str(folder), dtype=model.dtype):
            raise ConfigError(
                f"model.path {model.path!r} is a student, and {given} cuts one out of the teacher: leave one of them "
                "out"
            )
    elif said := [name for name, value in vars(model).items() if name != "dtype" and value != vars(_PLAIN)[name]]:
        raise ConfigError(
            f"model.{said[0]} says a student's shape, and {given} cuts the student out of the teacher: leave one of "
            "them out"
        )
    return StudentShape(Ratios(**shares), section.student_by, folder, None if model.dtype == "auto" else model.dtype)


def with_student(config: Config, cut: StudentShape, teacher: Path) -> Config:
    """The configuration with the student's folder as its model. A tokenizer that is the model's is the teacher's."""
    model = PretrainedModel(path=str(cut.folder), dtype=config.model.dtype)
    data = config.data
    if data.tokenizer == "model":
        data = data.model_copy(update={"tokenizer": str(teacher)})
    return config.model_copy(update={"model": model, "data": data})
