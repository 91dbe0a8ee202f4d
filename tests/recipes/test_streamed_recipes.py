"""`tightfit.fit` streams weights where the lever is named or nothing else makes room, and says how many blocks."""

import pytest
import yaml

import tightfit
from command_line import tightfit as run
from tightfit import TokenBatch
from tightfit.planner import host
from tightfit.training.config import AdapterConfig
from tiny_adapters import saved_llama


@pytest.mark.slow  # a plan with streamed blocks takes many traces
def test_adapters_on_a_base_above_the_budget_fit_with_streamed_blocks(tmp_path):
    folder = saved_llama(tmp_path, hidden_size=128, intermediate_size=512, num_hidden_layers=4)
    how = {"device": "cpu", "adapter": AdapterConfig(r=4, base="fp32")}

    def row(budget, levers):
        return tightfit.fit(str(folder), TokenBatch(1, 16, 600), budget=budget, levers=levers, **how)[0]

    plain = row("1GiB", "rounding")
    budget = int(0.75 * plain.peak_bytes)
    assert not row(budget, ["exact"]).fits
    streamed = row(budget, ["exact", "stream"])
    assert streamed.fits
    assert streamed.peak_bytes <= budget
    assert 0 < streamed.streamed_blocks <= 4
    assert f"{streamed.streamed_blocks} of 4 blocks streamed" in streamed.name
    assert streamed.to_dict()["streamed_blocks"] == streamed.streamed_blocks
    assert streamed.changes == plain.changes


@pytest.mark.slow  # searches recipes of a large model
@pytest.mark.keeps("fit-streams-what-does-not-fit")
def test_what_does_not_fit_a_card_is_a_row_with_streamed_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "process_bytes", lambda held, tidied: 1 << 28)  # a process grows from plan to plan
    resident, *rows = rows_within(tmp_path, (1.0, 0.8, 0.7), adapter=AdapterConfig(r=4, base="bf16"))
    assert all(each.fits and each.needed_bytes <= resident.peak_bytes for each in rows)
    assert all(0 < each.streamed_blocks <= 8 for each in rows)
    assert rows[0].step_seconds <= rows[1].step_seconds, "what a larger budget has room for is not recomputed"
    loading = {each.host_peak_bytes for each in (resident, *rows)}
    assert len(loading) == 1, "all weights come through the host, and they are more than those that stay there"
    assert all(each.changes == resident.changes for each in rows), "streaming changes nothing"
    for row in rows:
        assert 16 <= row.longest_sequence.value <= resident.longest_sequence.value, "of 16 tokens all fit"
        assert row.largest_batch.value >= 1
        assert row.longest_sequence.confirmed
    assert 1 < rows[1].largest_batch.value < rows[0].largest_batch.value < resident.largest_batch.value


@pytest.mark.slow  # recipes of adapters are searched too
@pytest.mark.keeps("fit-streams-what-does-not-fit")
def test_all_weights_stream_where_the_host_updates_them(tmp_path):
    resident, row = rows_within(tmp_path, (1.0, 0.8), optimizer="offloaded_adamw")
    assert row.fits
    assert 0 < row.streamed_blocks < 8
    assert row.needed_bytes <= 0.8 * resident.peak_bytes


def rows_within(folder, shares, **how):
    """The row of all weights, or of the adapters asked for, within shares of its peak with a budget that it needs not
    reach.
    """
    model = str(saved_llama(folder, hidden_size=256, intermediate_size=1024, num_hidden_layers=8))
    how |= {"dtype": "bf16", "precision": "bf16", "device": "rtx4090"}
    found, peak = [], 1 << 30
    for share in shares:
        recipes = tightfit.fit(model, TokenBatch(1, 16, 600), budget=int(share * peak), **how)
        found.append(next(each for each in recipes if (each.recipe.adapter is None) == ("adapter" not in how)))
        peak = found[0].peak_bytes
    return found


@pytest.mark.slow  # two searches of a model as large as the test above needs
@pytest.mark.keeps("fit-streams-what-does-not-fit")
def test_the_configuration_of_a_streamed_row_names_its_lever(tmp_path):
    folder = str(saved_llama(tmp_path, hidden_size=256, intermediate_size=1024, num_hidden_layers=8))
    asked = ("fit", "--model", folder, "--seq-len", "16", "--device", "rtx4090", "--adapter", "r=4", "--base", "bf16")
    written = tmp_path / "run.yaml"
    assert run(*asked, "--budget", "28MB", "--pick", "1", "--output", str(written)).code == 0
    assert yaml.safe_load(written.read_text())["memory"]["levers"] == ["rounding", "stream"]
