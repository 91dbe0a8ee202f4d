"""Trainings of several ranks on cards, over NCCL, disturbed within a step: they end with the bits of the plain one."""

import json
import re
import signal
from pathlib import Path

import pytest
import yaml
from ranks_beside_one import assert_equal, assert_same, at, corrections, lines, newest
from ranks_on_cards import HERE, begun_ranks
from sharded_recovering import assert_recovered
from tiny_training import settings

MIB = 1 << 20


def training(folder, parallel, dropout=0.1):
    """Rows long enough that recompute pays beside cuBLAS's workspaces, one more than two ranks share evenly."""
    model = {"hidden_size": 64, "num_layers": 4, "num_heads": 4, "max_position_embeddings": 128, "dropout": dropout}
    steps = {"device": "cuda", "parallel": parallel, "batch_size": 7, "max_steps": 4, "log_every": 1}
    data, memory, saved = {"sequence_length": 128}, {"levers": ["recompute"]}, {"every_steps": 2}
    return settings(folder, model=model, data=data, training=steps, memory=memory, checkpoint=saved)


def train(config, *options, ranks=2, disturbed=None):
    folder = Path(config.output.folder).parent
    (folder / "train.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    words = (str(HERE / "trained_ranks.py"), json.dumps(disturbed or {}), "train.yaml", *options)
    return begun_ranks(ranks, *words, folder=folder)


def trained(config, *options, **settings):
    """How often the card of each rank was full."""
    ended = train(config, *options, **settings)
    assert ended.returncode == 0, ended.stderr[-3000:]
    rows = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"rank"')]
    return [row["full"] for row in sorted(rows, key=lambda row: row["rank"])], ended.stdout + ended.stderr


def cut(config, *options, **settings):
    """The exit codes of the ranks of a training that a signal ends, as torchrun says them, and its errors."""
    ended = train(config, *options, **settings)
    assert ended.returncode, "the signal came"
    return {int(r): int(code) for r, code in re.findall(r"rank *: (\d+) .*\n *exitcode *: (-?\d+)", ended.stderr)}, [
        line for line in ended.stderr.splitlines() if line.startswith("error: ")
    ]


def predicted(config):
    return json.loads((Path(config.output.folder) / "result.json").read_text())["predicted_peak_bytes"]


@pytest.fixture(scope="module", params=["fsdp2", "ddp"])
def plain(request, tmp_path_factory):
    """The training that nothing disturbs."""
    config = training(tmp_path_factory.mktemp(request.param), request.param)
    assert trained(config)[0] == [0, 0]
    return config


# By the number of the call of forward and backward; those of a rank that stands in for itself are among them.
FULL = {
    "rank 1, in forward of the first step": {"1": {"full": {"1": 60}}},
    "both ranks, in backward and in forward": {"0": {"full": {"3": 400}}, "1": {"full": {"3": 60}}},
    "rank 0, again and again": {"0": {"full": {"2": 400, "3": 60, "5": 200}}},
}


@pytest.mark.keeps("ranks-cards-recover-out")
@pytest.mark.slow  # two processes on null cards, and plans: a minute for each
@pytest.mark.parametrize("case", FULL)
def test_a_step_on_full_cards_is_undone_and_run_again_to_the_same_bits(plain, case):
    config = at(plain, case.replace(" ", "-"))
    times, said = trained(config, disturbed=FULL[case])
    assert times == [len(FULL[case].get(str(rank), {}).get("full", {})) for rank in range(2)]
    assert_equal(config, plain)
    if "0" in FULL[case] or config.training.parallel == "fsdp2":  # in DDP each rank has a plan of its own
        assert "runs again with a tighter plan" in said
        assert predicted(config) == corrections(config)["bound_bytes"] < predicted(plain)


@pytest.mark.keeps("ranks-cards-recover-out")
@pytest.mark.slow  # some forty trainings of three steps on two null cards: minutes
def test_ranks_whose_cards_are_full_anywhere_in_a_step_change_no_bit(tmp_path):
    """Of a model with all that a step may change, under FSDP2: also as a stand-in, and under the tighter plan."""
    ended = begun_ranks(2, str(HERE / "recovering_ranks.py"), str(tmp_path), "19", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert_recovered(tmp_path, 2)


@pytest.mark.keeps("ranks-cards-recover-out")
@pytest.mark.slow  # two processes on null cards: a minute
def test_an_update_on_a_full_card_is_finished_by_its_rank(plain):
    config = at(plain, "updated")
    times, said = trained(config, disturbed={"0": {"full in update": {"1": 60, "3": 5}}})
    assert times == [2, 0]
    assert_equal(config, plain)
    assert "in the optimizer's step; it goes on where it stopped" in said


@pytest.mark.keeps("ranks-cards-recover-out")
@pytest.mark.slow  # two processes on null cards, and plans: a minute
def test_ranks_train_on_in_what_another_process_leaves_of_a_card(plain):
    config = at(plain, "left")
    room = {"fsdp2": 10, "ddp": 7}[config.training.parallel] * MIB  # FSDP2's streams have pools of their own
    _, said = trained(config, disturbed={"0": {"room": {"3": room}}})
    assert_equal(config, plain)
    assert "out of memory on cuda:0 (asked for" in said
    assert corrections(config)["failures"] > 0


# The call of forward and backward, and the operator in it.
FORWARD, BACKWARD = [3, 60], [3, 400]


@pytest.mark.keeps("ranks-cards-killed-or")
@pytest.mark.slow  # two trainings of two processes on null cards: a minute and a half for each
@pytest.mark.parametrize(("rank", "where"), [(0, BACKWARD), (1, FORWARD)], ids=["0", "1"])
def test_a_rank_killed_in_a_step_changes_no_bit_of_the_resumed_training(plain, rank, where):
    config = at(plain, f"killed-{rank}")
    call, operator = where
    codes, said = cut(config, disturbed={rank: {"signal": {call: [operator, signal.SIGKILL]}}})
    assert codes == {rank: -signal.SIGKILL, 1 - rank: 2}
    assert len(said) == 1
    assert said[0].startswith(f"error: rank {1 - rank} has lost another rank")
    assert newest(config).step == 2
    trained(config, "--resume")
    assert_equal(config, plain)


@pytest.mark.keeps("ranks-cards-killed-or")
@pytest.mark.slow  # two trainings of two processes on null cards: a minute and a half for each
@pytest.mark.parametrize(("rank", "where"), [(0, FORWARD), (1, BACKWARD)], ids=["0", "1"])
def test_a_signal_in_a_step_ends_all_ranks_with_a_checkpoint(plain, rank, where):
    """A step of FSDP2 is made to its end: the other ranks wait for its messages."""
    config = at(plain, f"ended-{rank}")
    call, operator = where
    codes, said = cut(config, disturbed={rank: {"signal": {call: [operator, signal.SIGTERM]}}})
    # torchrun ends the second one where it is no longer Python's main program.
    assert sorted(codes) == [0, 1]
    assert 128 + signal.SIGTERM in codes.values()
    assert {*codes.values()} <= {128 + signal.SIGTERM, -signal.SIGTERM}
    assert said == []
    assert newest(config).step == len(lines(config)) == (3 if config.training.parallel == "fsdp2" else 2)
    trained(config, "--resume")
    assert_equal(config, plain)


@pytest.mark.keeps("ranks-cards-killed-or")
@pytest.mark.slow  # four trainings on null cards: two minutes for each
@pytest.mark.parametrize("parallel", ["fsdp2", "ddp"])
def test_a_training_goes_on_with_another_number_of_cards(tmp_path, parallel):
    """Without dropout, whose numbers are each rank's own."""
    alone = training(tmp_path, "auto", dropout=0.0)
    trained(alone, ranks=1)
    config = at(alone, "together")
    ended = {"0": {"signal": {"2": [60, signal.SIGTERM]}}}
    cut(config, f"training.parallel={parallel}", disturbed=ended)
    cut(config, "--resume", ranks=1, disturbed=ended)
    trained(config, "--resume", f"training.parallel={parallel}")
    assert_same(alone, config)
    assert newest(config).record["around"]["ranks"] == 2
