"""The reward of a training: a function of the user's, looked up, called, and checked."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tightfit.errors import ConfigError, RewardError
from tightfit.tracing.restore import generators_restored
from tightfit.training.random_states import seed_generators

Function = Callable[..., Any]


def demand_arguments(name: str, function: Function, columns: Sequence[str]) -> None:
    """Raises `ConfigError` unless the function takes prompts, completions and the data's columns by name."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of C code; the call will say
        return
    try:
        signature.bind(**dict.fromkeys(("prompts", "completions", *columns), ()))
    except TypeError as error:
        wanted = ", ".join(("prompts", "completions", *columns))
        raise ConfigError(
            f"training.reward {name}: {path_of(name)}{signature} cannot be called with {wanted}: {error}: give it "
            "these parameters, or **columns for those it does not need"
        ) from None


def path_of(name: str) -> str:
    """The function's own name."""
    return name.partition(":")[2]


def rewards_of(
    name: str,
    function: Function,
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    seed: int,
) -> torch.Tensor:
    """The reward of each completion, fp32 (completions,).

    The function is called with all random generators seeded, and they are as before afterwards: what it draws depends
    on `seed` alone. Raises `RewardError` where it raises, or returns something else than a finite number for each.
    """
    with generators_restored():
        seed_generators(seed)
        try:
            found = function(prompts=list(prompts), completions=list(completions), **columns)
        except Exception as error:  # of code that is not ours
            reason = " ".join(str(error).split())
            raise RewardError(f"training.reward {name}: raised {type(error).__name__}: {reason}") from error
    try:
        rewards = [float(reward) for reward in found]
    except (TypeError, ValueError):
        raise RewardError(
            f"training.reward {name}: returned {_shown(found)}, wanted a list of {len(completions)} numbers, one for "
            "each completion"
        ) from None
    if len(rewards) != len(completions):
        raise RewardError(
            f"training.reward {name}: returned {len(rewards)} rewards for {len(completions)} completions: return one "
            "for each"
        )
    wrong = next((index for index, reward in enumerate(rewards) if not math.isfinite(reward)), None)
    if wrong is not None:
        raise RewardError(
            f"training.reward {name}: returned {rewards[wrong]} for the completion {_shown(completions[wrong])}: "
            "return finite numbers"
        )
    return torch.tensor(rewards, dtype=torch.float32)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
