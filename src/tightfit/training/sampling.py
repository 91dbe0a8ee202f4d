"""A sample of the trained model."""

import torch
from torch import nn

from tightfit.levers.micro_batch import IGNORE_INDEX
from tightfit.models.generation import continue_ids, generate_text
from tightfit.training.data.prepare import PreparedData
from tightfit.training.data.tokenizer import TextTokenizer

PROMPT_TOKENS, SAMPLE_TOKENS = 12, 80  # of the sample: what begins it, and what the model adds
SAMPLE_TEMPERATURE, SAMPLE_TOP_K = 0.8, 50


def sample_text(model: nn.Module, data: PreparedData, *, seed: int) -> str:
    """The beginning of a sample that was held out, if one was, and what the model makes of it."""
    samples = data.validation if len(data.validation) else data.training
    if data.objective != "causal":
        return _sample_answer(model, data.tokenizer, samples.batch([0]), seed=seed)
    return generate_text(
        model,
        data.tokenizer,
        data.tokenizer.decode(samples.beginning(PROMPT_TOKENS)),
        max_new_tokens=SAMPLE_TOKENS,
        temperature=SAMPLE_TEMPERATURE,
        top_k=SAMPLE_TOP_K,
        seed=seed,
    )


def _sample_answer(model: nn.Module, tokenizer: TextTokenizer, batch: dict[str, torch.Tensor], *, seed: int) -> str:
    """The text before the first answer of a sample, and the model's answer."""
    learnt = (batch["labels"][0] != IGNORE_INDEX).nonzero()
    asked = batch["input_ids"][0, : max(1, int(learnt[0]) if len(learnt) else PROMPT_TOKENS)].tolist()
    stop = tokenizer.chat.end_of_turn()
    answer = continue_ids(
        model,
        asked,
        stop=tokenizer.end_of_text if stop is None else stop,
        max_new_tokens=SAMPLE_TOKENS,
        temperature=SAMPLE_TEMPERATURE,
        top_k=SAMPLE_TOP_K,
        seed=seed,
    )
    return tokenizer.decode(asked) + tokenizer.decode(answer)
