import pytest
import torch
from blocks_with_dropout import BATCH, TOKENS, Model


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def ids():
    return torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) % 32
