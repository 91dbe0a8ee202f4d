"""The teacher of a distillation: its folder, its weights, its hash, and whether its tokenizer is the data's."""

import json
from pathlib import Path
from typing import Any

from torch import nn

from tightfit.errors import DataError, ModelError
from tightfit.models.compress.heads import head_of
from tightfit.models.compress.source import open_source
from tightfit.models.pretrained import demand_hub, find
from tightfit.ops.weights.low_bit import freeze_in_low_bits
from tightfit.training.data.content_hash import hash_files
from tightfit.training.data.tokenized import tokens_folder
from tightfit.training.data.tokenizer import TextTokenizer, load_tokenizer

KEY = "distil.teacher"
# What a folder's model is made of: these files decide its numbers.
_CONTENT = ("*.safetensors", "*.bin", "config.json", "adapter_config.json")
_SEGMENTING = ("normalizer", "pre_tokenizer")


def teacher_folder(path: str) -> Path:
    """The folder of a teacher: the one that is named, or the snapshot of a repository of the hub.

    Raises `ModelError` where there is none.
    """
    if Path(path).exists():
        return Path(path)
    try:
        place = find(path)
    except ModelError as error:
        raise ModelError(str(error).replace("model.path", KEY)) from None
    if not place.has_weights:
        raise ModelError(f"{KEY} {path!r} is a published model's shape without weights: give a folder with weights")
    return _snapshot(place.name)


def _snapshot(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(f"{KEY} {name!r} needs the package transformers: pip install 'tightfit[hf]'") from error
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except OSError:
        try:
            demand_hub(name)
        except ModelError as error:
            raise ModelError(str(error).replace("model.path", KEY)) from None
        return Path(snapshot_download(name, ignore_patterns=["*.gguf", "*.onnx", "*.msgpack", "*.h5"]))


def load_teacher(folder: Path, dtype: str) -> nn.Module:
    """The teacher on the CPU, in evaluation mode and frozen, its weights held in `dtype`: fp32, bf16, int8 or nf4.

    Raises `SourceError` and `ModelError`.
    """
    source = open_source(folder)
    source.refuse_quantised("distil")
    model = source.model(dtype if dtype in ("fp32", "bf16") else "bf16").eval().requires_grad_(False)
    if dtype in ("int8", "nf4"):
        freeze_in_low_bits(model, dtype, head=head_of(model))
    config: Any = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a cache of keys and values would be made for every batch
    return model


def teacher_digest(folder: Path) -> str:
    """The hash of the files that decide a teacher's numbers. Raises `ModelError` where there are none."""
    paths = sorted({path for pattern in _CONTENT for path in folder.glob(pattern)})
    if not any(path.suffix in (".safetensors", ".bin") for path in paths):
        raise ModelError(f"{KEY} {folder}: holds no weights: give the folder of a finished run, or of transformers")
    return hash_files(paths, tokens_folder() / "hashed")


def teacher_tokenizer(folder: Path) -> TextTokenizer:
    """Raises `DataError` where the folder has none."""
    try:
        return load_tokenizer(folder)
    except DataError as error:
        raise DataError(f"{KEY} {error}") from None


def demand_same_tokenizer(data: TextTokenizer, teacher: TextTokenizer, folder: Path) -> None:
    """Raise `DataError` unless both tokenizers have the same tokens by the same ids and cut text the same way.

    A divergence compares two distributions token by token, so each id has to mean one text.
    """
    todo = f"set data.tokenizer to {folder}"
    ours, theirs = data.tokens, teacher.tokens
    if ours != theirs:
        by_id = [{i: token for token, i in each.items()} for each in (ours, theirs)]
        first = next(i for i in sorted(by_id[0].keys() | by_id[1].keys()) if by_id[0].get(i) != by_id[1].get(i))
        own, other = (repr(each[first]) if first in each else "nothing" for each in by_id)
        raise DataError(
            f"the data's tokenizer is not the teacher's: token {first} is {own} for the data ({len(ours)} tokens) and "
            f"{other} for {KEY} {folder} ({len(theirs)} tokens): {todo}"
        )
    one, two = (json.loads(each.to_text()) for each in (data, teacher))
    for part in ("model", *_SEGMENTING):
        if _segmenting(one.get(part)) != _segmenting(two.get(part)):
            raise DataError(
                f"the data's tokenizer is not the teacher's: the tokens are the same and {part} is another, so text is "
                f"cut differently: {todo}"
            )


def _segmenting(part: Any) -> Any:
    """The settings that decide how text is split into tokens: merges in one of their two spellings, without the
    vocabulary.
    """
    if not isinstance(part, dict):
        return part
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in part.get("merges") or ()]
    return {**{name: value for name, value in part.items() if name != "vocab"}, "merges": merges}


def demand_same_vocabulary(student: nn.Linear, teacher: nn.Linear) -> None:
    """Raise `ModelError` unless both heads have the same rows."""
    rows, wanted = len(student.weight), len(teacher.weight)
    if rows != wanted:
        raise ModelError(
            f"the student's head has {rows} tokens and the teacher's {wanted}: set model.vocab_size to {wanted}, or "
            "choose a student with the teacher's vocabulary"
        )
