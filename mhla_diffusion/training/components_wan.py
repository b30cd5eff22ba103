"""Everything of a Wan pipeline but its transformer, small enough to be made in minutes from a folder of videos.

The classes are those of Wan2.1 (AutoencoderKLWan, UMT5EncoderModel), so a run on a few clips takes the same path as one
on the published checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..backbones.wan import WAN
from ..devices import usable_device
from ..errors import UserError
from ..randomness import sample_generator
from .components import (
    ComponentsReport,
    check_arguments,
    count_parameters,
    progress,
    save_components,
    to_floats,
    train_autoencoder,
)
from .config import DataOptions
from .data import UnreadableSample
from .videos import DamagedVideos, VideoFolder

MAX_CLIPS = 256  # of a larger folder the first are enough for a small VAE
KL_WEIGHT = 1e-3  # keeps the latents of all channels near a normal distribution
SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}


def write_wan_components(
    out: str | Path,
    data: str,
    size: int = 64,
    steps: int = 300,
    batch_size: int = 2,
    seed: int = 0,
    num_frames: int = 33,
    fps: float = 24.0,
) -> ComponentsReport:
    """Write a WanPipeline without its transformer: AutoencoderKLWan, T5 tokenizer, UMT5EncoderModel and scheduler.

    The VAE has factor 4 in time, height and width, and 8 channels, and is trained on clips of `data`; the tokenizer is
    made of its captions; the text encoder keeps its random weights. The folder appears when all of it is done.

    Args:
        out: folder to write, new or empty.
        data: a folder of captioned videos, as `data.train` of a training config takes it.
        size: side of the clips in pixels, a multiple of 16.
        steps, batch_size: of the VAE's training, on 5 frames of a clip at a time.
        seed: all random numbers follow from it.
        num_frames, fps: of the clips.

    Raises:
        UserError: for a size that WanPipeline does not take, videos that cannot be used, or an `out` that is not empty.
    """
    from diffusers import WanPipeline

    out, clock = Path(out), time.perf_counter()
    check_arguments(out, size, WAN.pipeline_multiple, steps, batch_size)
    clips, captions = read_clips(data, DataOptions(size=size, num_frames=num_frames, fps=fps), seed)
    device = usable_device()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        vae, tokenizer = wan_vae().to(device), t5_tokenizer(captions)
        text_encoder = umt5_encoder(len(tokenizer))
    held_out, learned = clips[::16], clips[torch.arange(len(clips)) % 16 != 0]
    generator = sample_generator(seed, "components", "vae")
    train_autoencoder(vae, lambda: run_loss(vae, learned, batch_size, 5, generator), steps, warmup=20)
    pictures, psnr = finish_autoencoder(vae, learned, held_out)
    scheduler = WAN.build_pipeline(None, {}).scheduler
    pipeline = WanPipeline(tokenizer, text_encoder, vae.cpu(), scheduler)
    save_components(pipeline, out)
    parameters = {"VAE": count_parameters(vae), "text encoder": count_parameters(text_encoder)}
    seconds = time.perf_counter() - clock
    return ComponentsReport(out, len(clips), psnr, len(tokenizer), parameters, seconds, pictures)


def read_clips(data: str, options: DataOptions, seed: int = 0) -> tuple[Tensor, list[str]]:
    """The first clips of a folder as (N, 3, T, H, W) uint8, without those that are damaged, and all of its captions."""
    source = VideoFolder(data, options, "--data")
    if len(source) < 2:
        raise UserError(f"--data {data} has {len(source)} video; 2 or more are needed, one of them to test the VAE on")
    clips, damaged = [], DamagedVideos()
    for index in progress(range(min(len(source), MAX_CLIPS)), "reading", min(len(source), MAX_CLIPS)):
        try:
            clip = source.read(index, sample_generator(seed, "components", index)).image
        except UnreadableSample as error:
            damaged.add(source.files[index], error)
            continue
        clips.append(((clip + 1) * 127.5).round().byte())
    damaged.close()
    if len(clips) < 2:
        raise UserError(f"of --data {data} {len(clips)} can be read, but 2 or more videos are needed{damaged.first}")
    return torch.stack(clips), source.texts


# The VAE -------------------------------------------------------------------------------------------------------------


def wan_vae() -> nn.Module:
    """An AutoencoderKLWan of factor 4 in time, height and width, with 8 latent channels and random weights."""
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=8,
        z_dim=8,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * 8,
        latents_std=[1.0] * 8,
        scale_factor_spatial=4,
        scale_factor_temporal=4,
    )


def run_loss(vae: nn.Module, clips: Tensor, batch_size: int, frames: int, generator: torch.Generator) -> Tensor:
    """How well `vae` reconstructs runs of `frames` frames of `clips` (N, 3, T, H, W) uint8.

    The mean absolute plus the mean squared error, and a little of the Kullback-Leibler divergence.
    """
    device, frames = next(vae.parameters()).device, min(frames, clips.shape[2])
    chosen = torch.randint(len(clips), (batch_size,), generator=generator).tolist()
    first = torch.randint(clips.shape[2] - frames + 1, (batch_size,), generator=generator).tolist()
    real = torch.stack([clips[i, :, t : t + frames] for i, t in zip(chosen, first, strict=True)])
    real = to_floats(real, device)
    latents = vae.encode(real).latent_dist
    noise = torch.randn(latents.mean.shape, generator=generator).to(device)
    error = vae.decode(latents.mean + latents.std * noise).sample - real
    divergence = 0.5 * (latents.mean.square() + latents.var - 1 - latents.logvar).mean()
    return error.abs().mean() + error.square().mean() + KL_WEIGHT * divergence


@torch.no_grad()
def finish_autoencoder(vae: nn.Module, learned: Tensor, held_out: Tensor) -> tuple[Tensor, float]:
    """Set `latents_mean` and `latents_std` of the VAE so that each channel of the latents of `learned` is normalised.

    Returns the middle frames of up to 12 clips of `held_out` above their reconstructions, (2, n, 3, H, W) in [-1, 1],
    and the mean PSNR of all frames of these clips in dB. Raises `UserError` when the latents are not finite.
    """
    device = next(vae.parameters()).device
    some = learned[:: max(1, len(learned) // 16)]
    latents = torch.cat([vae.encode(to_floats(clip[None], device)).latent_dist.mean for clip in some])
    channels = latents.transpose(0, 1).flatten(1)
    mean, std = channels.mean(1), channels.std(1)
    if not (std.isfinite().all() and (std > 0).all()):
        raise UserError("the VAE's training diverged; other --steps, --batch-size or --seed may help")
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    real = torch.stack([to_floats(clip, device) for clip in held_out[:12]])
    seen = torch.cat([vae.decode(vae.encode(clip[None]).latent_dist.mean).sample.clamp(-1, 1) for clip in real])
    error = ((seen - real) / 2).square().transpose(1, 2).flatten(2).mean(2)
    middle = real.shape[2] // 2
    return torch.stack([real, seen])[:, :, :, middle].cpu(), (-10 * error.log10()).mean().item()


# Text ----------------------------------------------------------------------------------------------------------------


def t5_tokenizer(texts: Sequence[str], vocabulary: int = 2048) -> Any:
    """A tokenizer of byte pairs within words, learned from `texts`, that ends a text with </s> as UMT5's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[*SPECIAL.values()], show_progress=False)
    tokenizer.train_from_iterator(sorted(texts), trainer)
    end = SPECIAL["eos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.token_to_id(end))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **SPECIAL)


def umt5_encoder(vocabulary: int) -> nn.Module:
    """A UMT5EncoderModel of 2 layers and width 64 with random weights, which tells captions apart."""
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        vocab_size=vocabulary,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return UMT5EncoderModel(config).requires_grad_(False).eval()
