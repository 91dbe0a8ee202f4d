"""Tensors in files: the bytes of every dtype and layout, in files that `safetensors` reads and writes too."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from torch import nn

from tightfit.errors import CheckpointError, OutputError
from tightfit.memory.allocator import measured_peak, storage_bytes
from tightfit.training.checkpoint import tensors
from tightfit.training.checkpoint.layout import DTYPES
from tightfit.training.checkpoint.store import Checkpoints
from tightfit.training.checkpoint.stored import Checkpoint
from tightfit.training.checkpoint.tensor_file import open_tensor_file


def saved(folder: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    Checkpoints(folder).save(1, tensors, {})
    found = Checkpoints(folder).newest_intact().checkpoint
    assert found is not None
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that NaNs compare as well."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def of_each_dtype(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Random bytes, NaNs among them, in each dtype; of a truth value only the bytes 0 and 1."""
    torch.manual_seed(0)
    found = {}
    for name, (_, size) in DTYPES.items():
        content = torch.randint(0, 2 if name == "bool" else 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8)
        found[name] = content.view(getattr(torch, name))
    return found


@pytest.mark.keeps("tensors-dtype-come-back")
def test_every_dtype_comes_back_bit_for_bit(scratch: Path):
    given = of_each_dtype((3, 5))
    assert len(given) == 19

    checkpoint = saved(scratch, given)

    for name, tensor in given.items():
        read = checkpoint.read(name)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bits(read), bits(tensor)), name


@pytest.mark.keeps("tensors-dtype-come-back")
def test_safetensors_reads_the_file(scratch: Path):
    given = {**of_each_dtype((3, 5)), "none": torch.zeros(0, 4), "one": torch.tensor(2.5), "größe": torch.ones(2)}
    given.pop("float8_e8m0fnu")  # their reader for torch does not know it

    read = load_file(saved(scratch, given).path / "tensors.safetensors")

    assert read.keys() == given.keys()
    for name, tensor in given.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bits(read[name]), bits(tensor)), name


@pytest.mark.keeps("tensors-dtype-come-back")
def test_a_file_that_safetensors_wrote_is_read(scratch: Path):
    given = {**of_each_dtype((2, 3)), "none": torch.zeros(0, 4), "one": torch.tensor(2.5)}
    given.pop("float8_e8m0fnu")
    save_file(given, path := scratch / "theirs.safetensors", metadata={"format": "pt", "more": "text"})

    file = open_tensor_file(path)
    read = {name: torch.empty_like(tensor) for name, tensor in given.items()}
    file.read_into(read)

    assert file.specs.keys() == given.keys()
    for name, tensor in given.items():
        assert torch.equal(bits(read[name]), bits(tensor)), name
    with pytest.raises(CheckpointError, match="has no tensor 'other'"):
        file.read_into({"other": torch.zeros(1)})


@pytest.mark.keeps("tensors-dtype-come-back")
@pytest.mark.parametrize("staging_bytes", [16, 64, 100, 1 << 20])
def test_tensors_that_are_not_in_one_piece_go_through_the_staging_buffer(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, staging_bytes: int
):
    monkeypatch.setattr(tensors, "STAGING_BYTES", staging_bytes)
    base = torch.arange(5 * 6 * 7, dtype=torch.float64).view(5, 6, 7)
    given = {
        "transposed": base.transpose(0, 2),
        "strided": base[:, ::2, 1::3],
        "rows": base[::2],
        "conjugated": torch.complex(base, -base).to(torch.complex64).conj(),
        "negated": torch.complex(base, -base).to(torch.complex64).conj().imag,
        "one": base[0, 0, 3],
        "flipped in 16 bits": base.bfloat16().permute(2, 0, 1),
        "expanded": torch.arange(3.0).expand(4, 3),
    }

    checkpoint = saved(scratch, given)

    read = {name: torch.zeros_like(tensor) for name, tensor in given.items() if name != "expanded"}
    assert not read["transposed"].is_contiguous()
    checkpoint.read_into(read)
    for name, tensor in read.items():
        assert torch.equal(tensor, given[name]), name
    assert torch.equal(checkpoint.read("expanded"), given["expanded"])
    with pytest.raises(CheckpointError, match="cannot be read into an expanded one"):
        checkpoint.read_into({"expanded": torch.zeros(3).expand(4, 3)})


def test_tied_tensors_are_stored_once_and_read_back_into_both(scratch: Path):
    weight = torch.randn(100, 10)
    checkpoint = saved(scratch, {"head": weight, "embedding": weight, "view": weight[:50]})

    assert (checkpoint.path / "tensors.safetensors").stat().st_size < 1.6 * weight.nbytes
    read = {name: torch.zeros(100, 10) for name in ("head", "embedding")}
    checkpoint.read_into(read)
    assert torch.equal(read["head"], weight)
    assert torch.equal(read["embedding"], weight)
    assert torch.equal(checkpoint.read("view"), weight[:50])
    assert checkpoint.digests["head"] == checkpoint.digests["embedding"] != checkpoint.digests["view"]


def test_the_size_of_the_file_is_known_before(scratch: Path):
    weight = torch.randn(10, 10)
    given = {**of_each_dtype((3, 5)), "weight": weight, "tied": weight}

    path = saved(scratch, given).path / "tensors.safetensors"

    assert tensors.file_bytes(given) == path.stat().st_size


def test_safetensors_reads_a_tied_model(scratch: Path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
            self.head.weight = self.embedding.weight

    model, other = Tied(), Tied()

    load_model(other, str(saved(scratch, model.state_dict()).path / "tensors.safetensors"))

    assert torch.equal(other.head.weight, model.head.weight)


@pytest.mark.keeps("tensors-dtype-come-back")
def test_weights_that_are_trained_are_read_into_where_they_are(scratch: Path):
    weight = nn.Parameter(torch.randn(4, 4))
    kept = weight.detach().clone()
    checkpoint = saved(scratch, {"weight": weight})
    address, loss = weight.data_ptr(), (weight * weight).sum()
    with torch.no_grad():
        weight.zero_()

    checkpoint.read_into({"weight": weight})

    assert torch.equal(weight, kept)
    assert (weight.data_ptr(), weight.is_leaf, weight.requires_grad) == (address, True, True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # autograd knows of the write


def test_the_same_tensors_are_the_same_bytes_in_whatever_order(scratch: Path):
    given = of_each_dtype((2, 2))

    first = saved(scratch / "first", given)
    second = saved(scratch / "second", dict(reversed(given.items())))

    for name in ("tensors.safetensors", "manifest.json"):
        assert (first.path / name).read_bytes() == (second.path / name).read_bytes()


@pytest.mark.keeps("checkpoint-another-model-refused")
def test_another_model_is_refused_before_anything_is_read(scratch: Path):
    checkpoint = saved(scratch, {"a": torch.ones(2, 3), "b": torch.ones(2)})
    good = torch.zeros(2, 3)

    with pytest.raises(CheckpointError, match=r"tensor 'b' is float32 of shape \[2\], to be read into .*\[3\]"):
        checkpoint.read_into({"a": good, "b": torch.zeros(3)})
    with pytest.raises(CheckpointError, match=r"'b' is float32 .* bfloat16"):
        checkpoint.read_into({"a": good, "b": torch.zeros(2).bfloat16()})
    with pytest.raises(CheckpointError, match="has no tensor 'c': it is of another model or optimizer"):
        checkpoint.read_into({"a": good, "c": torch.zeros(2)})
    assert not good.any()


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("a", torch.zeros(2, dtype=torch.complex128)),
        ("a", torch.zeros(2).to_sparse()),
        ("a", torch.zeros(2, device="meta")),
        ("a\nb", torch.zeros(2)),
        ("__metadata__", torch.zeros(2)),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name_and_leaves_nothing(scratch: Path, name: str, tensor: torch.Tensor):
    with pytest.raises(OutputError) as refused:
        Checkpoints(scratch).save(1, {"good": torch.zeros(2), name: tensor}, {})

    assert repr(name) in str(refused.value)
    assert str(refused.value).isprintable()
    assert list(scratch.iterdir()) == []


SIZES = {
    "in one piece": {"a": torch.zeros(300_000), "b": torch.zeros(500, 500)},
    "transposed": {"a": torch.zeros(300_000), "b": torch.zeros(500, 500).t()},
    "larger than the buffer": {"a": torch.zeros(3000, 2000).t(), "b": torch.zeros(10)},
}


@pytest.mark.keeps("peaks-saving-loading-copying")
@pytest.mark.parametrize("case", SIZES)
def test_the_peaks_of_saving_and_loading_are_the_allocators(scratch: Path, case: str):
    given = SIZES[case]
    resident = list(given.values())
    checkpoint = saved(scratch / "before", given)  # what a first save imports is there

    saving = measured_peak(lambda: Checkpoints(scratch).save(1, given, {}), resident)
    loading = measured_peak(lambda: checkpoint.read_into(given), resident)
    verifying = measured_peak(checkpoint.verify, resident)

    expected = storage_bytes(resident)
    assert saving == pytest.approx(expected + tensors.save_peak_bytes(given), rel=0.001)
    assert loading == pytest.approx(expected + tensors.save_peak_bytes(given), rel=0.001)
    assert verifying == expected
    assert tensors.save_peak_bytes(given) == {"in one piece": 0, "transposed": 1_000_000}.get(case, 16 << 20)
