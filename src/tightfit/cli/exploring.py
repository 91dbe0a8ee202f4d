"""`explore`: the page in a browser."""

import os
import webbrowser
from typing import Annotated

import typer

from tightfit.cli.ending import ends_in_order
from tightfit.errors import InputError

FEWEST, MOST = 2, 4  # processes that answer: one slow question must not block another, and each takes about 700 MB


def explore(
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="The address to listen on; 0.0.0.0 lets others in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", help="The port; 0 is a free one.")] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open a browser.")] = False,
) -> None:
    """Serve a local page that says what fits a card: memory, time, recipes and what they cost.

    Choose a model or upload its configuration, a card and a batch. The page
    needs Gradio (pip install 'tightfit\\[explore]'). It loads nothing from
    outside, sends nothing, and runs no code of an uploaded file. Its address
    is the first line of the output. Ctrl-C ends it.

    [dim]tightfit explore[/]

    [dim]tightfit explore --port 7860 --no-browser[/]
    """
    if not 0 <= port < 2**16:
        raise InputError(f"--port {port} is no port: give 0 to {2**16 - 1}")
    with ends_in_order():
        from tightfit.cli.explorer.serving import serve

        def ready(address: str) -> None:
            typer.echo(address)
            if not no_browser:
                webbrowser.open(address)

        serve(host, port, workers=min(max(os.cpu_count() or FEWEST, FEWEST), MOST), ready=ready)
