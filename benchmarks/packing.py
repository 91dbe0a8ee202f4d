"""What packing gains: tokens a second of packed rows against rows of one document each, padded.

The same documents, whose lengths are drawn from a log-normal distribution as those of chats and web pages are, in
batches of as many rows of at most as many tokens. Padding counts for no token. Were a step's time the number of its
positions, packed rows would have 1 / fill of the tokens a second of padded ones, where fill is the share of tokens in
the padded rows; `of_ideal` is what they have of that.

Steps of both kinds take turns, on the same model; seconds are of the processor, on one thread, so that what other
processes do in between is not in them.

    python benchmarks/packing.py [--small] [--rounds 12] [--output results.json]
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from taking_turns import options_of, report, settle
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.step import StepSettings
from tightfit.training.data.best_fit import best_fit
from tightfit.training.data.packing import BatchStream
from tightfit.training.data.samples import BestFitSamples, PaddedSamples, Pieces, Samples
from tightfit.training.data.store import TokenStore
from tightfit.training.objective import CausalLMLoss, counted
from tightfit.training.stepper import Stepper

VOCABULARY, PAD, ROWS = 4096, 0, 4
SHAPE = {"hidden_size": 512, "num_layers": 4, "num_heads": 8, "vocab_size": VOCABULARY}
TINY = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "vocab_size": VOCABULARY}
CHUNKED = {"attention": "chunked", "attention_chunk_size": 128}
# Attention, and the length of a row.
CASES = {"fused, 512": ({}, 512), "fused, 1024": ({}, 1024), "chunked, 512": (CHUNKED, 512)}
SMALL, SMALL_COUNT, COUNT = 64, 200, 4000
MEDIAN, SPREAD = 5.0, 0.9  # of the logarithm of a length
WARM_UP = 1
MILLION = 1_000_000


def documents(count: int, longest: int) -> TokenStore:
    random = np.random.RandomState(0)
    lengths = np.clip(np.exp(random.normal(MEDIAN, SPREAD, count)), 2, longest).astype(np.int64)
    return TokenStore.from_lists([random.randint(1, VOCABULARY, length) for length in lengths])


def samples_of(store: TokenStore, longest: int) -> dict[str, Samples]:
    pieces = Pieces.cut(np.arange(len(store)), store.lengths, longest)
    return {
        "padded": PaddedSamples(store, pieces, PAD),
        "packed": BestFitSamples.of(store, pieces, longest, PAD),
    }


def measure(shape: dict[str, Any], samples: dict[str, Samples], longest: int, rounds: int) -> dict[str, Any]:
    """Tokens a second of each kind of rows, their fill, and the ratio of the one to the other."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**shape, max_position_embeddings=longest))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    stepper = Stepper(model, optimizer, CausalLMLoss(), StepSettings(grad_clip=1.0), micro_batches=1)
    streams = {name: BatchStream(each, ROWS, seed=0) for name, each in samples.items()}
    seconds: dict[str, list[float]] = {name: [] for name in streams}
    tokens, positions = dict.fromkeys(streams, 0), dict.fromkeys(streams, 0)
    for turn in range(rounds + WARM_UP):
        for name in list(streams)[:: 1 if turn % 2 else -1]:
            batch = counted(next(streams[name]))
            start = time.process_time()
            stepper.step(batch)
            settle("cpu")
            if turn >= WARM_UP:
                seconds[name].append(time.process_time() - start)
                tokens[name] += int((batch["input_ids"] != PAD).sum())
                positions[name] += batch["input_ids"].numel()
    speed = {name: tokens[name] / sum(seconds[name]) for name in streams}
    fill = {name: tokens[name] / positions[name] for name in streams}
    gain = speed["packed"] / speed["padded"]
    return {
        "tokens_per_second": speed,
        "fill": fill,
        "step_seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "gain": gain,
        "of_ideal": gain * fill["padded"],
    }


def a_million_lengths() -> dict[str, float]:
    """Processor seconds of arranging a million documents, and how full their rows are."""
    lengths = np.clip(np.exp(np.random.RandomState(0).normal(5.5, 1.2, MILLION)).astype(np.int64), 1, 2048)
    start = time.process_time()
    rows = best_fit(lengths, 2048)
    seconds = time.process_time() - start
    return {"documents": MILLION, "seconds": seconds, "fill": float(lengths.sum() / (len(rows) * 2048))}


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(__doc__ or "", arguments, rounds=12)
    torch.set_num_threads(1)
    shape, rounds = (TINY, min(options.rounds, 2)) if options.small else (SHAPE, options.rounds)
    found = {}
    for name, (how, length) in CASES.items():
        longest, count = (SMALL, SMALL_COUNT) if options.small else (length, COUNT)
        samples = samples_of(documents(count, longest), longest)
        found[name] = measure({**shape, **how}, samples, longest, rounds)
    report(options, {"rows": ROWS, "cases": found, "best_fit": a_million_lengths()})


if __name__ == "__main__":
    main()
