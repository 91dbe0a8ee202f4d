"""Beyond language models: any module with repeated blocks is estimated exactly, planned and verified."""

import pytest
import torch
from torch import nn
from vision_models import diffusion_case, vision_case

from tightfit import estimate, plan, verify
from tightfit.step import StepSettings
from tiny import allocator_peak


@pytest.mark.keeps("modules-language-models-vision")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("case", "precision"), [(vision_case, "fp32"), (vision_case, "bf16"), (diffusion_case, "fp32")]
)
def test_a_model_of_images_is_estimated_planned_and_verified(case, precision):

    model, batch = case()
    settings = StepSettings(precision)
    found = estimate(model, batch, precision=precision)
    assert found.peak_bytes == pytest.approx(allocator_peak(model, batch, settings=settings), rel=0.001)
    made = plan(model, batch, "0.75x", precision=precision)
    assert len(made.choices) == 4
    with made.apply(model):
        assert allocator_peak(model, batch, settings=settings) <= made.budget_bytes
    assert verify(model, batch, made).ok


class LoopOverExperts(nn.Module):
    """Experts in a loop, each over the tokens that chose it; a bias decides whom they choose."""

    def __init__(self, bias, count=4, width=64, chosen=1):
        super().__init__()
        torch.manual_seed(0)
        self.chosen = chosen
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, width)) for _ in range(count)
        )
        with torch.no_grad():
            self.router.bias.copy_(torch.tensor(bias))

    def forward(self, x):
        shares, experts = self.router(x).softmax(-1).topk(self.chosen, dim=-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(experts == i)
            out = out.index_add(0, token, expert(x[token]) * shares[token, place, None])
        return out.square().mean()


@pytest.mark.keeps("router-decides-sizes-estimate")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "bias", [(0.0, 0.0, 0.0, 0.0), (99.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 99.0), (9.0, 9.0, 0.0, 0.0)]
)
@pytest.mark.parametrize("chosen", [1, 2])
def test_the_worst_peak_bounds_even_and_one_sided_routing(bias, chosen):
    model, batch = LoopOverExperts(bias, chosen=chosen), {"x": torch.randn(512, 64)}
    found = estimate(model, batch)
    assert found.worst_peak_bytes is not None
    assert found.peak_bytes <= found.worst_peak_bytes
    assert allocator_peak(model, batch) <= found.worst_peak_bytes
    assert "It depends on the data" in str(found)


def test_a_model_without_a_router_has_no_worst_peak():
    model, batch = vision_case()
    assert estimate(model, batch).worst_peak_bytes is None
