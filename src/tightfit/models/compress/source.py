"""A model that is to be compressed: what a run has trained, or a folder that `transformers` reads."""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tightfit.errors import SourceError, why_unreadable
from tightfit.models.adapters import ADAPTER_CONFIG, is_adapted, merged
from tightfit.models.decoder import Decoder
from tightfit.models.dtypes import WEIGHT_DTYPES, convert_weights
from tightfit.models.export import export_model
from tightfit.models.layouts import to_transformers
from tightfit.models.loading import build_model, weights_dtype
from tightfit.models.own import CONFIG_FILE, decoder_config, is_own, stated_dtype
from tightfit.models.pretrained import transformers_config, transformers_package
from tightfit.training.config.schema import PretrainedModel
from tightfit.training.data.tokenizer import TextTokenizer, load_tokenizer
from tightfit.training.data.tokenizer_files import tokenizer_files
from tightfit.training.run_folders.loading import load_trained, tokenizer_sources
from tightfit.training.run_folders.records import is_run

Kind = Literal["run", "hugging_face"]
WANTED = "give the folder of a run, or a Hugging Face folder with weights"
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
# Of tokenizers without a tokenizer.json; copied as they are.
OLD_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt")


@dataclass(frozen=True)
class Source:
    """A folder with a model. `kind` is `run` for a folder that tightfit wrote, `hugging_face` for any other."""

    folder: Path
    kind: Kind

    def model(self, dtype: str | None = None) -> nn.Module:
        """The model on the CPU in evaluation mode, adapters merged. `dtype` is `fp32` or `bf16`; None leaves the
        weights as they are stored (fp16 is read as fp32). Raises `ModelError`.
        """
        if self.kind == "run" or (self.folder / ADAPTER_CONFIG).is_file():
            model, _ = load_trained(self.folder)
            model = merged(model) if is_adapted(model) else model
            if dtype is not None:
                convert_weights(model, WEIGHT_DTYPES[dtype])
        else:
            section = {"path": str(self.folder), **({} if dtype is None else {"dtype": dtype})}
            model = build_model(PretrainedModel.model_validate(section))
        return model.eval()

    def transformers_model(self, dtype: str | None = None) -> nn.Module:
        """The model as `transformers` loads it: a reference decoder with its weights under their names there, and
        equal logits. Raises `ModelError` for a shape that no architecture of `transformers` expresses.
        """
        model = self.model(dtype)
        if not isinstance(model, Decoder):
            return model
        with tempfile.TemporaryDirectory(prefix="tightfit-") as folder:
            export_model(model, folder)
            del model
            return build_model(PretrainedModel(path=folder)).eval()

    def transformers_shape(self) -> tuple[Any, torch.dtype]:
        """The configuration and the weights' dtype of `transformers_model`. Reads no weights, unless the folder has
        adapters, or is of a run that was killed. Raises `ModelError`.
        """
        if is_own(self.folder):
            shape = decoder_config(self.folder)
            config = transformers_package().AutoConfig.for_model(**to_transformers(shape))
            return config, WEIGHT_DTYPES[stated_dtype(vars(shape))]
        if (self.folder / CONFIG_FILE).is_file() and not (self.folder / ADAPTER_CONFIG).is_file():
            section = PretrainedModel(path=str(self.folder))
            return transformers_config(section.path), WEIGHT_DTYPES[weights_dtype(section)]
        model: Any = self.transformers_model()
        return model.config, next(model.parameters()).dtype

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """Raises `DataError` where the folder has none."""
        return load_tokenizer(self.folder)

    @property
    def quantised(self) -> str | None:
        """How the weights are quantised, as config.json says; None where they are not."""
        said = self._config.get("quantization_config")
        if not said:
            return None
        return str(said.get("quant_method") or "quantization_config") if isinstance(said, dict) else str(said)

    def refuse_quantised(self, command: str) -> None:
        """Raise `SourceError` where the weights are quantised: a command needs them in floating point."""
        if self.quantised is not None:
            raise SourceError(
                f"{self.folder}: is quantised already ({self.quantised}), and {command} needs weights in floating "
                "point: give the folder that it was made from"
            )

    @property
    def weight_bytes(self) -> int:
        """Bytes of the files with weights."""
        return weight_bytes(self.folder)

    def write(self, model: nn.Module, folder: str | Path, *, beside: Mapping[str, bytes] | None = None) -> str:
        """Write a model that was made from this one to a new folder that `transformers` reads, with the tokenizer's
        files and those of `beside`. Returns the name of the architecture. The folder is complete or not there.

        Raises `OutputError` where it holds files or cannot be written, and `ModelError`.
        """
        files = self.tokenizer_files()
        end = load_tokenizer(self.folder).end_of_text if files and self.kind == "run" else None
        return export_model(model, folder, end_of_text=end, beside={**files, **(beside or {})})

    def tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer's files by name; empty where there is none."""
        files = tokenizer_files(self.folder, *tokenizer_sources(self.folder))
        old = {name: self.folder / name for name in OLD_TOKENIZERS}
        return {**{name: path.read_bytes() for name, path in old.items() if path.is_file()}, **files}

    @property
    def _config(self) -> dict[str, Any]:
        return read_config(self.folder)


def open_source(path: str | Path) -> Source:
    """The model in a folder: a run's, also of one that was killed, or one that `transformers` reads.

    Reads no weights. Raises `SourceError` for anything else.
    """
    folder = Path(path)
    if not folder.exists():
        raise SourceError(f"{folder}: no such folder: {WANTED}")
    if not folder.is_dir():
        raise SourceError(f"{folder}: is a file: {WANTED}")
    read_config(folder)
    if is_run(folder) or is_own(folder):
        return Source(folder, "run")
    if (folder / ADAPTER_CONFIG).is_file():
        return Source(folder, "hugging_face")
    if not (folder / CONFIG_FILE).is_file():
        raise SourceError(f"{folder}: holds neither a run nor a {CONFIG_FILE}: {WANTED}")
    if not weight_bytes(folder):
        raise SourceError(f"{folder}: has a {CONFIG_FILE} and no weights: {WANTED}")
    return Source(folder, "hugging_face")


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of config.json; empty where there is none. Raises `SourceError` where it cannot be read."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}: cannot be read: {why_unreadable(error)}: {WANTED}") from error
    if not isinstance(raw, dict):
        raise SourceError(f"{path}: holds no mapping: {WANTED}")
    return raw


def weight_bytes(folder: str | Path) -> int:
    """Bytes of the files with weights in a folder; 0 where there are none."""
    return sum(path.stat().st_size for kind in WEIGHTS for path in Path(folder).glob(kind))
