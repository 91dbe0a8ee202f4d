"""Distillation as a training: its memory, its gradients, its store, what it refuses."""

import gc
import os
import re
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_distillations import LENGTH, VOCABULARY, decoder, settings, write_teacher
from torch import nn

import tightfit
from command_line import tightfit as run_command
from quick_trainings import leave_out_pictures
from tightfit.errors import CannotFit, InputError, ModelError
from tightfit.levers.micro_batch import split_batch
from tightfit.memory.allocator import measured_peak
from tightfit.models.compress import distilling, store_writing
from tightfit.models.compress.heads import head_input
from tightfit.models.compress.losses import PROJECTION, DistillationLoss
from tightfit.models.compress.source import open_source
from tightfit.models.compress.teacher_store import TeacherStore, packed_ids, unpacked_ids
from tightfit.models.compress.teachers import load_teacher
from tightfit.models.saving import save_model
from tightfit.optim.by_name import build_optimizer
from tightfit.step import Part, StepSettings, TokenBatch, forward_backward, update
from tightfit.training.api import train
from tightfit.training.checkpoint.files import Files
from tightfit.training.config import Config, dump_config, parse_config
from tightfit.training.config.schema import DistilConfig
from tightfit.training.data.prepare import prepare_data
from tightfit.training.data.tokenizer import load_tokenizer
from tightfit.training.loop import resident_tensors
from tightfit.training.objective import counted
from tightfit.training.reporter import SilentReporter
from tightfit.training.run_folders.loading import load_run


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_teacher(tmp_path_factory.mktemp("teacher"))


def teacher_model() -> nn.Module:
    return decoder(48, seed=7).eval().requires_grad_(False)


def ragged_batch() -> dict[str, Any]:
    """Four packed rows, each of two documents, with unlike numbers of labels."""
    torch.manual_seed(3)
    ids = torch.randint(VOCABULARY, (4, LENGTH))
    labels = ids.clone()
    labels[0, 5:] = -100
    labels[2, ::2] = -100
    positions = torch.cat((torch.arange(12), torch.arange(LENGTH - 12))).repeat(4, 1)
    return counted({"input_ids": ids, "labels": labels, "position_ids": positions})


def naive_loss(student: nn.Module, teacher: nn.Module, batch: dict[str, Any], temperature: float, hard: float):
    """The same from the logits of all tokens of both models."""
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        wanted = teacher(**inputs).logits[:, :-1].flatten(0, 1)
    found, labels = student(**inputs).logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    log_p, log_q = (wanted / temperature).log_softmax(1), (found / temperature).log_softmax(1)
    soft = (log_p.exp() * (log_p - log_q)).sum(1)[labels != -100].sum() * temperature**2
    ce = F.cross_entropy(found, labels, ignore_index=-100, reduction="sum")
    return ((1 - hard) * soft + hard * ce) / (labels != -100).sum()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def relative_gap(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    gap = sum(float((one[name] - other[name]).square().sum()) for name in one)
    return (gap / sum(float(g.square().sum()) for g in one.values())) ** 0.5


@pytest.mark.keeps("step-gradients-loop-two")
def test_an_online_step_has_the_gradients_of_two_whole_logit_tensors_however_it_is_split():
    student, beside, batch = decoder(32, seed=1), teacher_model(), ragged_batch()
    loss = DistillationLoss(beside, DistilConfig(temperature=2.0, hard_weight=0.3))
    expected = naive_loss(student, beside, batch, 2.0, 0.3)
    expected.backward()
    dense = gradients(student)
    found = loss(student, batch)
    found.backward()
    assert torch.allclose(found, expected, rtol=1e-5)
    assert relative_gap(dense, gradients(student)) < 1e-5
    for part in split_batch(batch, 3):  # with 0.6, 1.2 and 2.2 of the labels that even parts would have
        loss(student, part).backward()
    assert relative_gap(dense, gradients(student)) < 1e-5
    assert all(p.grad is None for p in beside.parameters())


class Naive:
    """The loss from whole logits, with its teacher counted as that of `DistillationLoss` is."""

    def __init__(self, teacher: nn.Module) -> None:
        self.modules_beside = (teacher,)

    def __call__(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        return naive_loss(model, self.modules_beside[0], batch, 1.0, 0.0)


def step_peaks(model: nn.Module, loss: Any, batch: dict[str, Any]) -> tuple[int, int]:
    """The peak of a step as a dry run predicts it, and as the allocator records it."""
    predicted = tightfit.estimate(model, batch, loss=loss, device="cpu").peak_bytes
    optimizer = build_optimizer("adamw", model.parameters())

    def step() -> None:
        forward_backward(model, [Part(batch, 1.0)], loss)
        update(model, optimizer, StepSettings())

    step()
    return predicted, measured_peak(step, resident_tensors(model, optimizer, batch, loss))


@pytest.mark.keeps("step-student-6-000")
@pytest.mark.slow  # a large vocabulary
def test_a_step_takes_a_fraction_of_one_with_two_whole_logit_tensors():
    vocabulary = 6000
    student = decoder(16, vocab_size=vocabulary)
    beside = decoder(24, vocab_size=vocabulary, seed=7).eval().requires_grad_(False)
    batch = counted(
        {**TokenBatch(32, LENGTH, vocabulary).tensors(), "position_ids": torch.arange(LENGTH).repeat(32, 1)}
    )
    naive, chunked = (
        step_peaks(student, loss, batch) for loss in (Naive(beside), DistillationLoss(beside, DistilConfig()))
    )
    assert is_predicted(*naive)
    assert is_predicted(*chunked)
    assert chunked[1] < 0.1 * naive[1]


@pytest.mark.keeps("document-loss-move-document")
def test_a_document_is_distilled_alike_whatever_stands_before_it_in_its_row():
    student, beside, batch = decoder(32, seed=1), teacher_model(), ragged_batch()
    batch["labels"][:, :13] = -100
    loss = DistillationLoss(beside, DistilConfig())
    first = loss(student, batch)
    batch["input_ids"][:, :12] = (batch["input_ids"][:, :12] + 100) % VOCABULARY
    assert torch.equal(first, loss(student, batch))


def test_hidden_states_of_another_width_go_through_a_projection_that_learns():
    student, beside, batch = decoder(32, seed=1), teacher_model(), ragged_batch()
    student.add_module(PROJECTION, nn.Linear(32, 48, bias=False))
    plain = DistillationLoss(beside, DistilConfig())(student, batch)
    found = DistillationLoss(beside, DistilConfig(hidden_weight=0.5))(student, batch)
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    states = [head_input(model, inputs).hidden[:, :-1] for model in (student, beside)]
    squares = (getattr(student, PROJECTION)(states[0]) - states[1]).square().mean(-1)
    mean = squares[batch["labels"][:, 1:] != -100].mean()
    assert torch.allclose(found, plain + 0.5 * mean, rtol=1e-5)
    found.backward()
    assert getattr(student, PROJECTION).weight.grad.abs().max() > 0


class Watching(SilentReporter):
    """Notes at each step how many teachers are alive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.teachers: list[weakref.ref[nn.Module]] = []
        self.alive: list[int] = []

        def loaded(folder: Path, dtype: str) -> nn.Module:
            model = load_teacher(folder, dtype)
            self.teachers.append(weakref.ref(model))
            return model

        monkeypatch.setattr(distilling, "load_teacher", loaded)

    def on_step(self, metrics: Any) -> None:
        self.alive.append(sum(each() is not None for each in self.teachers))


def is_predicted(predicted: int | None, measured: int | None) -> bool:
    assert predicted is not None
    assert measured is not None
    return abs(predicted / measured - 1) < 1e-3


@pytest.mark.keeps("peak-distillation-predicted-within", "store-takes-most-120")
def test_peaks_are_predicted_with_the_teacher_beside_the_student_and_after_it_has_left(
    tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
):
    leave_out_pictures(monkeypatch)
    watching = Watching(monkeypatch)
    config = settings(tmp_path, teacher)
    online = tightfit.distil(config, reporter=watching)
    weights = sum(p.numel() for p in decoder(48).parameters()) * 4
    assert online.training is not None
    assert watching.alive == [1, 1]
    assert online.teacher_bytes > weights
    assert is_predicted(online.training.predicted_peak_bytes, online.training.measured_peak_bytes)

    folder = tmp_path / "store"
    offline = tightfit.distil(config, store=folder, reporter=watching)
    assert offline.training is not None
    assert offline.store is not None
    assert watching.alive[2:] == [0, 0]
    assert len(watching.teachers) == 2
    assert offline.teacher_bytes == 0
    assert is_predicted(offline.training.predicted_peak_bytes, offline.training.measured_peak_bytes)
    assert online.training.measured_peak_bytes - offline.training.measured_peak_bytes > 0.8 * weights
    assert is_predicted(offline.store.predicted_peak_bytes, offline.store.measured_peak_bytes)
    on_disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert offline.store.bytes_per_token == on_disk / offline.store.positions <= 120
    gc.collect()
    assert all(each() is None for each in watching.teachers)

    again = tightfit.distil(config, store=folder, store_only=True, reporter=watching)
    assert len(watching.teachers) == 2, "a complete store needs no teacher"
    assert again.store is not None
    assert again.store.written_shards == 0


def shard_bytes(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.keeps("store-takes-most-120")
def test_a_store_whose_writer_was_killed_goes_on_to_the_same_bytes(
    tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store_writing, "SHARD_TOKENS", 9 * LENGTH)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    config = settings(tmp_path, teacher)
    whole = tightfit.distil(config, store=tmp_path / "whole", store_only=True)
    assert whole.training is None
    assert whole.store is not None
    assert whole.store.shards > 3

    child = os.fork()
    if child == 0:  # killed between the bytes of its second shard and their name
        rename, calls = Files.rename, []

        def killing(files: Files, source: Path, target: Path) -> None:
            calls.append(target)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            rename(files, source, target)

        Files.rename = killing  # type: ignore[method-assign]
        try:
            tightfit.distil(config, store=tmp_path / "killed", store_only=True)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = sorted(path.name for path in (tmp_path / "killed").iterdir())
    assert left[-1] == "step-00000000"
    assert left[0].startswith(".part-step-00000001")

    damaged = tmp_path / "killed" / "step-00000000" / "tensors.safetensors"
    first = damaged.read_bytes()
    goes_on = tightfit.distil(config, store=tmp_path / "killed", store_only=True)
    assert goes_on.store is not None
    assert goes_on.store.written_shards == whole.store.shards - 1
    assert shard_bytes(tmp_path / "killed") == shard_bytes(tmp_path / "whole")
    damaged.write_bytes(first[:-1] + bytes([first[-1] ^ 1]))
    assert tightfit.distil(config, store=tmp_path / "killed", store_only=True).store.written_shards == 1  # type: ignore[union-attr]
    assert shard_bytes(tmp_path / "killed") == shard_bytes(tmp_path / "whole")


@pytest.mark.keeps("store-takes-most-120")
def test_ids_of_large_vocabularies_take_three_bytes():
    ids = torch.tensor([[0, 65_536, 128_255], [2**24 - 1, 7, 256]], dtype=torch.int32)
    packed = packed_ids(ids, 128_256)
    assert packed.shape == (2, 3, 3)
    assert torch.equal(unpacked_ids(packed.numpy()), ids)
    narrow = packed_ids(ids[:, :1] % 600, 600)
    assert narrow.dtype == torch.uint16
    assert torch.equal(unpacked_ids(narrow.numpy()), ids[:, :1] % 600)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, teacher: Path) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    tightfit.distil(settings(folder, teacher), store=folder / "store", store_only=True)
    return folder / "store"


def other_teacher(folder: Path) -> Path:
    return write_teacher(folder / "other", seed=5)


def wide_teacher(folder: Path) -> Path:
    """The same tokenizer, and a head with rows that no token has."""
    return write_teacher(folder / "wide", vocab_size=VOCABULARY + 20)


# What is asked, by what the one line about it says.
MISUSES: dict[str, dict[str, Any]] = {
    "distil.teacher is not given": {"teacher": None},
    "distil.teacher 'runs/nothing-here-7': no such": {"teacher": "runs/nothing-here-7"},
    "is not the teacher's: token ": {"data": {"tokenizer": "train", "vocab_size": 280}},
    "the student's head has 300 tokens and the teacher's 320: set model.vocab_size to 320": {"teacher": wide_teacher},
    "hidden_weight needs hidden states, which a store does not keep": {"store": True, "hidden_weight": 0.5},
    "divergence jsd needs the teacher's whole distribution": {"store": True, "divergence": "jsd"},
    "store, which it is for, is not": {"k": 5},
    "holds distributions of other data": {"store": True, "data": {"seed": 3}},
    "holds distributions of another teacher": {"store": True, "teacher": other_teacher},
    "holds distributions of k 20, and not of 7": {"store": True, "k": 7},
    "301 tokens are to be kept of a vocabulary of 300": {"store": "new", "k": 301},
    "--store-only writes distil.store": {"store_only": True},
    "training.objective is dpo": {"training": {"objective": "dpo"}},
}


@pytest.mark.keeps("another-tokenizer-another-vocabulary")
@pytest.mark.parametrize("line", MISUSES)
def test_each_misuse_is_one_line(line: str, tmp_path: Path, teacher: Path, store: Path):
    asked = dict(MISUSES[line])
    named = asked.pop("teacher", teacher)
    named = named(tmp_path) if callable(named) else named
    where = asked.pop("store", None)
    sections = {name: asked.pop(name) for name in ("data", "training") if name in asked}
    sections["distil"] = {"teacher": None if named is None else str(named)}
    if where is not None:
        asked["store"] = store if where is True else tmp_path / where
    with pytest.raises(InputError) as raised:
        tightfit.distil(settings(tmp_path, teacher, **sections), **asked)
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 2


def cutting(folder: Path, teacher: Path, model: Path | None = None, output: str = "run", **distil: Any) -> Config:
    """A distillation that leaves the section `model` out, or names one by its path."""
    raw = settings(folder, teacher, distil=distil, output={"folder": str(folder / output)}).model_dump(mode="json")
    raw["training"] |= {"max_steps": 6, "learning_rate": 3e-3}
    return parse_config({**raw, "model": {} if model is None else {"path": str(model)}})


@torch.no_grad()
def divergence(teacher: Path, student: Path) -> float:
    ids = torch.randint(VOCABULARY, (8, LENGTH), generator=torch.Generator().manual_seed(0))
    wanted, found = (load_run(folder).model(input_ids=ids).logits.log_softmax(-1) for folder in (teacher, student))
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


@pytest.mark.keeps("student-cut-out-teacher")
@pytest.mark.slow  # a pruning with its report, three trainings
def test_a_student_that_is_cut_out_of_its_teacher_is_the_pruned_teacher_and_heals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    leave_out_pictures(monkeypatch)
    teacher, model = write_teacher(tmp_path / "teacher"), decoder(48)
    for parameter in model.layers.parameters():  # so that every layer matters
        parameter.data.mul_(6 if parameter.dim() > 1 else 1)
    save_model(model, teacher)
    shares = {"layers": 0.5, "ffn": 0.25}
    tightfit.prune(teacher, output=tmp_path / "pruned", seq_len=8, **shares)
    healed = tightfit.distil(cutting(tmp_path, teacher, tmp_path / "pruned", "healed"))

    config = cutting(tmp_path, teacher, student_layers=0.5, student_ffn=0.25, student_by="norm")
    cut = tightfit.distil(config, ["data.tokenizer=model", "checkpoint.every_steps=3"])
    assert healed.training is not None
    assert cut.training is not None
    assert is_predicted(cut.training.predicted_peak_bytes, cut.training.measured_peak_bytes)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("pruned", "run/student")]
    assert weights[0] == weights[1]
    after = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("healed", "run")]
    assert after[0] == after[1]
    assert divergence(teacher, tmp_path / "run") < 0.95 * divergence(teacher, tmp_path / "pruned")

    (tmp_path / "run" / "config.json").unlink()  # as if the run had been killed: the checkpoint has the weights
    assert divergence(teacher, tmp_path / "run") < 0.95 * divergence(teacher, tmp_path / "pruned")
    more = tightfit.distil(config, ["data.tokenizer=model", "checkpoint.every_steps=3", "training.max_steps=7"],
                           resume=True)  # fmt: skip
    assert more.training is not None
    assert more.training.resumed_from == 6


@pytest.mark.keeps("student-cut-out-teacher")
def test_a_student_is_cut_by_activations_on_the_training_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A channel that reads with large weights and writes nothing goes by activation, and stays by norm."""
    leave_out_pictures(monkeypatch)
    teacher, model = write_teacher(tmp_path / "teacher"), decoder(48)
    mlp: Any = model.layers[0].mlp
    with torch.no_grad():
        mlp.gate_proj.weight[5] = 9.0
        mlp.down_proj.weight[:, 5] = 0
    save_model(model, teacher)
    name, width, stays = "model.layers.0.mlp.gate_proj.weight", len(mlp.gate_proj.weight), {}
    for by in ("activation", "norm"):
        config = cutting(tmp_path, teacher, student_ffn=0.25, student_by=by)
        config = parse_config(config.model_dump(mode="json"), ["training.max_steps=1"])
        tightfit.distil(config)
        rows = open_source(tmp_path / "run" / "student").model().state_dict()[name]
        stays[by] = any(torch.equal(row, mlp.gate_proj.weight[5]) for row in rows)
        assert len(load_run(tmp_path / "run").model.state_dict()[name]) == len(rows) == width * 3 // 4
    assert stays == {"activation": False, "norm": True}


@pytest.mark.keeps("student-cut-out-teacher")
def test_a_cut_that_another_key_contradicts_is_one_line(tmp_path: Path, teacher: Path):
    def refusal(config: Config, *overrides: str) -> str:
        with pytest.raises(InputError) as raised:
            tightfit.distil(config, overrides)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    plain = cutting(tmp_path, teacher)
    assert "model.hidden_size says a student's shape, and distil.student_ffn cuts" in refusal(
        plain, "distil.student_ffn=0.5", "model.hidden_size=32"
    )
    named = cutting(tmp_path, teacher, teacher)
    assert "is a student, and distil.student_layers cuts one" in refusal(named, "distil.student_layers=0.5")
    assert "distil.student_heads 0.3 of 2 key and value heads is 0.6" in refusal(plain, "distil.student_heads=0.3")
    assert "student_width cuts the student out of the teacher, which is not given" in refusal(
        plain, "distil.student_width=0.5", "distil.teacher=null"
    )
    assert "student_ffn" in refusal(plain, "distil.student_ffn=1.5")


@pytest.mark.keeps("another-tokenizer-another-vocabulary")
def test_train_and_estimate_refuse_a_teacher(tmp_path: Path, teacher: Path):
    with pytest.raises(InputError, match="train has no teacher: run tightfit distil"):
        train(settings(tmp_path, teacher))
    config = tmp_path / "distil.yaml"
    config.write_text(dump_config(settings(tmp_path, teacher)))
    assert "a prediction has no teacher" in run_command("estimate", config).error
    assert run_command("estimate", config, "distil=null").code == 0


@pytest.mark.keeps("another-tokenizer-another-vocabulary")
def test_a_budget_that_the_teacher_alone_exceeds_is_refused_before_it_reads(tmp_path: Path, teacher: Path):
    config = settings(tmp_path, teacher, memory={"budget": "200KiB"})
    with pytest.raises(CannotFit, match="the teacher reads one sample in") as raised:
        tightfit.distil(config, store=tmp_path / "store", store_only=True)
    assert raised.value.least_bytes > 200 * 1024
    assert not (tmp_path / "store").exists()


def test_the_command_writes_a_store_and_its_figures_and_says_one_line_of_a_mistake(tmp_path: Path, teacher: Path):
    config = tmp_path / "distil.yaml"
    config.write_text(dump_config(settings(tmp_path, teacher)))
    done = run_command("distil", config, f"distil.store={tmp_path}/store", "--store-only", "--json")
    assert done.code == 0
    assert '"bytes_per_token": ' in done.out
    shown = run_command("distil", config, f"distil.store={tmp_path}/store", "--store-only")
    assert "bytes a token" in shown.out
    wrong = run_command("distil", config, f"distil.store={tmp_path}/store", "data.seed=9")
    assert wrong.code == 2
    assert "holds distributions of other data" in wrong.error


@pytest.mark.slow  # two models by name
def test_the_command_says_what_each_loss_is_and_which_side_is_the_teacher(tmp_path: Path, teacher: Path):
    config = tmp_path / "distil.yaml"
    raw = settings(tmp_path, teacher).model_dump(mode="json")
    raw["data"]["validation_fraction"] = 0.2
    config.write_text(dump_config(parse_config(raw)))
    done = run_command("distil", config)
    assert done.code == 0, done.error
    said = " ".join(done.out.split())
    assert "The loss of a step is the student's distance from the teacher" in said
    assert re.search(r"On held-out text [\d.]+ \(perplexity ", said)
    assert f"Before is the teacher ({teacher}), after the student" in said


def test_a_teacher_that_is_not_there_is_said_before_anything_is_measured_or_read(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(distilling, "run_training", None)
    with pytest.raises(ModelError, match="no such file or folder"):
        tightfit.distil(settings(tmp_path, tmp_path / "nothing"))


@pytest.mark.keeps("another-tokenizer-another-vocabulary")
def test_a_softly_capped_head_is_refused_by_name(tmp_path: Path):
    class Capped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = decoder(32)
            self.head = self.inner.head

        def forward(self, input_ids: torch.Tensor) -> Any:
            output = self.inner(input_ids)
            return output._replace(logits=output.logits.tanh())

    from tightfit.models.compress.heads import demand_plain_logits

    with pytest.raises(InputError, match="the student Capped changes its logits after its head"):
        demand_plain_logits(Capped(), "the student")


@pytest.mark.slow  # builds models of transformers, two trainings
def test_models_of_transformers_are_distilled_and_load_there(tmp_path: Path, teacher: Path):
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
    torch.manual_seed(0)
    for name, width in (("large", 48), ("small", 32)):
        model = LlamaForCausalLM(LlamaConfig(hidden_size=width, intermediate_size=2 * width, **shape))
        model.save_pretrained(tmp_path / name)
        load_tokenizer(teacher).save(tmp_path / name)
    raw = settings(tmp_path, tmp_path / "large", distil={"hidden_weight": 0.1}).model_dump(mode="json")
    data = {**raw["data"], "validation_fraction": 0.1}
    config = parse_config({**raw, "model": {"path": str(tmp_path / "small")}, "data": data})
    result = tightfit.distil(config)
    assert result.training is not None
    assert is_predicted(result.training.predicted_peak_bytes, result.training.measured_peak_bytes)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert not hasattr(loaded, PROJECTION)
    assert result.report is not None
    assert result.report.after.parameters == sum(p.numel() for p in loaded.parameters())
    assert result.report.before.perplexity is not None
    assert result.report.notes == (f"Before is the teacher ({tmp_path}/large), after the student ({tmp_path}/run).",)
    packed = ["data.packing=best_fit"]  # planned for a row with a boundary, and so a mask, which these rows need not
    offline = tightfit.distil(config, packed, store=tmp_path / "store", store_method="topk", hidden_weight=0.0)
    assert offline.training is not None
    assert offline.training.measured_peak_bytes <= offline.training.predicted_peak_bytes


@pytest.mark.slow  # trains three models for hundreds of steps
def test_a_student_learns_faster_from_a_teacher_than_from_the_text_alone(tmp_path: Path):
    """A student of a ninth of the teacher's weights, on a short text that it sees many times."""
    sections: dict[str, Any] = {
        "model": {"hidden_size": 128, "num_layers": 3, "num_heads": 4, "vocab_size": 600,
                  "max_position_embeddings": 64},
        "data": {"source": "default", "max_documents": 150, "sequence_length": 64, "vocab_size": 600,
                 "tokenizer": "train", "validation_fraction": 0.05},
        "training": {"max_steps": 500, "batch_size": 16, "learning_rate": 2e-3, "warmup_steps": 20},
        "output": {"folder": str(tmp_path / "teacher")},
    }  # fmt: skip
    config = settings(tmp_path, tmp_path / "teacher", **sections)
    train(config, ["distil=null"])
    student = [
        f"data.tokenizer={tmp_path}/teacher", "model.hidden_size=48", "model.num_layers=2",
        "training.max_steps=150", "training.learning_rate=4e-3",
    ]  # fmt: skip
    alone = train(config, ["distil=null", *student, f"output.folder={tmp_path}/alone"])
    taught = tightfit.distil(config, [*student, f"output.folder={tmp_path}/online"]).training
    assert taught is not None
    assert alone.validation_loss is not None
    assert taught.validation_loss is not None
    assert taught.validation_loss < alone.validation_loss - 0.1


@pytest.mark.keeps("resumed-distillation-bit-exact")
@pytest.mark.slow  # three trainings and their plans
def test_a_resumed_distillation_is_bit_exact_and_keeps_its_teacher(tmp_path: Path, teacher: Path):
    distil = {"hidden_weight": 0.5, "hard_weight": 0.2}
    training = {"schedule": "constant", "gradient_accumulation_steps": 2}
    at_once = settings(tmp_path, teacher, distil=distil, training=training)
    tightfit.distil(at_once, ["training.max_steps=4"])
    whole = (tmp_path / "run" / "model.safetensors").read_bytes()
    checkpoint = {"every_steps": 1}
    output = {"folder": str(tmp_path / "resumed")}
    begun = settings(tmp_path, teacher, distil=distil, training=training, checkpoint=checkpoint, output=output)
    tightfit.distil(begun, ["training.max_steps=2"])
    going_on = ["training.max_steps=4", "output.overwrite=false"]
    save_model(decoder(48, seed=9), moved := tmp_path / "moved")
    kept = {path.name: path.read_bytes() for path in teacher.iterdir()}
    (teacher / "model.safetensors").write_bytes((moved / "model.safetensors").read_bytes())
    with pytest.raises(InputError, match=r"distil\.teacher is not the one that"):
        tightfit.distil(begun, going_on, resume=True)
    (teacher / "model.safetensors").write_bytes(kept["model.safetensors"])
    tightfit.distil(begun, going_on, resume=True)
    assert (tmp_path / "resumed" / "model.safetensors").read_bytes() == whole
    assert PROJECTION.encode() not in whole


@pytest.mark.keeps("teacher-bf16-8-bits")
@pytest.mark.slow  # plans of several levers, and trainings in few bits
@pytest.mark.parametrize("dtype", ["bf16", "int8", "nf4"])
def test_a_budget_includes_a_teacher_in_few_bits(dtype: str, tmp_path: Path, teacher: Path):
    config = settings(tmp_path, teacher, distil={"teacher_dtype": dtype})
    plain = tightfit.distil(config).training
    planned = tightfit.distil(config, ["memory.budget=0.9x", "memory.verify=true"]).training
    assert plain is not None
    assert planned is not None
    assert is_predicted(plain.predicted_peak_bytes, plain.measured_peak_bytes)
    assert is_predicted(planned.predicted_peak_bytes, planned.measured_peak_bytes)
    assert planned.measured_peak_bytes <= 0.9 * plain.plain_peak_bytes


def test_a_store_is_read_in_any_order(store: Path, tmp_path: Path, teacher: Path):
    from tightfit.models.compress.stored_samples import StoredSamples, labelled
    from tightfit.models.compress.teacher_store import open_store

    config = settings(tmp_path, teacher)
    samples = prepare_data(config.data, config.model).training
    opened = open_store(store, {})
    assert isinstance(opened, TeacherStore)
    both = StoredSamples(samples, opened).batch([5, 2])
    alone = StoredSamples(samples, opened).batch([2])
    assert torch.equal(both["teacher_ids"][1], alone["teacher_ids"][0])
    counted_tokens = labelled(both["labels"])
    sums = both["teacher_weights"].float().sum(-1)
    assert (sums[counted_tokens] > 0.5).all()  # of each token with a label, about 1
    assert (sums[~counted_tokens] == 0).all()
