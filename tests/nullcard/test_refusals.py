"""Where a null card cannot be made, one line says why. Tests of what it does are in tests/card (`make test-card`)."""

import subprocess
import sys

import pytest

from tightfit.devices.nullcard import build
from tightfit.devices.nullcard.card import card_of
from tightfit.errors import DeviceError


@pytest.fixture
def other_torch(monkeypatch, tmp_path):
    def say(text: str) -> None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "version.py").write_text(text)
        (tmp_path / "torch" / "__init__.py").write_text("")
        spec = build.importlib.util.spec_from_file_location("torch", tmp_path / "torch" / "__init__.py")
        monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: spec)

    return say


CUDA = "__version__ = '2.14.1+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"


def test_a_build_for_cpus_is_refused(other_torch, tmp_path):
    other_torch("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    with pytest.raises(
        DeviceError, match=r"needs PyTorch's CUDA build, and this is 2\.13\.0\+cpu: install the ordinary"
    ):
        build.libraries(tmp_path)


def test_a_build_for_another_cuda_says_which(other_torch):
    other_torch(CUDA)
    assert build.installed_torch().cuda_version == 12080


@pytest.mark.parametrize(
    ("asked", "version"),
    [(["numpy", 'nvidia-cudnn-cu13==9.24.0.43; platform_system == "Linux"'], 92400), (["numpy"], 92000), (None, 92000)],
    ids=["a wheel", "a build of another kind", "sources in a folder"],
)
def test_cudnn_is_the_one_that_pytorch_asks_for(other_torch, monkeypatch, asked, version):
    def requires(name):
        if asked is None:
            raise build.importlib.metadata.PackageNotFoundError(name)
        return asked

    other_torch(CUDA)
    monkeypatch.setattr(build.importlib.metadata, "requires", requires)
    assert build.installed_torch().cudnn_version == version


def test_without_a_compiler_one_line_says_what_to_install(other_torch, monkeypatch, tmp_path):
    other_torch(CUDA)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(build.sys, "platform", "linux")
    with pytest.raises(DeviceError, match="needs a C compiler: apt-get install gcc, or set CC"):
        build.libraries(tmp_path)
    assert not list(tmp_path.glob("nullcard/*"))


def test_another_system_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(build.sys, "platform", "darwin")
    with pytest.raises(DeviceError, match="runs on Linux only, and this is darwin"):
        build.libraries(tmp_path)


def test_a_folder_that_the_loader_cannot_name_is_refused(other_torch, monkeypatch, tmp_path):
    other_torch(CUDA)
    monkeypatch.setattr(build.sys, "platform", "linux")
    with pytest.raises(DeviceError, match="no path with spaces or colons: set TIGHTFIT_CACHE to another"):
        build.libraries(tmp_path / "two words")


@pytest.mark.parametrize(("device", "said"), [("cpu", "'cpu' is no card"), ("rtx409", "did you mean rtx4090")])
def test_an_unknown_card_is_refused(device, said):
    with pytest.raises(DeviceError, match=said):
        card_of(device)


def test_a_card_of_ones_own_has_its_figures():
    card = card_of("memory=8GiB,bandwidth=400GB/s,fp32=20TFLOPS,capability=8.6,sms=46")
    assert (card.memory_bytes, card.capability, card.multiprocessors) == (8 << 30, (8, 6), 46)


def test_the_command_says_what_is_missing():
    def said(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tightfit.devices.nullcard", *arguments], capture_output=True, text=True
        )

    assert "no command: write -- and what is to be run" in said("rtx4090").stderr
    refused = said("rtx9999", "--", "true")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: device 'rtx9999'")
    assert refused.stderr.count("\n") == 1
