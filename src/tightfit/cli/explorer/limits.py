"""How large a question to the page may be. Past these numbers a dry run takes minutes, or memory of its own."""

from tightfit.errors import InputError

UPLOAD_BYTES = 256 * 1024  # of a configuration; that of the largest published model has 30 KiB
TOKENS = 2**20  # sequence x batch
LAYERS = 256  # blocks of a model; the largest published one has 126
EXPERTS = 1024  # in a layer
WIDTH = 2**24  # any other number of a configuration: widths, vocabularies, positions
DEPTH = 16  # mappings and lists in each other
SECONDS = 300  # for one answer


def check_tokens(sequence_length: int, batch_size: int) -> None:
    """Raise `InputError` for a batch that is too large to be asked about here."""
    for name, value in (("sequence", sequence_length), ("batch", batch_size)):
        if value < 1:
            raise InputError(f"{name} {value} is less than 1: give a whole number above zero")
    if sequence_length * batch_size > TOKENS:
        raise InputError(
            f"{batch_size:,} x {sequence_length:,} tokens are more than the {TOKENS:,} that this page takes: ask for "
            "fewer, or use the command line"
        )


def check_number(name: str, value: float) -> None:
    """Raise `InputError` for a number of a configuration that is too large to be asked about here."""
    lowered = name.lower()
    most = WIDTH
    if "layer" in lowered and "drop" not in lowered:
        most = LAYERS
    elif "experts" in lowered:
        most = EXPERTS
    if abs(value) > most:
        raise InputError(f"{name} {value:,} is more than the {most:,} that this page takes: use the command line")
