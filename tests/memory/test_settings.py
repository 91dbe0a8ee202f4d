"""CUDA's allocator is set up before CUDA starts, or one line says why not."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tightfit.errors import ConfigError, DeviceError, InputError
from tightfit.memory.settings import VARIABLES, private_pool, set_allocator
from tightfit.names import KEYS, parse_allocator
from tightfit.runtime.internals import allocator, allocator_settings, installed_release, set_allocator_settings
from tightfit.training.config import parse_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    """Settings are the process's: each test finds none and leaves none."""
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")  # so that what a test sets is taken away again
        monkeypatch.delenv(variable)
    before = allocator_settings()
    yield
    set_allocator_settings(before)


@pytest.mark.slow  # an interpreter of its own
def test_a_setting_reaches_torch_and_the_processes_that_are_started():
    assert set_allocator("expandable_segments") == "expandable_segments:True"
    assert allocator_settings() == "expandable_segments:True"
    child = "import tightfit.runtime.internals; print(tightfit.runtime.internals.allocator_settings())"
    said = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "expandable_segments:True"


def test_settings_in_pytorchs_words_go_through_as_they_are():
    words = "max_split_size_mb:128,roundup_power2_divisions:[256:1,512:2,>:8]"
    assert set_allocator(words) == os.environ[VARIABLES[0]] == allocator_settings() == words


def test_a_setting_that_is_none_is_one_line():
    with pytest.raises(InputError, match=r"'expandable_segment' is no setting of CUDA's allocator: did you mean 'exp"):
        set_allocator("expandable_segment")
    with pytest.raises(InputError, match="'max_split_size_mb' has no value: write max_split_size_mb:VALUE"):
        set_allocator("max_split_size_mb")
    with pytest.raises(InputError, match="choose among backend, "):
        set_allocator("xyz:1")
    with pytest.raises(InputError, match="max_split_size_mb too small, must be >= 20") as caught:
        set_allocator("max_split_size_mb:5")
    assert "\n" not in str(caught.value)
    assert VARIABLES[0] not in os.environ


@pytest.mark.keeps("cuda-allocator-configured-before")
@pytest.mark.parametrize("variable", VARIABLES)
def test_an_environment_that_says_otherwise_is_not_overridden_silently(variable, monkeypatch):
    monkeypatch.setenv(variable, "backend:native")
    with pytest.raises(InputError, match=f"{variable} is set to 'backend:native' already: remove one of them"):
        set_allocator("expandable_segments")
    monkeypatch.setenv(variable, "expandable_segments:True")
    set_allocator("expandable_segments")


@pytest.mark.keeps("cuda-allocator-configured-before")
def test_once_cuda_has_started_only_the_same_setting_is_taken(monkeypatch):
    set_allocator("expandable_segments")
    monkeypatch.delenv(VARIABLES[0])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    set_allocator("expandable_segments")
    with pytest.raises(DeviceError, match=r"CUDA has started in this process already.*PYTORCH_ALLOC_CONF=backend:nat"):
        set_allocator("backend:native")
    assert allocator_settings() == "expandable_segments:True"


def test_where_torch_does_not_tell_its_settings_they_are_remembered(monkeypatch):
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)  # as in torch 2.11
    monkeypatch.setattr(allocator, "_allocator_words", [])
    monkeypatch.setenv(VARIABLES[0], "backend:native")
    assert allocator_settings() == "backend:native"
    monkeypatch.delenv(VARIABLES[0])
    set_allocator("expandable_segments")
    monkeypatch.delenv(VARIABLES[0])
    assert allocator_settings() == "expandable_segments:True"
    with pytest.raises(InputError):
        set_allocator("max_split_size_mb:5")
    assert allocator_settings() == "expandable_segments:True"


def test_the_configuration_takes_it_and_refuses_what_is_none():
    assert parse_config({"memory": {"allocator": "expandable_segments"}}).memory.allocator == "expandable_segments"
    with pytest.raises(ConfigError, match=r"memory\.allocator: allocator 'expandable': 'expandable' is no setting"):
        parse_config({"memory": {"allocator": "expandable"}})


@pytest.mark.parametrize(
    ("device", "pools"),
    [("cuda", ["made", "in use on cuda:3", "done"]), ("cuda:1", ["made", "in use on cuda:1", "done"]), ("cpu", [])],
)
def test_only_on_cuda_is_a_private_pool_made_and_it_is_left_after_an_error_too(device, pools, monkeypatch):
    events = []

    @contextmanager
    def use(pool, device):
        events.append(f"in use on {device}")
        try:
            yield
        finally:
            events.append("done")

    monkeypatch.setattr(torch.cuda, "MemPool", lambda: events.append("made"))
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)

    def fails():
        with private_pool(device):
            assert events == pools[:2]
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert events == pools


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_memory_of_a_private_pool_goes_back_whole():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with private_pool("cuda"):
        tensor = torch.ones(1 << 26, device="cuda")
    assert torch.cuda.memory_reserved() > before
    del tensor
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


# Keys of the builds of torch for CUDA: in c10/cuda/CUDAAllocatorConfig.cpp (2.11 to 2.15), of which a build for a CPU
# knows nothing.
KEYS_OF_CUDA = {
    "graph_capture_record_stream_reuse", "per_process_memory_fraction", "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb", "pinned_use_cuda_host_register", "release_lock_on_cudamalloc",
    "throw_on_cudamalloc_oom",
}  # fmt: skip
NEWER = {(2, 12): {"throw_on_cudamalloc_oom"}, (2, 13): {"pinned_max_cached_size_mb", "pinned_max_round_threshold_mb"}}


def test_torch_knows_the_keys_that_are_offered():
    """In the libraries of torch."""
    libraries = (Path(torch.__file__).parent / "lib").glob("libc10*.so")
    content = b"".join(path.read_bytes() for path in libraries)
    known = {key for key in KEYS if key.encode() in content}
    expected = set(KEYS) if torch.version.cuda else set(KEYS) - KEYS_OF_CUDA
    newer = set().union(*(keys for release, keys in NEWER.items() if installed_release() < release))
    assert known == expected - newer
    assert {"backend", "expandable_segments", "max_split_size_mb", "roundup_power2_divisions"} <= known
    assert set(KEYS) > KEYS_OF_CUDA


def test_brackets_hold_one_value_together():
    assert parse_allocator("roundup_power2_divisions:[256:1,>:8], backend:native") == (
        "roundup_power2_divisions:[256:1,>:8],backend:native"
    )


@pytest.mark.slow  # a benchmark, in a process that imports torch anew
def test_the_benchmark_of_settings_runs_a_setting_in_a_process_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src")]))
    from benchmarks.gpu import fragmentation

    monkeypatch.setattr(fragmentation, "SETTINGS", ("expandable_segments",))
    fragmentation.main(["--small", "--output", str(tmp_path / "small.json")])
    found = json.loads((tmp_path / "small.json").read_text())["results"]
    assert [row["setting"] for row in found] == ["expandable_segments"]
    assert all(row["step_seconds"] > 0 for row in found)
    assert "expandable_segments: " in capsys.readouterr().out
