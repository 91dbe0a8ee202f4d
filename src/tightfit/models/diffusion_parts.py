"""The models beside a denoiser, VAE and text encoders, from the fields of their config.json, and what they make of
images and texts. For each repository they are those of its pipeline in diffusers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tightfit.errors import InputError, ModelError
from tightfit.models.diffusion import CLASS, INSTALL_HINT, SCALE
from tightfit.models.dtypes import convert_weights
from tightfit.models.published import Published, published

FLUX_2_VAE, QWEN_VAE, WAN_VAE = "AutoencoderKLFlux2", "AutoencoderKLQwenImage", "AutoencoderKLWan"
_OF_VIDEOS = (QWEN_VAE, WAN_VAE)  # they take frames, and an image is a video of one

_VAE = {
    CLASS: "AutoencoderKL", "in_channels": 3, "out_channels": 3, "latent_channels": 4, "layers_per_block": 2,
    "norm_num_groups": 32, "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4, "sample_size": 512,
}  # fmt: skip
_VAE_16 = {**_VAE, "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}
_VAE_FLUX_2 = {**_VAE, CLASS: FLUX_2_VAE, "latent_channels": 32, "sample_size": 1024, "patch_size": [2, 2]}
_VAE_OF_VIDEOS = {
    "base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [],
    "temperal_downsample": [False, True, True],
}  # fmt: skip
_CLIP = {"vocab_size": 49408, "max_position_embeddings": 77}
_CLIP_L = {
    **_CLIP, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "hidden_act": "quick_gelu", "projection_dim": 768,
}  # fmt: skip
_CLIP_H = {
    **_CLIP, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 23, "num_attention_heads": 16,
    "hidden_act": "gelu", "projection_dim": 512,
}  # fmt: skip
_CLIP_BIG_G = {
    **_CLIP, "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
    "hidden_act": "gelu", "projection_dim": 1280,
}  # fmt: skip
_T5_XXL = {
    "d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_layers": 24, "num_heads": 64, "vocab_size": 32128,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
}  # fmt: skip
_UMT5_XXL = {**_T5_XXL, "vocab_size": 256384}
_QWEN_3 = {key: value for key, value in published()["qwen3-4b"].config.items() if key != "model_type"}
_QWEN_2_5_VL = {
    "text_config": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 128000, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {"hidden_size": 1280, "out_hidden_size": 3584},
}  # fmt: skip


class Encoder(NamedTuple):
    """A text encoder as a pipeline calls it: its class in `transformers`, the fields of its config.json, the tokens of
    a text. The pipeline takes the hidden states of these `layers`, side by side (none: the last ones, and no others are
    kept). With `padded` it gives a mask, with `options` more. It drops the first `template` tokens, which are its own.
    """

    name: str
    config: Mapping[str, Any]
    tokens: int
    layers: tuple[int, ...] = ()
    padded: bool = False
    options: Mapping[str, Any] = {}
    template: int = 0


@dataclass(frozen=True)
class Parts:
    """The other networks of a denoiser. `passes` of the denoiser make a step of sampling: two with guidance by an empty
    text, `in_one_batch` or one after the other, and one where the guidance was distilled. With `vae_in_fp32` scripts or
    pipelines keep the VAE so, whatever the others are.
    """

    vae: Mapping[str, Any]
    encoders: tuple[Encoder, ...]
    passes: int = 2
    in_one_batch: bool = True
    vae_in_fp32: bool = False


_PROJECTED = "CLIPTextModelWithProjection"
_WAN = Parts(
    {**_VAE_OF_VIDEOS, CLASS: WAN_VAE},
    (Encoder("UMT5EncoderModel", _UMT5_XXL, 512, padded=True),),
    in_one_batch=False,
    vae_in_fp32=True,
)
# By the repository: the subfolders vae, text_encoder, text_encoder_2 and text_encoder_3 of each.
PARTS = {
    "stable-diffusion-v1-5/stable-diffusion-v1-5": Parts(_VAE, (Encoder("CLIPTextModel", _CLIP_L, 77),)),
    "stabilityai/stable-diffusion-2-1": Parts(_VAE, (Encoder("CLIPTextModel", _CLIP_H, 77),)),
    "stabilityai/stable-diffusion-xl-base-1.0": Parts(
        _VAE,
        (Encoder("CLIPTextModel", _CLIP_L, 77, layers=(-2,)), Encoder(_PROJECTED, _CLIP_BIG_G, 77, layers=(-2,))),
        vae_in_fp32=True,
    ),
    "stabilityai/stable-diffusion-3-medium-diffusers": Parts(
        _VAE_16,
        (
            Encoder(_PROJECTED, _CLIP_L, 77, layers=(-2,)),
            Encoder(_PROJECTED, _CLIP_BIG_G, 77, layers=(-2,)),
            Encoder("T5EncoderModel", _T5_XXL, 77),
        ),
    ),
    "black-forest-labs/FLUX.1-dev": Parts(
        _VAE_16, (Encoder("CLIPTextModel", _CLIP_L, 77), Encoder("T5EncoderModel", _T5_XXL, 512)), passes=1
    ),
    "black-forest-labs/FLUX.2-klein-base-4B": Parts(
        _VAE_FLUX_2,
        (Encoder("Qwen3ForCausalLM", _QWEN_3, 512, layers=(9, 18, 27), padded=True, options={"use_cache": False}),),
        in_one_batch=False,
    ),
    "Qwen/Qwen-Image": Parts(
        {**_VAE_OF_VIDEOS, CLASS: QWEN_VAE},
        (
            Encoder(
                "Qwen2_5_VLForConditionalGeneration", _QWEN_2_5_VL, 34 + 512, layers=(-1,), padded=True, template=34
            ),
        ),
        in_one_batch=False,
    ),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": _WAN,
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": _WAN,
}


class Beside(NamedTuple):
    """The models beside a denoiser, frozen."""

    vae: nn.Module
    encoders: tuple[nn.Module, ...]


def build_parts(parts: Parts, dtype: torch.dtype) -> Beside:
    """They with new weights. Raises `ModelError` where a package is missing."""
    try:
        import diffusers
        import transformers
    except ImportError as error:
        raise ModelError(f"VAE and text encoders need the package {error.name}: {INSTALL_HINT}") from error
    encoders = []
    for known in parts.encoders:
        kind: Any = getattr(transformers, known.name)
        encoders.append(kind(kind.config_class(**known.config)))
    vae = getattr(diffusers, parts.vae[CLASS]).from_config(dict(parts.vae))
    for model in (vae, *encoders):
        model.requires_grad_(False).eval()
        convert_weights(model, torch.float32 if model is vae and parts.vae_in_fp32 else dtype)
    return Beside(vae, tuple(encoders))


@torch.no_grad()
def embedded(known: Encoder, model: nn.Module, ids: Tensor) -> Tensor:
    """The results that the pipeline takes from its text encoder for token ids (B, T)."""
    given = dict(known.options)
    if known.padded:
        given["attention_mask"] = torch.ones_like(ids)
        given["attention_mask"][:, -1] = 0
    if not known.layers:
        return model(ids, **given)[0]
    found = model(ids, output_hidden_states=True, **given)  # with the logits, where a model has them
    states = [found.hidden_states[layer] for layer in known.layers]
    if len(states) > 1:
        return torch.stack(states, dim=1).transpose(1, 2).flatten(2)
    return states[0][:, known.template :].clone() if known.template else states[0]


def images_of_latents(vae: Any, latents: Tensor) -> Tensor:
    """Images, or videos, (B, 3, H, W) or (B, 3, F, H, W), whose latents have this shape; all zeros."""
    size, _, *frames, height, width = latents.shape
    kind = type(vae).__name__
    scale = SCALE * (vae.config.patch_size[0] if kind == FLUX_2_VAE else 1)
    if kind in _OF_VIDEOS:  # the first frame has a latent of its own
        frames = [1 + (frames[0] - 1) * 2 ** sum(vae.config.temperal_downsample) if frames else 1]
    return torch.zeros(size, 3, *frames, height * scale, width * scale, dtype=vae.dtype)


@torch.no_grad()
def latents_of(vae: Any, images: Tensor) -> Tensor:
    """The latents of images, drawn and scaled as diffusers' scripts do, in the shape that a denoiser takes."""
    kind = type(vae).__name__
    if kind == FLUX_2_VAE:
        latents = _patched(vae.encode(images).latent_dist.mode())
        mean, deviation = _scales(vae, latents)
        return (latents - mean) / deviation
    if kind in _OF_VIDEOS:
        latents = vae.encode(images).latent_dist.sample()
        mean, deviation = _scales(vae, latents)
        latents = (latents - mean) * (1.0 / deviation)
        return latents.squeeze(2)  # of an image: its one frame
    return vae.encode(images).latent_dist.sample() * vae.config.scaling_factor


@torch.no_grad()
def images_of(vae: Any, latents: Tensor) -> Tensor:
    """The images, or videos, of latents as a denoiser has them."""
    kind, latents = type(vae).__name__, latents.to(vae.dtype)
    if kind == FLUX_2_VAE:
        mean, deviation = _scales(vae, latents)
        return vae.decode(_unpatched(latents * deviation + mean), return_dict=False)[0]
    if kind in _OF_VIDEOS:
        latents = latents if latents.dim() == 5 else latents.unsqueeze(2)
        mean, deviation = _scales(vae, latents)
        return vae.decode(latents / (1.0 / deviation) + mean, return_dict=False)[0]
    return vae.decode(latents / vae.config.scaling_factor, return_dict=False)[0]


def _scales(vae: Any, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel, in the shape of the latents: batch statistics, or numbers of the config."""
    if type(vae).__name__ == FLUX_2_VAE:
        statistics = vae.bn.running_mean, torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
    else:
        statistics = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
    mean, deviation = (each.to(latents).view(1, -1, *[1] * (latents.dim() - 2)) for each in statistics)
    return mean, deviation


def _patched(latents: Tensor) -> Tensor:
    """Latents (B, C, H, W) as 2 x 2 of them in a place, (B, 4 C, H / 2, W / 2)."""
    size, channels, height, width = latents.shape
    found = latents.view(size, channels, height // 2, 2, width // 2, 2).permute(0, 1, 3, 5, 2, 4)
    return found.reshape(size, channels * 4, height // 2, width // 2)


def _unpatched(latents: Tensor) -> Tensor:
    size, channels, height, width = latents.shape
    found = latents.reshape(size, channels // 4, 2, 2, height, width).permute(0, 1, 4, 2, 5, 3)
    return found.reshape(size, channels // 4, height * 2, width * 2)


def parts_of(known: Published | None, name: str) -> Parts:
    """The parts beside a published denoiser. Raises `InputError` for any other model."""
    parts = None if known is None else PARTS.get(known.source)
    if parts is None:
        names = ", ".join(key for key, each in published().items() if each.source in PARTS)
        raise InputError(
            f"--phase is for these diffusion models by name: {names}; {name} is none of them: leave it out"
        )
    return parts
