from tightfit.planner.records import BlockChoice
from tightfit.planner.report.plan_tables import block_table
from tightfit.planner.report.terminal import rendered
from tightfit.planner.report.words import alike, keeps, kept_bytes, kept_in_words, short


def test_kept_outputs_go_by_the_names_of_modules_the_costly_ones_first():
    operators = ["aten.add.Tensor", "aten.mm.default", "aten.rsqrt.default", "aten._scaled_dot_product_x.default"]
    words = kept_in_words(operators, ["", "mlp.up_proj", "norm", "self_attn"])
    assert words == "self_attn (attention), mlp.up_proj, norm (rsqrt), add"


def test_several_operators_of_one_module_are_counted():
    assert kept_in_words(["aten.mul.Tensor"] * 2, ["mlp"] * 2) == "mlp (mul ×2)"
    assert kept_in_words(["aten.add.Tensor"] * 2, [""] * 2) == "add ×2"


def test_a_block_that_keeps_all_or_nothing_says_so():
    assert keeps(BlockChoice("layers.0", "keep")) == "everything"
    assert keeps(BlockChoice("layers.0", "recompute", joined=True)) == "only its input, not even its output"


def test_operators_have_short_names():
    assert short("aten._scaled_dot_product_flash_attention_for_cpu_backward.default") == "attention backward"
    assert short("aten._to_copy.default") == "_to_copy"


def test_what_compiled_blocks_keep_is_a_share_and_its_bytes_are_not_told():
    compiled = BlockChoice("layers.0", "compile", share=0.25)
    assert keeps(compiled) == "25% of what compiled code would keep"
    assert kept_bytes([compiled]) == ""
    assert kept_bytes([BlockChoice("layers.0", "keep", kept_bytes=1024)] * 2) == "2.00 KiB"
    assert [name for name, _ in alike([compiled, BlockChoice("layers.1", "compile", share=0.5)])] == [
        "layers.0",
        "layers.1",
    ]


def test_blocks_that_do_the_same_in_turns_are_named_together():
    turns = [BlockChoice(f"layers.{i}", "recompute" if i % 2 else "keep") for i in range(12)]
    assert [(name, len(same)) for name, same in alike(turns)] == [
        ("layers.0, layers.2, … layers.10 (6 blocks)", 6),
        ("layers.1, layers.3, … layers.11 (6 blocks)", 6),
    ]
    apart = [BlockChoice(f"layers.{i}", "recompute" if i == 3 else "keep") for i in range(6)]
    assert [name for name, _ in alike(apart)] == ["layers.0 … layers.2, layers.4 … layers.5", "layers.3"]


def test_a_path_that_all_blocks_begin_with_stands_once_above_them():
    def shown(*paths):
        choices = [BlockChoice(path, "recompute", recompute_seconds=0.001 * n) for n, path in enumerate(paths)]
        return rendered(block_table(choices), width=80)

    deep = shown("base_model.model.model.layers.0", "base_model.model.model.layers.1")
    assert deep.count("base_model.model.model") == 1
    assert "\nlayers.0 " in deep.replace(" …", " ")
    apart = shown("encoder.model.layers.0", "decoder.model.layers.0")
    assert "blocks of" not in apart
    assert "encoder.model.layers.0" in apart
    assert "blocks of" not in shown("model.layers.0", "model.layers.1")
