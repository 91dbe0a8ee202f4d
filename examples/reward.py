"""A reward for `tightfit train` with `training.objective: grpo`: short answers that name what was asked for."""


def names_it(prompts: list, completions: list[str], answer: list[str]) -> list[float]:
    """1 for a completion with the answer in it, less a little for every further character."""
    return [
        (known.lower() in text.lower()) - 0.005 * len(text) for text, known in zip(completions, answer, strict=True)
    ]
