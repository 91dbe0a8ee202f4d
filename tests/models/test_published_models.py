"""Published models by name: built dry from their table, they have the number of parameters that was published."""

import pytest

from tightfit.config import PretrainedModel
from tightfit.errors import ModelError
from tightfit.models.loading import build_model
from tightfit.models.published import published
from tightfit.tracing.build import build_dry


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", published())
def test_a_published_model_has_its_published_number_of_parameters(name):
    model = build_dry(lambda: build_model(PretrainedModel(path=name, random_init=True)))
    assert sum(p.numel() for p in model.parameters()) == published()[name].parameters


def test_the_repository_names_the_same_model_in_any_case():
    model = build_dry(lambda: build_model(PretrainedModel(path="OPENAI-community/GPT2", random_init=True)))
    assert sum(p.numel() for p in model.parameters()) == published()["gpt2"].parameters


def test_a_published_model_without_weights_is_told_how_to_be_built():
    with pytest.raises(ModelError, match=r"set model\.random_init to true"):
        build_model(PretrainedModel(path="gpt2"))


def test_a_misspelt_name_is_told_the_nearest():
    with pytest.raises(ModelError, match=r"did you mean llama-3\.1-8b\?"):
        build_model(PretrainedModel(path="llama-3.1-8", random_init=True))
