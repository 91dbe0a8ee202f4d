"""The run's folder: the only file that writes what a training leaves on disk.

A file is written under a temporary name and then renamed, so that a reader sees a whole file or none. Only
metrics.jsonl grows, a whole line at a time.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from tightfit.data.tokenizer import TOKENIZER_FILE, TextTokenizer
from tightfit.errors import OutputError
from tightfit.models.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tightfit.models.saving import CONFIG_FILE, RUN_CONFIG, WEIGHTS_FILE, save_model

CONFIG, PLAN, METRICS, RESULT = RUN_CONFIG, "plan.json", "metrics.jsonl", "result.json"
PICTURE, PAGE = "memory.png", "report.html"
RUN_FILES = (
    CONFIG,
    PLAN,
    METRICS,
    RESULT,
    PICTURE,
    PAGE,
    TOKENIZER_FILE,
    CONFIG_FILE,
    WEIGHTS_FILE,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    "generation_config.json",
)
_WEIGHTS = "model*.safetensors*"  # large models of transformers come in several files with an index


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def claim(self, *, overwrite: bool) -> None:
        """Make sure that the run can be written here, before anything expensive happens.

        Raises `OutputError` where the folder cannot be made or written, or holds a run and `overwrite` is False.
        """
        with self._writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path) as probe:
                probe.write(b"x")
        earlier = self._earlier()
        if earlier and not overwrite:
            raise OutputError(
                f"{self.path}: holds an earlier run ({earlier[0].name}): choose another output.folder, or set "
                "output.overwrite to true"
            )

    def clear(self) -> None:
        """Remove the files of an earlier run, and nothing else."""
        for path in self._earlier():
            with self._writing(path):
                path.unlink()

    def write(self, name: str, content: str | bytes) -> Path:
        """A whole file, under its name only when it is complete. Raises `OutputError`."""
        data = content.encode() if isinstance(content, str) else content
        target = self.path / name
        part = target.with_name(f".{name}.part")
        with self._writing(target):
            try:
                with part.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(part, target)
            finally:
                part.unlink(missing_ok=True)
        return target

    def append(self, name: str, line: str) -> None:
        """One more line at the end of a file."""
        with self._writing(self.path / name), (self.path / name).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def write_tokenizer(self, tokenizer: TextTokenizer) -> None:
        self._write_files(tokenizer.save)

    def write_model(self, model: nn.Module) -> None:
        """Weights and config. Raises `OutputError`."""
        self._write_files(lambda folder: save_model(model, folder))

    def _write_files(self, write: Callable[[Path], None]) -> None:
        """What `write` puts in a folder, moved here when all of it is there."""
        with self._writing(self.path), tempfile.TemporaryDirectory(dir=self.path, prefix=".part-") as part:
            written = Path(part)
            write(written)
            for file in sorted(written.iterdir()):
                file.chmod(_usual_mode(written))  # safetensors lets nobody but the owner read
                os.replace(file, self.path / file.name)

    def _earlier(self) -> list[Path]:
        named = [self.path / name for name in RUN_FILES]
        return [path for path in dict.fromkeys([*named, *self.path.glob(_WEIGHTS)]) if path.is_file()]

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(
                f"{path}: cannot be written: {error.strerror or error}: choose another output.folder"
            ) from error


def _usual_mode(folder: Path) -> int:
    """The permissions that a new file gets."""
    probe = folder.with_name(f"{folder.name}.probe")
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    return mode
