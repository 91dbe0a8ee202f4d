"""Modules that are no language models: a vision transformer, and a diffusion transformer with adaptive norms."""

import math

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, PATCH, SIDE, CHANNELS, CLASSES = 64, 4, 4, 32, 3, 10


class Attention(nn.Module):
    """Self-attention without a mask; x is (batch, tokens, width)."""

    def __init__(self):
        super().__init__()
        self.projections, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.projections(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))


class VisionBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), mlp()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Pixels (batch, 3, 32, 32) and labels (batch,) to a cross-entropy."""

    def __init__(self, depth=4):
        super().__init__()
        self.patches = nn.Conv2d(CHANNELS, WIDTH, PATCH, stride=PATCH)
        self.summary = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 1 + (SIDE // PATCH) ** 2, WIDTH))
        self.blocks = nn.ModuleList(VisionBlock() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, pixels, labels):
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.summary.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x[:, 0])), labels)


class AdaptiveBlock(nn.Module):
    """A block whose norms are shifted, scaled and gated by the condition (Peebles and Xie 2022, adaLN)."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.attention, self.mlp = Attention(), mlp()
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)

    def forward(self, x, condition):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(condition))[:, None].chunk(6, dim=-1)
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiffusionTransformer(nn.Module):
    """Predicts the noise in images (batch, 3, 32, 32) at times (batch,); the noise is drawn in the step."""

    def __init__(self, depth=4):
        super().__init__()
        self.patches = nn.Conv2d(CHANNELS, WIDTH, PATCH, stride=PATCH)
        self.times = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(AdaptiveBlock() for _ in range(depth))
        self.head = nn.Linear(WIDTH, CHANNELS * PATCH * PATCH)

    def forward(self, images, times):
        noise = torch.randn_like(images)
        level = times.view(-1, 1, 1, 1)
        x = self.patches(images * (1 - level) + noise * level).flatten(2).transpose(1, 2)
        condition = self.times(self.waves(times))
        for block in self.blocks:
            x = block(x, condition)
        grid = self.head(x).transpose(1, 2)
        return F.mse_loss(F.fold(grid, (SIDE, SIDE), PATCH, stride=PATCH), noise)

    def waves(self, times):
        rates = torch.exp(-math.log(1e4) * torch.arange(WIDTH // 2) / (WIDTH // 2))
        angles = times[:, None] * rates
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


def vision_case():
    torch.manual_seed(0)
    return VisionTransformer(), {"pixels": torch.randn(8, CHANNELS, SIDE, SIDE), "labels": torch.arange(8) % CLASSES}


def diffusion_case():
    torch.manual_seed(0)
    return DiffusionTransformer(), {"images": torch.randn(8, CHANNELS, SIDE, SIDE), "times": torch.linspace(0, 1, 8)}
