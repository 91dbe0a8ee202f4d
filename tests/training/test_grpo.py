"""Group relative policy optimisation: its loss, rewards of the user's own function, and a training on prompts."""

import json
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_resume import interrupted, timeless
from tiny_training import Listener, metrics
from torch import nn

from command_line import tightfit as run
from quick_trainings import leave_out_pictures
from tightfit.devices.present import lookup
from tightfit.errors import CannotFit, ConfigError, DataError, RewardError
from tightfit.levers.chunked_loss import apply_chunked_loss
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.models.decoder import Decoder, DecoderConfig
from tightfit.step import forward_backward
from tightfit.tracing.build import build_dry
from tightfit.training.api import train
from tightfit.training.config import Config, parse_config
from tightfit.training.data.prompts import prepare_prompts
from tightfit.training.grpo import estimate_policy_phases
from tightfit.training.objective import ADVANTAGES, DRAWN, REFERENCE, counted
from tightfit.training.policy import PolicyLoss, advantages_of
from tightfit.training.rewards import rewards_of
from tightfit.training.rollouts import log_probs
from tiny_adapters import saved_llama

VOCABULARY, LENGTH = 61, 12
SHAPE = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 300, "max_position_embeddings": 48}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_pictures(monkeypatch)


# Rewards, named as `test_grpo:...`


def letters(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
    return [float(text.count("e")) for text in completions]


def drawing(prompts: list[str], completions: list[str], number: list[int]) -> list[float]:
    chance = random.random() + float(np.random.rand()) + float(torch.rand(()))
    return [float(text.count("e")) + chance * n for text, n in zip(completions, number, strict=True)]


def of_another_count(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [1.0]


def none_at_all(prompts: Any, completions: Any, **columns: Any) -> None:
    return None


def not_a_number(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float("nan")] * len(completions)


def raising(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    raise KeyError("no such answer")


def without_columns(prompts: Any, completions: Any) -> list[float]:
    return [0.0] * len(completions)


class CutAtCall:
    """Sends this process a real signal in its n-th call, once."""

    def __init__(self, call: int):
        self.left = call

    def __call__(self, prompts: list[str], completions: list[str], number: list[int]) -> list[float]:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)
        return drawing(prompts, completions, number)


cutting = CutAtCall(0)


class FailsAtCall(CutAtCall):
    def __call__(self, prompts: list[str], completions: list[str], number: list[int]) -> list[float]:
        self.left -= 1
        if self.left == 0:
            raise ValueError("the judge is away")
        return drawing(prompts, completions, number)


failing = FailsAtCall(0)


# The loss


def decoder(**other: Any) -> Decoder:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY, **other}
    return Decoder(DecoderConfig(**shape, max_position_embeddings=LENGTH))


def completions() -> dict[str, torch.Tensor]:
    """Six completions of several lengths after prompts of 4 tokens; some ratios are clipped on either side."""
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (6, LENGTH))
    labels = ids.clone()
    labels[:, :4] = -100
    for row, length in enumerate((12, 9, 6, 12, 7, 5)):
        labels[row, length:] = -100
    drawn, reference = (-4 + 0.5 * torch.randn(6, LENGTH, dtype=torch.float64) for _ in range(2))
    advantages = torch.tensor([1.5, -0.5, -1.0, 0.7, -0.3, -0.4], dtype=torch.float64)
    return {"input_ids": ids, "labels": labels, DRAWN: drawn, REFERENCE: reference, ADVANTAGES: advantages}


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def written_out(model: nn.Module, batch: dict[str, torch.Tensor], epsilon: float, beta: float, temperature: float):
    """Equations 3 and 4 of arXiv:2402.03300, token by token."""
    log_softmax = (model(batch["input_ids"]).logits / temperature).log_softmax(-1)
    of_rows = []
    for row in range(len(batch["input_ids"])):
        terms = []
        for at in range(1, LENGTH):
            if batch["labels"][row, at] < 0:
                continue
            now = log_softmax[row, at - 1, batch["input_ids"][row, at]]
            ratio, advantage = torch.exp(now - batch[DRAWN][row, at - 1]), batch[ADVANTAGES][row]
            gain = torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - epsilon, 1 + epsilon) * advantage)
            towards = torch.exp(batch[REFERENCE][row, at - 1] - now)
            terms.append(gain - beta * (towards - torch.log(towards) - 1))
        of_rows.append(torch.stack(terms).mean())
    return -torch.stack(of_rows).mean()


@pytest.mark.keeps("rewards-train-policy")
@pytest.mark.parametrize(("beta", "temperature"), [(0.0, 1.0), (0.3, 0.7)])
def test_loss_and_gradients_are_those_of_the_paper_token_by_token(beta: float, temperature: float):
    found = []
    for loss in (PolicyLoss(0.2, beta, temperature), lambda m, b: written_out(m, b, 0.2, beta, temperature)):
        model = decoder().double()
        value = loss(model, counted(completions()))
        value.backward()
        found.append((value.detach(), gradient(model)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-9, atol=0)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-7, atol=1e-10)


def test_a_first_update_needs_no_log_probabilities_of_the_draw():
    batch, found = completions(), []
    del batch[REFERENCE]
    for known in (False, True):
        model = decoder().double()
        own = log_probs(model, batch, 1.0, "fp32", is_reference=False)
        given = {**batch, DRAWN: own} if known else {name: value for name, value in batch.items() if name != DRAWN}
        PolicyLoss(0.2)(model, counted(given)).backward()
        found.append(gradient(model))
    assert found[0].abs().max() > 0
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-9)


@pytest.mark.keeps("rewards-train-policy")
def test_micro_batches_add_up_to_the_gradient_of_the_batch():
    loss, found = PolicyLoss(0.2, 0.3), []
    for count in (1, 4):
        model = decoder().double()
        forward_backward(model, as_parts(split_batch(counted(completions()), count), loss), loss)
        found.append(gradient(model))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_chunked_head_computes_it_without_the_logits(temperature: float, monkeypatch: pytest.MonkeyPatch):
    batch = {name: v.float() if v.is_floating_point() else v for name, v in completions().items()}
    loss, found = PolicyLoss(0.2, 0.3, temperature), []
    for chunked in (False, True):
        model = decoder()
        if chunked:
            apply_chunked_loss(model, "head", 5)
            monkeypatch.setattr("tightfit.levers.deferred_logits.DeferredLogits.materialise", None)
        loss(model, counted(batch)).backward()
        found.append(gradient(model))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_advantages_are_rewards_in_deviations_of_their_group_and_equal_rewards_have_none():
    found = advantages_of(torch.tensor([1.0, 3.0, 1.0, 3.0, 2.0, 2.0, 2.0, 2.0]), 4)
    torch.testing.assert_close(found, torch.tensor([-1.0, 1.0, -1.0, 1.0, 0.0, 0.0, 0.0, 0.0]), rtol=1e-3, atol=0)


def test_log_probabilities_without_gradients_never_have_the_logits_whole(monkeypatch: pytest.MonkeyPatch):
    model, batch = decoder(dropout=0.5).train(), completions()
    plain = (model.eval()(batch["input_ids"]).logits / 0.7).log_softmax(-1)
    monkeypatch.setattr("tightfit.levers.deferred_logits.DeferredLogits.materialise", None)
    found = log_probs(model.train(), batch, 0.7, "fp32", is_reference=False)
    expected = plain[:, :-1].gather(2, batch["input_ids"][:, 1:, None])[..., 0]
    is_learnt = batch["labels"][:, 1:] >= 0
    torch.testing.assert_close(found[:, :-1][is_learnt], expected[is_learnt], rtol=1e-4, atol=1e-5)
    assert model.training
    assert "forward" not in vars(model.head)


def test_adapters_are_their_own_reference_when_they_are_switched_off(tmp_path: Path):
    from tightfit.models.adapters import add_adapter
    from tightfit.models.loading import build_model
    from tightfit.training.config import AdapterConfig, PretrainedModel

    base = build_model(PretrainedModel(path=str(saved_llama(tmp_path))))
    ids = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    before = log_probs(base, batch, 1.0, "fp32", is_reference=False)
    adapted = add_adapter(base, AdapterConfig())
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.ones_(parameter)
    assert torch.equal(log_probs(adapted, batch, 1.0, "fp32", is_reference=True), before)
    assert not torch.equal(log_probs(adapted, batch, 1.0, "fp32", is_reference=False), before)


# A training


def rewarded(
    folder: Path,
    *,
    reward: str = "letters",
    prompts: list[Any] | None = None,
    length: int = 48,
    **training: Any,
) -> Config:
    folder.mkdir(exist_ok=True)
    source = folder.parent / "prompts.jsonl"
    asked = [f"What is {n} and {n + 1}?" for n in range(10, 20)] if prompts is None else prompts
    source.write_text("".join(json.dumps({"prompt": p, "number": n}) + "\n" for n, p in enumerate(asked)))
    groups = {"group_size": 8, "max_completion_tokens": 8, **training.pop("grpo", {})}
    memory, model = training.pop("memory", {}), training.pop("model", SHAPE)
    steps = {"max_steps": 6, "batch_size": 16, "learning_rate": 1e-2, "schedule": "constant", "device": "cpu"}
    return parse_config(
        {
            "model": model,
            "data": {"source": str(source), "sequence_length": length, "vocab_size": 300},
            "training": {"objective": "grpo", "reward": f"test_grpo:{reward}", "grpo": groups, **steps, **training},
            "memory": memory,
            "output": {"folder": str(folder / "run")},
        }
    )


@pytest.mark.keeps("rewards-train-policy")
def test_the_reward_rises_and_the_peak_of_every_phase_is_the_predicted_one(tmp_path: Path):
    listener = Listener()
    config = rewarded(tmp_path / "a", max_steps=16, batch_size=32, grpo={"iterations": 2})
    result = train(config, reporter=listener)
    rewards = [line["reward"] for line in metrics(tmp_path / "a")]
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.2
    assert result.predicted_phase_bytes == result.measured_phase_bytes
    assert list(result.predicted_phase_bytes or {}) == ["generation", "log_probs", "update"]
    assert (result.predicted_phase_bytes or {})["update"] == result.predicted_peak_bytes
    assert any(value.startswith("predicted peaks: generation") for name, value in listener.told if name == "note")
    assert result.sample.startswith("What is")


@pytest.mark.slow  # a training of three phases
@pytest.mark.keeps("rewards-train-policy")
def test_a_reference_of_its_own_counts_in_every_phase(tmp_path: Path):
    result = train(rewarded(tmp_path / "a", max_steps=3, grpo={"beta": 0.1}))
    bare = train(rewarded(tmp_path / "b", max_steps=3))
    predicted, measured = result.predicted_phase_bytes or {}, result.measured_phase_bytes or {}
    assert (predicted["generation"], predicted["log_probs"]) == (measured["generation"], measured["log_probs"])
    assert abs(predicted["update"] - measured["update"]) <= 8  # the factor beta, which PyTorch puts into a tensor
    weights = predicted["generation"] - (bare.predicted_phase_bytes or {})["generation"]
    assert weights >= 4 * result.parameters


@pytest.mark.sampled(1)
@pytest.mark.keeps("rewards-train-policy")
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_the_phases_are_known_from_the_configuration_alone(tmp_path: Path, beta: float):
    settings = {"max_steps": 1, "grpo": {"beta": beta}}
    data = prepare_prompts(*_sections(rewarded(tmp_path / "a", **settings)))
    longest = int(max(data.training.lengths))
    config = rewarded(tmp_path / "a", length=longest, **settings)
    shape = config.model
    assert isinstance(shape, DecoderConfig)
    model = build_dry(lambda: Decoder(shape))
    found = estimate_policy_phases(model, config, lookup("cpu"))
    result = train(config)
    assert found.peak_bytes == result.predicted_phase_bytes
    assert found.drawn_at_once == 8
    assert found.highest_bytes == max(found.peak_bytes.values())


@pytest.mark.sampled(1)
@pytest.mark.keeps("rewards-train-policy", "run-interrupted-resumed-ends")
@pytest.mark.parametrize(("step", "iterations"), [(3, 2), (2, 1)])
def test_an_interrupted_training_ends_as_the_whole_one(tmp_path: Path, step: int, iterations: int):
    """The reward draws random numbers, and step 3 is the first of two that learn from one rollout."""
    settings = {"reward": "drawing", "model": {**SHAPE, "dropout": 0.1}, "grpo": {"iterations": iterations}}
    whole, cut = rewarded(tmp_path / "whole", **settings), rewarded(tmp_path / "cut", **settings)
    train(whole)
    interrupted(cut, step)
    assert train(cut, resume=True).resumed_from == step
    assert timeless(tmp_path / "cut") == timeless(tmp_path / "whole")


@pytest.mark.slow  # two trainings
@pytest.mark.keeps("rewards-train-policy")
def test_a_signal_cuts_a_rollout_which_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("test_grpo.cutting", CutAtCall(3))
    whole, cut = (rewarded(tmp_path / name, reward=r) for name, r in (("whole", "drawing"), ("cut", "cutting")))
    train(whole)
    with pytest.raises(KeyboardInterrupt):
        train(cut)
    assert train(cut, resume=True).resumed_from == 2
    assert timeless(tmp_path / "cut") == timeless(tmp_path / "whole")


@pytest.mark.slow  # two trainings
def test_a_reward_that_fails_ends_with_a_checkpoint_of_the_steps_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("test_grpo.failing", FailsAtCall(3))
    whole, cut = (rewarded(tmp_path / name, reward=r) for name, r in (("whole", "drawing"), ("cut", "failing")))
    train(whole)
    with pytest.raises(RewardError, match="test_grpo:failing: raised ValueError: the judge is away"):
        train(cut)
    assert train(cut, resume=True).resumed_from == 2
    assert timeless(tmp_path / "cut") == timeless(tmp_path / "whole")


@pytest.mark.slow  # two trainings and their plans
def test_fewer_completions_are_drawn_at_once_where_the_budget_has_no_room_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "tightfit.training.grpo._generation_peak", lambda m, s, drawing, *_: 4 * 10**9 * (drawing.rows - 2)
    )
    drawn: list[int] = []

    def generate(model: Any, ids: torch.Tensor, *, max_new_tokens: int, **_: Any) -> torch.Tensor:
        drawn.append(len(ids))
        return torch.cat((ids, ids[:, :1].repeat(1, max_new_tokens)), dim=1)

    monkeypatch.setattr("tightfit.training.rollouts.generate", generate)
    train(rewarded(tmp_path / "a", max_steps=1, memory={"host_budget": "4GiB"}))
    assert drawn == [2] * 8


def test_a_generation_that_runs_out_of_memory_goes_on_with_half_as_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    drawn, listener = [], Listener()

    def generate(model: Any, ids: torch.Tensor, *, max_new_tokens: int, **_: Any) -> torch.Tensor:
        if len(ids) > 4:
            raise RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
            )
        drawn.append(len(ids))
        return torch.cat((ids, ids[:, :1].repeat(1, max_new_tokens)), dim=1)

    monkeypatch.setattr("tightfit.training.rollouts.generate", generate)
    train(rewarded(tmp_path / "a", max_steps=1), reporter=listener)
    assert drawn == [4] * 4
    assert ("note", "the generation is out of memory: it goes on with 4 completions at a time") in listener.told


@pytest.mark.slow  # a search that ends without a plan
def test_a_budget_without_room_for_one_completion_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tightfit.training.grpo._generation_peak", lambda *_: 10**9)
    with pytest.raises(CannotFit, match=r"drawing one completion takes .* lower training\.grpo\.max_completion_tokens"):
        train(rewarded(tmp_path / "a", memory={"budget": "0.9x"}))


def test_conversations_are_asked_in_the_chat_template(tmp_path: Path):
    prompts = [[{"role": "user", "content": f"What is {n}?"}] for n in range(8)]
    result = train(rewarded(tmp_path / "a", max_steps=1, prompts=prompts))
    assert "user" in result.sample


def test_the_phases_of_a_model_without_memory_count_its_reference(tmp_path: Path):
    shape = {**SHAPE, "vocab_size": 20_000, "hidden_size": 256}  # what is small has memory in dry runs
    found = []
    for beta in (0.0, 0.1):
        config = rewarded(tmp_path / str(beta), model=shape, grpo={"beta": beta})
        model = build_dry(lambda: Decoder(DecoderConfig(**shape)))  # pyright: ignore[reportArgumentType]
        found.append(estimate_policy_phases(model, config, lookup("rtx4090")).peak_bytes)
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert found[1]["generation"] - found[0]["generation"] >= weights
    assert found[1]["update"] - found[0]["update"] >= weights


def _sections(config: Config) -> tuple[Any, ...]:
    return config.data, config.model, config.training.groups


def test_estimate_answers_one_phase_or_all(tmp_path: Path):
    config = rewarded(tmp_path / "a")
    (file := tmp_path / "run.yaml").write_text(json.dumps(config.model_dump(mode="json", exclude_defaults=True)))
    every = json.loads(run("estimate", str(file), "--phase", "all", "--json").out)
    assert list(every["peak_bytes"]) == ["generation", "update"]
    one = json.loads(run("estimate", str(file), "--phase", "update", "--json").out)
    assert one["peak_bytes"] == {"update": every["peak_bytes"]["update"]}
    refused = run("estimate", str(file), "--phase", "sample")
    told = refused.err.splitlines()[-1]  # before it may stand that the machine was busy when it was measured
    assert (refused.code, told) == (2, "error: --phase sample: known are generation, log_probs, update, and all")


# What is refused


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("of_another_count", r"returned 1 rewards for 2 completions: return one for each"),
        ("none_at_all", r"returned None, wanted a list of 2 numbers"),
        ("not_a_number", r"returned nan for the completion 'a': return finite numbers"),
        ("raising", r"raised KeyError: 'no such answer'"),
    ],
)
def test_a_reward_returns_a_finite_number_for_each_completion(name: str, says: str):
    with pytest.raises(RewardError, match=rf"^training\.reward test_grpo:{name}: {says}") as caught:
        rewards_of(f"test_grpo:{name}", globals()[name], ["p", "p"], ["a", "b"], {}, 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("no_such", r"training\.reward test_grpo:no_such: no_such is not there in test_grpo: name a function"),
        ("SHAPE", r"training\.reward test_grpo:SHAPE: SHAPE is a dict in test_grpo: name a function"),
        (
            "without_columns",
            r"cannot be called with prompts, completions, number: .*'number'.*these parameters",
        ),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_the_model_is_built(tmp_path: Path, reward: str, says: str):
    with pytest.raises(ConfigError, match=says):
        train(rewarded(tmp_path / "a", reward=reward))
    assert not (tmp_path / "a" / "run" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("training", "says"),
    [
        ({"reward": None}, "objective grpo needs a reward"),
        ({"reward": "letters"}, "reward 'letters' names no function: write module:function"),
        ({"objective": "sft"}, "reward is for objective grpo, not sft"),
        ({"batch_size": 12}, "batch_size 12 counts completions, and a group is 8 of them"),
        ({"grpo": {"group_size": 1}}, "training.grpo.group_size"),
        ({"grpo": {"max_completion_tokens": 48}}, "leave no token of data.sequence_length 48 for a prompt"),
        ({"evaluate_every": 2}, "holds no prompts out"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_in_one_line(training: dict[str, Any], says: str):
    given = {"objective": "grpo", "reward": "test_grpo:letters", "batch_size": 8, **training}
    with pytest.raises(ConfigError) as caught:
        parse_config({"data": {"sequence_length": 48}, "training": {"grpo": {"max_completion_tokens": 8}, **given}})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([{"prompt": "a " * 60}], r"prompts.jsonl:1: the prompt has \d+ tokens, and data.sequence_length 48 leaves 40"),
        ([{"text": "a"}], r"prompts.jsonl:1: holds no 'prompt'"),
        ([{"prompt": "a"}, {"prompt": "b", "answer": 1}], r"prompts.jsonl:2: has 'answer', unlike line 1"),
        ([{"prompt": [{"role": "user"}]}], r"holds no 'prompt'"),
        ([], r"holds no prompt to learn from"),
    ],
)
def test_prompts_that_cannot_be_used_are_named_by_their_line(tmp_path: Path, lines: list[Any], says: str):
    config = rewarded(tmp_path / "a", reward="of_another_count")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DataError, match=says):
        train(config)
