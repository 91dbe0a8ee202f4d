"""The sections of docs/benchmarks.md on weights that are streamed: of `streamed.py`, `streamed_on_cards.py` and
`streaming_peers.py`.
"""

from collections.abc import Mapping
from typing import Any

from accuracy_page import Record, rows, where

GIB, MIB = 2**30, 2**20
WORKS = {"adapters": "adapters on frozen weights", "all": "all weights, `offloaded_adamw`"}


def below_the_weights(record: Record) -> str:
    """Trainings on a CPU in less memory than the weights take."""
    parts = ["## Training below the size of the weights\n"]
    for work, found in record["results"].items():
        load = f"load {found['environment']['load_average']:.0f}"
        parts.append(
            f"{WORKS[work]}: {found['blocks']} blocks, {found['weights_bytes'] / GIB:.2f} GiB of weights in fp32, "
            f"{found['steps']} steps of 1 x {found['tokens']} tokens; {where(found)} The machine was busy ({load}), so "
            "seconds are not shown. `none` is resident training"
            + (", PyTorch's own, with its moments in mapped files" if work == "all" else "")
            + ". The bound is of private writable memory (`RLIMIT_DATA`).\n"
        )
        header = "| blocks streamed | bound | tensors | predicted | resident, no file's | resident | predicted | bits |"
        parts.append(rows(header, [_line(row) for row in found["rows"].values()]))
    return "\n".join(parts)


def _line(row: Mapping[str, Any]) -> str:
    def size(key: str) -> str:
        return "" if row[key] is None else f"{row[key] / GIB:.2f} GiB"

    same = "the same" if row["losses_equal"] and row["weights_equal"] else "others"
    return (
        f"| {row['streamed_blocks']} | {size('limit_bytes')} | {_bytes(row['measured_peak_bytes'])} "
        f"| {_bytes(row['predicted_peak_bytes'])} | {size('measured_anonymous_peak_bytes')} "
        f"| {size('measured_host_peak_bytes')} | {size('predicted_host_peak_bytes')} | {same} |"
    )


def _bytes(count: int | None) -> str:
    return "" if count is None else f"{count:,}"


def on_small_cards(record: Record) -> str:
    """An 8B on null cards that cannot hold it, to the byte or not."""
    lines = []
    for row in record["rows"]:
        card = f"| {row['card']}, {row['gigabytes']} GB | {row['work']} "
        if "error" in row:
            lines.append(f"{card}| {row['error'].rpartition('Fit: ')[2].partition(',')[0]} | | | | |")
            continue
        lines.append(
            f"{card}| {row['streamed_blocks']} | {row['predicted_peak_bytes']:,} | {row['measured_peak_bytes']:,} "
            f"| {row['measured_reserved_bytes'] / row['predicted_reserved_bytes'] - 1:+.2%} "
            f"| {row['host_peak_bytes'] / GIB:.1f} GiB |"
        )
    table = rows("| card | | blocks streamed | predicted | allocated | reserved, beside | host, predicted |", lines)
    return f"""\
## An 8B on cards that cannot hold it

{where(record)} Llama-3.1-8B, 1 x 1,024 tokens, planned for 85% of each card and run on a null one: no kernel runs, and
what streams is not touched, so the host's column is predicted alone.

{table}"""


def beside_peers(record: Record) -> str:
    """Published figures of others beside predictions for the same work."""
    lines, left = [], []
    for row in record["rows"]:
        published, config = row["published"], row["published"]["config"]
        name = f"{config.get('system') or config.get('method') or config.get('loader')}, {config['model']}"
        if "not_asked" in row:
            left.append(
                f"- {name} ({published['source']}, {published['figure']} {published['unit']}): {row['not_asked']}."
            )
            continue
        also = published["also"]
        work = f"{config['batch_size']} x {config['sequence_length']:,} tokens"
        lines.append(
            f"| {name}: published | {work} | {published['figure']:,.0f} MiB | {also['reserved_MB']:,.0f} MiB "
            f"| {also['host_MB'] / 1024:.1f} GiB | {also['step_seconds']:.1f} s |"
        )
        for ours in row["ours"]:
            title = f"| tightfit, predicted, host: {ours['host']} | {work} "
            if "refused" in ours:
                lines.append(f"{title}| {ours['refused'].removeprefix('error: ').partition(':')[0]} | | | |")
                continue
            lines.append(
                f"{title}| {ours['peak_bytes'] / MIB:,.0f} MiB | {ours['reserved_bytes'] / MIB:,.0f} MiB "
                f"| {ours['host_peak_bytes'] / GIB:.1f} GiB | {ours['step_seconds']:.1f} s |"
            )
    table = rows("| | work | card, allocated | card, reserved | host | step |", lines)
    return f"""\
## Weights on the host, beside others

{where(record)} No card has run these: they are predictions of dry runs, for the device bytes that the others
published.
Their figures are published ones (`benchmarks/published/streaming.json` names the sources), on a card and a host that
they do not name in full; MB are read as MiB. Our seconds assume the host's rate (`--host`). Both update on the host in
one kernel.

{table}
Others' published work that was not asked of tightfit:

{chr(10).join(left)}
"""
