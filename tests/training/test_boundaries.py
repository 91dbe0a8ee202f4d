"""A model that does not keep the documents of a packed row apart is refused before it is trained."""

import pytest
import torch
from packed_rows import MODELS, VOCABULARY, decoder, of_transformers
from torch import nn

from tightfit.errors import ModelError
from tightfit.training.boundaries import demand_boundaries


def demand(model: nn.Module, longest: int = 32) -> None:
    demand_boundaries(model, vocabulary=VOCABULARY, longest=longest)


class Wrapped(nn.Module):
    """A model that a user has put another one in."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model


class IgnoresPositions(Wrapped):
    def forward(self, input_ids, position_ids=None, **others):
        return self.model(input_ids=input_ids)


class AddsAMaskOfOnes(Wrapped):
    def forward(self, input_ids, **others):
        return self.model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **others)


class TakesNoPositions(Wrapped):
    def forward(self, input_ids):
        return self.model(input_ids=input_ids)


class CarriesAState(Wrapped):
    """Attention keeps the documents apart, and a recurrence over the row does not."""

    def forward(self, input_ids, position_ids):
        outputs = self.model(input_ids=input_ids, position_ids=position_ids)
        return outputs._replace(logits=outputs.logits.cumsum(dim=1))


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_models_that_keep_documents_apart_are_let_through(make):
    demand(make())


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_experts_that_compute_all_documents_together_are_let_through(name):
    demand(of_transformers(name, num_experts_per_tok=2, num_local_experts=4, num_experts=4, moe_intermediate_size=16))


@pytest.mark.keeps("model-lets-packed-documents")
@pytest.mark.parametrize(
    ("model", "line"),
    [
        (lambda: IgnoresPositions(decoder()), "in IgnoresPositions a document's logits move by up to"),
        (lambda: AddsAMaskOfOnes(of_transformers("Llama")), "in AddsAMaskOfOnes a document's logits move by up to"),
        (lambda: CarriesAState(decoder()), "in CarriesAState a document's logits move by up to"),
        (lambda: TakesNoPositions(decoder()), "TakesNoPositions takes no position_ids"),
        (lambda: of_transformers("Mamba", state_size=4), "in MambaForCausalLM a document's logits move by up to"),
    ],
    ids=["positions ignored", "mask of ones", "recurrence", "no positions", "mamba"],
)
def test_models_that_do_not_are_refused_in_a_line_that_says_what_to_do(model, line):
    with pytest.raises(ModelError, match=r"data\.packing best_fit: .*set data\.packing to none$") as raised:
        demand(model())
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.keeps("model-lets-packed-documents")
def test_a_model_that_caches_keys_and_values_is_refused():
    model = of_transformers("Llama")
    model.config.use_cache = True
    with pytest.raises(ModelError, match="in LlamaForCausalLM a document's logits move"):
        demand(model)


def test_the_shortest_rows_are_tried_in_documents_of_one_token():
    demand(decoder(max_position_embeddings=2), longest=2)
    with pytest.raises(ModelError, match="a document's logits move"):
        demand(IgnoresPositions(decoder(max_position_embeddings=2)), longest=2)


def test_the_try_leaves_model_and_random_state_as_they_were():
    model = decoder(dropout=0.5)
    weights, state = [p.clone() for p in model.parameters()], torch.get_rng_state()
    demand(model)
    assert all(torch.equal(before, p) and p.grad is None for before, p in zip(weights, model.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert model.layers[0].dropout.training
