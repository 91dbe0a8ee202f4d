"""Ways to quantise a model by name, without torch."""

import difflib

from tightfit.errors import InputError

QUANTISED_FILE = "quantisation.json"  # in the folder of a quantised model: how it was made
METHODS: dict[str, str] = {
    "int8_dynamic": "int8 weights, one scale a row; activations in int8, one scale a token, found as it runs",
    "int8": "int8 weights, one scale a row; activations as they are",
    "int8_static": "int8 weights, one scale a row; activations in int8, one scale a layer, from a calibration text",
    "int4": "4-bit weights, one scale and zero for 32 weights of a row; all else in bf16",
}
# Methods of GPTQModel. 7.7.0 declares torch>=2.14.1, and 7.1.0 numpy==2.2.6: neither installs beside our versions.
OF_GPTQMODEL = ("gptq", "awq")
GGUF = "gguf"  # what `tightfit export` writes


def refuse_other(name: str) -> None:
    """Raise `InputError` for a name that is not among `METHODS`."""
    if name in METHODS:
        return
    if name in OF_GPTQMODEL:
        raise InputError(
            f"--to {name}: GPTQModel, which has it, needs other versions of torch or numpy than tightfit is tested "
            "with: run GPTQModel in an environment of its own, or take int4"
        )
    if name.startswith(GGUF):
        raise InputError(
            f"--to {name}: quantise writes what tightfit reads: tightfit export --to gguf_q8_0 writes GGUF, and "
            "llama.cpp's llama-quantize makes its other types of that"
        )
    near = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"choose {', '.join([*METHODS][:-1])} or {[*METHODS][-1]}"
    raise InputError(f"--to {name!r} is not known: {hint}")
