"""The store that a distillation names: opened, written where it is not complete, and its figures."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from torch import nn

from tightfit.devices.spec import DeviceSpec
from tightfit.errors import ConfigError
from tightfit.memory.allocator import storage_bytes
from tightfit.models.compress.heads import head_of
from tightfit.models.compress.store_writing import StoreFigures, StoreWriter, shard_samples
from tightfit.models.compress.teacher_store import KEY, WIDEST, Identity, TeacherStore, open_store
from tightfit.tracing.surroundings import held_by
from tightfit.training.config import Config
from tightfit.training.data.prepare import PreparedData

DEFAULT_K = 20
# Of an identity: the vocabulary is the teacher's, and the rows are found by a dry run.
_DECIDED_LATER = ("vocabulary", "rows")


def wanted_identity(config: Config, data: PreparedData, teacher: str | None) -> Identity:
    """The identity that a configuration gives its store. `teacher` is the hash of the teacher, None where any may have
    written it.
    """
    settings = config.distil
    assert settings is not None, "a distillation has its section"
    return Identity(
        data=data.fingerprint,
        tokenizer=data.tokenizer.digest,
        teacher=teacher or "",
        teacher_dtype=settings.teacher_dtype,
        precision=config.training.precision,
        method=settings.store_method,
        k=settings.k or DEFAULT_K,
        temperature=settings.temperature,
        seed=settings.seed,
        vocabulary=0,
        samples=len(data.training),
        shard_samples=shard_samples(data.training),
        rows=0,
    )


def complete_store(
    config: Config,
    data: PreparedData,
    device: DeviceSpec,
    teacher: str | None,
    load: Callable[[], nn.Module],
    note: Callable[[str], None],
) -> tuple[TeacherStore, StoreFigures]:
    """The store of `distil.store`, written as far as it was not there. `teacher` is the teacher's hash, and `load`
    loads the teacher, which is called only where something is left to write.

    Raises `DataError` where the store is of something else, `ConfigError` where `k` does not fit the vocabulary, and
    `CannotFit`.
    """
    settings = config.distil
    assert settings is not None, "a distillation has its section"
    assert settings.store is not None, "a store is named"
    identity = wanted_identity(config, data, teacher)
    asked = {name: value for name, value in asdict(identity).items() if name not in _DECIDED_LATER}
    store = open_store(settings.store, {**asked, "teacher": teacher})
    missing = None if store is None else store.missing()
    if store is not None and missing == []:
        note(f"{KEY} {settings.store}: is complete, so the teacher is not loaded")
        return store, _figures(store, 0)
    if teacher is None:
        raise ConfigError(
            f"distil.teacher is not given, and {KEY} {settings.store} is not complete: give the teacher that writes it"
        )
    model = load()
    vocabulary = len(head_of(model).weight)
    if not identity.k <= vocabulary <= WIDEST:
        raise ConfigError(
            f"distil.k {identity.k} tokens are to be kept of a vocabulary of {vocabulary}: give at most {vocabulary}"
            if identity.k > vocabulary
            else f"{KEY}: a vocabulary of {vocabulary} tokens has more than the {WIDEST} that a store can name"
        )
    writer = StoreWriter(model, data.training, config, device, note)
    if store is None:
        identity, predicted = writer.begun(Identity(**{**asdict(identity), "vocabulary": vocabulary}))
        store = TeacherStore(Path(settings.store), identity)
        missing = list(range(identity.shards))
    else:
        predicted = writer.continued(store)
    assert missing is not None
    note(f"writing {len(missing)} of {store.identity.shards} shards of {KEY} {settings.store}")
    seconds = writer.write(store, missing)
    held = storage_bytes(held_by([model]))
    return store, _figures(store, len(missing), held, predicted, writer.measure(store), seconds)


def _figures(
    store: TeacherStore,
    written: int,
    teacher_bytes: int | None = None,
    predicted: int | None = None,
    measured: int | None = None,
    seconds: float | None = None,
) -> StoreFigures:
    identity = store.identity
    return StoreFigures(
        folder=str(store.folder),
        positions=store.positions(),
        disk_bytes=store.nbytes(),
        shards=identity.shards,
        written_shards=written,
        samples_at_once=identity.rows,
        teacher_bytes=teacher_bytes,
        predicted_peak_bytes=predicted,
        measured_peak_bytes=measured,
        seconds=seconds,
    )
