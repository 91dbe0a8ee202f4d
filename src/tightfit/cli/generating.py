"""`generate`: text from what a run has trained."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tightfit.cli import options

if TYPE_CHECKING:
    from torch import nn

    from tightfit.training.data.tokenizer import TextTokenizer

LARGEST_SEED = 2**63 - 1  # that `torch.Generator.manual_seed` takes


def generate(
    run: options.Run,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="The text to continue.", show_default=False)],
    chat: Annotated[
        bool, typer.Option("--chat", help="Answer the prompt, as a turn of the user in the run's chat template.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=0, help="At most so many tokens more.")] = 100,
    temperature: Annotated[float, typer.Option(metavar="T", min=0, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(metavar="K", min=1, help="Draw from the K likeliest.")] = 50,
    seed: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=LARGEST_SEED, help="For the same text again.")
    ] = None,
    device: options.RunsOn = "cpu",
) -> None:
    """Continue a text with a trained model, or answer it.

    [dim]tightfit generate runs/quickstart --prompt "def main(" --max-new-tokens 60[/]
    """
    from tightfit.models.generation import continue_ids, generate_text
    from tightfit.training.data.tokenizer import answer_prompt

    model, tokenizer = loaded(run, device)
    if chat:
        asked, stop = answer_prompt(tokenizer, prompt)
        answer = continue_ids(
            model, asked, stop=stop, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed
        )
        typer.echo(tokenizer.decode(answer))
        return
    text = generate_text(
        model, tokenizer, prompt, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed
    )
    typer.echo(text)


def loaded(run: Path, device: str) -> "tuple[nn.Module, TextTokenizer]":
    """The model that a run has trained so far, on a device. Where its weights are those of a checkpoint, a line on
    stderr says of which.
    """
    from tightfit.devices.present import torch_device
    from tightfit.training.run_folders.loading import load_run

    there = torch_device(device)  # before weights are read
    found = load_run(run)
    for line in found.source:
        typer.echo(line, err=True)
    return found.model.to(there), found.tokenizer
