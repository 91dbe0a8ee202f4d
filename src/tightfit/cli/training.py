"""`train`: the whole road."""

from tightfit.cli import options


def train(config: options.Config = None, overrides: options.Overrides = None) -> None:
    """Train a model as CONFIG says, within its memory budget.

    [dim]tightfit train examples/quickstart.yaml memory.budget=0.4x training.max_steps=100[/]
    """
