"""A recipe as a script for another library."""

import json
import re
import shlex

import pytest
import torch

from command_line import mistake
from plain_environment import plain_environment, runs
from tightfit.cli.question import Question
from tightfit.cli.recipe_subject import recipe_subject, recipe_text
from tightfit.errors import InputError
from tightfit.names import OPTIMIZERS
from tightfit.recipes.code import LIBRARIES, Job, as_code
from tightfit.recipes.records import Outcome, Recipe
from tightfit.recipes.written import WrittenSections, written
from tightfit.training.config.schema import AdapterConfig

ADAPTER = AdapterConfig(r=16, alpha=32.0, target_modules="all-linear", base="nf4")
each_library = pytest.mark.parametrize("library", LIBRARIES)


def job(recipe, **settings):
    return Job(recipe, "FOLDER", "22GiB", **{"batch_size": 4, "sequence_length": 128, **settings})


@pytest.mark.keeps("recipe-script-transformers-trl")
@each_library
def test_every_recipe_is_a_script_that_compiles(library):
    for optimizer in (*OPTIMIZERS, "offloaded_adamw:0.5"):
        for dtype in ("fp32", "bf16"):
            compile(as_code(library, job(Recipe(dtype, None, optimizer))), library, "exec")
    for base in ("fp32", "bf16", "int8", "nf4"):
        adapter = ADAPTER.model_copy(update={"base": base, "target_modules": ("q_proj", "v_proj")})
        compile(as_code(library, job(Recipe("bf16", adapter, precision="bf16"))), library, "exec")


@each_library
def test_a_script_names_what_the_recipe_says(library):
    text = as_code(library, job(Recipe("bf16", ADAPTER, "adamw8bit", precision="bf16"), micro_batches=2))
    for said in (
        'BUDGET = "22GiB"',
        "BATCH, LENGTH = 4, 128",
        "PARTS = 2",
        "dtype=torch.bfloat16",
        'freeze_in_low_bits(model, "nf4")',
        "r=16,",
        "lora_alpha=32,",
        'target_modules="all-linear"',
        "bitsandbytes.optim.AdamW8bit(trained",
        "bf16-mixed" if library == "lightning" else "bf16=True",
    ):
        assert said in text
    stepping = as_code(library, job(Recipe("bf16", None, "adamw_bf16", True), levers=["exact", "offload"]))
    assert "step_in_backward(optimizer, trained)" in stepping
    assert ("gradient_clip_val=None" if library == "lightning" else "max_grad_norm=0.0") in stepping
    assert 'LEVERS = ["exact", "offload"]' in stepping


@each_library
def test_a_script_clips_as_the_recipe_was_planned(library):
    recipe = Recipe("fp32", None, "adamw_fused", precision="bf16")
    plain, clipped = as_code(library, job(recipe)), as_code(library, job(recipe, grad_clip=0.5))
    if library == "lightning":
        assert "gradient_clip_val=None" in plain
        assert "clip_grad_norm_" not in plain
        assert "gradient_clip_val=0.5" in clipped
        assert "clip_grad_norm_(self.parameters(), gradient_clip_val)" in clipped
        with pytest.raises(InputError, match="fused AdamW scales fp16 gradients itself"):
            as_code(library, job(Recipe("fp32", None, "adamw_fused", precision="fp16"), grad_clip=0.5))
    else:
        assert "max_grad_norm=0.0" in plain
        assert "max_grad_norm=0.5" in clipped


def test_what_cannot_be_written_is_one_line():
    with pytest.raises(InputError, match="--as 'keras' is not known: choose one of transformers, trl, lightning"):
        as_code("keras", job(Recipe()))
    with pytest.raises(InputError, match="the loop of trl cannot step in backward"):
        as_code("trl", job(Recipe(step_in_backward=True), micro_batches=2))
    with pytest.raises(InputError, match="4 sequences do not split in 3 equal micro-batches"):
        as_code("lightning", job(Recipe(), micro_batches=3))


def test_names_with_quotes_do_not_leave_their_string():
    text = as_code("trl", Job(Recipe(), 'a"b\\', 10**9))
    assert 'default="a\\"b\\\\"' in text
    compile(text, "trl", "exec")


def test_fit_writes_a_script_with_the_hubs_name_and_refuses_what_no_library_loads():
    outcome = Outcome(Recipe("bf16", None, "adamw8bit"), True, 1, 1, micro_batches=2)
    setting = WrittenSections({"path": "llama-3.1-8b"}, budget="80GiB", batch_size=4, sequence_length=64)
    text = written(outcome, setting, "trl")
    assert 'default="meta-llama/Llama-3.1-8B"' in text
    assert "PARTS = 2" in text
    with pytest.raises(InputError, match="tightfit's own decoder"):
        written(outcome, WrittenSections({"preset": "cpu8"}), "lightning")
    with pytest.raises(InputError, match="--as keras is not known: choose one of yaml, transformers, trl, lightning"):
        written(outcome, setting, "keras")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--as", "trl"), "--as says how --output is written"),
        (("--as", "keras", "--output", "run.py"), "--as keras is not known: choose one of yaml"),
    ],
)
def test_misuse_of_as_is_one_line(options, said):
    assert said in mistake("fit", "--model", "cpu8", "--device", "rtx3060", *options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with its tokenizer, and a file of texts."""
    import tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    place = tmp_path_factory.mktemp("model")
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 300)}}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    kept = PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<eos>")
    kept.save_pretrained(place)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=300, max_position_embeddings=128)).save_pretrained(place)
    texts = [{"text": " ".join(f"w{2 + (7 * i + j) % 298}" for j in range(60))} for i in range(24)]
    (place / "texts.jsonl").write_text("".join(f"{json.dumps(text)}\n" for text in texts))
    return place


RECIPES = {
    "adapters": Recipe("bf16", ADAPTER.model_copy(update={"base": "bf16"}), "adamw_fused", precision="bf16"),
    "nf4": Recipe("bf16", ADAPTER, "adamw_fused", precision="bf16"),
    "bf16": Recipe("bf16", None, "adamw_bf16", True),
    "8bit": Recipe("fp32", None, "adamw8bit"),
    "clipped": Recipe("fp32", None, "adamw_fused", precision="bf16"),  # lightning clips none beside a fused optimizer
}


def installed_by(script):
    """The requirements of the line that a script says to install it with."""
    line = next(line for line in script.splitlines() if "pip install" in line)
    return shlex.split(line)[2:]


@each_library
def test_a_script_names_what_has_to_be_installed(library):
    def extras(recipe):
        return installed_by(as_code(library, job(recipe)))

    own = {"transformers": [], "trl": ["trl"], "lightning": []}[library]
    also = ",lightning" if library == "lightning" else ""
    assert extras(RECIPES["clipped"]) == [f"tightfit[hf{also}]", *own]
    for name in ("nf4", "8bit"):
        assert extras(RECIPES[name]) == [f"tightfit[hf{also}{',lowbit'}]", *own]


def test_a_plain_environment_has_what_a_line_names_and_nothing_else(tmp_path):
    python = plain_environment(tmp_path / "site", "tightfit[hf]")
    names = ("tightfit", "transformers", "peft", "torch", "bitsandbytes", "torchao", "trl", "pytest", "matplotlib")
    text = f"from importlib.util import find_spec; print(*(name for name in {names} if find_spec(name)))"
    done = runs(python, "-c", text, cwd=tmp_path)
    assert done.stdout.split() == ["tightfit", "transformers", "peft", "torch"], done.stderr


@pytest.mark.keeps("recipe-script-transformers-trl")
@pytest.mark.slow  # each script runs in a process of its own: ten seconds of imports, and a training
@pytest.mark.parametrize("name", RECIPES)
@each_library
def test_a_script_trains_two_steps_within_its_budget_with_what_it_says_to_install(library, name, folder, tmp_path):
    recipe = RECIPES[name]
    parts = 1 if recipe.step_in_backward else 2
    # trl's loss takes room for 32768 words a token, whatever the model has.
    budget = "64MiB" if library == "trl" else "20MiB"
    wanted = Job(recipe, str(folder), budget, 4, 48, "exact", parts, 1.0 if name == "clipped" else None)
    script = tmp_path / "train.py"
    script.write_text(as_code(library, wanted))
    python = plain_environment(tmp_path / "site", *installed_by(script.read_text()))
    arguments = [script, folder / "texts.jsonl", "--steps", "2", "--output", tmp_path / "trained"]
    done = runs(python, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Peak " in done.stdout or "peak" in done.stdout, done.stdout
    saved = {path.name for path in (tmp_path / "trained").iterdir()}
    assert ("adapter_model.safetensors" if recipe.adapter else "model.safetensors") in saved


@pytest.mark.parametrize(
    ("model", "as_", "said"),
    [
        ("vit-b-16", "yaml", "--model vit-b-16 is a ViTForImageClassification, which your own loop trains"),
        (
            "whisper-tiny",
            "trl",
            "--model whisper-tiny is a WhisperForConditionalGeneration, which your own loop trains",
        ),
        ("t5-small", "transformers", "--as: t5-small has an encoder, and a script trains causal language models alone"),
    ],
)
def test_nothing_is_written_of_a_model_that_it_could_not_load(model, as_, said):
    subject = recipe_subject(Question(config=None, model=model, device="rtx4090"))
    with pytest.raises(InputError, match=re.escape(said)):
        recipe_text(subject, Outcome(Recipe(), True, 1, 1), as_)
