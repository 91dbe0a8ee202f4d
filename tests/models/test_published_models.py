"""Published models by name: built dry from their table, they have the number of parameters that was published."""

import pytest

from tightfit.errors import ModelError
from tightfit.models.loading import build_model, weights_dtype, without_weights
from tightfit.models.published import find_published, published
from tightfit.tracing.build import build_dry
from tightfit.training.config import PretrainedModel

# The smallest of each architecture, and of each size that the table has; the slow test builds all.
QUICK = (
    "gpt2", "smollm2-135m", "qwen2.5-0.5b", "qwen3-0.6b", "qwen3-30b-a3b", "gemma-3-270m", "mixtral-8x7b", "phi-4-mini",
    "gpt-oss-20b", "deepseek-v2-lite", "t5-small", "whisper-tiny", "vit-base-patch16-224",
)  # fmt: skip


def counted(name):
    model = build_dry(lambda: build_model(PretrainedModel(path=name, random_init=True), any_task=True))
    return sum(p.numel() for p in model.parameters())


@pytest.mark.keeps("published-model-given-name")
@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", QUICK)
def test_a_published_model_has_its_published_number_of_parameters(name):
    assert counted(name) == published()[name].parameters


@pytest.mark.keeps("published-model-named-spelling")
@pytest.mark.slow  # builds every model of the table: a minute
def test_every_published_model_has_its_published_number_of_parameters():
    counts = {name: counted(name) for name in published()}
    assert counts == {name: known.parameters for name, known in published().items()}


@pytest.mark.keeps("published-model-named-spelling")
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("LLaMA 3.1 8B", "llama-3.1-8b"),
        ("llama_3_1_8b", "llama-3.1-8b"),
        ("llama3.1:8b", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("405B", "llama-3.1-405b"),
        ("Llama-3.3-70B-Instruct", "llama-3.1-70b"),
        ("qwen2.5-72b", "qwen2.5-72b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("DeepSeek-R1", "deepseek-v3"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("phi4", "phi-4"),
        ("t5-base", "t5-base"),
        ("openai/whisper-base", "whisper-base"),
        ("ViT-B/16", None),
        ("unsloth/Llama-3.1-8B", None),
        ("qwen2-57b", None),
        ("llama-3.1", None),
    ],
)
def test_a_name_in_any_spelling_is_one_entry_or_none(name, key):
    assert find_published(name) is (None if key is None else published()[key])


def test_no_two_models_answer_to_one_name():
    for key, known in published().items():
        for name in (key, *known.also, known.source):
            assert find_published(name) is known, name


def test_the_repository_names_the_same_model_in_any_case():
    assert counted("OPENAI-community/GPT2") == published()["gpt2"].parameters


def test_a_published_model_without_weights_is_told_how_to_be_built():
    with pytest.raises(ModelError, match="random_init to true, or name the repository openai-community/gpt2"):
        build_model(PretrainedModel(path="gpt2"))


def test_a_misspelt_name_is_told_the_nearest():
    with pytest.raises(ModelError, match=r"did you mean llama-3\.1-8b\?"):
        build_model(PretrainedModel(path="llama-3.1-8", random_init=True))


def test_the_dtype_of_a_checkpoint_is_known_without_it():
    for path, dtype in (("Qwen/Qwen3-0.6B", "bf16"), ("google-t5/t5-small", "fp32")):
        assert weights_dtype(PretrainedModel(path=path)) == dtype
        assert without_weights(PretrainedModel(path=path)).dtype == dtype


def test_a_model_of_images_is_no_language_model():
    with pytest.raises(ModelError, match="its config is of a vit: name a function"):
        build_model(PretrainedModel(path="vit-base", random_init=True))
