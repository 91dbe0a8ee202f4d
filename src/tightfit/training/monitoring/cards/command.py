"""`tightfit.run`: a command as it is, on cards that are not there, or on those of this machine."""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tightfit.devices.nullcard.build import installed_torch
from tightfit.devices.nullcard.card import Card, card_of, environment
from tightfit.errors import DeviceError, InputError, OutputError
from tightfit.training.monitoring.cards.records import SETTINGS, CardRunRecord, RankOfRun, RunSettings
from tightfit.units import format_bytes, parse_bytes

STEPS = 3  # by default: the first has no states yet, in the second DDP makes its buckets anew
COPIED = 1 << 20  # bytes: larger copies are not made where numbers are not true, so that weights are not loaded
TIMED_OUT, INTERRUPTED = 124, 130  # exit codes, as those of `timeout` and of a shell
SIGNALLED = 128  # and the signal's number, of a command that a signal ended, as in a shell
PATIENCE = 10.0  # seconds that a command has for its own end
START = Path(__file__).parent / "start"
HERE = "cuda"  # the name of this machine's own card
# Asked in a process of its own: one that looks at a card takes some of its memory.
ASKED = """
import json, torch
card = torch.cuda.get_device_properties(0)
found = (card.name, card.total_memory, (card.major, card.minor), card.multi_processor_count, torch.cuda.device_count())
print("\\n" + json.dumps(found))
"""


class CardRun(CardRunRecord):
    """The result of `tightfit.run`; it can be printed and written."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self, path: str | Path) -> None:
        """Write the record to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        from tightfit.training.monitoring.cards.describe import describe_run

        return describe_run(self)


def run(
    command: Sequence[str],
    *,
    device: str,
    memory: int | str | None = None,
    count: int = 1,
    steps: int = STEPS,
    values: bool = False,
    load: bool = False,
    snapshot: str | Path | None = None,
    timeout: float | None = None,
    quiet: bool = False,
) -> CardRun:
    """Run a command, unchanged, on cards that are not there (or on this machine's), and say what it takes of them.

    PyTorch's own CUDA build runs on a CUDA runtime that computes nothing. So allocated and reserved bytes are
    measurements of PyTorch's own allocator. Integers and booleans are true (masks, positions, labels, counts), other
    numbers are zeros or old memory: lines that read them are named in `read_values`. Linux, a C compiler and PyTorch's
    ordinary (CUDA) wheel are needed.

    Args:
        command: words, as `subprocess.run` takes them: `["python", "train.py", "--lr", "1e-4"]`, or `torchrun ...`.
        device: a card's name or figures, as `--device` takes them. `"cuda"`: the cards of this machine, whose kernels
            run, so that `memory`, `count`, `values` and `load` have no meaning.
        memory: all of its memory, bytes or text (`"8GiB"`), instead of its own.
        count: the number of cards.
        steps: the command is ended after so many optimizer steps of each process; 0: it runs to its own end.
        values: true numbers, computed by the CPU's kernels: slow, for the few steps wanted.
        load: make large copies to the card too, as for weights that are read from disk. `values` does it in any case.
        snapshot: write PyTorch's own memory snapshot there, for its memory viewer.
        timeout: seconds after which the command is ended; None: never.
        quiet: take what the command prints away.

    Returns:
        The record: what it took, whether it fits, and each rank's part.

    Raises:
        DeviceError: the card is not known, or cannot be made here; or this machine has none.
        InputError: there is no such program, or a number makes no sense.
        OutputError: `snapshot` cannot be written.

    Example:
        >>> import tightfit
        >>> tightfit.run([], device="rtx4090")
        Traceback (most recent call last):
        tightfit.errors.InputError: no command: give the words of one, such as ["python", "train.py"]
    """
    here = device == HERE
    if here and (memory is not None or count != 1 or values or load):
        raise InputError("on this machine's own cards (cuda) all numbers are true and their memory is their own: "
                         "leave memory, count, values and load out, or name a card that is not here")  # fmt: skip
    card = _card_here() if here else _card(device, memory, count)
    if not command:
        raise InputError('no command: give the words of one, such as ["python", "train.py"]')
    if steps < 0:
        raise InputError(f"steps is {steps}, wanted a number from 0 on (0: to the command's own end)")
    if timeout is not None and timeout <= 0:
        raise InputError(f"timeout is {timeout}, wanted seconds above zero")
    program = shutil.which(command[0])
    if program is None:
        raise InputError(f"{command[0]}: there is no such program")
    if snapshot is not None:
        _check_writable(Path(snapshot))
    card = card if values or load else replace(card, most_copied=COPIED)
    variables = {**os.environ} if here else environment(card)
    with tempfile.TemporaryDirectory(prefix="tightfit-run-") as folder:
        written = None if snapshot is None else str(Path(snapshot).absolute())
        settings = RunSettings(folder, installed_torch().version, steps, values, written, here)
        variables[SETTINGS] = json.dumps(vars(settings))
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(START), variables.get("PYTHONPATH")]))
        code, ended = _ran(program, command, variables, timeout, quiet)
        files = sorted(Path(folder).glob("*.json"))
        ranks = tuple(RankOfRun.from_dict(json.loads(file.read_text(encoding="utf-8"))) for file in files)
    found = _result(card, command, _of_training(ranks), code, values or here, ended)
    return replace(found, here=here)


def _card_here() -> Card:
    asked = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True)
    if asked.returncode:
        why = asked.stderr.strip().splitlines()[-1:] or [f"exit code {asked.returncode}"]
        raise DeviceError(f"this machine has no card that PyTorch can use: {why[0]}")
    name, memory, (major, minor), multiprocessors, count = json.loads(asked.stdout.splitlines()[-1])
    return Card(name, memory, (major, minor), multiprocessors, count)


def _card(device: str, memory: int | str | None, count: int) -> Card:
    if count < 1:
        raise InputError(f"count is {count}, wanted a number of cards from 1 on")
    card = replace(card_of(device, parse_bytes(memory) if isinstance(memory, str) else memory), count=count)
    if card.memory_bytes <= card.context_bytes:
        raise DeviceError(
            f"{card.name} with {format_bytes(card.memory_bytes)}: CUDA itself takes {format_bytes(card.context_bytes)} "
            "of it: give it more memory"
        )
    return card


def _check_writable(target: Path) -> None:
    if target.is_dir() or not os.access(target.absolute().parent, os.W_OK):
        raise OutputError(f"{target}: cannot be written: name a file in a folder that is there")


def _ran(
    program: str, command: Sequence[str], variables: dict[str, str], timeout: float | None, quiet: bool
) -> tuple[int, str]:
    """The command's exit code, and why it was ended from here, if it was."""
    output = subprocess.DEVNULL if quiet else None
    started = subprocess.Popen(
        [program, *command[1:]], env=variables, stdout=output, stderr=output, start_new_session=timeout is not None
    )
    # A kernel that does not run leaves old bytes, so a count that a program reads may be anything: where the host's
    # memory ends, this process ends first.
    with suppress(OSError):
        Path(f"/proc/{started.pid}/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        code = started.wait(timeout)
        return (code if code >= 0 else SIGNALLED - code), ""
    except subprocess.TimeoutExpired:
        _end(started)
        return TIMED_OUT, f"ended after {timeout:g} seconds"
    except KeyboardInterrupt:  # the terminal has sent it to the command too
        with suppress(subprocess.TimeoutExpired):
            started.wait(PATIENCE)
        _end(started)
        return INTERRUPTED, "interrupted"


def _end(started: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if started.poll() is None:
            with suppress(OSError):
                leads = os.getpgid(started.pid) == started.pid  # a group of its own, with all that it started
                send = os.killpg if leads else os.kill
                send(started.pid, number)
            with suppress(subprocess.TimeoutExpired):
                started.wait(PATIENCE)


def _of_training(ranks: tuple[RankOfRun, ...]) -> tuple[RankOfRun, ...]:
    """Those that trained or ran out of memory; where none did, all that took memory of a card."""
    trained = tuple(rank for rank in ranks if rank.model or rank.out_of_memory is not None)
    return trained or tuple(rank for rank in ranks if rank.peak_bytes)


def _result(
    card: Card, command: Sequence[str], ranks: tuple[RankOfRun, ...], code: int, values: bool, ended: str
) -> CardRun:
    refused = next((rank.out_of_memory for rank in ranks if rank.out_of_memory is not None), None)
    highest = max(ranks, key=lambda rank: (rank.out_of_memory is not None, rank.peak_bytes), default=None)
    came_through = bool(ranks) and (code == 0 or all(rank.steps for rank in ranks))
    notes = [] if not ended else [f"The command was {ended}."]
    if not ranks:
        notes.append("The command took no memory of a card: no process of it used CUDA to its end.")
    elif not any(rank.model for rank in ranks):
        notes.append("No model was called with gradients, so there are no steps: the peak is of the whole process.")
    caught = [each for rank in ranks for each in rank.caught]
    if caught:
        times = "once" if len(caught) == 1 else f"{len(caught)} times, first"
        where = f" at {caught[0].at}" if caught[0].at else ""
        notes.append(
            f"The card had no room {times}{where} ({format_bytes(caught[0].asked_bytes)} more); the command went on."
        )
    if code and refused is None and not ended:
        why = "" if values else " Not all numbers were true: if that is why, --values computes them."
        notes.append(f"The command failed with exit code {code}, which is its own.{why}")
    return CardRun(
        fits=False if refused is not None else True if came_through else None,
        device=card.name,
        count=card.count,
        memory_bytes=card.memory_bytes,
        context_bytes=card.context_bytes,
        peak_bytes=max((rank.peak_bytes for rank in ranks), default=0),
        reserved_bytes=max((rank.reserved_bytes for rank in ranks), default=0),
        host_peak_bytes=max((rank.host_peak_bytes for rank in ranks), default=0),
        by_category=highest.by_category if highest else {},
        steps=highest.steps if highest else (),
        ranks=ranks,
        out_of_memory=refused,
        read_values=highest.read_values if highest else (),
        values=values,
        exit_code=code,
        command=tuple(command),
        notes=tuple(notes),
    )


@contextmanager
def card(device: str, memory: int | str | None = None, count: int = 1) -> Iterator[None]:
    """Bring a card that is not there into this process, before it imports PyTorch. It stays to the process's end.

    Args:
        device: a card's name or figures, as `--device` takes them.
        memory: all of its memory, bytes or text, instead of its own.
        count: the number of cards.

    Raises:
        DeviceError: the card is not known, or cannot be made here.
        InputError: this process has imported PyTorch already.

    Example:
        >>> import torch, tightfit
        >>> from tightfit.errors import InputError
        >>> try:
        ...     with tightfit.card("rtx4090"):
        ...         pass
        ... except InputError as error:
        ...     print(str(error).partition(",")[0])
        this process has PyTorch already
    """
    wanted = _card(device, memory, count)
    if "torch" in sys.modules:
        raise InputError(
            "this process has PyTorch already, with the CUDA that it found: enter tightfit.card before the first "
            f"import of torch, or start the script with tightfit run --device {device} -- python SCRIPT"
        )
    variables = environment(wanted)
    os.environ.update({name: variables[name] for name in variables if variables[name] != os.environ.get(name)})
    for path in variables["LD_PRELOAD"].split(
        ":"
    ):  # by their names PyTorch's libraries find these, being there already
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    yield
