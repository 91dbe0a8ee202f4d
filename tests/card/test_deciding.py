"""What decides which operators follow is true on a null card, and the bytes of everything else stay what they are."""

import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tightfit
from tightfit.devices.nullcard.deciding import true_decisions
from tightfit.memory.counters import read_counters

pytestmark = pytest.mark.usefixtures("null_card")

ROWS, LENGTH = 1, 2048
# As the mask code of transformers: positions, labels and padding are looked at, and what needs no mask gets none.
ATTENTION = f"""
import torch
from torch import nn
import torch.nn.functional as F

ids = torch.randint(0, 100, ({ROWS}, {LENGTH})).cuda()
padding = torch.ones_like(ids)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.projection, self.head = nn.Embedding(100, 256), nn.Linear(256, 768), nn.Linear(256, 100)

    def forward(self, ids):
        mask = torch.ones({LENGTH}, {LENGTH}, dtype=torch.bool, device="cuda").tril() if NEEDS_ONE else None
        print("mask", mask is not None, flush=True)
        q, k, v = self.projection(self.embedding(ids)).view({ROWS}, {LENGTH}, 3, 4, 64).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.head(x.transpose(1, 2).flatten(2))

model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LOOKS = {
    "arange": "(torch.arange(2048, device='cuda').diff() != 1).any()",
    "cumsum of padding": "((padding.cumsum(-1) - 1)[:, -1] != 2047).any()",
    "all of a boolean mask": "not padding.bool().all()",
    "written in place": "not (torch.zeros_like(ids).add_(padding).eq_(1) & padding).all()",
    "a selected size": "padding[padding == 1].numel() != padding.numel()",
    "floating point": "not torch.all((1.0 - padding[:, None, None, :].to(torch.float32)) * -1e9 == 0)",
    "columns set to zero": "not torch.full((4, 4), -1e9, device='cuda')[:, :2].zero_().eq(0).all()",
    "a count in whole chunks": "(padding.sum() / 256).ceil().to(torch.int64) * 256 != 2048",
    "filled floating point": "not torch.full((4, 4), -1e9, device='cuda').triu(1).tril().eq(0).all()",
}


def run_with(folder, needs_one):
    path = folder / "train.py"
    path.write_text(ATTENTION.replace("NEEDS_ONE", needs_one))
    run = tightfit.run([sys.executable, str(path)], device="rtx4090", steps=2)
    assert run.exit_code == 0
    return run


@pytest.fixture(scope="module")
def without_mask(tmp_path_factory):
    folder = tmp_path_factory.mktemp("branches")
    with_mask, without = (run_with(folder, answer).peak_bytes for answer in ("True", "False"))
    assert with_mask > without
    return without


@pytest.mark.sampled(2)
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_script_that_looks_at_its_mask_takes_the_branch_that_a_card_would(without_mask, tmp_path, capfd, look):
    run = run_with(tmp_path, look)
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("mask")]
    assert said == ["mask False"] * 2
    if "1e9" in look or "/" in look:  # floating point: a kernel that nobody saw may have changed them
        assert run.read_values
    else:  # and blocks of such masks in the allocator's cache change which later ones are split
        assert run.peak_bytes == without_mask
        assert not run.read_values


def peak_of(step):
    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("recomputes", [False, True], ids=["plain", "checkpoint"])
def test_gradients_are_added_in_place_as_without(recomputes):
    """Autograd does so where nobody else holds the first, and a tensor that Python has seen is held."""
    weight = nn.Parameter(torch.zeros(4096, 256, device="cuda"))

    def read_twice(weight):
        return (weight * 2).sum() + (weight * 3).sum()

    def step():
        (checkpoint(read_twice, weight, use_reentrant=False) if recomputes else read_twice(weight)).backward()
        weight.grad = None

    plain = peak_of(step)
    with true_decisions():
        assert peak_of(step) == plain


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(64, 4), nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.counts = []

    def forward(self, x):
        chosen = self.router(x).softmax(-1).topk(1).indices.squeeze(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            self.counts.append(len(rows))
            out = out.index_add(0, rows, expert(x[rows]))
        return out


@pytest.mark.parametrize("reentrant", [False, True])
def test_experts_get_tokens_in_turn_and_a_checkpoint_recomputes_with_the_same(reentrant):
    model, x = Experts().cuda(), torch.randn(64, 64).cuda().requires_grad_()
    with true_decisions():
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert model.counts == [16] * 8


def test_kernels_are_away_within_a_backward_and_back_behind_it_and_behind_an_error():
    seen = []
    x = torch.zeros(4, device="cuda", requires_grad=True)

    def look(gradient):
        seen.append(torch.arange(1, 4, device="cuda").tolist())
        if len(seen) == 1:
            with torch.enable_grad():
                seen.append(torch.arange(1, 4, device="cuda").tolist())
            raise ValueError("of the hook")

    torch.full((1 << 16,), 7, device="cuda")  # old memory
    with true_decisions():
        y = x * 2
        y.register_hook(look)
        with pytest.raises(ValueError, match="of the hook"):
            y.sum().backward()
        assert torch.arange(1, 4, device="cuda").tolist() == [1, 2, 3]
    assert seen[0] != seen[1] == [1, 2, 3]
    assert type(torch.autograd.Variable._execution_engine) is torch._C._ImperativeEngine
    assert torch.enable_grad.__enter__.__module__ == "torch.autograd.grad_mode"


def test_what_cannot_be_known_ends_no_script():
    """Places that no kernel has made are beyond their tensor, and a card whose kernels do nothing does not mind."""
    with true_decisions() as values:
        places = torch.empty(8, dtype=torch.int64, device="cuda").random_(10**9, 10**9 + 9)
        values._known.clear()
        torch.arange(4, device="cuda")[places]
        torch.arange(4, device="cuda").gather(0, places)


def test_a_scaler_finds_no_overflow_and_keeps_its_scale():
    weight = nn.Parameter(torch.zeros(4, device="cuda"))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler(init_scale=4.0)
    stepped = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(True))
    torch.full((1 << 16,), float("inf"), device="cuda")  # old memory
    with true_decisions():
        for _ in range(3):
            scaler.scale((weight * 2).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 4.0
    assert len(stepped) == 3


def test_memory_that_is_filled_with_zeros_takes_none_of_the_host():
    with true_decisions():
        before = read_counters(torch.device("cpu")).rss_bytes
        states = [torch.zeros(1 << 28, dtype=dtype, device="cuda") for dtype in (torch.float32, torch.uint8)]
        assert read_counters(torch.device("cpu")).rss_bytes - before < 64 << 20
        assert states[1][-1].item() == 0


def test_large_batches_of_ids_arrive_though_large_copies_are_not_made(tmp_path):
    path = tmp_path / "count.py"
    text = "import torch\nids = torch.ones(1 << 20, dtype=torch.int64).cuda()\nids[-1] = 5\n"
    path.write_text(text + "print('sum', ids.sum().item(), ids.cpu()[-1].item())\nassert ids.sum() == (1 << 20) + 4")
    run = tightfit.run([sys.executable, str(path)], device="rtx4090")
    assert run.exit_code == 0
    assert not run.read_values


def test_lines_that_read_what_no_kernel_has_made_are_still_named(tmp_path):
    path = tmp_path / "read.py"
    text = "import torch\nx = torch.randn(8, 8).cuda()\nlabels = torch.tensor([1, -100, 3]).cuda()\n"
    text += "labels.ne(-100).sum().item()\n(x @ x).sum().item()\nx.argmax().item()\n(x > 0).nonzero()\n"
    path.write_text(text)
    run = tightfit.run([sys.executable, str(path)], device="rtx4090", quiet=True)
    assert sorted(value.line for value in run.read_values) == [
        "(x > 0).nonzero()",
        "(x @ x).sum().item()",
        "x.argmax().item()",
    ]


class Prepared(torch.autograd.Function):
    """A loss over a weight whose gradient is made in forward, as losses in chunks make it."""

    @staticmethod
    def forward(ctx, weight):
        gradient = torch.zeros_like(weight)
        gradient.add_(weight.detach())
        ctx.save_for_backward(gradient)
        return weight.detach().sum()

    @staticmethod
    def backward(ctx, upstream):
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(upstream)


def test_autograd_adds_in_place_to_a_gradient_that_forward_has_made():
    weight = nn.Parameter(torch.zeros(1000, 1024, device="cuda"))
    places = torch.zeros(8, dtype=torch.int64, device="cuda")

    def peak():
        weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        (nn.functional.embedding(places, weight).sum() + Prepared.apply(weight)).backward()
        return torch.cuda.max_memory_allocated()

    plain = peak()
    with true_decisions():
        assert peak() == plain


FLAGS = """
import torch
from torch import nn

torch.full((1 << 16,), 7, device="cuda")  # memory that was written before
model, norms = nn.Linear(256, 256).cuda(), []
optimizer = torch.optim.SGD(model.parameters())
for step in range(2):
    loss = model(torch.randn(64, 256).cuda()).square().mean()
    loss.backward()
    marks = [torch.tensor(-1.0, device="cuda") for _ in range(64)]
    print("mark", bool(marks[-1] < 0))
    del marks
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    print("overflows", bool((~torch.isfinite(norm) | (norm < 0)).any()))
    print("finite", all(bool(torch.isfinite(p.grad).all()) for p in model.parameters()))
    print("is none", bool(torch.isnan(loss)), "infinite", bool(torch.isinf(loss).any()))
    print("above", int((model.weight > 3).sum()), flush=True)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.keeps("tightfit-run-says-script")
def test_checks_for_overflow_find_none_and_other_counts_are_zero(tmp_path, capfd):
    """DeepSpeed and scalers skip the update otherwise, by whatever lay in memory."""
    path = tmp_path / "train.py"
    path.write_text(FLAGS)
    run = tightfit.run([sys.executable, str(path)], device="rtx4090", steps=2)
    assert run.exit_code == 0
    said = [
        line
        for line in capfd.readouterr().out.splitlines()
        if line.split()[0] in ("mark", "overflows", "finite", "is", "above")
    ]
    assert said == ["mark True", "overflows False", "finite True", "is none False infinite False", "above 0"] * 2
    assert len(run.steps) == 2
    assert {value.line.split("(")[0] for value in run.read_values} == {"print"}
