"""The zoo as text: docs/zoo.md."""

from typing import Any

PAGE = """\
# The zoo

Written by `python benchmarks/zoo.py`; the figures are in `benchmarks/results/zoo.json`.
{cpu}, {threads} thread, torch {torch}, transformers {transformers}.

The zoo is every causal language model class of `transformers`, made tiny from its configuration with random weights: 2
sequences of 64 tokens, AdamW, the second step. The error compares `estimate` with the CPU allocator's own record. The
plan is for 0.6x of the plain peak with exact levers only, or for the least peak that fits if that is more. Its peak is
measured too, and `verify` compares loss, gradients, buffers and random states of the plain and the planned step.

{summary}A class that routes tokens by data ("routes") is estimated with evenly used experts. Its plan is made for the
worst routing tried.

| class | precision | error of the estimate | routes | plan: measured / plain | within its budget | outcome |
|---|---|---|---|---|---|---|
"""


def page(results: list[dict[str, Any]], where: dict[str, Any]) -> str:
    """The table of docs/zoo.md."""
    head = PAGE.format(
        cpu=where["machine"]["cpu"],
        threads=where["threads"],
        torch=where["versions"]["torch"],
        transformers=where["versions"]["transformers"],
        summary="".join(map(summary, grouped(results).items())),
    )
    return head + "".join(map(table_line, results))


def grouped(results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in results:
        groups.setdefault(row["precision"], []).append(row)
    return groups


def summary(group: tuple[str, list[dict[str, Any]]]) -> str:
    """One precision in figures."""
    precision, rows = group
    errors = sorted(abs(row["predicted"] / row["measured"] - 1) for row in rows if "predicted" in row)
    if not errors:
        return f"{precision}: none of {len(rows)} classes ran.\n\n"
    planned = [row for row in rows if "planned_measured" in row]
    ran = sum("measured" in row for row in rows)
    exact = sum(row["outcome"] == "bit-equal" for row in rows)
    unrepeatable = sum(row["outcome"] == "not repeatable" for row in rows)
    refused = sum(row["outcome"] == "refused" for row in rows)
    within = sum(row["planned_measured"] <= row["budget"] for row in planned)
    return (
        f"{precision}: {ran} of {len(rows)} classes run. {sum(e <= 0.001 for e in errors)} of {ran} are estimated "
        f"within 0.1% (median {errors[len(errors) // 2]:.5%}, worst {errors[-1]:.3%}). {within} of {len(planned)} "
        f"plans stay within their budget. {exact} of the {ran - unrepeatable} whose plain step is repeatable are "
        f"bit-equal under their plan, {refused} are refused by name.\n\n"
    )


def table_line(row: dict[str, Any]) -> str:
    error = f"{row['predicted'] / row['measured'] - 1:+.5%}" if "predicted" in row else ""
    share = f"{row['planned_measured'] / row['measured']:.2f}" if "planned_measured" in row else ""
    within = "" if not share else "yes" if row["planned_measured"] <= row["budget"] else "NO"
    routes = "yes" if row.get("depends_on_data") else ""
    why = f": {row['why'][:160]}" if row.get("why") else ""
    return (
        f"| {row['class']} | {row['precision']} | {error} | {routes} | {share} | {within} | {row['outcome']}"
        f"{why.replace('|', '/')} |\n"
    )
