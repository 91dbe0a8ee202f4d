"""Text from a causal language model, token by token.

Each token is one forward over the whole text so far: no cache to keep right, and short samples are all it is for.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from tightfit.errors import InputError
from tightfit.models.mode import evaluating


class TextCodec(Protocol):
    """What `generate_text` needs of a tokenizer."""

    @property
    def end_of_text(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


@torch.no_grad()
def generate(
    model: nn.Module,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int | None = None,
    end_of_text: int | None = None,
    context_length: int | None = None,
) -> Tensor:
    """`input_ids` (B, T) int64 followed by up to `max_new_tokens` more, (B, T + n).

    `model(input_ids=...)` returns an object with `logits` (B, T, V). Temperature 0 is greedy; else tokens are drawn
    from the softmax of logits / temperature, of the `top_k` likeliest where given, reproducibly where `seed` is. Stops
    early where every row has drawn `end_of_text`; a row that has goes on with it. Only the last `context_length`
    tokens are read, by default as many as the model has positions. Raises `InputError`.
    """
    _check(input_ids, max_new_tokens, temperature, top_k)
    limit = context_length or getattr(getattr(model, "config", None), "max_position_embeddings", None)
    generator = None if seed is None else torch.Generator(input_ids.device).manual_seed(seed)
    ended = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
    with evaluating(model):
        for _ in range(max_new_tokens):
            seen = input_ids if limit is None else input_ids[:, -limit:]
            following = _draw(model(input_ids=seen).logits[:, -1], temperature, top_k, generator)
            if end_of_text is not None:
                following = following.masked_fill(ended, end_of_text)
                ended |= following == end_of_text
            input_ids = torch.cat((input_ids, following[:, None]), dim=1)
            if ended.all():
                break
    return input_ids


def generate_text(
    model: nn.Module,
    tokenizer: TextCodec,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int | None = None,
) -> str:
    """`prompt` and its continuation as text, up to the first end of text; the arguments are those of `generate`.

    An empty prompt starts a new document.
    """
    prefix = tokenizer.encode(prompt) or [tokenizer.end_of_text]
    device = next(model.parameters()).device
    ids = generate(
        model,
        torch.tensor([prefix], device=device),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        end_of_text=tokenizer.end_of_text,
    )
    continuation = ids[0, len(prefix) :].tolist()
    if tokenizer.end_of_text in continuation:
        continuation = continuation[: continuation.index(tokenizer.end_of_text)]
    return tokenizer.decode(([] if not prompt else prefix) + continuation)


def _check(input_ids: Tensor, max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise InputError(f"input_ids have the shape {tuple(input_ids.shape)}: give (batch, tokens), at least one token")
    if max_new_tokens < 0:
        raise InputError(f"max_new_tokens is {max_new_tokens}: give zero or more")
    if temperature < 0:
        raise InputError(f"temperature is {temperature}: give 0 for greedy, or more")
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k is {top_k}: give at least 1, or leave it out")


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token for each row of logits (B, V), (B,) int64."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    scores = logits.float() / temperature
    if top_k is None:
        return torch.multinomial(scores.softmax(dim=-1), 1, generator=generator)[:, 0]
    best, tokens = scores.topk(min(top_k, scores.shape[-1]), dim=-1)
    return tokens.gather(1, torch.multinomial(best.softmax(dim=-1), 1, generator=generator))[:, 0]
