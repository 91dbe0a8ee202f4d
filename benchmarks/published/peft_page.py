"""The section of docs/accuracy.md about PEFT's methods, from benchmarks/results/published_peft.json."""

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
SAME_BYTES = ("ia3/llama-3.2-3B-default", "ia3/llama-3.2-3B-lr_0.001")


def methods(record: Record) -> str:
    found, versions, rows = record["summary"], record["environment"]["versions"], record["rows"]
    return f"""\
## Methods of PEFT on an L40S, published by PEFT

Reserved bytes of PEFT's comparison of methods (Llama-3.2-3B in bf16, batches of 4, at most 768 tokens), 5,000 steps on
an L40S with torch 2.13, beside two answers from a machine without a GPU (torch {versions["torch"]}): PEFT's own
`run.py`, unchanged, for 30 steps on a null L40S, and a dry run of the step with the longest batch. The longest batch is
not published: {record["longest"]} tokens are one choice for all methods. Texts are random letters, so the lengths of
the batches before are not PEFT's either, and what the allocator still holds of those counts as reserved: two runs of
one method (IA3) are {spread(rows):.1%} apart. In the dry run the longest batch finds an empty cache, since run.py
empties it behind every tenth step. Of a method that did not run, the
table has the last line. MiSS ran beside torchao 0.17, which its code wants.
`python -m benchmarks.published.peft`.

Run: {found["measured"]} of {found["methods"]} methods, {said(found, "measured")}. Predicted: {found["predicted"]}, \
{said(found, "predicted")}.

| method | trained parameters | published | run on a null card | predicted | why not |
|---|---|---|---|---|---|
{chr(10).join(line(row) for row in rows)}
"""


def spread(rows: Sequence[Record]) -> float:
    """How far two runs are apart whose methods have the same bytes: they differ in the learning rate alone."""
    first, second = (row["measured_error"] for row in rows if row["experiment"] in SAME_BYTES)
    return abs(first - second)


def said(found: Mapping[str, Any], name: str) -> str:
    if not found[name]:
        return "none"
    return f"median error {found[f'{name}_median']:.1%}, worst {found[f'{name}_worst']:.1%}"


def line(row: Record) -> str:
    cells = [row["experiment"], f"{row['trained_parameters']:,}", f"{row['published_bytes']:,}"]
    cells += [f"{row[f'{name}_error']:+.1%}" if f"{name}_error" in row else "" for name in ("measured", "predicted")]
    why = [row[f"{name}_failed"].replace("|", "/") for name in ("measured", "predicted") if f"{name}_failed" in row]
    return "| " + " | ".join([*cells, "; ".join(why)]) + " |"
