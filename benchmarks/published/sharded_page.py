"""The section of docs/accuracy.md about ranks on cards, from benchmarks/results/published_sharded.json."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def sharded(record: Record) -> str:
    results = record["results"]
    clear = [row for row in results if row["ambiguous"] is None]
    unclear = [row for row in results if row["ambiguous"] is not None]
    torches = record["environment"]["versions"]["torch"]
    reserved = [row for row in clear if row["quantity"] != "allocated"]
    return f"""\
## Ranks of FSDP2 on graphics cards, published by others

{sharded_line(record)}

The rows that count are torchtitan's own runs, predicted with torch {torches} on a machine without a GPU by
`python -m benchmarks.published.sharded` (`make published`): rank 0 is played with the model, the loss, the wrapping and
the allocator's setting of the commit that was measured. AdamW in fp32, gathered weights and activations in bf16,
gradients reduced in fp32 and clipped, nothing compiled. "Operators" keeps every second product and attention of each
block, "full" its input alone. No published row of a 70B under FSDP2 was found that says what it ran.

Reserved are bytes of all segments. FSDP2 gathers and reduces on streams of their own, and CUDA's allocator gives no
memory of one stream to another, so each stream's pools are replayed. Of {len(reserved)} reserved figures,
{sum(abs(row["error"]) <= 0.01 for row in reserved)} are within 1%.

{table(clear, "cause")}

{len(unclear)} rows do not say everything that decides their bytes, and count nowhere above:

{table(unclear, "ambiguous")}
"""


def sharded_line(record: Record) -> str:
    """The comparison in a sentence."""
    errors = sorted(abs(row["error"]) for row in record["results"] if row["ambiguous"] is None)
    return (
        f"Ranks of FSDP2 on cards, compared with {len(errors)} published figures of torchtitan: median error "
        f"{statistics.median(errors):.2%}, worst {errors[-1]:.1%}."
    )


KEPT = {"default": "freed", "always": "freed, the last block's too", "never": "kept"}


def table(results: Sequence[Record], why: str) -> str:
    names = ["model", "ranks", "a rank's batch", "checkpoints", "weights after forward", "date", "published"]
    names += ["predicted", "error", {"ambiguous": "not said"}.get(why, why)]
    head = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    return "\n".join([*head, *(line(row, row[why]) for row in results)])


def line(row: Record, why: str) -> str:
    step, digits = row["step"], row["digits"]
    return (
        f"| [{step['model']}]({row['source']}), {step['card']} | {step['ranks']} | {step['batch']} x {step['length']} "
        f"| {step['checkpoint']} | {KEPT[step['reshard']]} | {row['date']} | {row['published']} {row['unit']} "
        f"{row['quantity']} | {row['predicted']:.{digits}f} | {row['error']:+.2%} | {why} |"
    )
