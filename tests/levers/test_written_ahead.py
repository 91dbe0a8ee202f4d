"""What the compiler writes for dry runs: the same around kernels without their text, and in forks of the process."""

import re
import threading
from contextlib import nullcontext

import pytest
import torch

import tightfit
from tightfit.levers.captured import capture_paths, fused
from tightfit.levers.captured.fused import Fused
from tightfit.levers.recompute import KEEP_ALL, RECOMPUTE_ALL, OperatorKey, Policy
from tightfit.runtime.forked import processes_for
from tightfit.runtime.internals import inductor
from tiny import VOCABULARY, decoder, token_batch

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # dynamo asks it of what it is given
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # within PyTorch's compiler
]

PRODUCTS = Policy(frozenset(OperatorKey("aten.mm.default", place) for place in range(9)))
POLICIES = (PRODUCTS, RECOMPUTE_ALL, KEEP_ALL)


def ours(width=64):
    return decoder(num_layers=3, hidden_size=width), "layers", "fp32"


def dropping():
    return decoder(num_layers=3, hidden_size=64, dropout=0.1).train(), "layers", "fp32"


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"vocab_size": VOCABULARY, "use_cache": False, "bos_token_id": 0, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(**size, n_embd=64, n_layer=3, n_head=4)).train(), "transformer.h", "bf16"


@pytest.fixture
def programs(monkeypatch):
    """The programs that dry runs of compiled blocks have played."""
    found: dict[int, Fused] = {}
    play = Fused.play

    def noted(self, args):
        found[id(self)] = self
        return play(self, args)

    monkeypatch.setattr(Fused, "play", noted)
    return found


def run_dry(make):
    model, blocks, precision = make()
    policies = {f"{blocks}.{place}": policy for place, policy in enumerate(POLICIES)}
    with capture_paths(model, policies, fused=tuple(policies)):
        return tightfit.estimate(model, token_batch(2), precision=precision).peak_bytes


def around_kernels(source):
    """The wrapper without the kernels and their names."""
    text = re.sub(r"cpp_\w+ = async_compile.cpp_pybinding\(.*?r'''.*?'''\)", "", source, flags=re.DOTALL)
    return [line for line in re.sub(r"cpp_fused\w+", "kernel", text).splitlines() if line.strip()]


@pytest.mark.keeps("dry-runs-compiled-blocks")
@pytest.mark.slow  # the compiler writes six programs twice, for each model
@pytest.mark.parametrize("make", [ours, dropping, gpt2])
def test_without_the_text_of_kernels_the_code_around_them_is_the_same(make, programs, monkeypatch):
    run_dry(make)
    assert len(programs) == 6
    for program in programs.values():
        short = program.write(threads=2)
        with monkeypatch.context() as patch:
            patch.setattr(inductor, "kernels_without_text", nullcontext)
            whole = program.write(threads=2)
        assert around_kernels(short) == around_kernels(whole)
        assert "for(int64_t" in whole
        assert "for(int64_t" not in short


@pytest.mark.keeps("dry-runs-compiled-blocks")
@pytest.mark.slow  # the compiler writes six programs twice
def test_programs_are_written_in_forks_as_in_the_process_itself(programs, monkeypatch):
    monkeypatch.setattr(fused, "processes_for", lambda parts: min(parts, 2))
    run_dry(lambda: ours(32))  # no other test records blocks of this width
    assert len(programs) == 6
    for program in programs.values():
        assert program.source == program.write(torch.get_num_threads())


@pytest.mark.keeps("dry-runs-compiled-blocks")
@pytest.mark.slow  # records a block, and the compiler writes six programs
def test_a_recording_leaves_no_thread_that_would_forbid_forks(programs, monkeypatch):
    monkeypatch.setattr(fused, "processes_for", lambda parts: 1)
    before = threading.active_count()
    may_fork = processes_for(2)
    run_dry(lambda: ours(96))  # no other test records blocks of this width
    assert programs
    assert threading.active_count() == before
    assert processes_for(2) == may_fork
