"""The page of `tightfit explore` as a Hugging Face Space: upload this folder as it is."""

import os

from tightfit.cli.explorer.serving import serve

if __name__ == "__main__":  # the worker processes import this file too
    serve(
        os.environ.get("GRADIO_SERVER_NAME", "0.0.0.0"),
        int(os.environ.get("GRADIO_SERVER_PORT", "7860")),
        workers=2,
        ready=lambda address: print(address, flush=True),
    )
