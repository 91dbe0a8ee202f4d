import json
import pickle

import pytest

from memory_snapshots import MIB, snapshot
from tightfit.errors import InputError
from tightfit.memory.snapshot import read_snapshot, snapshot_of


@pytest.fixture
def pickled(tmp_path):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot()))
    return path


def test_segments_tell_what_was_reserved_used_and_idle(pickled):
    found = read_snapshot(pickled)
    assert found.segments == 2
    assert found.reserved_bytes == 77 * MIB
    assert found.allocated_bytes == 23 * MIB
    assert found.inactive_bytes == 54 * MIB
    assert found.inactive_split_bytes == 50 * MIB
    assert found.largest_free_bytes == 50 * MIB


def test_the_history_tells_the_peak_and_who_held_it(pickled):
    found = read_snapshot(pickled)
    assert found.peak_bytes == 65 * MIB  # weights, both activations and the gradient
    assert [(h.where, h.bytes, h.count, h.phase) for h in found.holders] == [
        ("model.py:12 forward", 50 * MIB, 2, "forward"),
        ("no frames were recorded", 10 * MIB, 1, None),
        ("??:0 torch::autograd::Engine::evaluate_function", 5 * MIB, 1, "backward"),
    ]
    assert found.phases == {"forward": 50 * MIB, "not recorded": 10 * MIB, "backward": 5 * MIB}


def test_a_refused_allocation_is_told_with_its_place(pickled):
    (refused,) = read_snapshot(pickled).refused
    assert (refused.requested_bytes, refused.free_bytes) == (64 * MIB, 40 * MIB)
    assert (refused.where, refused.phase) == ("train.py:40 <module>", "optimizer")


def test_without_a_history_the_moment_is_the_peak():
    raw = {**snapshot(), "device_traces": [[]]}
    found = snapshot_of(raw)
    assert (found.events, found.peak_bytes) == (0, 23 * MIB)


def test_what_was_there_before_the_history_and_freed_in_it_counts_to_the_peak():
    raw = snapshot()
    raw["device_traces"][0].insert(0, {"action": "free_completed", "addr": 7, "size": 100 * MIB, "frames": []})
    found = snapshot_of(raw)
    assert found.peak_bytes == 110 * MIB
    assert found.phases["not recorded"] == 110 * MIB


def test_the_form_in_json_says_the_same(pickled, tmp_path):
    path = tmp_path / "snapshot.json"
    path.write_text(json.dumps(snapshot()))
    assert read_snapshot(path) == read_snapshot(pickled)


class Attack:
    """Unpickling this writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.keeps("nothing-snapshot-file-executed")
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_with_code_is_refused_by_name_and_nothing_of_it_runs(tmp_path, protocol):
    written, path = tmp_path / "written", tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({**snapshot(), "segments": [Attack(written)]}, protocol))
    with pytest.raises(InputError, match=r"refused, because the pickle refers to _?io\.open.*No code .* was run"):
        read_snapshot(path)
    assert not written.exists()
    pickle.loads(path.read_bytes())["segments"][0].close()  # the attack is a real one
    assert written.exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80", b"\x80\x04garbage", pickle.dumps([1, 2]), pickle.dumps({"segments": [{}]}), b"{", b'{"a": 1}'],
    ids=["empty", "cut", "garbage", "list", "no-blocks", "half-json", "other-json"],
)  # fmt: skip
def test_what_is_no_snapshot_is_told(tmp_path, content):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(content)
    with pytest.raises(InputError, match="not a CUDA memory snapshot"):
        read_snapshot(path)


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_snapshot(tmp_path / "none.pickle")
