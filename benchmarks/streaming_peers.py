"""What others publish of training with weights on the host, beside what tightfit predicts for the same work.

Their figures are in benchmarks/published/streaming.json, each with its source. Ours are predictions of dry runs, by the
command of each row; no card has run them. A published row whose work cannot be asked of `tightfit plan` says why.

    python benchmarks/streaming_peers.py [--only BATCH ...] [--output FILE]

A row that the file has already is not run again.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from environment import environment

HERE = Path(__file__).parent
PUBLISHED = HERE / "published" / "streaming.json"
RESULTS = HERE / "results" / "streaming_peers.json"
HOSTS = ("desktop",)  # of ours: the peers' are not named; another one changes the seconds of the update alone
LLAMA = "Llama-3.1-8B-Instruct"
NOT_ASKED = {
    "OLMoE-1B-7B": "the model is not among the published ones, and the batch is not said",
    "Krea 2": "the model is not among the diffusion models by name, and the resolution is not said",
    "DeepSeek-V2-Lite": "the host computes the experts there, which tightfit does not do",
    "Qwen2.5-7B": "GRPO with a server of rollouts, which counts too",
    "Qwen3.5-27B": "GRPO with a server of rollouts, which counts too",
}


def asked(row: Mapping[str, Any]) -> list[str] | None:
    """The arguments of `tightfit plan` for a published row's work, in the device's bytes that it took."""
    config = row["config"]
    if config["model"] != LLAMA:
        return None
    return [
        "plan", "--model", "llama-3.1-8b", "--device", "rtx4090", "--seq-len", str(config["sequence_length"]),
        "--batch-size", str(config["batch_size"]), "--optimizer", "offloaded_adamw_fused", "--dtype", "bf16",
        "--levers", "exact,chunked_loss,offload,stream", "--budget", f"{row['figure']:.0f}MiB", "--json",
    ]  # fmt: skip


def ours(command: list[str], host: str) -> dict[str, Any]:
    """What a command predicts, or its refusal."""
    command = [*command, "--host", host]
    done = subprocess.run([sys.executable, "-m", "tightfit", *command], capture_output=True, text=True, check=False)
    said = {"command": shlex.join(["tightfit", *command]), "host": host}
    if done.returncode:
        return {**said, "refused": done.stderr.splitlines()[-1]}
    plan = json.loads(done.stdout)
    stream = next(lever for lever in plan["levers"] if lever["name"] == "stream")
    return {
        **said,
        "peak_bytes": plan["peak_bytes"],
        "reserved_bytes": plan["planned"]["reserved_bytes"],
        "host_peak_bytes": plan["host_peak_bytes"],
        "step_seconds": plan["step_seconds"],
        "streamed_blocks": len(stream["paths"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", type=int, metavar="BATCH", help="rows with these batches")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    known = json.loads(given.output.read_text("utf-8"))["rows"] if given.output.exists() else []
    rows = []
    for row in json.loads(PUBLISHED.read_text("utf-8")):
        command = asked(row)
        found = next((other for other in known if other["published"] == row and "ours" in other), None)
        if command is None:
            found = {"published": row, "not_asked": NOT_ASKED[row["config"]["model"]]}
        elif found is None and (given.only is None or row["config"]["batch_size"] in given.only):
            found = {"published": row, "ours": [ours(command, host) for host in HOSTS]}
        rows.append(found or {"published": row, "not_asked": f"not run yet: tightfit {shlex.join(command or [])}"})
        given.output.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
