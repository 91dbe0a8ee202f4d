"""Small trainings under FSDP2 on several cards that are full at chosen operators, run by torchrun.

    torchrun --nproc-per-node 2 recovering_ranks.py FOLDER STRIDE

Memory runs out at every so many operators that take memory of the card; `FOLDER/RANK.json` says what came of it.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from sharded_recovering import BetweenMessages, Place, main
from taken_memory import FullFrom

from tightfit.devices.nullcard.values import true_values

LENGTH, SHARE = 256, 0.985  # so long that recompute pays beside cuBLAS's workspaces


class FullBetweenMessages(BetweenMessages, FullFrom):
    """Memory of the card runs out at operators by their numbers, outside of messages; never without a number."""

    @property
    def failing(self) -> Sequence[int]:
        """The operators that take memory of the card."""
        return self.allocating


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with torch.backends.cudnn.flags(enabled=False), true_values():  # a dry run does not know cuDNN's batch norm
        main(Path(sys.argv[1]), int(sys.argv[2]), Place("cuda", LENGTH, SHARE, FullBetweenMessages))
    sys.stdout.flush()
    os._exit(0)
