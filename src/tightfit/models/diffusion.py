"""Denoisers of `diffusers`, UNets and transformers: built from the fields of their config.json, with a batch of the
right shapes and the training step of diffusers' own scripts as a loss.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.errors import InputError, ModelError
from tightfit.models.dtypes import convert_weights

CLASS = "_class_name"  # the field of config.json that names the class
INSTALL_HINT = "pip install 'tightfit[diffusion]'"
SCALE = 8  # pixels of an image to one latent, in each direction
STEPS = 1000  # of noise


class Kind(NamedTuple):
    """Facts of a class of denoisers: the text tokens of diffusers' scripts, the layers that these adapt (a text is a
    pattern), the pixels of an image where the config names no size, and the frames of a video's latents.
    """

    text: int
    adapted: tuple[str, ...] | str
    pixels: int = 1024
    frames: int | None = None


_ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")
_JOINT = (*_ATTENTION, "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")

UNET, SD3 = "UNet2DConditionModel", "SD3Transformer2DModel"
FLUX, FLUX_2 = "FluxTransformer2DModel", "Flux2Transformer2DModel"
QWEN, WAN = "QwenImageTransformer2DModel", "WanTransformer3DModel"
# examples/text_to_image/train_text_to_image_lora*.py and
# examples/dreambooth/train_dreambooth_lora_{sd3,flux,flux2_klein,qwen_image}.py. For Wan diffusers has no script: 81
# frames of 480 pixels are what its makers trained it for, and its VAE makes 21 frames of them.
KINDS = {
    UNET: Kind(77, _ATTENTION),
    SD3: Kind(77 + 77, _JOINT),
    FLUX: Kind(512, (*_JOINT, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")),
    # The names of both kinds of blocks as one pattern: `to_out` is a layer in one of them and a list in the other.
    FLUX_2: Kind(512, r".*\.(to_k|to_q|to_v|to_out\.0|to_qkv_mlp_proj)|single_transformer_blocks\.\d+\.attn\.to_out"),
    QWEN: Kind(512, _ATTENTION),
    WAN: Kind(512, _ATTENTION, pixels=480, frames=21),
}
_POOLED = (SD3, FLUX)  # they take one vector of the whole text, too


def is_denoiser(model: nn.Module) -> bool:
    """True for a denoiser of `diffusers` of a known class, also below adapters."""
    return kind_of(model) in KINDS


def kind_of(model: nn.Module) -> str:
    """The name of a model's class, below adapters."""
    below = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore[reportCallIssue] - peft's
    return type(below).__name__ if type(below).__module__.startswith("diffusers.") else ""


def build_denoiser(fields: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> nn.Module:
    """A denoiser with new weights, from the fields of its config.json. Raises `ModelError`."""
    try:
        import diffusers
    except ImportError as error:
        raise ModelError(f"this model needs the package diffusers: {INSTALL_HINT}") from error
    name = fields.get(CLASS)
    if name not in KINDS:
        raise ModelError(f"its config is of a {name}: known are {', '.join(KINDS)}")
    model = getattr(diffusers, name).from_config(dict(fields))
    convert_weights(model, dtype)
    return model


def denoising_batch(model: nn.Module, size: int, image: int | None, text: int | None) -> dict[str, Tensor]:
    """Latents of images of `image` x `image` pixels (None: the size that the model was made for), and what text
    encoders make of `text` tokens (None: as many as diffusers' scripts have). Raises `InputError`.
    """
    config: Any = model.config
    kind = kind_of(model)
    facts = KINDS[kind]
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    pixels = image or (SCALE * config.sample_size if "sample_size" in config else facts.pixels)
    unit = SCALE * 2 ** (len(config.block_out_channels) - 1 if kind == UNET else 1)
    if pixels % unit:
        raise InputError(f"--image {pixels}: images of {kind} have a multiple of {unit} pixels on each side")
    if pixels // SCALE // 2 > getattr(config, "pos_embed_max_size", pixels):
        raise InputError(f"--image {pixels}: {kind} has positions for {config.pos_embed_max_size * 2 * SCALE} pixels")
    channels = config.in_channels // 4 if kind in (FLUX, QWEN) else config.in_channels
    side, tokens = pixels // SCALE, text or facts.text
    if kind == FLUX_2:  # its scripts draw noise for 2 x 2 latents in a token
        side //= 2
    width = {UNET: "cross_attention_dim", WAN: "text_dim"}.get(kind, "joint_attention_dim")
    frames = () if facts.frames is None else (facts.frames,)
    batch = {
        "latents": torch.zeros(size, channels, *frames, side, side, dtype=dtype),
        "encoder_hidden_states": torch.zeros(size, tokens, config[width], dtype=dtype),
    }
    if kind in _POOLED:
        batch["pooled_projections"] = torch.zeros(size, config.pooled_projection_dim, dtype=dtype)
    if kind == UNET and config.addition_embed_type == "text_time":  # SDXL: the pooled text, and six sizes of the image
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        batch["text_embeds"] = torch.zeros(size, pooled, dtype=dtype)
        batch["time_ids"] = torch.full((size, 6), float(pixels), dtype=dtype)
    return batch


def denoising_loss(model: nn.Module) -> "NoiseLoss | FlowLoss":
    """The loss of diffusers' scripts for a denoiser."""
    return NoiseLoss() if kind_of(model) == UNET else FlowLoss(kind_of(model))


def _scheduler(name: str, **settings: Any) -> Any:
    import diffusers

    return getattr(diffusers, name)(num_train_timesteps=STEPS, **settings)


@dataclass(frozen=True)
class NoiseLoss:
    """`loss(model, batch)`: the mean squared error of the noise that a UNet finds in noisy latents.

    `batch` has `latents` (B, C, H, W), `encoder_hidden_states` (B, T, D), and for SDXL `text_embeds` and `time_ids`.
    Noise and steps are drawn anew in each call (`train_text_to_image_lora.py`, `train_text_to_image_lora_sdxl.py`).
    """

    scheduler: Any = field(
        default_factory=lambda: _scheduler(
            "DDPMScheduler", beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"
        )
    )

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        latents = batch["latents"]
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, STEPS, (len(latents),), device=latents.device)
        noisy = self.scheduler.add_noise(latents, noise, timesteps)
        found = predicted(model, noisy, timesteps, batch, UNET)
        return F.mse_loss(found.float(), noise.float(), reduction="mean")


@dataclass(frozen=True)
class FlowLoss:
    """`loss(model, batch)`: the weighted squared error of flow matching, of the transformers of SD3, FLUX.1, FLUX.2,
    Qwen-Image and Wan.

    `batch` has `latents` (B, C, H, W), of videos (B, C, F, H, W), `encoder_hidden_states` (B, T, D) and for SD3 and
    FLUX.1 `pooled_projections` (B, P). Noise and levels (logit-normal) are drawn anew in each call
    (`train_dreambooth_lora_sd3.py`, `train_dreambooth_lora_flux.py` and their like).
    """

    kind: str
    guidance: float = 3.5
    scheduler: Any = field(default_factory=lambda: _scheduler("FlowMatchEulerDiscreteScheduler", shift=3.0))

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        latents = batch["latents"]
        noise = torch.randn_like(latents)
        places = (torch.normal(0.0, 1.0, (len(latents),)).sigmoid() * STEPS).long()
        timesteps = self.scheduler.timesteps[places].to(latents.device)
        sigmas = self.scheduler.sigmas[places].to(latents.device, latents.dtype)
        sigmas = sigmas.reshape(-1, *[1] * (latents.dim() - 1))
        noisy = (1.0 - sigmas) * latents + sigmas * noise
        found = predicted(model, noisy, timesteps, batch, self.kind, self.guidance)
        if self.kind == SD3:
            found = found * -sigmas + noisy  # preconditioned: the clean latents
            target = latents
        else:
            target = noise - latents
        weighting = torch.ones_like(sigmas)
        errors = weighting.float() * (found.float() - target.float()) ** 2
        return errors.reshape(len(latents), -1).mean(1).mean()


def predicted(
    model: nn.Module, noisy: Tensor, timesteps: Tensor, batch: Mapping[str, Tensor], kind: str, guidance: float = 3.5
) -> Tensor:
    """The prediction of a denoiser for noisy latents at these steps of the noise, of their shape.

    The kind is the name of the denoiser's class, which may be wrapped: compiled, or in DDP.
    """
    text = {"encoder_hidden_states": batch["encoder_hidden_states"], "return_dict": False}
    if kind in _POOLED:
        text["pooled_projections"] = batch["pooled_projections"]
    if kind == FLUX:
        return _of_flux(model, noisy, timesteps, text, guidance)
    if kind == FLUX_2:
        return _of_flux_2(model, noisy, timesteps, text, guidance)
    if kind == QWEN:
        size, _, height, width = noisy.shape
        shapes = [(1, height // 2, width // 2)] * size
        found = model(hidden_states=packed(noisy), timestep=timesteps / STEPS, img_shapes=shapes, **text)[0]
        return unpacked(found, height, width)
    if kind == UNET:
        added = {name: batch[name] for name in ("text_embeds", "time_ids") if name in batch}
        given = {"added_cond_kwargs": added} if added else {}
        return model(noisy, timesteps, **text, **given)[0]
    return model(hidden_states=noisy, timestep=timesteps, **text)[0]


def packed(latents: Tensor) -> Tensor:
    """Latents (B, C, H, W) as tokens of 2 x 2 latents each, (B, H / 2 x W / 2, 4 C)."""
    size, channels, height, width = latents.shape
    found = latents.view(size, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return found.reshape(size, height // 2 * (width // 2), channels * 4)


def unpacked(tokens: Tensor, height: int, width: int) -> Tensor:
    """The latents (B, C, H, W) of tokens of 2 x 2 latents."""
    found = tokens.view(len(tokens), height // 2, width // 2, -1, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return found.reshape(len(tokens), -1, height, width)


def _of_flux(model: nn.Module, noisy: Tensor, timesteps: Tensor, text: dict[str, Any], level: float) -> Tensor:
    size, _, height, width = noisy.shape
    rows, columns, device = height // 2, width // 2, noisy.device
    places = torch.zeros(rows, columns, 3, device=device, dtype=noisy.dtype)
    places[..., 1] += torch.arange(rows, device=device)[:, None]
    places[..., 2] += torch.arange(columns, device=device)[None, :]
    config: Any = model.config
    guidance = torch.full((size,), level, device=device) if config.guidance_embeds else None
    found = model(
        hidden_states=packed(noisy),
        timestep=timesteps / STEPS,
        guidance=guidance,
        txt_ids=torch.zeros(text["encoder_hidden_states"].shape[1], 3, device=device, dtype=noisy.dtype),
        img_ids=places.reshape(rows * columns, 3),
        **text,
    )[0]
    return unpacked(found, height, width)


def _of_flux_2(model: nn.Module, noisy: Tensor, timesteps: Tensor, text: dict[str, Any], level: float) -> Tensor:
    size, channels, height, width = noisy.shape
    device, words = noisy.device, text["encoder_hidden_states"].shape[1]
    config: Any = model.config
    guidance = torch.full([1], level, device=device).expand(size) if config.guidance_embeds else None
    found = model(
        hidden_states=noisy.reshape(size, channels, height * width).permute(0, 2, 1),
        timestep=timesteps / STEPS,
        guidance=guidance,
        txt_ids=_places(size, 1, 1, words).to(device),
        img_ids=_places(size, height, width, 1).to(device),
        **text,
    )[0]
    return found.permute(0, 2, 1).reshape(noisy.shape)


def _places(size: int, rows: int, columns: int, words: int) -> Tensor:
    """The places of tokens for FLUX.2, in time, rows, columns and words, (B, T, 4)."""
    places = torch.cartesian_prod(*(torch.arange(count) for count in (1, rows, columns, words)))
    return places.expand(size, -1, -1)
