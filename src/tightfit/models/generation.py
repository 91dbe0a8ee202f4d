"""Text from a causal language model, token by token.

The prompt is read in pieces and each further token by itself, with a cache of keys and values where the model keeps
one. Where it keeps none, and beyond its positions, each token is one forward over what it can hold.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from tightfit.errors import InputError
from tightfit.models.loading import position_limit
from tightfit.models.mode import evaluating
from tightfit.models.reading import Reader, pieces, reader

CHUNK_SIZE = 512  # tokens of a prompt that are read at once


class TextCodec(Protocol):
    """The methods of a tokenizer that `generate_text` calls."""

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
    chunk_size: int = CHUNK_SIZE,
) -> Tensor:
    """`input_ids` (B, T) int64 followed by up to `max_new_tokens` more, (B, T + n).

    `model(input_ids=...)` returns an object with `logits` (B, T, V). Temperature 0 is greedy; else tokens are drawn
    from the softmax of logits / temperature, of the `top_k` likeliest where given, reproducibly where `seed` is. Stops
    early where every row has drawn `end_of_text`; a row that has goes on with it. Only the last `context_length`
    tokens are read, by default as many as the model has positions; `chunk_size` of them at a time. Raises
    `InputError`.
    """
    _check(input_ids, max_new_tokens, temperature, top_k, chunk_size)
    generator = None if seed is None else torch.Generator(input_ids.device).manual_seed(seed)
    running = Generation(
        model,
        input_ids,
        max_new_tokens=max_new_tokens,
        context_length=context_length,
        chunk_size=chunk_size,
        temperature=temperature,
        top_k=top_k,
        generator=generator,
        end_of_text=end_of_text,
    )
    with evaluating(model):
        for _ in range(max_new_tokens):
            input_ids = running.extended(input_ids)
            if running.is_over:
                break
    return input_ids


class Generation:
    """Extends texts token by token; mutable, for one batch of them. The arguments are those of `generate`.

    `on_read` is called with the cache's tensors after each piece that was read.
    """

    def __init__(
        self,
        model: nn.Module,
        input_ids: Tensor,
        *,
        max_new_tokens: int,
        context_length: int | None = None,
        chunk_size: int = CHUNK_SIZE,
        temperature: float = 0.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        end_of_text: int | None = None,
        on_read: Callable[[list[Tensor]], None] | None = None,
    ):
        limit = context_length or position_limit(model)
        self.reading = _GrowingText(model, limit, chunk_size, input_ids.shape[1] + max_new_tokens, on_read)
        self.temperature, self.top_k, self.generator, self.end_of_text = temperature, top_k, generator, end_of_text
        self.ended = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def extended(self, input_ids: Tensor) -> Tensor:
        """The ids (B, T) with one more token each."""
        logits = self.reading.following(input_ids)
        following = _draw(logits, self.temperature, self.top_k, self.generator)
        if self.end_of_text is not None:
            following = following.masked_fill(self.ended, self.end_of_text)
            self.ended |= following == self.end_of_text
        return torch.cat((input_ids, following[:, None]), dim=1)

    @property
    def is_over(self) -> bool:
        """True if every text has ended."""
        return bool(self.ended.all())


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
    continuation = continue_ids(
        model,
        prefix,
        stop=tokenizer.end_of_text,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )
    return tokenizer.decode(([] if not prompt else prefix) + continuation)


def continue_ids(
    model: nn.Module,
    prefix: list[int],
    *,
    stop: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int | None = None,
) -> list[int]:
    """The ids that continue the ids `prefix`, such as a chat's prompt, up to the first `stop`, which is left out."""
    ids = generate(
        model,
        torch.tensor([prefix], device=next(model.parameters()).device),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        end_of_text=stop,
    )
    continuation = ids[0, len(prefix) :].tolist()
    return continuation[: continuation.index(stop)] if stop in continuation else continuation


class _GrowingText:
    """Reads a growing text: what is new of it, while all of it fits."""

    def __init__(
        self,
        model: nn.Module,
        limit: int | None,
        chunk_size: int,
        longest: int,
        on_read: Callable[[list[Tensor]], None] | None,
    ):
        self.model, self.limit, self.chunk_size, self.on_read = model, limit, chunk_size, on_read
        self.capacity = longest if limit is None else min(longest, limit)
        self.begin()

    def begin(self) -> None:
        self.read: Reader | None = reader(self.model, self.capacity)
        self.length = 0  # of what is read

    def following(self, input_ids: Tensor) -> Tensor:
        """Logits (B, V) of the token after `input_ids` (B, T), which goes on where the last call's ended."""
        seen = input_ids if self.limit is None else input_ids[:, -self.limit :]
        if self.read is None:
            return self.model(input_ids=seen).logits[:, -1]
        if seen.shape[1] < input_ids.shape[1]:  # it slides: every token has another position than before
            self.begin()
        logits = []
        for piece in pieces(seen[:, self.length :], self.chunk_size):
            logits.append(self.read(piece)[:, -1].clone())
            if self.on_read is not None:
                self.on_read(list(self.read.cached()))
        self.length = seen.shape[1]
        return logits[-1]


def _check(input_ids: Tensor, max_new_tokens: int, temperature: float, top_k: int | None, chunk_size: int) -> None:
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise InputError(f"input_ids have the shape {tuple(input_ids.shape)}: give (batch, tokens), at least one token")
    if max_new_tokens < 0:
        raise InputError(f"max_new_tokens is {max_new_tokens}: give zero or more")
    if temperature < 0:
        raise InputError(f"temperature is {temperature}: give 0 for greedy, or more")
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k is {top_k}: give at least 1, or leave it out")
    if chunk_size < 1:
        raise InputError(f"chunk_size is {chunk_size}: give at least 1")


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token for each row of logits (B, V), (B,) int64."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    scores = logits.float() / temperature
    if top_k is None:
        return torch.multinomial(scores.softmax(dim=-1), 1, generator=generator)[:, 0]
    best, tokens = scores.topk(min(top_k, scores.shape[-1]), dim=-1)
    return tokens.gather(1, torch.multinomial(best.softmax(dim=-1), 1, generator=generator))[:, 0]
