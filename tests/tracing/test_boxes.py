"""Losses that match predicted boxes with true ones by numbers that a dry run does not have."""

import pytest
import torch
import transformers

import tightfit
from tiny import allocator_peak

pytest.importorskip("scipy", reason="not installed")  # whose assignment the losses of detectors use

BACKBONE = {"embedding_size": 16, "layer_type": "basic"}
SMALL = {"num_labels": 5, "num_queries": 10, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2}


def yolos():
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.YolosConfig(**shape, image_size=[64, 64], num_detection_tokens=10, num_labels=5)
    return transformers.YolosForObjectDetection(config)


def detr():
    backbone = transformers.ResNetConfig(**BACKBONE, hidden_sizes=[16, 32], depths=[1, 1], out_features=["stage2"])
    shape = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    return transformers.DetrForObjectDetection(transformers.DetrConfig(**SMALL, **shape, backbone_config=backbone))


def rt_detr():
    stages = {"hidden_sizes": [16, 32, 48, 64], "depths": [1] * 4, "out_features": ["stage2", "stage3", "stage4"]}
    config = transformers.RTDetrConfig(
        **SMALL, backbone_config=transformers.RTDetrResNetConfig(**BACKBONE, **stages), encoder_hidden_dim=32,
        encoder_in_channels=[32, 48, 64], encoder_ffn_dim=64, encoder_attention_heads=2, decoder_ffn_dim=64,
        decoder_in_channels=[32, 32, 32], num_denoising=4, decoder_n_points=2,
    )  # fmt: skip
    return transformers.RTDetrForObjectDetection(config)


def batch():
    boxes = torch.tensor([[0.5, 0.5, 0.2, 0.2], [0.3, 0.3, 0.1, 0.2]])
    labels = [{"class_labels": torch.tensor([1, 2]), "boxes": boxes} for _ in range(2)]
    return {"pixel_values": torch.rand(2, 3, 64, 64), "labels": labels}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [yolos, detr, rt_detr], ids=lambda kind: kind.__name__)
def test_a_detectors_estimate_is_its_peak_or_little_above(kind):
    torch.manual_seed(0)
    model = kind().train()
    measured = allocator_peak(model, batch())
    found = tightfit.estimate(model, batch())
    assert measured <= found.peak_bytes <= 1.02 * measured
    assert any("matcher" in line.lower() for line in found.assumptions)
