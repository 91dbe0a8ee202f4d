"""Denoisers of diffusers: built from a config, with the training step of diffusers' scripts, predicted and planned."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tightfit
from command_line import tightfit as run
from tightfit.errors import InputError, ModelError
from tightfit.memory.allocator import measured_peak, storage_bytes
from tightfit.models.adapters import add_adapter
from tightfit.models.diffusion import KINDS, build_denoiser, denoising_batch, denoising_loss, is_denoiser, kind_of
from tightfit.models.diffusion_parts import (
    PARTS,
    Encoder,
    Parts,
    build_parts,
    embedded,
    images_of,
    images_of_latents,
    latents_of,
)
from tightfit.models.diffusion_phases import drawn_latents, estimate_phases
from tightfit.models.published import published
from tightfit.recipes.neighbours import layers_to_adapt
from tightfit.runtime.nested import tensors_in
from tightfit.tracing.build import build_dry
from tightfit.tracing.record import Category
from tightfit.training.config import AdapterConfig, PretrainedModel
from tiny import allocator_peak

diffusers = pytest.importorskip("diffusers", reason="the extra diffusion is not installed")

UNET = {
    "_class_name": "UNet2DConditionModel", "sample_size": 8, "block_out_channels": [32, 64], "layers_per_block": 1,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"], "cross_attention_dim": 32, "attention_head_dim": 8,
    "norm_num_groups": 8,
}  # fmt: skip
WITH_SIZES = UNET | {
    "transformer_layers_per_block": [1, 2], "attention_head_dim": [2, 4], "use_linear_projection": True,
    "addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 80,
}  # fmt: skip
SD3 = {
    "_class_name": "SD3Transformer2DModel", "sample_size": 8, "patch_size": 2, "in_channels": 16, "num_layers": 3,
    "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32, "caption_projection_dim": 32,
    "pooled_projection_dim": 64, "out_channels": 16, "pos_embed_max_size": 16,
}  # fmt: skip
FLUX = {
    "_class_name": "FluxTransformer2DModel", "in_channels": 64, "num_layers": 2, "num_single_layers": 2,
    "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32,
    "guidance_embeds": True, "axes_dims_rope": [4, 6, 6],
}  # fmt: skip
FLUX_2 = {
    "_class_name": "Flux2Transformer2DModel", "in_channels": 32, "num_layers": 2, "num_single_layers": 2,
    "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32, "timestep_guidance_channels": 32,
    "guidance_embeds": False, "axes_dims_rope": [4, 4, 4, 4],
}  # fmt: skip
QWEN = {
    "_class_name": "QwenImageTransformer2DModel", "in_channels": 64, "out_channels": 16, "num_layers": 2,
    "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32, "axes_dims_rope": [4, 6, 6],
}  # fmt: skip
WAN = {
    "_class_name": "WanTransformer3DModel", "num_attention_heads": 2, "attention_head_dim": 16, "text_dim": 32,
    "freq_dim": 32, "ffn_dim": 64, "num_layers": 2,
}  # fmt: skip
SHAPES = {"sd1.5": UNET, "sdxl": WITH_SIZES, "sd3": SD3, "flux": FLUX, "flux.2": FLUX_2, "qwen": QWEN, "wan": WAN}


def made(name, *, lora):
    torch.manual_seed(0)
    model = build_denoiser(SHAPES[name])
    if lora:
        model = add_adapter(model, AdapterConfig(r=4))
        for path, parameter in model.named_parameters():
            if "lora_B" in path:
                torch.nn.init.normal_(parameter, std=0.1)
    batch = denoising_batch(model, 2, 128, 16)
    return model.train(), {key: torch.randn_like(value) for key, value in batch.items()}, denoising_loss(model)


def tables(model, loss, batch):
    """Bytes of what the noise scheduler holds, which live as long as the training. Qwen-Image keeps the rotations of
    its tokens of 2 x 2 latents so, a complex number for two of a head's channels.
    """
    scheduler = sum(tensor.nbytes for tensor in tensors_in(list(vars(loss.scheduler).values())))
    if kind_of(model) != "QwenImageTransformer2DModel":
        return scheduler
    return scheduler + batch["latents"][0, 0].numel() // 4 * QWEN["attention_head_dim"] // 2 * torch.complex64.itemsize


CASES = [(name, lora) for name in SHAPES for lora in (True, False)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "lora"), CASES)
def test_the_predicted_peak_of_the_scripts_step_is_the_allocators(name, lora):
    model, batch, loss = made(name, lora=lora)
    found = tightfit.estimate(model, batch, loss=loss)
    measured = allocator_peak(model, batch, loss=loss)
    assert measured - 1024 <= found.peak_bytes <= measured + 1024 + tables(model, loss, batch)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "lora"), CASES)
def test_a_plan_of_it_changes_no_bit_and_keeps_its_budget(name, lora):
    model, batch, loss = made(name, lora=lora)
    plan = tightfit.plan(model, batch, "0.8x", loss=loss)
    assert plan.peak_bytes <= plan.budget_bytes
    assert tightfit.verify(model, batch, plan, loss=loss).ok
    with plan.apply(model):
        assert allocator_peak(model, batch, loss=loss) <= plan.peak_bytes


@pytest.mark.parametrize("name", SHAPES)
def test_recompute_by_hand_has_the_plain_gradients(name):
    model, batch, loss = made(name, lora=False)
    gradients = []
    for glob in (
        None,
        {"sd1.5": "*.attentions.*", "sdxl": "*.attentions.*", "wan": "blocks.*"}.get(name, "*transformer_blocks.*"),
    ):
        torch.manual_seed(3)
        model.zero_grad()
        if glob is None:
            loss(model, batch).backward()
        else:
            with tightfit.recompute(model, glob):
                loss(model, batch).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 20
    assert all(map(torch.equal, *gradients))


def test_the_loss_is_that_of_the_scripts():
    model, batch, loss = made("sd1.5", lora=False)
    torch.manual_seed(5)
    found = loss(model, batch)
    torch.manual_seed(5)
    noise = torch.randn_like(batch["latents"])
    steps = torch.randint(0, 1000, (2,))
    kept = (1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2).cumprod(0)[steps][:, None, None, None]
    noisy = kept.sqrt() * batch["latents"] + (1 - kept).sqrt() * noise
    predicted = model(noisy, steps, batch["encoder_hidden_states"]).sample
    torch.testing.assert_close(found, F.mse_loss(predicted, noise))


def test_a_perfect_flow_has_no_loss():
    """FLUX.1's tokens of 2 x 2 latents, which Qwen-Image's are too."""
    model, batch, loss = made("flux", lora=False)

    class Perfect(torch.nn.Module):
        """A denoiser that knows the noise, with FLUX's packing of 2 x 2 latents in a token."""

        config = model.config

        def forward(self, hidden_states, timestep, **given):
            assert given["img_ids"].shape == (hidden_states.shape[1], 3)
            level = timestep[:, None, None]
            latents = batch["latents"].unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5)
            latents = latents.reshape(hidden_states.shape)
            return ((hidden_states - latents) / level,)  # noise - latents, from (1 - s) latents + s noise

    assert loss(Perfect(), batch) < 1e-6


@pytest.mark.parametrize("name", ["flux.2", "wan"])
def test_a_perfect_flow_of_a_token_for_each_latent_has_no_loss(name):
    model, batch, loss = made(name, lora=False)

    class Perfect(torch.nn.Module):
        """A denoiser that knows the noise. FLUX.2 counts rows and columns of its tokens, and the words of a text."""

        config = model.config

        def forward(self, hidden_states, timestep, **given):
            latents, level = batch["latents"], (timestep if name == "flux.2" else timestep / 1000)
            if name == "flux.2":
                rows, columns = latents.shape[2:]
                assert given["img_ids"][0, -1].tolist() == [0, rows - 1, columns - 1, 0]
                assert given["txt_ids"][0, -1].tolist() == [0, 0, 0, batch["encoder_hidden_states"].shape[1] - 1]
                latents = latents.flatten(2).transpose(1, 2)
            return ((hidden_states - latents) / level.reshape(-1, *[1] * (latents.dim() - 1)),)

    assert loss(Perfect(), batch) < 1e-6


@pytest.mark.slow  # builds a published model
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [name for name, each in published().items() if each.is_denoiser])
def test_one_is_known_by_name_with_its_published_number_of_parameters(name):
    found = json.loads(run("estimate", "--model", name, "--image", 256, "--device", "h200", "--adapter", "r=4,alpha=4",
                           "--base", "bf16", "--json").out)  # fmt: skip
    assert found["base_bytes"] == 2 * published()[name].parameters
    assert found["adapted"] == sorted(found["adapted"])
    assert {"to_k", "to_q", "to_v"} <= set(found["adapted"])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--model", "sd1.5", "--image", 100), "--image 100: images of UNet2DConditionModel have a multiple of 64"),
        (("--model", "gpt2", "--image", 512), "--image 512 is for diffusion models, and gpt2 is none"),
    ],
)
def test_an_image_that_cannot_be_is_refused_in_one_line(options, line):
    result = run("estimate", *options, "--device", "rtx4090")
    assert result.code == InputError.exit_code
    assert line in " ".join(result.err.split())


def test_a_training_of_ours_refuses_one_in_one_line():
    from tightfit.models.loading import build_model

    with pytest.raises(ModelError, match=r"sd1\.5.*UNet2DConditionModel, which your own loop trains"):
        build_model(PretrainedModel(path="sd1.5", random_init=True))


def test_what_is_no_denoiser_is_none():
    assert not is_denoiser(torch.nn.Linear(2, 2))
    assert is_denoiser(build_denoiser(UNET))
    with pytest.raises(ModelError, match="known are UNet2DConditionModel"):
        build_denoiser({"_class_name": "AutoencoderKL"})


# The phases around the step: VAE and text encoders

VAE = {
    "_class_name": "AutoencoderKL", "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 8,
    "block_out_channels": [8, 8, 16, 16], "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4, "sample_size": 64,
}  # fmt: skip
VAE_OF_VIDEOS = {"base_dim": 8, "num_res_blocks": 1}
CLIP = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
T5 = {"vocab_size": 100, "d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2}
QWEN_3 = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
THREE_PLACES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
QWEN_2_5_VL = {
    "text_config": QWEN_3 | {"rope_parameters": THREE_PLACES},
    "vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32},
}  # fmt: skip
TWO_TEXTS = (Encoder("CLIPTextModel", CLIP, 16, layers=(-2,)), Encoder("T5EncoderModel", T5, 16))
WITH_PARTS = {
    "sd1.5": Parts(VAE, TWO_TEXTS),
    "sdxl": Parts(VAE, TWO_TEXTS),
    "sd3": Parts(VAE | {"latent_channels": 16}, TWO_TEXTS),
    "flux": Parts(VAE | {"latent_channels": 16}, TWO_TEXTS, passes=1),
    "flux.2": Parts(
        VAE | {"_class_name": "AutoencoderKLFlux2", "latent_channels": 8, "patch_size": [2, 2]},
        (Encoder("Qwen3ForCausalLM", QWEN_3, 16, layers=(1, 2, 3), padded=True, options={"use_cache": False}),),
        in_one_batch=False,
    ),
    "qwen": Parts(
        VAE_OF_VIDEOS | {"_class_name": "AutoencoderKLQwenImage"},
        (Encoder("Qwen2_5_VLForConditionalGeneration", QWEN_2_5_VL, 16, layers=(-1,), padded=True, template=4),),
        in_one_batch=False,
    ),
    "wan": Parts(
        VAE_OF_VIDEOS | {"_class_name": "AutoencoderKLWan"},
        (Encoder("UMT5EncoderModel", T5, 16, padded=True),),
        in_one_batch=False,
        vae_in_fp32=True,
    ),
}


def weights(*models):
    """With the tables of places that Qwen-Image's denoiser keeps as plain attributes."""
    modules = [module for model in models for module in model.modules()]
    plain = [value for module in modules for value in vars(module).values() if isinstance(value, torch.Tensor)]
    return [tensor for model in models for tensor in (*model.parameters(), *model.buffers())] + plain


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", WITH_PARTS)
def test_the_predicted_peak_of_each_phase_is_that_of_running_it(name):
    model, batch, loss = made(name, lora=True)
    if name == "wan":
        batch["latents"] = batch["latents"][:, :, :3].clone()  # of nine frames
    parts = WITH_PARTS[name]
    step = tightfit.estimate(model, batch, loss=loss)
    found = {(row.phase, row.parts): row.peak_bytes for row in estimate_phases(model, batch, parts, step).rows}

    vae, encoders = build_parts(parts, torch.float32)
    images, ids = images_of_latents(vae, batch["latents"]), torch.zeros(2, 16, dtype=torch.long)
    assert images.shape == (2, 3, *{"wan": (9,), "qwen": (1,)}.get(name, ()), 128, 128)
    assert latents_of(vae, images).shape == batch["latents"].shape
    runs = [(lambda: latents_of(vae, images), vae, images)]
    runs += [(lambda e=e, k=k: embedded(k, e, ids), e, ids) for k, e in zip(parts.encoders, encoders, strict=True)]
    beside = storage_bytes(weights(vae, *encoders))
    alone = max(measured_peak(run, [*weights(part), given]) for run, part, given in runs)
    together = max(measured_peak(run, [*weights(vae, *encoders), given]) for run, _, given in runs)
    assert found["cache", "offloaded"] == alone
    assert found["cache", "resident"] == together

    assert found["train", "gone"] == step.peak_bytes
    states = step.step_figures.by_category[str(Category.OPTIMIZER_STATE)]
    held = storage_bytes(weights(model)) + states
    assert found["train", "offloaded"] == max(step.peak_bytes, held + alone)
    assert found["train", "resident"] == max(step.peak_bytes + beside, held + together)

    own = [*weights(model), *batch.values()]
    drawing = measured_peak(lambda: drawn_latents(model, batch, parts), own) + states
    decoding = (
        measured_peak(lambda: images_of(vae, batch["latents"]), [*weights(vae, model), batch["latents"]]) + states
    )
    for place, expected in (
        ("gone", max(drawing + storage_bytes(weights(vae)), decoding)),
        ("resident", max(drawing + beside, decoding + storage_bytes(weights(*encoders)))),
    ):
        assert abs(found["sample", place] - expected) <= 16  # numbers of Python, which PyTorch puts into tensors


@pytest.mark.slow  # builds VAE and text encoders of nine models dry: 15 s
def test_the_parts_beside_each_published_denoiser_have_the_sizes_of_its_repository():
    """The counts that the pages and papers of CLIP ViT-L, OpenCLIP ViT-H and ViT-bigG, T5-XXL and the VAE state, and
    those of Qwen3-4B, Qwen2.5-VL-7B, FLUX.2's VAE, and the files of UMT5-XXL and Wan's and Qwen-Image's VAE.
    """
    known = {
        "CLIPTextModel": {123_060_480, 340_387_840},
        "CLIPTextModelWithProjection": {123_650_304, 694_659_840},
        "T5EncoderModel": {4_762_310_656},
        "Qwen3ForCausalLM": {4_022_468_096},
        "Qwen2_5_VLForConditionalGeneration": {8_292_166_656},
        "UMT5EncoderModel": {5_680_910_336},
        "AutoencoderKL": {83_653_863, 83_819_683},
        "AutoencoderKLFlux2": {84_046_115},
        "AutoencoderKLQwenImage": {126_892_531},
        "AutoencoderKLWan": {126_892_531},
    }
    denoisers = {each.source for each in published().values() if each.is_denoiser}
    assert set(PARTS) == denoisers
    for parts in PARTS.values():
        built = build_dry(lambda parts=parts: nn.ModuleList(flat_parts(build_parts(parts, torch.float32))))
        counts = [sum(p.numel() for p in model.parameters()) for model in built.children()]
        names = [parts.vae["_class_name"], *(each.name for each in parts.encoders)]
        assert all(count in known[name] for count, name in zip(counts, names, strict=True))


def flat_parts(beside):
    return [beside.vae, *beside.encoders]


def test_phases_of_what_has_none_are_refused_in_one_line():
    for arguments, says in (
        (("--model", "cpu26", "--phase", "cache"), "--phase is for these diffusion models by name: sd1.5, sd2.1,"),
        (("--model", "vit-base", "--phase", "cache"), "vit-base is none of them: leave it out"),
        (("--model", "sd1.5", "--phase", "encode"), "--phase encode: known are cache, train, sample, and all"),
    ):
        done = run("estimate", *arguments)
        assert done.code == 2
        assert says in done.err


def test_ways_out_adapt_the_layers_of_diffusers_scripts():
    model, *_ = made("sd1.5", lora=False)
    assert layers_to_adapt(model, None) == KINDS["UNet2DConditionModel"].adapted


@pytest.mark.slow  # two plans
def test_weights_in_16_bits_get_latents_in_16_bits():
    model, batch, loss = made("flux.2", lora=False)
    found = tightfit.fit(model, batch, loss=loss, device="rtx4090", dtype="bf16", optimizer="adamw_fused")
    assert not any("numbers in fp32" in note for note in found.notes)
    (row,) = (o for o in found if o.recipe.adapter is None and not o.recipe.step_in_backward)
    narrow = model.to(torch.bfloat16), {name: value.bfloat16() for name, value in batch.items()}
    expected = tightfit.estimate(*narrow, loss=loss, device="rtx4090", optimizer="adamw_fused")
    assert row.peak_bytes == expected.peak_bytes
