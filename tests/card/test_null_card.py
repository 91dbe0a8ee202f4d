"""The null card answers as its card would, and its memory ends where its card's would."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch

import tightfit
from tightfit.devices.nullcard.card import card_of, environment
from tightfit.errors import ModelError

MIB = 1 << 20


def on(device: str, code: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python code on another null card, in a process of its own."""
    own = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "TIGHTFIT_NULLCARD")}
    command = [sys.executable, "-m", "tightfit.devices.nullcard", device, *options, "--", sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env={**own, **variables})


def test_it_answers_with_the_figures_of_the_list():
    card = card_of("rtx4090")
    properties = torch.cuda.get_device_properties(0)
    assert (properties.name, properties.total_memory) == (card.name, card.memory_bytes)
    assert (properties.major, properties.minor) == card.capability
    assert properties.multi_processor_count == card.multiprocessors


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", ["t4", "rtx3060", "a100", "h100", "b200", "rtx5090"])
def test_other_cards_start_and_run_a_step(device):
    code = (
        "import torch; m = torch.nn.Linear(64, 64, device='cuda'); o = torch.optim.AdamW(m.parameters(), fused=True)\n"
        "q = torch.zeros(2, 4, 128, 64, device='cuda', dtype=torch.half, requires_grad=True)\n"
        "torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()\n"
        "m(torch.zeros(2, 64, device='cuda')).sum().backward(); o.step(); torch.cumsum(q, 0); torch.sort(q.flatten())\n"
        "print(torch.cuda.get_device_capability(), torch.cuda.max_memory_allocated() > 0)"
    )
    found = on(device, code)
    assert found.stdout == f"{card_of(device).capability} True\n", found.stderr


def test_cudnn_is_as_new_as_the_one_that_pytorch_was_built_with():
    major, minor, patch = torch._C._cudnn.getCompileVersion()
    assert torch.backends.cudnn.version() == major * 10000 + minor * 100 + patch


def test_several_cards_have_memory_of_their_own():
    code = (
        "import torch; torch.zeros(1 << 28, device='cuda:1'); "
        "print(torch.cuda.device_count(), torch.cuda.max_memory_allocated(0), torch.cuda.max_memory_allocated(1))"
    )
    assert on("rtx4090", code, "--count", "2").stdout == f"2 0 {1 << 30}\n"


def test_memory_ends_where_the_card_ends_and_comes_back():
    torch.cuda.empty_cache()
    before, total = torch.cuda.mem_get_info()
    pieces = []
    for _ in range(before // (256 * MIB)):
        pieces.append(torch.empty(256 * MIB, dtype=torch.uint8, device="cuda"))
    with pytest.raises(torch.cuda.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    assert before <= total
    assert torch.cuda.mem_get_info()[0] < 256 * MIB
    pieces.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == before


@pytest.mark.sampled(1)
@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_other_allocators_run_into_the_same_end(setting):
    code = (
        "import torch\n"
        "a = torch.empty(1 << 30, dtype=torch.uint8, device='cuda'); print(torch.cuda.memory_allocated() >> 20)\n"
        "del a; b = torch.zeros(1 << 20, device='cuda'); print(b.sum().item())\n"
        "try: kept = [torch.empty(12 << 30, dtype=torch.uint8, device='cuda') for _ in range(2)]\n"
        "except torch.OutOfMemoryError: print('out of memory')"
    )
    found = on("rtx4090", code, PYTORCH_ALLOC_CONF=setting)
    assert found.stdout == "1024\n0.0\nout of memory\n", found.stderr


def test_less_memory_is_what_the_user_says():
    code = "import torch; print(torch.cuda.mem_get_info()[1])"
    assert on("rtx4090", code, "--memory", "8GiB").stdout == f"{8 << 30}\n"
    assert on("rtx3080,memory=6GiB", code).stdout == f"{6 << 30}\n"


def test_copies_are_real_and_pinned_memory_is_pinned():
    host = torch.arange(1000.0).pin_memory()
    assert host.is_pinned()
    assert torch.equal(host.to("cuda", non_blocking=True).cpu(), host)


def test_a_captured_graph_repeats_its_copies():
    source, graph = torch.zeros(64, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copied = source.clone()
    source.copy_(torch.arange(64.0))
    graph.replay()
    assert torch.equal(copied.cpu(), torch.arange(64.0))


def test_a_launch_that_a_card_refuses_is_refused():
    library = ctypes.CDLL("libcudart.so.13" if torch.version.cuda.startswith("13") else "libcudart.so.12")
    three = ctypes.c_uint * 3

    class Dim(ctypes.Structure):
        _fields_ = [("sizes", three)]

    library.cudaLaunchKernel.argtypes = (ctypes.c_void_p, Dim, Dim, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert library.cudaLaunchKernel(None, Dim(three(1, 1, 1)), Dim(three(32, 1, 1)), None, 0, None) == 0
    assert library.cudaLaunchKernel(None, Dim(three(1, 1, 1)), Dim(three(2048, 1, 1)), None, 0, None) == 9
    assert library.cudaLaunchKernel(None, Dim(three(1, 1, 1)), Dim(three(32, 1, 1)), None, 1 << 20, None) == 1
    library.cudaGetLastError()


@pytest.mark.filterwarnings("ignore:Sparse")
def test_calls_that_are_not_modelled_are_counted_by_name():
    library, name, at, found = ctypes.CDLL("libcuda.so.1"), ctypes.create_string_buffer(96), 0, {}
    library.card_unmodelled_calls.restype = ctypes.c_long
    diagonal = torch.sparse_csr_tensor(torch.arange(9), torch.arange(8), torch.ones(8)).cuda()
    with pytest.raises(RuntimeError, match="not supported by the null card when calling `cusparseSpGEMM"):
        torch.matmul(diagonal, diagonal)
    torch.fft.fft(torch.zeros(8, device="cuda"))
    while calls := library.card_unmodelled_calls(at, name, len(name)):
        found[name.value.decode()] = calls
        at += 1
    assert found["cusparseSpGEMM_createDescr"] >= 1
    assert found["cufftXtMakePlanMany"] >= 1, "a size that is assumed"


def test_a_card_for_which_pytorch_has_no_code_is_refused_in_one_line():
    found = on("v100", "print('ran')")
    assert found.returncode == 2
    assert found.stderr.startswith("error: NVIDIA V100")
    assert found.stderr.count("\n") == 1
    assert "compute capability 7.0" in found.stderr


def test_a_process_that_starts_another_hands_the_card_on():
    found = environment(card_of("t4"))
    code = "import torch; print(torch.cuda.get_device_name())"
    said = subprocess.run([sys.executable, "-c", code], env=found, capture_output=True, text=True)
    assert said.stdout == f"{card_of('t4').name}\n"


def test_libraries_of_others_that_are_linked_to_the_runtime_load():
    """bitsandbytes: nf4 on a card is its kernels."""
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.zeros(64, 64, device="cuda")
    packed, state = functional.quantize_4bit(weight, quant_type="nf4")
    assert packed.nbytes == weight.numel() / 2
    assert functional.dequantize_4bit(packed, state).shape == weight.shape


def graph(device):
    places = torch.stack([torch.arange(32), torch.arange(32).roll(1)])
    return torch.sparse_coo_tensor(places, torch.ones(32), (32, 32)).to(device)


LINEAR_ALGEBRA = {
    "factors of batches": lambda a: torch.linalg.lu_factor(a)[0],
    "inverse": torch.linalg.inv,
    "solved": lambda a: torch.linalg.solve(a, a),
    "determinant": torch.linalg.det,
    "orthogonal factor": lambda a: torch.linalg.qr(a)[0],
    "orthogonal factor of one": lambda a: torch.linalg.qr(a[0])[0],
    "Cholesky": torch.linalg.cholesky,
    "Cholesky of one": lambda a: torch.linalg.cholesky(a[0]),
    "eigenvalues": lambda a: torch.linalg.eigh(a)[0],
    "eigenvectors of a large one": lambda a: torch.linalg.eigh(torch.nn.functional.pad(a[0], (0, 600, 0, 600)))[1],
    "singular values": torch.linalg.svdvals,
    "singular vectors": lambda a: torch.linalg.svd(a, full_matrices=False)[0],
    "nuclear norm": lambda a: torch.linalg.matrix_norm(a, "nuc"),
    "least squares": lambda a: torch.linalg.lstsq(a, a).solution,
    "orthogonal weights": lambda a: torch.nn.init.orthogonal_(torch.empty(32, 32, device=a.device)) @ a,
    "frequencies": lambda a: torch.fft.rfft2(a).abs(),
    "graph": lambda a: torch.sparse.mm(graph(a.device), a[0]),
    "windows of sound": lambda a: torch.stft(
        a.flatten(1), 64, window=torch.hann_window(64, device=a.device), return_complex=True
    ).abs(),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.usefixtures("null_card")
@pytest.mark.parametrize("name", LINEAR_ALGEBRA)
def test_factorisations_fourier_transforms_and_sparse_products_run(name):
    """What cuSOLVER, cuFFT and cuSPARSE do of them: they take scratch memory, and say that they succeeded."""
    a = torch.randn(4, 32, 32, device="cuda", requires_grad=True)
    LINEAR_ALGEBRA[name](a).sum().backward()
    assert a.grad.shape == a.shape


def mlp():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
                                 for _ in range(3)))  # fmt: skip


@pytest.mark.keeps("nothing-computed-nothing-compared")
def test_numbers_that_nobody_computed_are_not_compared():
    """Neither does a tile try whether it mixes tokens, nor does `verify` find that all is equal."""
    model, batch = mlp().cuda(), (torch.randn(4, 64, 8, device="cuda"),)

    def loss(model, batch):
        return model(*batch).square().mean()

    plan = tightfit.plan(model, batch, "1x", loss=loss, device="cuda")
    with pytest.raises(ModelError, match="a card that computes none: take tightfit run --values"):
        tightfit.verify(model, batch, plan, loss=loss)
    with torch.no_grad():
        model[0][0].weight.fill_(torch.nan)  # what lies in memory is anything
    tightfit.tile(model, "0", tokens=16)
    loss(model, batch).backward()
