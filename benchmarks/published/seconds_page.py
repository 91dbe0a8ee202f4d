"""The sections of docs/accuracy.md on seconds of cards, from benchmarks/results/published_seconds.json and
published_clocks.json.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any


def seconds_on_cards(record: Mapping[str, Any]) -> str:
    """The section, of what `benchmarks/published/seconds.py` found."""
    judged, pairs = record["judged"], record["variants"]
    lines = [_row(row) for row in record["rows"] if not row["fitted"]]
    sources = [f"- {key}: {s['by']}, <{s['address']}>: {s['means']}." for key, s in record["sources"].items()]
    return f"""\
## Seconds on cards

We measured nothing here. `benchmarks/published/seconds.json` has the figures that others measured and published, and
`python -m benchmarks.published.seconds` predicts them. The efficiency of kernels on a card
(`src/tightfit/devices/kernels.toml`) is fitted to one half of the rows
(`python -m benchmarks.published.fit_seconds`). A hash chose the half before the fit. The other half judges:

| judged by rows not fitted | rows | median error | worst | beyond 30% |
|---|---|---|---|---|
{_summary("all", judged["all"])}
{_summary("training steps", judged["steps"])}
{_summary("operators", judged["operators"])}
{_summary("figures above 1 ms", judged["figures above 1 ms"])}
{_summary("for comparison: rows fitted", record["seen"])}

{pairs["pairs"]} pairs of training steps differ in precision, length or batch, with at least one step not fitted.
{pairs["in order"]} of them are predicted in the published order of seconds per token.

This has limits. Rows of one table were measured on one machine, and rows of one operator differ in its sizes, so a row
that was not fitted has neighbours that were. Steps are of GPT-like models on A100, H100 and RTX 3090, eager. An
operator's time on a small tensor is the host's, and no source names the host. Cards before Ampere have no rows, so
their figures are assumed. The line of figures above 1 ms was added after the rows were judged.

{chr(10).join(sources)}

{len(record["unsaid"])} further rows are not judged, because a dry run cannot predict them yet:

{_unsaid(record)}

| row | published | predicted | error |
|---|---|---|---|
{chr(10).join(lines)}
"""


def two_clocks(record: Mapping[str, Any]) -> str:
    """The section, of what `benchmarks/published/clocks.py` found."""
    found = record["as fitted for the sum of operators"]
    one, other = found["sum of operators"], found["two clocks"]
    host_later = other["judged steps whose host is later"]
    return f"""\
## Two clocks

On a card the host launches operators and the device runs their kernels meanwhile. Estimates, plans and `fit` state both
(`host_seconds`, `device_seconds`). `step_seconds` is the sum of the longer one of each operator. The other way is the
later one of the two sums. `python -m benchmarks.published.clocks` judges both by the published training steps that no
fit has seen:

| `step_seconds` as | rows | median error | worst | beyond 30% |
|---|---|---|---|---|
{_exactly("the sum of operators (the roofline alone)", one["judged steps"])}
{_exactly("the later of two clocks", other["judged steps"])}

Two clocks are not better here: the host is later in {host_later} of these steps. No source publishes steps of small
models, where the ways differ. So `step_seconds` stays the sum.
"""


def _exactly(name: str, s: Mapping[str, Any]) -> str:
    return f"| {name} | {s['rows']} | {s['median']:.3%} | {s['worst']:.3%} | {s['beyond 30%']} |"


def _summary(name: str, s: Mapping[str, Any]) -> str:
    return f"| {name} | {s['rows']} | {s['median']:.1%} | {s['worst']:.1%} | {s['beyond 30%']} |"


def _row(row: Mapping[str, Any]) -> str:
    error = row["predicted"] / row["seconds"] - 1
    return f"| {row['id']} | {_ms(row['seconds'])} | {_ms(row['predicted'])} | {error:+.1%} |"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


def _unsaid(record: Mapping[str, Any]) -> str:
    counts = Counter((row["source"], _reason(row["unsaid"])) for row in record["unsaid"])
    return "\n".join(f"- {count} of {source}: {reason}." for (source, reason), count in counts.items())


def _reason(text: str) -> str:
    """Without the figure of the row."""
    if text.startswith("communication"):
        return "communication of sharded weights and gradients takes more than 5% of the figure if nothing hides it"
    return text
