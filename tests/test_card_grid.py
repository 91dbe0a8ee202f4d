"""The grid of steps on null cards keeps the rows that a run does not ask about."""

import json

from benchmarks import card


def test_steps_that_are_run_again_leave_the_others_as_they_were(tmp_path, monkeypatch):
    first, second, third = (step for step, _ in zip(card.steps(3, 0), range(3), strict=False))
    row = {"predicted": 2, "measured": 1, "predicted_reserved": 2, "reserved": 2, "commit": "old"}
    output = tmp_path / "card.json"
    output.write_text(
        json.dumps({"steps": [{**card.asdict(each), "name": each.name, **row} for each in (first, second)]})
    )

    def again(name, left, given):
        return ({**card.asdict(each), "name": each.name, **row, "measured": 2} for each in left)

    monkeypatch.setattr(card, "_on", again)
    card.main(["--output", str(output), "--resume", "--again", "--only", first.name])
    found = {each["name"]: each["measured"] for each in json.loads(output.read_text())["steps"]}
    assert found == {first.name: 2, second.name: 1}
    assert third.name not in found
