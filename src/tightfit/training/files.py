"""The files of a run: those before its first step, its results, and where they go for lack of room."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from tightfit.errors import OutputError
from tightfit.models.masks import masks_bytes, masks_of
from tightfit.models.saving import saved_bytes
from tightfit.names import MASKS
from tightfit.training.config import Config, dump_config
from tightfit.training.data.tokenizer import TextTokenizer
from tightfit.training.fitting import Fit
from tightfit.training.pictures import most_bytes, write_pictures
from tightfit.training.reporter import Reporter
from tightfit.training.result import StepMetrics, TrainResult
from tightfit.training.storage import CONFIG, METRICS, PLAN, RESULT, RUN_FILES, RunFolder
from tightfit.units import format_bytes

# Beside the user's own folders: those for temporary files, on a disk and in memory (Linux; file-hierarchy(7)).
TEMPORARY = ("/var/tmp", "/dev/shm")


@dataclass(frozen=True)
class RunFiles:
    """The files of one run. The model is the one that moves."""

    config: Config
    tokenizer: TextTokenizer
    model: nn.Module
    fitted: Fit

    def demand_room(self, folder: RunFolder) -> None:
        """Raises `OutputError` unless all that will be written finds room."""
        texts = len(self._config()) + len(self._plan())
        texts += sum(len(text.encode()) for text in self.tokenizer.to_files().values())
        texts += sum(mask.numel() // 8 + 1 for mask in masks_of(self.model).values())
        blocks = len(RUN_FILES) * folder.block_bytes()  # a file fills whole ones
        files = texts + self._metrics_bytes() + most_bytes(self.fitted) + blocks
        folder.demand_room(saved_bytes(self.model) + files + self._checkpoint_bytes())

    def write_beginning(self, folder: RunFolder, *, is_resumed: bool) -> None:
        """Write the files that are known before the first step; only now do the files of an earlier run go.

        Of a resumed run, those stay that the resumed training needs, so that a kill at any moment leaves it what it
        goes on from.
        """
        folder.clear(keep=(CONFIG, METRICS) if is_resumed else (), checkpoints=not is_resumed)
        self._write_known(folder)

    def write_end(self, result: TrainResult, unwritten: Sequence[str], folder: RunFolder, reporter: Reporter) -> None:
        """Weights, pictures, and last the result: where it stands, the run is complete.

        `unwritten` are lines of metrics that found no room. Raises `OutputError` where something finds none now: the
        weights, the result and what they need are then wherever there is some, and the error says where.
        """
        try:
            folder.write_model(self.model)
        except OutputError as error:
            result, kept = self._keep_elsewhere(result, [*folder.lines(METRICS), *unwritten], error)
            reporter.on_end(result)
            raise kept from error
        try:
            if unwritten:
                folder.append(METRICS, unwritten)
            if result.interrupted:  # whoever sent the signal may not wait for pictures
                folder.write(RESULT, result.to_json())
            write_pictures(result, self.fitted, folder, reporter)
            if not result.interrupted:
                folder.write(RESULT, result.to_json())
        finally:
            reporter.on_end(result)

    def _keep_elsewhere(
        self, result: TrainResult, metrics: Sequence[str], error: OutputError
    ) -> tuple[TrainResult, OutputError]:
        tried = []
        for place in other_places(saved_bytes(self.model)):
            there = Path(tempfile.mkdtemp(prefix=f"tightfit-{Path(result.folder).name}-", dir=place))
            kept = replace(result, folder=str(there))
            try:
                self._write_all(kept, metrics, RunFolder(there))
            except OutputError:
                tried.append(str(place))
                shutil.rmtree(there, ignore_errors=True)
            else:
                return kept, OutputError(f"{error}. The weights are kept in {there}: move them when there is room")
        where = f", nor in {', '.join(tried)}" if tried else ", nor anywhere else that was looked at"
        size = format_bytes(saved_bytes(self.model))
        return result, OutputError(f"{error}. There was no room for {size} of weights there{where}: they are lost")

    def _write_all(self, result: TrainResult, metrics: Sequence[str], folder: RunFolder) -> None:
        self._write_known(folder)
        folder.write_model(self.model)
        folder.append(METRICS, metrics)
        folder.write(RESULT, result.to_json())

    def _write_known(self, folder: RunFolder) -> None:
        folder.write(CONFIG, self._config())
        folder.write_tokenizer(self.tokenizer)
        if removed := masks_of(self.model):
            folder.write(MASKS, masks_bytes(removed))
        if self.fitted.plan is not None:
            folder.write(PLAN, self._plan())

    def _checkpoint_bytes(self) -> int:
        """Of the checkpoints that are kept and the one that is being written. The one that a signal asks for is written
        if it finds room.
        """
        checkpoint = self.config.checkpoint
        if checkpoint.every_steps is None:
            return 0
        count = min(checkpoint.keep_last + checkpoint.keep_best + 1, self.config.training.max_steps)
        return count * self.fitted.state_bytes

    def _config(self) -> str:
        return dump_config(self.config)

    def _plan(self) -> str:
        return "" if self.fitted.plan is None else json.dumps(self.fitted.plan.to_dict(), indent=1) + "\n"

    def _metrics_bytes(self) -> int:
        training = self.config.training
        figure = -1 / 3e-300  # no float is written in more characters
        figures = figure, figure, figure, 2**63, figure, figure, 2**63, False, figure, figure
        longest = StepMetrics(training.max_steps, *figures)
        evaluations = training.max_steps // (training.evaluate_every or training.max_steps)
        return (training.max_steps // training.log_every + evaluations + 2) * (len(longest.to_json()) + 1)


def other_places(needed_bytes: int) -> Iterator[Path]:
    """Folders that can be written and have so much room: where the command runs, the user's own, temporary ones."""
    named = (Path.cwd(), Path.home(), Path(tempfile.gettempdir()), *map(Path, TEMPORARY))
    for place in dict.fromkeys(named):
        try:
            if shutil.disk_usage(place).free > needed_bytes:
                tempfile.TemporaryFile(dir=place).close()
                yield place
        except OSError:
            continue  # it is not there, or not for us
