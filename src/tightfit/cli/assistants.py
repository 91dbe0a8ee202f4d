"""`mcp`: the questions of the command line as tools of an assistant, over the Model Context Protocol.

Each call is a command in a process and an empty folder of its own, with a limit of time. A model is a published name or
the text of a config.json, never a path; a log and a script are texts too.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tightfit.cli.ending import ends_in_order
from tightfit.errors import InputError, TightfitError
from tightfit.names import OPTIMIZERS

if TYPE_CHECKING:
    from mcp.server import MCPServer

COLUMNS = 120
LOG_BYTES = 2**20  # of a log, a script or its output
DEFAULT_SECONDS = 300
LINES = 200  # of a script's output with the report behind it
ANSWERED, INPUT_IS_WRONG = (0, 3), 2  # exit codes: done, and nothing fits
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
INSTRUCTIONS = (
    "Predicts the GPU memory and time of training or fine-tuning a transformer, from a dry run; needs no GPU and no "
    "weights. fit: what can be trained on a card, best first. estimate: the peak of one plain step. plan: the fastest "
    "step within a budget. doctor: why a log's out-of-memory happened. Peaks are bytes of a whole step."
)


def mcp(
    seconds: Annotated[
        int, typer.Option("--seconds", metavar="N", min=1, help="The longest that one answer may take.")
    ] = DEFAULT_SECONDS,
    allow_run: Annotated[
        bool,
        typer.Option("--allow-run", help="Offer the tool run too, which runs the assistant's script on this machine."),
    ] = False,
) -> None:
    """Serve fit, estimate, plan and doctor to an assistant, over stdin and stdout (Model Context Protocol).

    It needs the package mcp (pip install 'tightfit\\[mcp]'). Tools read
    nothing but the texts that they are passed, and write no file. In the
    settings of the assistant, the command is tightfit and its argument mcp.

    [dim]tightfit mcp[/]
    """
    with ends_in_order():
        server(seconds, allow_run).run("stdio")


def server(seconds: int = DEFAULT_SECONDS, allow_run: bool = False) -> "MCPServer":
    """The server with its tools. Raises `InputError` if mcp is not installed."""
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
        from mcp.types import ToolAnnotations
    except ImportError as error:
        raise InputError("an assistant's server needs the package mcp: pip install 'tightfit[mcp]'") from error
    from tightfit.version import package_version

    found = MCPServer("tightfit", instructions=INSTRUCTIONS, version=package_version(), log_level="ERROR")

    def offer(tool: Callable[..., str], *, read_only: bool) -> None:
        @functools.wraps(tool)
        def answered(*args: Any, **kwargs: Any) -> str:
            try:
                return tool(*args, **kwargs)
            except TightfitError as error:
                raise ToolError(str(error)) from error  # other exceptions are shown to nobody

        marked = ToolAnnotations(read_only_hint=read_only, open_world_hint=False)
        found.tool(annotations=marked, structured_output=False)(answered)

    tools = Tools(seconds)
    for tool in (tools.fit, tools.estimate, tools.plan, tools.doctor):
        offer(tool, read_only=True)
    if allow_run:
        offer(tools.run, read_only=False)
    return found


class Tools:
    """The tools. Their docstrings and parameters are what an assistant reads."""

    def __init__(self, seconds: int):
        self.seconds = seconds

    def fit(self, model: str, device: str, seq_len: int = 2048, batch_size: int = 1) -> str:
        """List how a model can be trained on a card: full weights, LoRA, optimizers, best first, with memory and speed.

        model: a published name such as llama-3.1-8b or "Qwen 2.5 7B", or the text of a Hugging Face config.json.
        device: a card such as rtx3060-12, "RTX 4090", t4, h100; "rtx3080,memory=20GiB" for other memory.
        """
        return self._asked("fit", model, device, seq_len, batch_size)

    def estimate(
        self, model: str, device: str, seq_len: int = 1024, batch_size: int = 1, precision: str = "bf16",
        optimizer: str = "adamw", adapter: str | None = None, base: str | None = None,
    ) -> str:  # fmt: skip
        """The peak memory and the time of one plain training step of a model on a card, and what the peak is made of.

        precision: fp32, or autocast to bf16 or fp16. optimizer: adamw, adamw_fused, adamw8bit, adafactor, sgd, ...
        adapter: LoRA alone is trained, such as "r=16,alpha=32". base: fp32, bf16, int8 or nf4 weights below it.
        model, device: as of fit.
        """
        more = {"precision": precision, "optimizer": optimizer, "adapter": adapter, "base": base}
        return self._asked("estimate", model, device, seq_len, batch_size, **more)

    def plan(
        self, model: str, device: str, budget: str = "100%", seq_len: int = 1024, batch_size: int = 1,
        precision: str = "bf16", optimizer: str = "adamw", adapter: str | None = None, base: str | None = None,
    ) -> str:  # fmt: skip
        """The fastest way to run a training step within a memory budget, and what it costs.

        budget: such as 11GiB, "80%" of the card, "0.5x" of the plain peak. The rest: as of estimate and fit.
        """
        more = {"precision": precision, "optimizer": optimizer, "adapter": adapter, "base": base}
        return self._asked("plan", model, device, seq_len, batch_size, budget=budget, levers="rounding", **more)

    def doctor(self, log: str) -> str:
        """Why memory ran out, and what helps. log: the text of a training's log or traceback with the error."""
        return self._run(["doctor", "-"], {}, _small("the log", log))

    def run(self, script: str, device: str, steps: int = 3) -> str:
        """Run a PyTorch training script on a simulated card that computes nothing: whether it fits, and its peaks.

        script: the text of a Python file that needs no other file. device: as of fit. steps: optimizer steps to run.
        """
        files = {"train.py": _small("the script", script)}
        limits = [f"--device={device}", f"--steps={steps}", f"--timeout={self.seconds}"]
        done = self._done(["run", *limits, "--", sys.executable, "train.py"], files)
        if done.returncode == INPUT_IS_WRONG and done.stderr.startswith("error: "):  # and no script has run
            raise TightfitError(_errors(done))
        said = [*done.stdout.splitlines(), *done.stderr.splitlines()]  # the script's, then also what was measured
        return "\n".join(said[-LINES:])[-LOG_BYTES:]

    def _asked(
        self, command: str, model: str, device: str, seq_len: int, batch_size: int, **options: str | None
    ) -> str:
        from tightfit.cli.explorer.limits import check_tokens

        check_tokens(seq_len, batch_size)
        optimizer = options.get("optimizer")
        # An assistant names no code that this machine imports.
        if optimizer is not None and optimizer.partition(":")[0] not in OPTIMIZERS:
            raise InputError(f"optimizer {optimizer!r} is not known here: choose one of {', '.join(OPTIMIZERS)}")
        if (options.get("adapter") or "").endswith(".json"):  # which the command would read
            raise InputError("an adapter is no file here: pass its keys, such as r=16,alpha=32")
        name, files = _model(model)
        given = {"device": device, "seq-len": seq_len, "batch-size": batch_size, **options}
        asked = [f"--{option}={value}" for option, value in given.items() if value is not None]
        return self._run([command, f"--model={name}", *asked], files)

    def _run(self, arguments: list[str], files: dict[str, str], text: str = "") -> str:
        """The text that the command prints. Raises `TightfitError` with its one line."""
        done = self._done(arguments, files, text)
        if done.returncode not in ANSWERED:
            raise TightfitError(_errors(done))
        return f"{done.stdout.rstrip()}\n{_errors(done, '')}".strip()

    def _done(self, arguments: list[str], files: dict[str, str], text: str = "") -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                Path(folder, name).write_text(content, "utf-8")
            try:
                return subprocess.run(
                    [sys.executable, "-m", "tightfit", *arguments],
                    cwd=folder, input=text, capture_output=True, text=True, timeout=self.seconds,
                    env=os.environ | OFFLINE | {"COLUMNS": str(COLUMNS)},
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                raise TightfitError(
                    f"no answer within {self.seconds} s: ask for fewer tokens or a smaller model"
                ) from None


def _errors(done: "subprocess.CompletedProcess[str]", otherwise: str | None = None) -> str:
    """The lines in which a command says what is wrong."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return "\n".join(lines) or (f"the command ended with {done.returncode}" if otherwise is None else otherwise)


def _model(model: str) -> tuple[str, dict[str, str]]:
    """The value of `--model`, and the files that it names. Raises `InputError` for paths, modules and repositories."""
    from tightfit.models.decoder_config import PRESETS
    from tightfit.models.published import find_published

    if model.lstrip().startswith("{"):
        from tightfit.cli.explorer.uploads import Upload, read_upload

        fields = read_upload(Upload.of("config.json", model.encode())).described.fields
        if fields is None:
            raise InputError("the config.json is of no model of transformers: give one with a model_type")
        return "config.json", {"config.json": json.dumps(dict(fields))}
    if model in PRESETS or find_published(model) is not None:
        return model, {}
    raise InputError(f"{model[:80]!r} is no published name that is known: give the text of the model's config.json")


def _small(what: str, text: str) -> str:
    if len(text.encode()) > LOG_BYTES:
        raise InputError(f"{what} has more than {LOG_BYTES:,} bytes: pass the part with the error")
    return text
