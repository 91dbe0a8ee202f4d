"""Kernels that a calibration may not take for others: casts both ways, unlike layouts, products with an odd side.

python -m benchmarks.gpu.kernels --output benchmarks/results/gpu_kernels.json

The least seconds of each, as a calibration takes them. `page.py` says what they come to.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from benchmarks.environment import environment

from tightfit.devices.timing import Call, fastest

ELEMENTS = (2**20, 2**22, 2**24, 2**26)
ROW, HEADS, HEAD = 512, 32, 64
HEAD_ROWS, HEAD_WIDTH = 8192, 768  # of a GPT-2's loss head
VOCABULARIES = (50257, 50264)  # GPT-2's, and the next multiple of eight
SECONDS, ROUNDS = 0.5, 6  # for all kernels of one size


def seconds(calls: Iterator[tuple[str, Call]]) -> dict[str, float]:
    return fastest(dict(calls), "cuda", SECONDS, ROUNDS)


def elementwise(elements: int) -> Iterator[tuple[str, Call]]:
    wide = torch.randn(elements // ROW, ROW, device="cuda")
    narrow = wide.to(torch.bfloat16)
    yield "narrowing", lambda: wide.to(torch.bfloat16)
    yield "widening", lambda: narrow.to(torch.float32)
    for name, x in (("float32", wide), ("bfloat16", narrow)):
        heads = x.view(1, -1, HEADS, HEAD).transpose(1, 2)
        angles = torch.randn(elements // (HEADS * HEAD), HEAD, device="cuda", dtype=x.dtype)
        halves = heads.chunk(2, -1)
        yield f"even product, {name}", lambda x=x: x * x
        yield f"uneven product, {name}", lambda heads=heads, angles=angles: heads * angles
        yield f"joined halves of heads, {name}", lambda halves=halves: torch.cat(halves, -1)
    heads, angles = narrow.view(1, -1, HEADS, HEAD).transpose(1, 2), torch.randn(elements // 2048, HEAD, device="cuda")
    yield "uneven product, mixed", lambda: heads * angles


def head(vocabulary: int) -> Iterator[tuple[str, Call]]:
    """The three products of a loss head, in bf16."""
    hidden, weight, gradient = (
        torch.randn(size, device="cuda", dtype=torch.bfloat16)
        for size in ((HEAD_ROWS, HEAD_WIDTH), (vocabulary, HEAD_WIDTH), (HEAD_ROWS, vocabulary))
    )
    yield "scores", lambda: hidden @ weight.t()
    yield "gradient of hidden states", lambda: gradient @ weight
    yield "gradient of weights", lambda: gradient.t() @ hidden


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    found = {
        "elementwise": {str(size): seconds(elementwise(size)) for size in ELEMENTS},
        "head": {str(size): seconds(head(size)) for size in VOCABULARIES},
    }
    options.output.write_text(json.dumps({"environment": environment(), **found}, indent=1) + "\n", encoding="utf-8")
    for name, rows in (("of 2^26 numbers", found["elementwise"][str(ELEMENTS[-1])]), *found["head"].items()):
        for what, least in rows.items():
            print(f"{name} {what}: {least * 1e6:,.0f} us")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
