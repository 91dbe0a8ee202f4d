"""`devices` and `calibrate`: what can be asked about, and what the device here really does."""

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tightfit.cli import options
from tightfit.cli.asking import columns, show
from tightfit.errors import DeviceError

if TYPE_CHECKING:
    from tightfit.cli.device_tables import DeviceRow
    from tightfit.devices.spec import Kind


def devices(as_json: options.Json = False) -> None:
    """Show the devices that can be asked about: those that are here, and common cards by their published figures.

    Their names are what `--device` takes, written as you like. Figures of
    your own may follow a name, or stand for it: memory (all that the device
    holds), bandwidth, fp32, tf32, bf16, fp16, capability, link, sms. Without
    a name, memory, bandwidth, fp32 and capability are needed; the rest is
    that of the card which is most alike. YAML and Python take the same text.

    [dim]tightfit devices --json[/]

    [dim]tightfit estimate --model cpu26 --device rtx4090[/]

    [dim]tightfit estimate --model cpu26 --device rtx3080,memory=8GiB[/]

    [dim]tightfit estimate --model cpu26 --device memory=8GiB,bandwidth=400GB/s,fp32=20TFLOPS,capability=8.6[/]
    """
    from tightfit.cli.device_tables import describe_devices

    rows = [*_here(), *_published()]
    show([_plain(row) for row in rows] if as_json else describe_devices(rows, columns()))


def calibrate(
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="cpu or cuda (else the one that is used by itself).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Measure again, even if it was measured before.")] = False,
    as_json: options.Json = False,
) -> None:
    """Measure the device that is here, in some seconds, and keep its figures for estimates and plans.

    The first training does this by itself. Estimates and plans before it have
    rough figures, taken in about a second. Do it again when the machine is quiet,
    if it was busy then.

    [dim]tightfit calibrate --force[/]
    """
    from tightfit.cli.device_tables import describe_calibration
    from tightfit.devices.present import cache_path, measure, present

    kind = _kind(device)
    say = partial(typer.echo, err=True)
    found = measure(kind, say) if force else present(kind, say, measured=True)
    path = str(cache_path(found.kind))
    show({**found.to_dict(), "path": path} if as_json else describe_calibration(found, path, columns()))


def _kind(device: str | None) -> "Kind | None":
    """The kind of a device that can be measured. Raises `DeviceError` for any other."""
    from tightfit.devices.present import PRESENT_KINDS

    kinds: dict[str, Kind] = {str(kind): kind for kind in PRESENT_KINDS}
    if device is None:
        return None
    if device not in kinds:
        raise DeviceError(f"--device {device!r} cannot be measured: take {' or '.join(kinds)}")
    return kinds[device]


def _here() -> "list[DeviceRow]":
    """The devices of this machine, with their figures if they were measured."""
    import torch

    from tightfit.cli.device_tables import DeviceRow
    from tightfit.devices.figures import figures_of
    from tightfit.devices.machine import device_name
    from tightfit.devices.present import PRESENT_KINDS, cached

    rows = []
    for kind in PRESENT_KINDS:
        if kind == "cuda" and not torch.cuda.is_available():
            continue
        spec = cached(kind)
        state = "not measured yet" if spec is None or spec.scaled_from else "measured"
        if spec is not None and spec.disturbed_by:
            state = "measured, busy"
        rows.append(DeviceRow(kind, None if spec is None else figures_of(spec), f"here, {state}: {device_name(kind)}"))
    return rows


def _published() -> "list[DeviceRow]":
    from tightfit.cli.device_tables import DeviceRow
    from tightfit.devices.figures import figures_of
    from tightfit.devices.known import known_devices
    from tightfit.devices.present import is_present

    return [
        DeviceRow(key, figures_of(known.spec), f"{known.spec.name}{', here' if is_present(known) else ''}")
        for key, known in known_devices().items()
    ]


def _plain(row: "DeviceRow") -> dict[str, Any]:
    figures = None if row.figures is None else asdict(row.figures)
    return {"device": row.key, "note": row.note, "figures": figures, **_origin(row.key)}


def _origin(key: str) -> dict[str, Any]:
    """Where the figures of a device come from."""
    from tightfit.devices.known import known_devices

    known = known_devices().get(key)
    if known is None:
        return {"origin": "measured here"}
    return {
        "origin": "published",
        "sources": known.sources,
        "memory_source": known.memory_source,
        "kernels_source": known.kernels_source,
    }
