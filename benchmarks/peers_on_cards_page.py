"""The section of docs/benchmarks.md of `peers_on_cards.py`: the memory of every peer on null cards, and ours beside."""

from collections.abc import Mapping, Sequence

from accuracy_page import Record, rows, where

GIB, UNSEEN_BYTES = 2**30, 1024
ALONE = "plain"


def on_null_cards(record: Record) -> str:
    """The peaks of others, a plan of ours for each, and what fits on five cards."""
    shape, first = record["shape"], record["cards"][0]
    found = {(row["card"], row["way"]): row for row in record["rows"]}
    others = [found[first, name] for name in record["ways"] if (first, name) in found]
    ran = sorted((row for row in others if row["fits"]), key=lambda row: row["peak_bytes"])
    plans = [row for row in record["rows"] if row["card"] == first and row["ours"] and "plan" in row]
    plain = next(row["peak_bytes"] for row in ran if row["way"] == ALONE)
    packages = ", ".join(f"{name} {version}" for name, version in record["environment"]["packages"].items())
    above = [row for row in plans if row["fits"] and row["peak_bytes"] > row["plan"]["budget_bytes"]]
    beside = [plan_line(row, plan_for(row["peak_bytes"], plans), plain) for row in ran]
    least = [least_line(row, plain) for row in plans if row["way"].startswith("least")]
    return (
        f"""\
## Every peer, on cards that are not here

{where(record)} Packages: {packages}.

Bytes that PyTorch's own allocator counted in three steps on null cards, which compute nothing: there are no seconds of
a card, and nobody's results were compared. The step is {shape["what"]}: {shape["size"]} x {shape["length"]} tokens,
fp32 weights, autocast in bf16, AdamW (`fused`) with fp32 states unless a way brings its own; transformers' model, no
cache of keys and values, `max_grad_norm` 0 in HF Trainer. DeepSpeed's engine has bf16 weights and fp32 copies of them.
Importing Unsloth patches more of transformers than its checkpoint. `benchmarks/peers_on_cards.py` has each way as code.

Beside each peak on the {first} is a plan of ours made for it, by the gentlest levers that reach it: `exact`, then
`rounding`, then streamed weights. Peaks within 1% of each other share the plan for the lowest. "Step" is predicted, of
plain's. Plans made with AdamW's fp32 states stand beside 8-bit, 4-bit and factored states of others too.
{len(above)} of {sum(bool(row["fits"]) for row in plans)} plans took more than their budget.

"""
        + rows("| of others | peak | of plain | our plan for it | predicted | measured | step |", beside)
        + (f"\nThe least that our levers reach on the {first}:\n\n" if least else "")
        + (rows("| | measured | of plain | levers | predicted | reserved, measured | step |", least) if least else "")
        + "\nAllocated bytes of what was run on further cards, or has no room; then what was asked for last. A "
        "cell without a figure was not run there, or has its reason below.\n\n"
        + rows(
            f"| | {' | '.join(record['cards'])} |",
            [
                f"| {name} | {' | '.join(cell(found.get((card, name))) for card in record['cards'])} |"
                for name in (*record["ways"], *record["least"])
                if any(cell(found.get((card, name))) for card in record["cards"][1:])
                or cell(found.get((first, name))).startswith("no")
            ],
        )
        + "\n"
        + empty(record["rows"])
        + unrun(record, found)
    )


def plan_for(peak: int, plans: Sequence[Record]) -> Record | None:
    """The plan made for that peak, or for one just below it."""
    made = [row for row in plans if row["way"].startswith("at ") and row["plan"]["budget_bytes"] - UNSEEN_BYTES <= peak]
    near = max(made, key=lambda row: row["plan"]["budget_bytes"], default=None)
    return near if near is not None and near["plan"]["budget_bytes"] * 1.01 >= peak else None


def plan_line(row: Record, plan: Record | None, plain: int) -> str:
    ours = " | | | " if plan is None else f"{levers(plan)} | {figures(plan)}"
    return f"| {row['way']} | {size(row['peak_bytes'])} | {row['peak_bytes'] / plain:.2f}x | {ours} |"


def levers(row: Record) -> str:
    """The class of a plan's levers, and those that it used."""
    parts = f", {row['plan']['micro_batches']} micro-batches" if row["plan"]["micro_batches"] > 1 else ""
    return f"{row['plan']['kind']}: {', '.join(row['plan']['levers']) or 'none'}{parts}"


def figures(row: Record) -> str:
    plan = row["plan"]
    measured = f"{size(row['peak_bytes'])} ({plan['predicted_bytes'] / row['peak_bytes'] - 1:+.3%})"
    if not row["fits"]:
        measured = cell(row) or "did not run"
    return f"{size(plan['predicted_bytes'])} | {measured} | {plan['seconds_of_plain']:.2f}x"


def least_line(row: Record, plain: int) -> str:
    plan = row["plan"]
    return (
        f"| {row['way']} | {size(row['peak_bytes'])} | {row['peak_bytes'] / plain:.2f}x | {levers(row)} "
        f"| {plan['predicted_bytes'] / row['peak_bytes'] - 1:+.3%} | {size(row['reserved_bytes'])} "
        f"| {plan['seconds_of_plain']:.2f}x |"
    )


def cell(row: Record | None) -> str:
    """A peak, or what the card had no room for; nothing where a way did not run for another reason."""
    if row is None or row["fits"] is None:
        return ""
    if row["fits"]:
        return size(row["peak_bytes"])
    return f"no: {size(row['refused']['bytes'])} more in {row['refused']['phase']}" if row["refused"] else "no"


def size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


def empty(found: Sequence[Record]) -> str:
    """The ways that did not run, each with its own words."""
    said: dict[str, list[str]] = {}
    for row in found:
        if row["fits"] is None:
            said.setdefault(f"{row['way']}: {row['why'].strip().rstrip('.')}", []).append(row["card"])
    lines = [f"- {why} ({', '.join(cards)})." for why, cards in said.items()]
    return "Empty:\n\n" + "\n".join(lines) + "\n\n" if lines else ""


def unrun(record: Record, found: Mapping[tuple[str, str], Record]) -> str:
    """What has no row on any card, and what was left out from the start."""
    names = [*record["ways"], *record["least"]]
    missing = [name for name in names if not any((card, name) in found for card in record["cards"])]
    return f"Not run on any card: {'; '.join((*missing, *record['left_out']))}.\n"
