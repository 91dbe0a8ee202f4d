"""What the first page shows: what fits a card, the picture of the best recipe's step, and how true predictions are.

    python benchmarks/front_page.py [--ask]

With `--ask`, `tightfit fit` and `tightfit plan` are run and their answers kept in `benchmarks/results/front_page.json`
and `docs/front_page.png` (about a minute). Then its block and its table in README.md and README.zh-CN.md are written.
"""

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile

from accuracy_page import RESULTS, Record, gpu_page, published_errors
from environment import ROOT, environment

FIT = "tightfit fit --model llama-3.1-8b --device rtx3060-12 --seq-len 2048"
ANSWER, PICTURE = RESULTS / "front_page.json", ROOT / "docs" / "front_page.png"
PAGES = {"en": ROOT / "README.md", "zh": ROOT / "README.zh-CN.md"}
COLUMNS = "80"
WORDS = {
    "en": {
        "head": "| predicted | compared with | cases | error |",
        "cpu": "| peaks on a CPU | the allocator's own record | {cases} steps "
        "| median {median:.4%}, worst {worst:.6%} |",
        "null": "| peaks on CUDA | PyTorch's CUDA allocator on [a card that computes nothing](docs/run.md) "
        "| {measured} steps, {cards} cards "
        "| {exact} to the byte, worst {worst:.1%}; {over} of {planned} plans over budget |",
        "published": "| peaks on CUDA | what {sources} other projects published | {cases} measurements "
        "| median {median:.4%}, worst {worst:.2%} |",
        "seconds": "| seconds of cards | what others published | {cases} figures "
        "| median {median:.0%}, worst {worst:.0%} |",
        "card": "| peaks on CUDA | [a real {gpu}](docs/accuracy.md#on-a-real-card), its own allocator | {cases} steps "
        "| median {median:.2%}, worst {worst:.1%}; {over} of {plans} plans over budget |",
    },
    "zh": {
        "head": "| 预测什么 | 与什么比较 | 数量 | 误差 |",
        "cpu": "| CPU 上的峰值 | 分配器自己的记录 | {cases} 个步骤 | 中位数 {median:.4%}，最差 {worst:.6%} |",
        "null": "| CUDA 上的峰值 | [不做任何计算的显卡](docs/zh/run.md)上 PyTorch 的 CUDA 分配器 "
        "| {cards} 种显卡，{measured} 个步骤 "
        "| {exact} 个精确到字节，最差 {worst:.1%}；{planned} 个计划中 {over} 个超出预算 |",
        "published": "| CUDA 上的峰值 | 其他 {sources} 个项目公布的测量值 "
        "| {cases} 个测量值 | 中位数 {median:.4%}，最差 {worst:.2%} |",
        "seconds": "| 显卡上的秒数 | 他人公布的数字 | {cases} 个数字 | 中位数 {median:.0%}，最差 {worst:.0%} |",
        "card": "| CUDA 上的峰值 | [一块真实的 {gpu}](docs/accuracy.md#on-a-real-card) 自己的分配器 | {cases} 个步骤 "
        "| 中位数 {median:.2%}，最差 {worst:.1%}；{plans} 个计划中 {over} 个超出预算 |",
    },
}


def results(name: str) -> Record:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def accuracy(language: str) -> str:
    """How true predictions are: one row for each thing that they were compared with."""
    words = WORDS[language]
    ran = [row for row in results("accuracy")["results"] if "measured" in row]
    on_cpu = [abs(row["predicted"] / row["measured"] - 1) for row in ran]
    cards, seconds = results("card"), results("published_seconds")["judged"]["all"]
    clear = [row for row in results("published")["results"] if row["ambiguous"] is None]
    published, null = published_errors(clear), cards["summary"]
    return "\n".join(
        [
            words["head"],
            "|---|---|---|---|",
            words["cpu"].format(cases=len(ran), median=statistics.median(on_cpu), worst=max(on_cpu)),
            of_a_card(words["card"]),
            words["null"].format(
                measured=null["measured"],
                cards=len({row["card"] for row in cards["steps"]}),
                exact=null["to_the_byte"],
                worst=null["worst_per_cent"] / 100,
                over=null["over_budget"],
                planned=null["planned"],
            ),
            words["published"].format(
                sources=len({row["source"] for row in clear}),
                cases=len(clear),
                median=statistics.median(published),
                worst=published[-1],
            ),
            words["seconds"].format(cases=seconds["rows"], median=seconds["median"], worst=seconds["worst"]),
        ]
    )


def of_a_card(words: str) -> str:
    """The row of the real card."""
    record = results("gpu")
    peaks, (over, plans, _) = gpu_page.errors(record, "peak_bytes"), gpu_page.plans_above(record)
    return words.format(
        gpu=record["environment"]["machine"]["gpu"].removeprefix("NVIDIA "),
        cases=len(peaks),
        median=statistics.median(peaks),
        worst=peaks[-1],
        over=over,
        plans=plans,
    )


def fit(record: Record) -> str:
    """The command and the beginning of its answer: what fits."""
    lines = record["fit"]
    end = lines.index("The nearest that do not fit, with what they need:")
    shown = "\n".join(lines[:end]).rstrip()
    return "\n".join(["```", f"$ {FIT}", shown, "...", "```"])


def page(language: str) -> str:
    """The page as it should be: with that block, and the table that begins with those heads."""
    text = PAGES[language].read_text("utf-8")
    parts = {
        rf"```\n\$ {re.escape(FIT)}\n.*?```": fit(results("front_page")),
        rf"{re.escape(WORDS[language]['head'])}(\n\|[^\n]*)*": accuracy(language),
    }
    for place, part in parts.items():
        text, found = re.subn(place, lambda _, part=part: part, text, flags=re.DOTALL)
        assert found == 1, place
    return text


def answer() -> list[str]:
    """What `tightfit fit` prints, 80 columns wide."""
    return said(FIT).splitlines()


def said(command: str, *more: str) -> str:
    typed = [sys.executable, "-m", *shlex.split(command), *more]
    done = subprocess.run(typed, capture_output=True, text=True, env={**os.environ, "COLUMNS": COLUMNS})
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr}")
    return done.stdout


def draw() -> None:
    """The step of the first recipe, plain and planned, with the card's line."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = f"{folder}/run.yaml"
        said(FIT, "--pick", "1", "--output", recipe)
        device = shlex.split(FIT)[shlex.split(FIT).index("--device") + 1]
        said(f"tightfit plan {recipe} --device {device}", "--png", str(PICTURE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ask", action="store_true", help="run the commands again")
    if parser.parse_args().ask:
        draw()
        ANSWER.write_text(
            json.dumps({"environment": environment(), "fit": answer()}, indent=1, ensure_ascii=False) + "\n"
        )
    for language, path in PAGES.items():
        path.write_text(page(language), "utf-8")


if __name__ == "__main__":
    main()
