"""The lever for the loss: an unmodified model, the same loss and gradients, and logits only where somebody looks."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.errors import LeverError
from tightfit.levers.chunked_loss import apply_chunked_loss
from tightfit.levers.deferred_logits import DeferredLogits

VOCABULARY, WIDTH, LENGTH = 97, 16, 13
FULL = (2, LENGTH, VOCABULARY)


class Model(nn.Module):
    """Returns logits and loss, the way small GPTs do; `loss` is how the logits become one."""

    def __init__(self, loss=None, *, bias=False, tied=True):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        self.loss = loss or flat_loss
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids, labels):
        logits = self.head(F.gelu(self.body(self.embedding(ids))))
        return logits, self.loss(logits, labels)


def flat_loss(logits, labels):
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
    labels = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
    labels[0, :4] = -100
    return ids, labels


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(mine, plain, **tolerance):
    assert mine.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(mine[name], gradient, **tolerance)


class LogitsSeen(TorchDispatchMode):
    """Notices when a tensor with all logits is made."""

    def __init__(self, tokens=2 * (LENGTH - 1), vocabulary=VOCABULARY):
        super().__init__()
        self.tokens, self.vocabulary, self.seen = tokens, vocabulary, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape[-1:] == (self.vocabulary,):
            self.seen = self.seen or out.numel() >= self.tokens * self.vocabulary
        return out


STAYS_DEFERRED = {
    "flat": flat_loss,
    "module": lambda x, y: nn.CrossEntropyLoss()(x.flatten(0, 1), y.flatten()),
    "keywords": lambda x, y: F.cross_entropy(input=x.view(-1, VOCABULARY), target=y.view(-1)),
    "shifted": lambda x, y: flat_loss(x[..., :-1, :].contiguous(), y[..., 1:].contiguous()),
    "shifted by a slice": lambda x, y: F.cross_entropy(x[:, :-1].reshape(-1, VOCABULARY), y[:, 1:].reshape(-1)),
    "inferred vocabulary": lambda x, y: F.cross_entropy(x.reshape(2 * LENGTH, -1), y.reshape(-1)),
    "flattened to the vocabulary": lambda x, y: F.cross_entropy(x.flatten(end_dim=-2), y.flatten()),
    "a size": lambda x, y: F.cross_entropy(x.view(torch.Size((-1, VOCABULARY))), y.view(-1)),
    "masked": lambda x, y: F.cross_entropy(x[y != -100], y[y != -100]),
    "indexed": lambda x, y: F.cross_entropy(x[torch.tensor([1, 0]), 2], y[torch.tensor([1, 0]), 2]),
    "a row at a time": lambda x, y: sum(F.cross_entropy(x[i], y[i]) for i in range(len(x))),
    "time first": lambda x, y: flat_loss(x.transpose(0, 1).contiguous(), y.transpose(0, 1).contiguous()),
    "one dimension more": lambda x, y: flat_loss(x.unsqueeze(1).squeeze(-3), y),
    "float": lambda x, y: flat_loss(x.float(), y),
    "to": lambda x, y: flat_loss(x.to(torch.float32).to(y.device).to(device="cpu", dtype=torch.float32), y),
    "sum": lambda x, y: F.cross_entropy(x.view(-1, VOCABULARY), y.view(-1), reduction="sum") / 7,
    "of each token": lambda x, y: (F.cross_entropy(x.view(-1, VOCABULARY), y.view(-1), reduction="none") ** 2).mean(),
    "smoothed": lambda x, y: F.cross_entropy(x.view(-1, VOCABULARY), y.view(-1), label_smoothing=0.1),
    "other ignore index": lambda x, y: F.cross_entropy(x.view(-1, VOCABULARY), y.clamp(min=0).view(-1), ignore_index=0),
    "looks at metadata": lambda x, y: (
        flat_loss(x, y) * (x.ndim + len(x) + x.dim() + x.requires_grad + x.is_floating_point()) / 8
    ),
}
NEEDS_LOGITS = {
    "class weights": lambda x, y: F.cross_entropy(x.view(-1, VOCABULARY), y.view(-1), torch.ones(VOCABULARY) * 2),
    "soft targets": lambda x, y: F.cross_entropy(
        x.view(-1, VOCABULARY), torch.softmax(torch.ones(2 * LENGTH, VOCABULARY), -1)
    ),
    "classes second": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "soft cap": lambda x, y: flat_loss(30 * torch.tanh(x / 30), y),
    "part of the vocabulary": lambda x, y: F.cross_entropy(x[..., :50].reshape(-1, 50), y.clamp(max=49).view(-1)),
    "part of the vocabulary in three": lambda x, y: flat_loss(x[:, :, 1:], y.clamp(max=VOCABULARY - 2)),
    "halves": lambda x, y: F.cross_entropy(x.view(-1, 1, VOCABULARY).transpose(1, 2).squeeze(2), y.view(-1)),
    "log-softmax": lambda x, y: F.nll_loss(F.log_softmax(x, dim=-1).view(-1, VOCABULARY), y.view(-1)),
    "z-loss beside it": lambda x, y: flat_loss(x, y) + 1e-2 * x.logsumexp(-1).square().mean(),
    "double": lambda x, y: flat_loss(x.double(), y).float(),
    "concatenated": lambda x, y: flat_loss(torch.cat([x, x], dim=1), torch.cat([y, y], dim=1)),
    "a dimension at the end": lambda x, y: flat_loss(x[..., None].squeeze(-1), y),
    "a dimension at the end by index": lambda x, y: flat_loss(x[:, :, :, None][..., 0], y),
    "written into": lambda x, y: flat_loss(x.masked_fill(torch.arange(VOCABULARY) == 3, -9.0), y.where(y != 3, 4)),
}


@pytest.mark.keeps("chunked-loss-equals-plain")
@pytest.mark.sampled(40)
@pytest.mark.parametrize("loss", STAYS_DEFERRED.values(), ids=STAYS_DEFERRED)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_are_the_same_and_the_logits_never_exist(loss, bias, tied):
    model = Model(loss, bias=bias, tied=tied)
    _, plain = model(*batch())
    wanted = gradients(model, plain)
    with apply_chunked_loss(model, "head", 5), LogitsSeen() as log:
        logits, mine = model(*batch())
        made = gradients(model, mine)
    assert isinstance(logits, DeferredLogits)
    assert not log.seen
    torch.testing.assert_close(mine, plain)
    assert mine.dtype == plain.dtype
    assert_same(made, wanted)


@pytest.mark.keeps("chunked-loss-equals-plain")
@pytest.mark.parametrize("loss", NEEDS_LOGITS.values(), ids=NEEDS_LOGITS)
def test_a_loss_that_needs_the_logits_gets_them_and_is_bit_equal(loss):
    model = Model(loss, bias=True)
    _, plain = model(*batch())
    wanted = gradients(model, plain)
    with apply_chunked_loss(model, "head", 5):
        _, mine = model(*batch())
        made = gradients(model, mine)
    if loss is not NEEDS_LOGITS["z-loss beside it"]:  # its first half is the chunked loss
        assert torch.equal(mine, plain)
        assert_same(made, wanted, rtol=0, atol=0)
    torch.testing.assert_close(mine, plain)
    assert_same(made, wanted)


@pytest.mark.parametrize("precision", ["autocast", "bf16 weights"])
@pytest.mark.parametrize("loss", ["flat", "float", "shifted"])
def test_dtypes_are_those_of_the_plain_run_in_lower_precision(precision, loss):
    model = Model(STAYS_DEFERRED[loss])
    if precision == "bf16 weights":
        model.bfloat16()

    def run():
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            logits, value = model(*batch())
        return logits, value, gradients(model, value)

    plain_logits, plain, wanted = run()
    with apply_chunked_loss(model, "head", 5):
        logits, mine, made = run()
    assert logits.dtype == plain_logits.dtype == torch.bfloat16
    assert mine.dtype == plain.dtype
    torch.testing.assert_close(mine, plain, rtol=2e-2, atol=0)
    assert {n: g.dtype for n, g in made.items()} == {n: g.dtype for n, g in wanted.items()}
    for name, gradient in wanted.items():
        assert (made[name] - gradient).norm() <= 2e-2 * gradient.norm(), name
    assert torch.equal(logits + 0, plain_logits + 0)


def test_the_loss_may_be_taken_outside_of_autocast():
    model = Model(lambda logits, labels: logits)
    ids, labels = batch()

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            _, logits = model(ids, labels)
        return flat_loss(logits.float(), labels)

    plain = run()
    with apply_chunked_loss(model, "head", 5):
        torch.testing.assert_close(run(), plain, rtol=1e-3, atol=0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "GPT2"])
@pytest.mark.parametrize("items", [None, 17, torch.tensor(17)], ids=str)
def test_unmodified_hugging_face_models_never_make_their_logits(family, tied, items):
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 501}
    if family != "GPT2":
        sizes |= {"intermediate_size": 48, "num_key_value_heads": 2}
    config = getattr(transformers, f"{family}Config")(**sizes, tie_word_embeddings=tied)
    model = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config).eval()
    ids = torch.randint(0, 501, (2, 20))
    labels = ids.masked_fill(torch.arange(20) < 4, -100)
    keywords = {} if items is None else {"num_items_in_batch": items}

    plain = model(input_ids=ids, labels=labels, **keywords)
    wanted = gradients(model, plain.loss)
    with apply_chunked_loss(model, "lm_head", 8), LogitsSeen(40, 501) as log:
        mine = model(input_ids=ids, labels=labels, **keywords)
        made = gradients(model, mine.loss)
    assert not log.seen
    torch.testing.assert_close(mine.loss, plain.loss)
    assert_same(made, wanted, rtol=1e-4, atol=1e-6)
    assert torch.equal(mine.logits + 0, plain.logits)


def test_hugging_face_logits_to_keep_and_generation_work():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50, intermediate_size=32
    )
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, 50, (1, 7))
    plain = model(input_ids=ids, logits_to_keep=3).logits
    words = model.generate(ids, max_new_tokens=4, do_sample=False)
    with apply_chunked_loss(model, "lm_head"):
        assert torch.equal(model(input_ids=ids, logits_to_keep=3).logits + 0, plain)
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), words)


def test_without_gradients_the_logits_are_plain():
    model = Model()
    with apply_chunked_loss(model, "head"):
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                assert type(model(*batch())[0]) is torch.Tensor
        model.requires_grad_(False)
        assert type(model(*batch())[0]) is torch.Tensor


def test_a_frozen_head_still_passes_gradients_on():
    model = Model(tied=False)
    model.head.requires_grad_(False)
    wanted = gradients(model, model(*batch())[1])
    with apply_chunked_loss(model, "head", 5):
        assert_same(gradients(model, model(*batch())[1]), wanted)


def about(logits):
    return (
        (logits.shape, logits.size(), logits.size(-1), logits.dim(), logits.ndim, logits.numel(), len(logits)),
        (logits.stride(), logits.is_contiguous(), logits.layout, logits.nbytes, logits.element_size()),
        (logits.dtype, logits.device, logits.is_cuda, logits.is_floating_point()),
        (logits.requires_grad, logits.is_leaf, logits.grad_fn is not None),
        (logits[0].shape, logits[:, -1:].shape, logits[..., None, :].shape, logits[None].shape, logits[0, 1].shape),
        (logits[:, :, :].shape, logits.view(-1, VOCABULARY).shape, logits.flatten(0, 1).shape),
    )


def test_logits_say_what_they_would_be():
    model = Model(bias=True)
    wanted = about(model(*batch())[0])
    with apply_chunked_loss(model, "head", 5), LogitsSeen() as log:
        logits = model(*batch())[0]
        assert isinstance(logits, torch.Tensor)
        assert about(logits) == wanted
    assert not log.seen


def test_looked_at_after_the_loss_the_logits_are_there():
    model = Model()
    plain, _ = model(*batch())
    with apply_chunked_loss(model, "head", 5):
        logits, loss = model(*batch())
        loss.backward()
        assert torch.equal(logits.argmax(-1), plain.argmax(-1))
        assert torch.equal(logits.detach(), plain.detach())
        assert torch.equal(copy.deepcopy(logits.detach()), plain.detach())
        assert repr(logits) == repr(plain.clone()).replace("CloneBackward0", "UnsafeViewBackward0")
        assert torch.equal(torch.stack([logits, logits])[1], plain)
        assert torch.equal(torch.tensor(logits.tolist()), plain)


def test_logits_and_slices_of_them_share_writes_as_views_do():
    def masked(logits, labels):
        shifted = logits[:, :-1]
        wide = logits.float()
        logits[..., 3] = -5.0
        return flat_loss(shifted.contiguous(), labels[:, 1:].where(labels[:, 1:] != 3, 4).contiguous()) + wide.mean()

    model = Model(masked)
    plain = model(*batch())[1]
    wanted = gradients(model, plain)
    with apply_chunked_loss(model, "head", 5):
        mine = model(*batch())[1]
        assert torch.equal(mine, plain)
        assert_same(gradients(model, mine), wanted, rtol=0, atol=0)


def test_a_gradient_of_the_logits_can_be_watched_before_the_loss_and_is_refused_after():
    model = Model(lambda logits, labels: logits)
    ids, labels = batch()
    logits = model(ids, labels)[1]
    logits.retain_grad()
    flat_loss(logits, labels).backward()
    with apply_chunked_loss(model, "head", 5):
        watched = model(ids, labels)[1]
        watched.retain_grad()
        flat_loss(watched, labels).backward()
        assert torch.equal(watched.grad, logits.grad)
        taken = model(ids, labels)[1]
        loss = flat_loss(taken, labels)
        for ask in (taken.retain_grad, lambda: taken.register_hook(print), lambda: torch.autograd.grad(loss, taken)):
            with pytest.raises(LeverError, match="gradient of the logits"):
                ask()


def test_logits_needed_after_the_weights_moved_are_refused():
    model = Model()
    with apply_chunked_loss(model, "head", 5):
        logits, loss = model(*batch())
        loss.backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        with pytest.raises(LeverError, match="the head's weight or its input was written to since"):
            logits.sum()


class Doubled(torch.autograd.Function):
    """An operator that takes tensors without asking Python what they are."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor * 2

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0] * 2


@pytest.mark.parametrize("precision", ["fp32", "autocast"])
def test_operators_below_python_get_values_and_give_gradients(precision):
    model = Model(lambda logits, labels: flat_loss(Doubled.apply(logits), labels), bias=True)

    def run():
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            return model(*batch())[1]

    plain = run()
    wanted = gradients(model, plain)
    with apply_chunked_loss(model, "head", 5):
        mine = run()
        made = gradients(model, mine)
    torch.testing.assert_close(mine, plain)
    for name, gradient in wanted.items():
        assert (made[name] - gradient).norm() <= (2e-2 if precision == "autocast" else 1e-6) * gradient.norm()


def test_hooks_of_the_head_run_and_may_change_the_logits():
    model = Model()
    seen = []
    handles = [
        model.head.register_forward_pre_hook(lambda module, args: seen.append("before")),
        model.head.register_forward_hook(lambda module, args, output: output * 2),
        model.head.register_full_backward_hook(lambda module, into, out: seen.append(out[0].shape)),
    ]
    plain = model(*batch())[1]
    wanted = gradients(model, plain)
    seen.clear()
    with apply_chunked_loss(model, "head", 5):
        mine = model(*batch())[1]
        assert torch.equal(mine, plain)
        assert_same(gradients(model, mine), wanted)
    assert seen == ["before", torch.Size(FULL)]
    for handle in handles:
        handle.remove()


def test_copies_and_pickles_of_the_model_keep_the_lever_on_their_own_head():
    model = Model()
    state = list(model.state_dict())
    with apply_chunked_loss(model, "head", 5):
        assert list(model.state_dict()) == state
        wanted = gradients(model, model(*batch())[1])
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert twin.head.forward.module is twin.head
            logits, loss = twin(*batch())
            assert isinstance(logits, DeferredLogits)
            assert_same(gradients(twin, loss), wanted)


def test_undo_restores_the_model_exactly():
    model = Model()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    handle = apply_chunked_loss(model, "head", 5)
    assert type(model.head) is nn.Linear
    handle.undo()
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    handle.undo()
    assert type(model(*batch())[0]) is torch.Tensor


def test_nothing_outlives_a_step():
    model = Model()
    gc.collect()
    gc.disable()
    try:
        with apply_chunked_loss(model, "head", 5):
            logits, loss = model(*batch())
            held = weakref.ref(logits), weakref.ref(logits.hidden)
            loss.backward()
            del logits, loss
            assert [reference() for reference in held] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_without_a_label_that_counts_the_loss_is_zero_not_nan(reduction):
    model = Model(lambda x, y: F.cross_entropy(x.view(-1, VOCABULARY), y.view(-1), reduction=reduction), tied=False)
    ids, labels = batch()
    with apply_chunked_loss(model, "head", 5):
        loss = model(ids, torch.full_like(labels, -100))[1]
        assert not any(g.any() for g in gradients(model, loss).values())
        assert loss.item() == 0


def test_a_head_that_is_none_is_refused_by_name():
    model = Model()
    for path, chunk_size, message in (
        ("nowhere", 5, "has no module 'nowhere'"),
        ("embedding", 5, "embedding is a Embedding, wanted the nn.Linear"),
        ("head", 0, "chunk_size 0 is not at least 1"),
    ):
        with pytest.raises(LeverError, match=message):
            apply_chunked_loss(model, path, chunk_size)
    with apply_chunked_loss(model, "head"), pytest.raises(LeverError, match="forward of head is already replaced"):
        apply_chunked_loss(model, "head")


def test_what_the_plain_head_refuses_is_refused_alike():
    model = Model()
    with apply_chunked_loss(model, "head"), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.head(torch.ones(2, 3, WIDTH + 1))
