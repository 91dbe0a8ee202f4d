"""A dry run that plays a card leaves PyTorch's dispatcher as it was for code that is compiled afterwards."""

import pytest
import torch
import torch.nn.functional as F

import tightfit
from tiny import decoder, token_batch


@pytest.mark.keeps("compiled-blocks-on-a-card")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo asks it of what it is given
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within PyTorch's compiler
def test_code_compiled_after_a_block_was_captured_for_a_card_has_gradients_of_composite_operators():
    model = decoder(num_layers=1, hidden_size=32)
    with tightfit.capture(model, "layers.*"):  # AOTAutograd asks for the kernels of `dropout`, a card's own
        tightfit.estimate(model, token_batch(2), device="rtx4090")

    def double(x):
        return 2 * F.dropout(x, p=0.0, training=True)

    x = torch.randn(8, requires_grad=True)
    torch.compile(double, backend="aot_eager")(x).sum().backward()
    assert torch.equal(x.grad, torch.full((8,), 2.0))
