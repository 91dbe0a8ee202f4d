"""The lever's interface: which modules it takes, what it leaves untouched, and how it comes off again."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tightfit
from exactness import assert_bit_equal, run
from tightfit.errors import LeverError, RecomputeError
from tightfit.levers.recompute import RECOMPUTE_ALL, Applied, Decision, OperatorKey, Policy, recompute
from tightfit.levers.recompute.lever import apply_policies, matching_modules
from tightfit.levers.recompute.rule import every_block

WIDTH, BLOCKS = 8, 5
LAYERS = 1 + 2 * BLOCKS  # linear ones of the model


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.dropout(F.silu(self.up(x)), 0.2, self.training))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x, scale=1.0):
        return x + scale * self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.embed, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(block() for _ in range(BLOCKS))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def build(block=Block):
    torch.manual_seed(3)
    return Model(block), torch.randn(4, WIDTH, requires_grad=True)


def dictionaries(model):
    return {path: dict(module.__dict__) for path, module in model.named_modules()}


@pytest.mark.parametrize(
    ("pattern", "count"),
    [("layers.*", BLOCKS), ("layers.[13]", 2), ("layers.*.mlp", BLOCKS), ("*.*.norm", BLOCKS), ("embed", 1)],
)
def test_a_star_in_a_glob_stays_within_one_part_of_the_path(pattern, count):
    assert len(matching_modules(build()[0], pattern)) == count


def test_modules_match_in_the_models_order():
    assert matching_modules(build()[0], "layers.*") == [f"layers.{i}" for i in range(BLOCKS)]


def test_a_glob_that_matches_nothing_lists_the_paths_that_exist():
    with pytest.raises(LeverError, match=r"no module matches 'blocks\.\*'.*embed.*layers\.\*\.mlp"):
        recompute(build()[0], "blocks.*")


def test_a_part_may_be_recomputed_within_a_recomputed_block():
    def levers(model):
        inner = recompute(model, "layers.*.mlp")
        return Applied([inner, recompute(model, "layers.*")])

    assert_bit_equal(run(*build()), run(*build(), levers=levers))


@pytest.mark.parametrize("segments", [0, -1, BLOCKS + 1])
def test_segments_out_of_range_are_refused(segments):
    with pytest.raises(LeverError, match=rf"segments={segments} is out of range.*matches {BLOCKS} modules"):
        recompute(build()[0], "layers.*", segments=segments)


def test_segments_differ_by_at_most_one_block():
    for count in range(1, 12):
        for segments in range(1, count + 1):
            paths = [str(block) for block in range(count)]
            joined = every_block(paths, segments=segments).joined
            ends = [place for place, path in enumerate(paths) if path not in joined]
            sizes = {end - before for end, before in zip(ends, [-1, *ends], strict=False)}
            assert len(ends) == segments
            assert ends[-1] == count - 1
            assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("options", [{}, {"segments": 2}, {"use_reentrant": True}])
@pytest.mark.parametrize("pattern", ["layers.*", "layers.*.mlp", "layers.2"])
def test_every_way_to_apply_it_is_bit_equal(pattern, options):
    if pattern == "layers.2":
        options = {**options, **({"segments": 1} if "segments" in options else {})}
    assert_bit_equal(run(*build()), run(*build(), levers=lambda model: recompute(model, pattern, **options)))


@pytest.mark.keeps("undo-restores-model-exactly")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_undo_restores_every_module_exactly(use_reentrant):
    model, inputs = build()
    before = dictionaries(model)
    applied = recompute(model, "layers.*", use_reentrant=use_reentrant)
    assert dictionaries(model) != before
    model(inputs).sum().backward()
    applied.undo()
    assert dictionaries(model) == before
    applied.undo()
    assert dictionaries(model) == before


def test_undo_restores_a_forward_that_somebody_else_had_replaced():
    model, inputs = build()
    doubled = model.layers[1].forward
    model.layers[1].forward = lambda x: 2 * doubled(x)
    before = dictionaries(model)
    torch.manual_seed(0)
    expected = model(inputs)
    with recompute(model, "layers.*"):
        torch.manual_seed(0)
        assert torch.equal(model(inputs), expected)
    assert dictionaries(model) == before


def test_the_handle_is_a_context_manager():
    model, _ = build()
    with recompute(model, "layers.*"):
        assert "forward" in model.layers[0].__dict__
    assert "forward" not in model.layers[0].__dict__


def test_leaving_the_context_by_an_exception_takes_it_off():
    model, _ = build()
    with pytest.raises(KeyError), recompute(model, "layers.*"):
        raise KeyError
    assert "forward" not in model.layers[0].__dict__


def test_applying_twice_is_refused_and_changes_nothing():
    model, _ = build()
    with recompute(model, "layers.3"):
        before = dictionaries(model)
        with pytest.raises(LeverError, match=r"layers\.3 is already recomputed: undo that first"):
            recompute(model, "layers.*")
        assert dictionaries(model) == before


def test_a_refused_segmentation_of_a_reentrant_recompute_changes_nothing():
    model, _ = build()
    before = dictionaries(model)
    with pytest.raises(LeverError, match="use_reentrant"):
        recompute(model, "layers.*", segments=2, use_reentrant=True)
    assert dictionaries(model) == before


@pytest.mark.keeps("undo-restores-model-exactly")
def test_names_types_and_hooks_of_the_model_stay():
    model, inputs = build()
    keys, types = list(model.state_dict()), [type(m) for m in model.modules()]
    calls = []
    model.layers[0].register_forward_hook(lambda *_: calls.append("forward"))
    model.layers[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    with recompute(model, "layers.*"):
        assert list(model.state_dict()) == keys
        assert [type(m) for m in model.modules()] == types
        model.load_state_dict(model.state_dict(), strict=True)
        model(inputs).sum().backward()
    assert calls == ["forward", "backward"]


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, saved])
def test_a_copy_of_the_model_recomputes_on_its_own_parameters(duplicate, use_reentrant):
    model, inputs = build()
    with recompute(model, "layers.*", use_reentrant=use_reentrant):
        twin = duplicate(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert twin.layers[0].forward.module is twin.layers[0]
        with Products() as products:
            frugal = run(twin, inputs)
    assert_bit_equal(run(*build()), frugal)
    assert products.count > LAYERS


class Products(TorchDispatchMode):
    """Counts the products of linear layers: one a layer in a plain step, more where blocks run again."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def test_a_copy_outlives_the_model_it_was_made_from():
    model, inputs = build()
    recompute(model, "layers.*")
    twin, original = copy.deepcopy(model), weakref.ref(model.layers[0].mlp.up.weight)
    del model
    gc.collect()
    assert original() is None, "a copy keeps nothing of the model alive"
    with Products() as products:
        frugal = run(twin, inputs)
    assert_bit_equal(run(*build()), frugal)
    assert products.count > LAYERS


def test_a_policy_keeps_exactly_the_operators_it_names():
    model, inputs = build()
    kept = Policy(frozenset({OperatorKey("aten.addmm.default", 0), OperatorKey("aten.native_layer_norm.default", 0)}))
    assert kept.decide(OperatorKey("aten.addmm.default", 0)) is Decision.KEEP
    assert kept.decide(OperatorKey("aten.addmm.default", 1)) is Decision.RECOMPUTE
    frugal = run(
        model, inputs, levers=lambda m: apply_policies(m, dict.fromkeys(matching_modules(m, "layers.*"), kept))
    )
    assert_bit_equal(run(*build()), frugal)


class LeavesTensor(Block):
    def forward(self, x):
        out = super().forward(x)
        self.aux = out.square().mean()
        return out


class MovesBuffer(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize(("block", "named"), [(LeavesTensor, "aux"), (MovesBuffer, "calls")])
def test_reentrant_recompute_of_a_block_that_leaves_something_is_refused_by_name(block, named):
    model, inputs = build(block)
    with recompute(model, "layers.*", use_reentrant=True):
        with pytest.raises(RecomputeError, match=rf"layers\.0: .*{named}.*use use_reentrant=False"):
            model(inputs)


def test_without_gradients_the_block_runs_as_it_is():
    model, inputs = build()
    model.eval()
    with torch.no_grad():
        expected = model(inputs)
        with recompute(model, "layers.*"):
            assert torch.equal(model(inputs), expected)


def test_recomputing_the_users_python_does_not_run_it_again():
    calls = []

    class Counts(Block):
        def forward(self, x):
            calls.append(1)
            return super().forward(x)

    model, inputs = build(Counts)
    with recompute(model, "layers.*"):
        model(inputs).sum().backward()
    assert len(calls) == BLOCKS


@pytest.mark.keeps("through-double-backward-retained")
@pytest.mark.slow  # compiling takes several seconds
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within PyTorch's compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo asks it of what it is given
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("lever", [recompute, tightfit.capture, tightfit.offload], ids=lambda lever: lever.__name__)
def test_a_compiled_model_with_a_lever_has_the_right_gradients(lever, backend):
    class Quiet(Block):
        def __init__(self):
            super().__init__()
            self.mlp.eval()

        def forward(self, x):
            return x + self.mlp.down(F.silu(self.mlp.up(self.norm(x))))

    model, inputs = build(Quiet)
    plain = run(*build(Quiet))
    with lever(model, "layers.*"):
        compiled = torch.compile(model, backend=backend)
        (compiled(inputs) * compiled(inputs).detach().cos()).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.gradients[name])


@pytest.mark.parametrize("operator", [torch.div, torch.mul])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("width", range(1, 17))
def test_what_is_written_into_an_operand_is_written_there_again(operator, place, width):
    """Complex numbers round otherwise where results go into an operand, in widths that differ between processors."""

    class Rotates(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(width)
            self.up, self.weight = nn.Linear(width, width), nn.Parameter(torch.randn(width, dtype=torch.complex64))

        def forward(self, x):
            y = self.up(x)
            with torch.no_grad():
                pair = [torch.complex(y, y.cos()), torch.complex(y.sin() + 2, y)]
                operator(*pair, out=pair[place])
            return (self.weight * pair[place]).abs() + y

    for rows in (1, 2):
        x = torch.randn(rows, width)
        plain = run(Rotates(), x)
        frugal = run(Rotates(), x, levers=lambda model: apply_policies(model, {"": RECOMPUTE_ALL}))
        assert_bit_equal(plain, frugal)
