"""What a dry run does not compute has no memory: any size on any machine, and nobody reads it by mistake."""

import ctypes
import itertools
import json
import re
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from torch import nn

from round_device import round_device
from tightfit import TokenBatch, build_dry, estimate
from tightfit.errors import TraceError
from tightfit.memory.counters import highest_rss
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.tracing.faults import FIRST_ADDRESS, LAST_ADDRESS, faults
from tightfit.tracing.unbacked import is_unbacked, unbacked_tensor

pytestmark = pytest.mark.skipif(not faults.watch(), reason="elsewhere unbacked tensors are untouched memory")
GIB = 2**30


def ended(program, *arguments):
    """What a Python process said, and how it ended."""
    code = textwrap.dedent(program)
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_a_tensor_larger_than_any_machine_is_made():
    tensor = unbacked_tensor((2**20, 2**20, 128), (2**27, 128, 1), torch.float32)
    assert tensor.untyped_storage().nbytes() == tensor.nbytes == 2**49
    assert tensor.shape == (2**20, 2**20, 128)
    assert is_unbacked(tensor[3].t())
    assert not tensor._is_view()


def test_no_two_of_them_share_an_address():
    made = [unbacked_tensor((100,), (1,), torch.float32) for _ in range(3)]
    starts = sorted(tensor.data_ptr() for tensor in made)
    assert all(after - before >= 400 for before, after in itertools.pairwise(starts))


@pytest.mark.keeps("computing-tensor-dry-run")
@pytest.mark.parametrize(
    ("use", "told"),
    [
        (lambda model: model(torch.ones(2, 512)), "aten.addmm"),
        (lambda model: torch.add(model.weight, 1), "aten.add"),
        (lambda model: model.weight.detach().fill_(0), "aten.fill"),
        (lambda model: model.weight.detach().numpy().sum(), "code outside of PyTorch"),
        (lambda model: model.weight.sum().backward(), "aten.sum"),
    ],
)
def test_computing_with_one_raises_a_line_with_the_operator(use, told):
    model = build_dry(lambda: nn.Linear(512, 512))
    for _ in range(2):  # the memory that the kernel got is gone again
        with pytest.raises(
            TraceError, match=rf"^{re.escape(told)}\S* reads .* has a shape but no memory, at .*unbacked"
        ):
            use(model)


def test_it_raises_too_once_dynamo_runs_the_frames_of_the_process():
    model = build_dry(lambda: nn.Linear(512, 512))
    before = torch._C._dynamo.eval_frame.set_eval_frame(False)
    try:
        with pytest.raises(TraceError, match=r"aten\.sum"):
            model.weight.sum()
    finally:
        torch._C._dynamo.eval_frame.set_eval_frame(before)


@pytest.mark.keeps("computing-tensor-dry-run")
def test_a_kernel_that_writes_far_more_than_there_is_raises_and_takes_little():
    model = build_dry(lambda: nn.Linear(2**16, 2**16))  # 16 GiB
    before = highest_rss()
    with pytest.raises(TraceError, match=r"aten\.fill"):
        model.weight.detach()[:, :8192].fill_(1.0)  # a page or more of each of 65,536 rows
    assert highest_rss() - before < GIB


def written_past_the_dispatcher(y):
    ctypes.memset(y.data_ptr(), 1, 4 * 512)


@pytest.mark.keeps("computing-tensor-dry-run")
def test_a_write_past_the_dispatcher_in_a_dry_run_is_an_exception():
    with pytest.raises(TraceError, match=r"no memory, at .*test_unbacked\.py:\d+ \(ctypes.memset"):
        peak_with(written_past_the_dispatcher)
    assert peak_with(lambda y: None).peak_bytes > 0


@pytest.mark.keeps("computing-tensor-dry-run")
def test_the_exception_comes_again_if_the_step_swallows_it():
    def swallowed(y):
        with suppress(TraceError):
            written_past_the_dispatcher(y)

    with pytest.raises(TraceError, match="has a shape but no memory"):
        peak_with(swallowed)


@pytest.mark.keeps("computing-tensor-dry-run")
def test_a_write_in_another_thread_of_the_step_is_an_exception_in_its_own():
    def elsewhere(y):
        thread = threading.Thread(target=written_past_the_dispatcher, args=(y,))
        thread.start()
        thread.join()

    with pytest.raises(TraceError, match="has a shape but no memory"):
        peak_with(elsewhere)


@pytest.mark.keeps("computing-tensor-dry-run")
def test_a_dry_run_in_another_thread_has_its_exception_there():
    with ThreadPoolExecutor(1) as pool, pytest.raises(TraceError, match="has a shape but no memory"):
        pool.submit(peak_with, written_past_the_dispatcher).result()


@pytest.mark.keeps("except-tensor-larger-1")
@pytest.mark.slow  # an interpreter of its own
def test_what_is_too_large_for_addresses_that_can_be_mapped_ends_in_one_line():
    end = ended(
        """
        import torch
        from tightfit.tracing.unbacked import unbacked_tensor
        print("so far")
        unbacked_tensor((2**20, 2**20), (2**20, 1), torch.float32)[:1] + 1
        print("never")
        """
    )
    assert (end.returncode, end.stdout) == (TraceError.exit_code, "so far\n")
    assert end.stderr.count("\n") == 1
    assert "aten.add" in end.stderr
    assert "has a shape but no memory" in end.stderr


def test_addresses_are_used_again_and_never_of_a_live_tensor():
    size = 300 * 2**30
    held = [unbacked_tensor((size,), (1,), torch.uint8)]
    starts = [held[0].data_ptr()]
    for _ in range(3 * (LAST_ADDRESS - FIRST_ADDRESS) // size):
        tensor = unbacked_tensor((size,), (1,), torch.uint8)
        assert FIRST_ADDRESS <= tensor.data_ptr() <= LAST_ADDRESS - size
        assert abs(tensor.data_ptr() - starts[0]) >= size
        starts.append(tensor.data_ptr())
    assert len(set(starts)) < len(starts)


def test_two_threads_that_fault_at_one_address_both_go_on(monkeypatch):
    build_dry(lambda: nn.Linear(8, 8))  # the handler is there
    real = faults._libc

    class Slow:
        munmap = real.munmap

        @staticmethod
        def mmap(*arguments):
            found = real.mmap(*arguments)
            time.sleep(0.05)  # as long as Python's lock may be another thread's
            return found

    monkeypatch.setattr(faults, "_libc", Slow)
    with ThreadPoolExecutor(2) as threads:
        went_on = list(threads.map(faults._map, [FIRST_ADDRESS + 2**43] * 2))
    faults._unmap()
    assert went_on == [True, True]


@pytest.mark.slow  # an interpreter of its own
def test_a_first_dry_run_in_another_thread_leaves_the_main_one_its_exception():
    end = ended(
        """
        import threading
        from torch import nn
        from tightfit import build_dry
        from tightfit.errors import TraceError
        thread = threading.Thread(target=lambda: build_dry(lambda: nn.Linear(512, 512)))
        thread.start(); thread.join()
        model = build_dry(lambda: nn.Linear(512, 512))
        try:
            model.weight.detach().fill_(1.0)
        except TraceError:
            print("raised")
        """
    )
    assert (end.returncode, end.stdout) == (0, "raised\n"), end.stderr


@pytest.mark.slow  # an interpreter of its own
def test_a_fault_of_somebody_elses_ends_as_it_would_have():
    end = ended(
        """
        import ctypes, faulthandler
        from torch import nn
        from tightfit import build_dry
        faulthandler.enable()
        model = build_dry(lambda: nn.Linear(512, 512))
        ctypes.string_at(0)
        """
    )
    assert end.returncode == -11
    assert "Fatal Python error: Segmentation fault" in end.stderr


class Reader(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.layer = nn.Linear(512, 512)
        self.read = read

    def forward(self, x):
        y = self.layer(x)
        self.read(y.detach())
        return y.sum()


def peak_with(read, rows=1024):
    asked = {"loss": lambda m, b: m(*b), "optimizer": "sgd", "device": round_device()}
    return estimate(Reader(read), (torch.zeros(rows, 512),), **asked)


@pytest.mark.keeps("computing-tensor-dry-run")
@pytest.mark.parametrize("read", [lambda y: y.numpy(), lambda y: y.tolist(), lambda y: y.__array__()])
def test_reading_a_large_unknown_tensor_behind_the_dispatcher_is_refused_by_line(read):
    with pytest.raises(TraceError, match=r"test_unbacked\.py:\d+: Tensor\.\w+ of a tensor of \(1024, 512\)"):
        peak_with(read)


@pytest.mark.keeps("computing-tensor-dry-run")
def test_small_unknown_tensors_are_read_as_the_documented_answer():
    seen = []
    told = peak_with(lambda y: seen.extend([y[0, :2].tolist(), float(y.mean().numpy())]))
    assert seen == [[1.0, 1.0], 1.0] * (len(seen) // 2) != []  # a step that imports something runs twice
    assert any("numbers read from a tensor" in line for line in map(str, told.assumptions))


def test_an_unknown_tensor_is_printed_without_numbers():
    seen = []
    peak_with(lambda y: seen.append(repr(y)))
    assert seen[0].startswith("tensor(...")


def test_masks_larger_than_what_is_computed_take_no_memory():
    seen = []

    def mask(y):
        places = torch.arange(2**17)
        causal = places[:, None] >= places[None, :]
        seen.append((causal.shape, is_unbacked(causal), bool((places >= 0).all())))

    peak_with(mask)
    assert seen[-1] == ((2**17, 2**17), True, True)


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "num_key_value_heads": 8,
}  # fmt: skip
LLAMA_8B = LLAMA | {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "max_position_embeddings": 2**20,
}  # fmt: skip
LLAMA_405B = LLAMA | {
    "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
    "max_position_embeddings": 131072,
}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False,
    "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "routed_scaling_factor": 2.5, "topk_group": 4, "v_head_dim": 128, "vocab_size": 129280,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.keeps("process-limited-4-gb")
@pytest.mark.slow  # minutes: transformers is imported, and DeepSeek-V3 has 15,000 experts
@pytest.mark.parametrize(
    ("shape", "length", "parameters"),
    [(LLAMA_8B, 2**20, 8.03e9), (LLAMA_405B, 8192, 405.9e9), (DEEPSEEK_V3, 4096, 671e9)],
    ids=["8B", "405B", "671B"],
)
def test_a_process_held_to_4_gb_estimates_it(shape, length, parameters, tmp_path):
    pytest.importorskip("transformers")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(shape))
    end = ended(
        """
        import json, resource, sys
        resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
        from tightfit import TokenBatch, build_dry, estimate
        from tightfit.training.config.schema import PretrainedModel
        from tightfit.memory.counters import highest_rss
        from tightfit.models.pretrained import build_pretrained
        section = PretrainedModel(path=sys.argv[1], random_init=True)
        model = build_dry(lambda: build_pretrained(section))
        batch = TokenBatch(1, int(sys.argv[2]), model.config.vocab_size)
        peak = estimate(model, batch, device="h200", precision="bf16").peak_bytes
        count = sum(p.numel() for p in model.parameters())
        print(json.dumps([count, peak, highest_rss()]))
        """,
        str(config),
        str(length),
    )
    assert end.returncode == 0, end.stderr
    count, peak, resident = json.loads(end.stdout.splitlines()[-1])
    assert count == pytest.approx(parameters, rel=0.01)
    assert peak > 16 * count
    assert resident < GIB


@pytest.mark.keeps("process-limited-4-gb")
@pytest.mark.slow  # an interpreter of its own with a limit
def test_logits_larger_than_the_limit_on_memory_are_estimated():
    end = ended(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
        import torch
        from tightfit import TokenBatch, build_dry, estimate
        from tightfit.models.decoder import Decoder
        from tightfit.models.decoder_config import DecoderConfig
        config = DecoderConfig(hidden_size=128, num_layers=1, num_heads=2, vocab_size=131072,
                               max_position_embeddings=65536)
        model = build_dry(lambda: Decoder(config))
        print(estimate(model, TokenBatch(1, 65536, 131072), device="h200").peak_bytes)
        """
    )
    assert end.returncode == 0, end.stderr
    assert int(end.stdout) > 2 * 65536 * 131072 * 4


def test_models_built_dry_and_real_are_estimated_alike():
    config = DecoderConfig(hidden_size=64, num_layers=2, num_heads=4, vocab_size=500)
    batch, asked = TokenBatch(2, 64, 500), {"device": round_device()}
    dry = estimate(build_dry(lambda: Decoder(config)), batch, **asked)
    assert dry.peak_bytes == estimate(Decoder(config), batch, **asked).peak_bytes


def test_a_routers_choice_for_32768_tokens_stays_known():
    """Unknown, each of the 128 experts would be assumed to take every token."""
    choice = torch.arange(32_768 * 8).view(32_768, 8) * 7919 % 128
    taken = []

    class Router(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, choice):
            mask = torch.nn.functional.one_hot(choice, 128).permute(2, 1, 0)
            for expert in (0, 127):
                place, token = torch.where(mask[expert])
                taken.append((len(place), len(token)))
            return self.scale.sum()

    estimate(Router(), (choice,), loss=lambda model, batch: model(*batch), device=round_device())
    held = [int((choice == expert).sum()) for expert in (0, 127)]
    assert taken[:2] == [(count, count) for count in held]
