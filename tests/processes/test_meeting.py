"""Ranks that are lost while all of them meet."""

import os
import subprocess
import sys

import torch.distributed as dist

from tightfit.ranks.processes.launch import NAMES
from tightfit.runtime.internals import wait_longer

MEETS = """
import os, signal
import torch.distributed as dist
from tightfit.ranks.processes.launch import launched
from tightfit.ranks.processes.ranks import SeveralRanks
if os.environ["RANK"] == "1":
    dist.new_group = lambda **_: os.kill(os.getpid(), signal.SIGKILL)
SeveralRanks(launched(), timeout_seconds=3, on_cuda=False)
"""


def test_a_rank_killed_between_the_groups_is_not_waited_for_longer_than_the_time_out_says():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job"}
    ranks = []
    for rank in "01":
        place = dict(zip(NAMES, (rank, "2", rank, "2", "127.0.0.1", str(store.port)), strict=True))
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", MEETS], text=True, stderr=subprocess.PIPE, env=os.environ | place | agent
            )
        )
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, -9], said
    assert "RankError: rank 0 has lost another rank, or waited 3 seconds for it" in said[0]


def test_a_group_that_waits_longer_outlasts_the_time_out_it_was_made_with():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    waits = f"""
import time, torch, torch.distributed as dist, sys
from datetime import timedelta
from tightfit.runtime.internals import {wait_longer.__name__}
rank = int(sys.argv[1])
store = dist.TCPStore("127.0.0.1", {store.port}, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
group = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
{wait_longer.__name__}(group, 100)
time.sleep(0 if rank else 3)
told = torch.tensor([7 * (1 - rank)])
dist.broadcast(told, 0, group=group, async_op=True).wait()
assert told.item() == 7
"""
    ranks = [subprocess.Popen([sys.executable, "-c", waits, rank], text=True, stderr=subprocess.PIPE) for rank in "01"]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
