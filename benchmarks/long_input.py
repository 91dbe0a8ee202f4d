"""A text of 32,768 tokens scored in pieces of 512 beside the single pass: their difference and their peaks.

    python benchmarks/long_input.py --output benchmarks/results/long_input.json

A decoder with new weights reads the start of the default corpus as bytes, in fp32 on the CPU. The pieces go through
chunked attention, as a cache does, the single pass through PyTorch's own. The peak is the allocator's own record over
the whole scoring, with the weights; the difference is the largest of one token's log-likelihood.
"""

import argparse
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from environment import environment
from tightfit import TextScore, score
from tightfit.memory.allocator import measured_peak
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.training.data.corpus import read_documents
from tightfit.units import format_bytes

SHAPE: dict[str, Any] = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "vocab_size": 6400}


def text(tokens: int) -> Tensor:
    """The first bytes of the default corpus."""
    characters = "".join(islice(read_documents("default"), tokens))
    return torch.tensor(list(characters.encode()[:tokens]))


def measure(model: Decoder, ids: Tensor, chunk_size: int | None) -> tuple[TextScore, dict[str, Any]]:
    """One scoring under the allocator's record."""
    made: list[TextScore] = []
    resident = [*model.parameters(), *model.buffers(), ids]
    peak = measured_peak(lambda: made.append(score(model, ids, chunk_size=chunk_size)), resident)
    (scored,) = made
    row = {"chunk_size": chunk_size, "peak_bytes": peak, "log_likelihood": scored.log_likelihood}
    print(f"{'single pass' if chunk_size is None else f'pieces of {chunk_size}'}: peak {format_bytes(peak)}, ", end="")
    print(f"log-likelihood {scored.log_likelihood:.4f}", flush=True)
    return scored, row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--chunk-size", type=int, default=512)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = DecoderConfig(**SHAPE, max_position_embeddings=options.tokens)
    model = Decoder(config)
    # tiles of the size of a piece: fewer operators, so that the record of the allocator stays small
    frugal = Decoder(replace(config, attention="chunked", attention_chunk_size=options.chunk_size))
    frugal.load_state_dict(model.state_dict())
    ids = text(options.tokens)
    pieces, first = measure(frugal, ids, options.chunk_size)
    whole, second = measure(model, ids, None)
    apart = (pieces.log_likelihoods - whole.log_likelihoods).abs().max().item()
    print(f"{options.tokens} tokens: the largest difference of a token's log-likelihood is {apart:.1e}")
    result = {"tokens": options.tokens, "model": SHAPE, "largest_difference": apart, "rows": [first, second]}
    if options.output:
        options.output.write_text(json.dumps({"environment": environment(), "result": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
