"""A process's first plan with compiled blocks prices its combinations in a fork, while it imports the compiler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CODE = """
import json
import sys
from tightfit.planner.search import fastest
if sys.argv[1] == "alone":
    fastest.processes_for = lambda parts: 1
from tightfit.planner.search.search import Search
import tightfit
from made_up_devices import even
from tiny import decoder, token_batch
priced, price = [], Search.price

def noted(self, combination, part):
    priced.append(str(combination))
    return price(self, combination, part)

Search.price = noted
model = decoder(num_layers=3, hidden_size=64)
made = tightfit.plan(model, token_batch(8), "0.5x", levers=["recompute", "chunked_loss", "compile"], device=even())
print(json.dumps({"plan": made.to_dict(), "priced": priced}))
"""


def planned(how: str) -> dict:
    command = [sys.executable, "-W", "ignore", "-c", CODE, how]
    paths = os.pathsep.join([str(TESTS), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.keeps("dry-runs-compiled-blocks")
@pytest.mark.slow  # two processes import the compiler, and compile sets
def test_the_plan_is_that_of_one_process_which_prices_nothing_of_it_again():
    together, alone = planned("together"), planned("alone")
    for found in (together, alone):  # the host's memory is that of the process
        found["plan"] = {key: value for key, value in found["plan"].items() if not key.startswith("host")}
    assert together["plan"] == alone["plan"]
    assert len(alone["priced"]) == 2
    assert together["priced"] == []
