"""Other people's scripts and packages on the card of this machine, and on a null card of its kind: the same bytes?

    python -m benchmarks.gpu.scripts --card cuda --repositories FOLDER --packages FOLDER --output FILE   (a real card)
    python -m benchmarks.gpu.scripts --card h200 --repositories FOLDER --packages FOLDER --output FILE   (a null card)
    python -m benchmarks.gpu.scripts --page                                       (the table of both docs/run.md)

The trainings are those of `scripts_on_cards.py` and `packages_on_cards.py`, with the same releases of everything both
times. What a card has measured goes into the file under its name, beside what others have. `--together` of them run at
a time: bytes are measured, no seconds.
"""

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import packages_on_cards, scripts_on_cards
from benchmarks.environment import environment

RESULTS = scripts_on_cards.ROOT / "benchmarks" / "results" / "gpu_scripts.json"
BEGIN, END = "<!-- real card: written by benchmarks/gpu/scripts.py --page -->\n", "<!-- end of real card -->\n"
REAL = "cuda"
FIGURES = ("peak_bytes", "reserved_bytes")


def trainings(
    repositories: Path, packages: Path, card: str, only: Sequence[str]
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Each one's name, and what runs it on a card."""
    for script in scripts_on_cards.SCRIPTS:
        there = (repositories / script.repository.partition("/")[2]).exists()
        if there and (not only or script.name in only):
            yield script.name, partial(scripts_on_cards.measured, script, repositories, card)
    for training in packages_on_cards.TRAININGS:
        if not only or training.name in only:
            yield training.name, partial(packages_on_cards.measured, training, packages, card)


def table(record: dict[str, Any]) -> str:
    """The trainings that both cards have run, as Markdown, and how far the null card is off."""
    (null_card,) = set(record) - {REAL}
    real, null = record[REAL]["rows"], record[null_card]["rows"]
    both = [name for name in null if null[name]["steps"] and real.get(name, {}).get("steps")]
    apart = {name: [null[name][figure] / real[name][figure] - 1 for figure in FIGURES] for name in both}
    off = [sorted(abs(shares[place]) for shares in apart.values()) for place in range(len(FIGURES))]
    lines = [
        f"{len(both)} trainings: allocated off by {statistics.median(off[0]):.2%} in the median and {off[0][-1]:.2%} "
        f"at worst, reserved by {statistics.median(off[1]):.2%} and {off[1][-1]:.2%}; "
        f"{sum(share == 0 for share in off[0])} are to the byte.",
        "",
        f"| training | {record[REAL]['environment']['machine']['gpu']}, allocated | null card | reserved | null card |",
        "|---|---|---|---|---|",
    ]
    for name in both:
        cells = (
            f"{real[name][figure]:,} | {share:+.2%}" if share else f"{real[name][figure]:,} | the same"
            for figure, share in zip(FIGURES, apart[name], strict=True)
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def line(name: str, row: dict[str, Any]) -> str:
    """For the terminal."""
    if not row["steps"]:
        return f"{name}: did not run: {row.get('why', row['exit_code'])}"
    return f"{name}: {row['peak_bytes']:,} allocated, {row['reserved_bytes']:,} reserved"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card")
    parser.add_argument("--repositories", type=Path)
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--together", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args(arguments)
    if given.page:
        scripts_on_cards.write_pages(table(json.loads(RESULTS.read_text("utf-8"))), BEGIN, END)
        return 0
    if None in (given.card, given.repositories, given.packages):
        parser.error("--card, --repositories and --packages are needed")
    content = json.loads(given.output.read_text("utf-8")) if given.output.exists() else {}
    known = content.setdefault(given.card, {"environment": {}, "rows": {}})
    with ProcessPoolExecutor(given.together, multiprocessing.get_context("spawn")) as pool:
        wanted = trainings(given.repositories.resolve(), given.packages.resolve(), given.card, given.only)
        running = {pool.submit(run): name for name, run in wanted}
        for done in as_completed(running):
            row = known["rows"][running[done]] = done.result()
            known["environment"] = environment()
            given.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            print(line(running[done], row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
