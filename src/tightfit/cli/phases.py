"""`estimate --phase`: the phases of training a diffusion model, with what stands beside the denoiser."""

from typing import TYPE_CHECKING

from tightfit.cli.question import Question
from tightfit.errors import InputError

if TYPE_CHECKING:
    from tightfit.models.diffusion_parts import PhaseEstimates


def phases_of(question: Question, phase: str) -> "PhaseEstimates":
    """The phases that a question is about. Raises `InputError` for an unknown one, or another model."""
    from tightfit.cli.subject import subject_of
    from tightfit.models.diffusion_parts import PHASES, estimate_phases, parts_of
    from tightfit.models.published import find_published

    if phase not in (*PHASES, "all"):
        raise InputError(f"--phase {phase}: known are {', '.join(PHASES)}, and all")
    name = question.model or ""
    parts = parts_of(find_published(name) if name else None, name or "a CONFIG")
    subject = subject_of(question, dry=True)
    batch = subject.batch
    assert isinstance(batch, dict), "a denoiser has a batch by names"
    return estimate_phases(
        subject.model,
        batch,
        parts,
        subject.estimate(),
        phases=PHASES if phase == "all" else (phase,),
        precision=subject.asked.step.precision,
        device=subject.asked.step.device,
    )


def described(found: "PhaseEstimates", width: int) -> str:
    """One table of the phases."""
    from tightfit.planner.report.terminal import rendered, table_of
    from tightfit.units import format_bytes

    table = table_of("phase", "VAE and text encoders", "peak", "of the device", texts=("VAE and text encoders",))
    for row in found.rows:
        share = f"{row.peak_bytes / found.device_bytes:.1%}{'' if row.fits else ', does not fit'}"
        table.add_row(row.phase, row.parts, format_bytes(row.peak_bytes), share)
    texts = " + ".join(map(format_bytes, found.encoder_bytes))
    return rendered(
        f"VAE {format_bytes(found.vae_bytes)}, text encoders {texts}, {found.device}.",
        "",
        table,
        "",
        "resident: on the device all the time, encoding in each step; offloaded: on the host but for the one that "
        "runs; gone: what they make is cached, and sampling keeps the VAE.",
        width=width,
    )
