"""The page: fields on the left; beside them the verdict, the memory bar, and the parts of an answer in tabs."""

import importlib.resources
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tightfit
from tightfit.cli.explorer import drawings, writing
from tightfit.cli.explorer.limits import UPLOAD_BYTES
from tightfit.cli.explorer.messages import NoAnswer, NoPlan, Progress, Waited
from tightfit.cli.explorer.question import (
    ALLOWED,
    BASES,
    DTYPES,
    PRECISIONS,
    PageQuestion,
    choosable_devices,
    choosable_models,
    choosable_optimizers,
)
from tightfit.cli.explorer.uploads import Described, Upload, UploadedModel
from tightfit.cli.explorer.workers import Readers, Workers
from tightfit.errors import InputError, TightfitError
from tightfit.planner.outcome import CurveRecord, EstimateRecord, PlanRecord
from tightfit.recipes.records import RecipesRecord
from tightfit.units import parse_budget

if TYPE_CHECKING:
    import gradio

INSTALL_HINT = "pip install 'tightfit[explore]'"
FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "DejaVu Sans", "sans-serif")  # of the reader's machine
MONO_FONTS = ("ui-monospace", "SFMono-Regular", "Menlo", "DejaVu Sans Mono", "monospace")
# The class that hides an answer to other fields, until there is another question (page.css says what stands there).
HIDE = "() => { document.body.classList.add('changed') }"
WATCH = (  # Gradio notices what is typed into a text, and not what is pasted, cut or deleted
    "() => document.addEventListener('input', (event) => { if (event.target.closest('#field-budget, #field-targets'))"
    " document.body.classList.add('changed') })"
)
SHOW = "(...values) => { document.body.classList.remove('changed'); return values }"
WAITING = 64  # questions that may wait for a worker, over all readers
FIELDS = (
    "model", "device", "sequence_length", "batch_size", "precision", "dtype", "optimizer", "step_in_backward", "rank",
    "targets", "base", "budget", "levers",
)  # fmt: skip


@dataclass
class PartialAnswer:
    """The parts of an answer that are known. Mutable: parts come one after the other."""

    estimate: EstimateRecord | None = None
    plan: PlanRecord | None = None
    refusal: NoPlan | None = None
    curve: CurveRecord | None = None
    recipes: RecipesRecord | None = None
    failure: NoAnswer | None = None
    progress: Progress | None = None
    waited: Waited | None = None
    is_complete: bool = False

    def take(self, part: Any) -> None:
        for name, kind in (
            ("estimate", EstimateRecord),
            ("plan", PlanRecord),
            ("refusal", NoPlan),
            ("curve", CurveRecord),
            ("recipes", RecipesRecord),
            ("failure", NoAnswer),
            ("progress", Progress),
            ("waited", Waited),
        ):
            if isinstance(part, kind):
                setattr(self, name, part)

    @property
    def doing(self) -> str:
        """The current work, and for how long the reader has waited; empty at the end."""
        if self.is_complete:
            return ""
        line = "Starting" if self.progress is None else self.progress.line
        return line if self.waited is None else f"{line} ({self.waited.seconds} s)"


def gradio_package() -> Any:
    """The package. Raises `InputError` with the line that installs it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that it imports
            import gradio
    except ImportError as error:
        raise InputError(f"the page needs the package gradio: {INSTALL_HINT}") from error
    return gradio


def has_recipes() -> bool:
    """True if this version searches for recipes."""
    return "fit" in tightfit.__all__


def stylesheet() -> str:
    return importlib.resources.files("tightfit.cli.explorer").joinpath("page.css").read_text("utf-8")


def theme() -> Any:
    """Fonts of the reader's machine: those of Gradio's own themes come from another host."""
    gr = gradio_package()
    return gr.themes.Base(primary_hue="blue", neutral_hue="slate", font=FONTS, font_mono=MONO_FONTS)


def build_page(workers: Workers) -> "gradio.Blocks":
    """The page, answered by `workers`. Raises `InputError` where Gradio is not installed."""
    gr = gradio_package()
    default = PageQuestion()
    with gr.Blocks(title="tightfit: what fits this card?", analytics_enabled=False, fill_width=True) as page:
        gr.HTML(
            "<h1>What fits this card?</h1><p>Peak memory and time of one training step, from a dry run of the real "
            "step.<span> No weights are loaded, nothing leaves this machine.</span></p>",
            elem_id="head",
        )
        uploaded = gr.State(None)
        with gr.Row():
            with gr.Column(scale=1, min_width=330):
                fields = _fields(gr, default)
                ask = gr.Button("Predict", variant="primary", elem_id="ask")
            with gr.Column(scale=3, min_width=330):
                # Beside the fields, and on a narrow screen below the button that was pressed.
                head = gr.HTML(drawings.waiting("Starting ..."), elem_classes="tf", elem_id="answer")
                with gr.Tab("Timeline"):
                    timeline = gr.HTML("", elem_classes="tf", elem_id="timeline")
                with gr.Tab("Recipes", visible=has_recipes()):
                    recipes = gr.HTML("", elem_classes="tf", elem_id="recipes")
                with gr.Tab("Trade-off"):
                    curve = gr.HTML("", elem_classes="tf", elem_id="curve")
                with gr.Tab("Run it"):
                    yaml = gr.Code("", language="yaml", label="run.yaml", interactive=False, elem_id="yaml")
                    python = gr.Code("", language="python", label="Python", interactive=False, elem_id="python")
        shown = [head, timeline, recipes, curve, yaml, python]
        inputs = [uploaded, *(fields[name] for name in FIELDS)]

        readers = Readers()

        def on_ask(asking: Any, upload: Upload | None, *values: Any) -> Iterator[tuple[Any, ...]]:
            has_left = readers.asks(str(asking.session_hash))
            before: tuple[Any, ...] = (None,) * len(shown)
            for found in answers(workers, upload, dict(zip(FIELDS, values, strict=True)), has_left):
                # A timeline is large, and need not be sent each second.
                yield tuple(gr.skip() if new == old else new for new, old in zip(found, before, strict=True))
                before = found
            # Gradio sends the last of these once more at the end, which may be after a newer question's first.
            yield (gr.skip(),) * len(shown)

        # Gradio passes what it knows of the reader to arguments of this type, which is known once it is imported.
        on_ask.__annotations__["asking"] = gr.Request

        def on_upload(file: Any, *values: Any) -> tuple[Any, ...]:
            return read(gr, workers, file, dict(zip(FIELDS, values, strict=True)))

        # A newer question of a reader begins at once, and ends the one before (`Readers`). Workers limit how many run.
        how: dict[str, Any] = {"concurrency_limit": WAITING, "concurrency_id": "questions", "trigger_mode": "multiple"}
        private = {"api_visibility": "private", "show_progress": "hidden"}
        ask.click(on_ask, inputs, shown, js=SHOW, **how, **private)
        page.load(on_ask, inputs, shown, **how, **private)
        (
            fields["file"]
            .upload(
                on_upload,
                [fields["file"], *(fields[name] for name in FIELDS)],
                [uploaded, fields["notes"], fields["file"], *(fields[name] for name in FIELDS)],
                **how,
                **private,
            )
            .then(on_ask, inputs, shown, js=SHOW, **how, **private)
        )
        fields["model"].input(lambda: (None, ""), None, [uploaded, fields["notes"]], queue=False, **private)

        # The answer is hidden in the browser, so that whatever still comes of it stays hidden too.
        page.load(None, None, None, js=WATCH, **private)
        for name in FIELDS:
            fields[name].input(None, None, None, js=HIDE, **private)
            if hasattr(fields[name], "submit"):
                fields[name].submit(on_ask, inputs, shown, js=SHOW, **how, **private)

        def on_leave(leaving: Any) -> None:
            readers.leaves(str(leaving.session_hash))

        on_leave.__annotations__["leaving"] = gr.Request
        page.unload(on_leave)
    page.queue(max_size=WAITING, api_open=False)
    return page


def _fields(gr: Any, default: PageQuestion) -> dict[str, Any]:
    """The fields of a question, in their order on the page."""
    fields: dict[str, Any] = {}

    def choice(name: str, label: str, options: dict[str, str], **more: Any) -> None:
        pairs = [(text, key) for key, text in options.items()]
        value = getattr(default, name)
        fields[name] = gr.Dropdown(pairs, value=value, label=label, elem_id=f"field-{name}", **more)

    def number(name: str, label: str) -> None:
        # Gradio refuses and rounds by itself where it knows limits, and the answer to other numbers stays in sight.
        value = getattr(default, name)
        fields[name] = gr.Number(value, label=label, elem_id=f"field-{name}", min_width=120)

    choice("model", "Model", choosable_models())
    # The upload's own name stays in the list of models until another one is chosen.
    fields["file"] = gr.UploadButton(
        "Upload a YAML or config.json", file_types=[".yaml", ".yml", ".json"], size="sm", elem_id="upload"
    )
    fields["notes"] = gr.HTML("", elem_classes="tf", elem_id="notes")
    choice("device", "Card", choosable_devices())
    with gr.Row():
        number("sequence_length", "Tokens")
        number("batch_size", "Sequences")
    fields["budget"] = gr.Textbox(
        default.budget, label="Budget", info="22GiB, 80% (of the card), 0.5x (of plain)",
        elem_id="field-budget", max_length=40,
    )  # fmt: skip
    with gr.Accordion("How it is trained", open=False):
        choice("dtype", "Weights", DTYPES, min_width=120)
        choice("precision", "Arithmetic", PRECISIONS, min_width=120)
        choice("optimizer", "Optimizer", choosable_optimizers(), allow_custom_value=True)  # offloaded_adamw:0.5
        fields["step_in_backward"] = gr.Checkbox(
            default.step_in_backward, label="Update each weight in backward", elem_id="field-step_in_backward"
        )
        choice("levers", "A plan may use", ALLOWED)
    with gr.Accordion("Adapters (LoRA, QLoRA)", open=False):
        number("rank", "Rank; 0 trains all weights")
        choice("base", "Frozen weights", BASES)
        fields["targets"] = gr.Textbox(
            default.targets, label="Layers", placeholder="q_proj+v_proj, or all-linear; empty: peft's choice",
            elem_id="field-targets", max_length=200,
        )  # fmt: skip
    return fields


# What happens


def answers(
    workers: Workers, upload: Upload | None, values: dict[str, Any], has_left: Callable[[], bool] = lambda: False
) -> Iterator[tuple[Any, ...]]:
    """The six places of an answer, again and again, as its parts come. It ends where the reader `has_left`."""
    try:
        question = PageQuestion.of({**values, "upload": upload})
        described = question.described
    except TightfitError as error:
        yield (drawings.failure(str(error)), "", "", "", "", "")
        return
    answer = PartialAnswer()
    yield shown_so_far(question, described, answer)
    try:
        for part in workers.ask(question, has_left):
            if has_left():
                return
            answer.take(part)
            yield shown_so_far(question, described, answer)
    except TightfitError as error:
        answer.failure = NoAnswer(str(error))
    if has_left():  # a newer question of this reader writes to the same places
        return
    answer.is_complete = True
    yield shown_so_far(question, described, answer)


def shown_so_far(question: PageQuestion, described: Described, answer: PartialAnswer) -> tuple[str, ...]:
    """The six places of an answer, as far as it is known. What does not fit is nothing to run."""
    texts = "", ""
    if answer.plan is not None:
        texts = writing.yaml_text(question, described), writing.python_text(question, described)
    elif answer.refusal is not None:
        texts = (writing.nothing_to_run(question),) * 2
    return (*places(question, answer), *texts)


def places(question: PageQuestion, answer: PartialAnswer) -> tuple[str, str, str, str]:
    """Head, timeline, recipes and curve, as far as they are known."""
    estimate, plan, doing = answer.estimate, answer.plan, answer.doing
    if estimate is None and doing:
        return drawings.waiting(doing), "", "", ""
    if estimate is None:
        line = answer.failure.line if answer.failure is not None else "the answer has no parts: ask again"
        return drawings.failure(line), "", "", ""
    refusal = answer.refusal
    head = drawings.headline(estimate, plan, None if refusal is None else refusal.line, doing, question.budget)
    head += drawings.bars(estimate, plan, question.budget)
    head += drawings.sentences(plan, None if refusal is None else refusal.line)
    if refusal is not None and refusal.ways_out:
        head += f"<h3>Ways out</h3>{drawings.paragraphs(refusal.ways_out)}"
    if answer.failure is not None:
        head += drawings.failure(answer.failure.line, "The rest has no answer")
    working = drawings.waiting(doing) if doing else ""
    recipes = drawings.recipes(answer.recipes) if answer.recipes is not None else working
    drawn = working
    if answer.curve is not None:
        budget = parse_budget(question.budget, device_bytes=estimate.device_bytes, plain_peak_bytes=estimate.peak_bytes)
        drawn = drawings.curve(answer.curve, plan, budget)
    return head, drawings.timelines(estimate, plan), recipes, drawn


def read(gr: Any, workers: Workers, file: Any, values: dict[str, Any]) -> tuple[Any, ...]:
    """The upload, a line about it, and the values of the fields as it has them."""
    try:
        upload = upload_of(file)
        reading: UploadedModel | None = None
        for part in workers.ask(upload):
            if isinstance(part, NoAnswer):
                raise InputError(part.line)
            reading = part
        assert isinstance(reading, UploadedModel), "an upload that is read gives a reading"
        question = PageQuestion.of({**values, **reading.values, "upload": upload})
    except TightfitError as error:
        return (None, drawings.failure(str(error)), gr.skip(), *(gr.skip() for _ in FIELDS))
    notes = drawings.paragraphs([f"Asking about {reading.described.name}, not the model above.", *reading.notes])
    return (upload, notes, gr.skip(), *(getattr(question, name) for name in FIELDS))


def upload_of(file: Any) -> Upload:
    """The file that Gradio has stored, which is removed; no other path is opened. Raises `InputError`."""
    path = Path(str(file)).resolve()
    if not isinstance(file, str) or not path.is_relative_to(Path(os.environ["GRADIO_TEMP_DIR"]).resolve()):
        raise InputError("no file came: choose one again")
    with path.open("rb") as stream:
        upload = Upload.of(path.name, stream.read(UPLOAD_BYTES + 1))
    path.unlink()
    return upload
