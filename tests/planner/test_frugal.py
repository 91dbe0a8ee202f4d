"""What keeps least memory in a block, whatever operators cost."""

import pytest
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from made_up_devices import CALIBRATIONS
from tightfit import plan
from tightfit.errors import CannotFit
from tiny import VOCABULARY, decoder, token_batch


class Repeated(nn.Module):
    """A decoder whose first block stands for the second as well: it runs twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = decoder()
        self.inner.layers[1] = self.inner.layers[0]

    def forward(self, **batch):
        return self.inner(**batch)


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    )


MODELS = {"decoder": decoder, "gpt2": gpt2, "repeated": Repeated}


def least(model, device, levers):
    with pytest.raises(CannotFit) as caught:
        plan(model, token_batch(2, 160), 1000, levers=levers, device=device)
    return caught.value.least_bytes


@pytest.mark.parametrize("levers", [("recompute",), ("recompute", "chunked_loss"), ("recompute", "offload")])
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_the_least_is_the_same_at_every_price(build, levers):
    model = build()
    assert len({least(model, device(), levers) for device in CALIBRATIONS.values()}) == 1
