"""Models of `transformers`, read piece by piece."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from tightfit import score
from tightfit.errors import ModelError
from tightfit.models.generation import generate

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 90}
LLAMA_LIKE = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 128}
CONFIGS = {
    "LlamaConfig": LLAMA_LIKE,
    "Qwen3Config": {**LLAMA_LIKE, "head_dim": 8},
    "MistralConfig": {**LLAMA_LIKE, "sliding_window": 16},
    "Gemma2Config": {**LLAMA_LIKE, "head_dim": 8, "sliding_window": 16, "pad_token_id": 0},
    "GPT2Config": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 90, "n_positions": 128},
}


def built(name, **changes) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**CONFIGS[name], **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    model.config.use_cache = False  # as `build_pretrained` leaves it
    return model


def text(length=75):
    return torch.randint(1, 90, (2, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.keeps("text-read-pieces-scores")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_text_in_pieces_scores_as_in_one_pass(name):
    model = built(name)
    whole = score(model, text(), chunk_size=None)
    for chunk_size in (1, 16, 31):
        pieces = score(model, text(), chunk_size=chunk_size)
        torch.testing.assert_close(pieces.log_likelihoods, whole.log_likelihoods, rtol=1e-5, atol=1e-5)
    assert not model.config.use_cache


@pytest.mark.parametrize("name", CONFIGS)
def test_text_generated_from_a_cache_is_that_of_whole_passes(name):
    model, ids = built(name), text(20)
    made = generate(model, ids, max_new_tokens=8, temperature=0, chunk_size=6)
    for _ in range(8):
        with torch.no_grad():
            ids = torch.cat((ids, model(input_ids=ids).logits[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(made, ids)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_argument_of_the_cache_has_two_names(name):
    """`transformers` calls it `cache` since 5.24, and `past_key_values` before."""
    whole = score(built("LlamaConfig"), text(), chunk_size=None)
    pieces = score(Renamed(built("LlamaConfig"), name), text(), chunk_size=16)
    torch.testing.assert_close(pieces.log_likelihoods, whole.log_likelihoods, rtol=1e-5, atol=1e-5)


class Renamed(nn.Module):
    """A causal model whose cache has the given name as an argument and in the output."""

    def __init__(self, model: nn.Module, name: str):
        super().__init__()
        self.model, self.config = model, model.config
        self.theirs = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
        self.forward = self.of_cache if name == "cache" else self.of_past_key_values

    def of_cache(self, input_ids, cache=None, use_cache=False):
        return SimpleNamespace(**self.called(input_ids, cache, use_cache, "cache"))

    def of_past_key_values(self, input_ids, past_key_values=None, use_cache=False):
        return SimpleNamespace(**self.called(input_ids, past_key_values, use_cache, "past_key_values"))

    def called(self, ids, cache, use_cache, name):
        output = self.model(input_ids=ids, use_cache=use_cache, **{self.theirs: cache})
        return {"logits": output.logits, name: getattr(output, self.theirs)}

    def prepare_inputs_for_generation(self):
        raise NotImplementedError


WITHOUT_KEYS = {
    "MambaConfig": {"state_size": 4},
    "RecurrentGemmaConfig": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "lru_width": 32,
        "num_hidden_layers": 3,
        "pad_token_id": 0,
        "intermediate_size": 48,
    },
    "XLMConfig": {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "pad_index": 0},
}


@pytest.mark.parametrize("name", WITHOUT_KEYS)
def test_a_model_without_keys_of_every_token_is_refused_by_name_and_still_generates(name):
    """A recurrent layer has a cache too, which takes one token at a time; the cache of XLM is a dict of its own."""
    torch.manual_seed(0)
    config = getattr(transformers, name)(
        **{"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 90} | WITHOUT_KEYS[name]
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ModelError, match=f"{type(model).__name__} keeps no cache"):
        score(model, text())
    assert generate(model, text(5), max_new_tokens=3, temperature=0).shape == (2, 8)
