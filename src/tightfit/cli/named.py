"""The page `docs/names.md`: what `--model` and `--device` know by name.

`python -m tightfit.cli.named > docs/names.md` writes it. No torch here.
"""

import sys
from collections.abc import Iterable

from tightfit.devices.known import KnownDevice, common_names, known_devices
from tightfit.models.decoder_config import PRESETS
from tightfit.models.published import Published, published

_MODELS = """\
# Names

Written by `python -m tightfit.cli.named` from `src/tightfit/models/published.toml` and
`src/tightfit/devices/known.toml`.

## Models

`--model` takes these names in any spelling: case, spaces, dots, hyphens and underscores do not matter, nor do words
such as Instruct. The repository on the Hugging Face Hub names the same model. A model has the fields of its own
config.json, and a test builds each one dry and counts its parameters. "Stored" is the dtype that `--dtype auto` takes.
ViT gets a batch of images with classes. Whisper gets 30 seconds of speech with the tokens of what is said (`--seq-len`,
else as many as it takes). Gemma 3 from 4b on reads images too; its batch is text. Diffusion models (`sd1.5` to
`wan2.1-14b`, extra `diffusion`) get latents of images of `--image` pixels, what text encoders make of `--seq-len`
tokens, and the loss of diffusers' training scripts. Wan, for which diffusers has none, gets videos of 81 frames. The
fields of `sd1.5`, `sdxl`, `sd3-medium`, `flux.1-dev`, `qwen-image` and `wan2.1-1.3b` are those of public copies of
their config.json, the count of `flux.2-klein-4b` is that which PEFT's comparison of methods states; `sd2.1` and
`wan2.1-14b` have not been compared. `estimate --phase all` has a table of the phases of each: caching what VAE and text
encoders make, the steps, and sampling, with VAE and text encoders resident, offloaded or gone. They are those of
diffusers' pipelines. Sampling with guidance runs one batch of two up to `sd3-medium`, and two passes one after the
other for FLUX.2, Qwen-Image and Wan; the VAE of Wan and of `sdxl` stays in fp32.

| name | also | repository | parameters | stored |
|---|---|---|---:|---|
"""

_CARDS = """
## Cards

`--device` takes these names in any spelling, with or without the maker's words (`NVIDIA GeForce RTX 4090`, `4090`).
`tightfit devices` shows their rates, and `tightfit devices --json` the source of each figure. Cards of AMD are not in
the list: PyTorch runs other kernels on them (hipBLASLt's products, other attention, other scratch memory), and no rule
of `src/tightfit/tracing/cuda` was derived for those. An estimate for an MI300X would be a guess.

| name | card | memory | compute capability | multiprocessors |
|---|---|---:|---|---:|
"""

_COMMON = """
Several cards share a name. The first one is taken, and a line on stderr says so.

| name | cards |
|---|---|
"""


def names_page() -> str:
    """The page, as Markdown."""
    presets = f"\nPresets of the reference decoder: {_listed(PRESETS)}.\n"
    models = "".join(_model(name, known) for name, known in published().items())
    cards = "".join(_card(known) for known in known_devices().values())
    common = "".join(
        f"| `{name}` | {', '.join(f'`{key}`' for key in keys)} |\n" for name, keys in common_names().items()
    )
    return _MODELS + models + presets + _CARDS + cards + _COMMON + common


def _model(name: str, known: Published) -> str:
    return f"| `{name}` | {_listed(known.also)} | {known.source} | {known.parameters:,} | {known.dtype} |\n"


def _card(known: KnownDevice) -> str:
    spec = known.spec
    assert spec.compute_capability is not None, "cards of the list have a compute capability"
    capability, memory = ".".join(map(str, spec.compute_capability)), f"{spec.memory_bytes / 2**30:.2f} GiB"
    return f"| `{known.key}` | {spec.name} | {memory} | {capability} | {spec.sm_count} |\n"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    sys.stdout.write(names_page())
