"""Wrong settings of levers, as a user meets them: one line that says what, where and what to do."""

import pytest
import yaml

from command_line import mistake, tightfit


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("memory.offload_folder=/nowhere", "/nowhere cannot be used: No such file or directory: name another folder"),
        ("memory.offload_budget=900000TB", "lower the budget or name a folder on another disk"),
        ("memory.offload_budget=0", "0 is not above zero"),
        ("training.optimizer=offloaded_adamw:1.5", "the share of the states on the host goes from 0 to 1"),
        ("memory.levers=[recompute,magic]", "memory.levers[1] is 'magic'"),
    ],
)
def test_a_wrong_setting_of_a_lever_is_one_line(tmp_path, setting, said):
    path = tmp_path / "training.yaml"
    model = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 300, "max_position_embeddings": 64}
    memory = {"budget": "0.9x", "levers": ["offload"]}
    path.write_text(yaml.safe_dump({"model": model, "data": {"sequence_length": 64}, "memory": memory}))
    assert said in mistake("plan", path, "training.device=cpu", setting)


@pytest.mark.slow  # two plans with every lever exact to rounding
def test_a_class_of_levers_with_names_is_taken_from_the_option_and_from_yaml(tmp_path):
    path = tmp_path / "training.yaml"
    model = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 300, "max_position_embeddings": 64}
    memory = {"budget": "0.8x", "levers": ["rounding", "offload"]}
    path.write_text(yaml.safe_dump({"model": model, "data": {"sequence_length": 64}, "memory": memory}))
    ask = ("plan", path, "--device", "rtx4090", "--json")
    by_key, by_option = tightfit(*ask), tightfit(*ask, "--levers", "rounding,offload")
    assert by_key.code == 0
    assert by_key.answer == by_option.answer
    wrong = tightfit(*ask, "--levers", "rounding,magic")
    assert (wrong.code, "magic" in wrong.error) == (2, True)
