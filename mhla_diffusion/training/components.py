"""Small parts for a pipeline that starts from nothing: a VAE trained on the data, a tokenizer made for its captions.

They are of the classes that the published pipelines hold, so that a run on a small data set takes the same path as one
on a published checkpoint.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..backbones.family import Family
from ..backbones.sana import SANA, complex_human_instruction
from ..devices import usable_device
from ..errors import UserError, check_writable
from ..randomness import sample_generator
from .checkpoints import whole_folder
from .config import DataOptions
from .data import read_batches
from .sources import open_source

MAX_IMAGES = 20_000  # of a larger data set the first are enough for a small VAE
LATENT_PENALTY = 1e-3  # keeps the latents of all channels near zero mean and alike in size
SPECIAL_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]


@dataclass
class ComponentsReport:
    """What was made, and how well the VAE reconstructs images that it was not trained on."""

    folder: Path
    images: int  # that were read, every 16th of them held out
    psnr: float  # dB, mean over the held-out images
    vocabulary: int
    parameters: dict[str, int]
    seconds: float
    pictures: Tensor  # (2, 12, 3, size, size) in [-1, 1]: held-out images and their reconstructions

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {count:,}" for name, count in self.parameters.items())
        return (
            f"{self.folder}: parameters: {sizes}; {self.vocabulary:,} tokens; the VAE reconstructs held-out images at "
            f"{self.psnr:.1f} dB; {self.seconds:.0f} s. Use it as model.components={self.folder}"
        )


def write_sana_components(
    out: str | Path, data: str, size: int = 64, steps: int = 1500, batch_size: int = 16, seed: int = 0
) -> ComponentsReport:
    """Write a SanaPipeline without its transformer: AutoencoderDC, GemmaTokenizer, Gemma2Model and scheduler.

    The VAE has factor 4 and 8 channels and is trained on the images of `data`; the tokenizer is made of its captions;
    the text encoder keeps its random weights. The folder appears when all of it is done.

    Args:
        out: folder to write, new or empty.
        data: captioned images, as `data.train` of a training config takes them.
        size: side of the images in pixels, a multiple of 32.
        steps, batch_size: of the VAE's training, on crops of half the side.
        seed: all random numbers follow from it.

    Raises:
        UserError: for a size that SanaPipeline does not take, captions that are missing, or an `out` that is not empty.
    """
    from diffusers import DPMSolverMultistepScheduler, SanaPipeline

    out, clock = Path(out), time.perf_counter()
    check_arguments(out, size, SANA.pipeline_multiple, steps, batch_size)
    images, captions = read_captioned_images(data, size, SANA)
    device = usable_device()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        vae, tokenizer = sana_vae().to(device), gemma_tokenizer([*complex_human_instruction(), *captions])
        text_encoder = gemma_encoder(len(tokenizer), tokenizer.pad_token_id)
    held_out, learned = images[::16], images[torch.arange(len(images)) % 16 != 0]
    generator = sample_generator(seed, "components", 0)
    train_autoencoder(vae, lambda: crop_loss(vae, learned, batch_size, size // 2, generator), steps, warmup=50)
    pictures, psnr = finish_autoencoder(vae, learned, held_out)
    scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    pipeline = SanaPipeline(tokenizer, text_encoder, vae.cpu(), None, scheduler)
    save_components(pipeline, out)
    parameters = {"VAE": count_parameters(vae), "text encoder": count_parameters(text_encoder)}
    seconds = time.perf_counter() - clock
    return ComponentsReport(out, len(images), psnr, len(tokenizer), parameters, seconds, pictures)


def save_components(pipeline: Any, out: Path) -> None:
    """Write a pipeline without a transformer as the folder `out`, which appears whole."""
    from diffusers.utils import logging

    shown = logging.get_verbosity()
    logging.set_verbosity_error()  # that there is no transformer to save
    try:
        with whole_folder(out) as folder:
            pipeline.save_pretrained(folder)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}") from None
    finally:
        logging.set_verbosity(shown)


def check_arguments(out: Path, size: int, multiple: int, steps: int, batch_size: int) -> None:
    """Raise `UserError` where nothing could come of these arguments, before anything is read."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty; choose a new folder")
    if size < 1 or size % multiple:
        raise UserError(f"--size {size} does not suit the pipeline; a multiple of {multiple} is accepted")
    for name, value in (("--steps", steps), ("--batch-size", batch_size)):
        if value < 1:
            raise UserError(f"{name} {value} is too small; 1 or more is accepted")
    check_writable("OUT", out)


# The data ------------------------------------------------------------------------------------------------------------


def read_captioned_images(data: str, size: int, family: Family) -> tuple[Tensor, list[str]]:
    """The first images of a data set as (N, 3, size, size) uint8, with their captions.

    Raises `UserError` where a sample has no caption, where there are too few, or where they are cached latents.
    """
    source = open_source(data, "--data", DataOptions(train=data, size=size), family, flip=False)
    count = min(len(source), MAX_IMAGES)
    if count < 16:
        raise UserError(f"--data {data} has {count} images; 16 or more are needed to train a VAE")
    plan = [[(0, index) for index in range(first, min(first + 64, count))] for first in range(0, count, 64)]
    images, captions = [], []
    for batch in progress(read_batches(source, plan, 0, num_workers=0), "reading", len(plan)):
        if batch.images is None:
            raise UserError(f"--data {data} holds latents; the images themselves are expected")
        if not all(batch.texts):
            raise UserError(f"--data {data} has images without a caption; give each a line in metadata.jsonl")
        images.append(((batch.images + 1) * 127.5).round().byte())
        captions += batch.texts
    return torch.cat(images), captions


def progress(items: Any, what: str, total: int) -> tqdm:
    """A bar on a terminal, a line every 15 seconds in a log."""
    interval = 0.2 if sys.stderr.isatty() else 15
    return tqdm(items, total=total, desc=what, dynamic_ncols=True, mininterval=interval)


# The VAE -------------------------------------------------------------------------------------------------------------


def sana_vae() -> nn.Module:
    """An AutoencoderDC of factor 4 with 8 latent channels and random weights."""
    from diffusers import AutoencoderDC

    channels, layers, blocks = (32, 32, 64), (0, 1, 1), ("ResBlock", "ResBlock", "ResBlock")
    return AutoencoderDC(
        in_channels=3,
        latent_channels=8,
        attention_head_dim=8,
        encoder_block_types=blocks,
        decoder_block_types=blocks,
        encoder_block_out_channels=channels,
        decoder_block_out_channels=channels,
        encoder_layers_per_block=layers,  # none at full size, which the first convolution halves
        decoder_layers_per_block=layers,
        encoder_qkv_multiscales=((), (), ()),
        decoder_qkv_multiscales=((), (), ()),
    )


def crop_loss(vae: nn.Module, images: Tensor, batch_size: int, crop: int, generator: torch.Generator) -> Tensor:
    """How well `vae` reconstructs random crops of `images` (N, 3, H, W) uint8.

    The mean absolute plus the mean squared error, with a small penalty on the size of the latents, without which their
    means would be far from the zero that diffusion needs.
    """
    chosen = torch.randint(len(images), (batch_size,), generator=generator)
    top, left = (int(torch.randint(side - crop + 1, (), generator=generator)) for side in images.shape[-2:])
    real = to_floats(images[chosen, :, top : top + crop, left : left + crop], next(vae.parameters()).device)
    latents = vae.encode(real).latent
    error = vae.decode(latents).sample - real
    return error.abs().mean() + error.square().mean() + LATENT_PENALTY * latents.square().mean()


def train_autoencoder(vae: nn.Module, loss: Callable[[], Tensor], steps: int, warmup: int, lr: float = 3e-3) -> None:
    """Train `vae` in place; each call of `loss` draws a batch and says how badly it is reconstructed."""
    vae.train()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
    warmup = min(warmup, steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    with progress(range(steps), "training the VAE", steps) as bar:
        for step in bar:
            value = loss()
            optimizer.zero_grad()
            value.backward()
            nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % 20 == 0:
                bar.set_postfix(loss=f"{value.item():.3f}", refresh=False)
    vae.requires_grad_(False).eval()


@torch.no_grad()
def finish_autoencoder(vae: nn.Module, learned: Tensor, held_out: Tensor) -> tuple[Tensor, float]:
    """Set `vae.config.scaling_factor` so that latents of `learned` have a standard deviation of 1.

    Returns 12 of the images `held_out` above their reconstructions, (2, 12, 3, H, W) in [-1, 1], and the mean PSNR of
    all of them in dB. Raises `UserError` when the latents are not finite.
    """
    device = next(vae.parameters()).device
    some = learned[:: max(1, len(learned) // 1024)]
    deviation = torch.cat([vae.encode(to_floats(part, device)).latent for part in some.split(64)]).std().item()
    if not (math.isfinite(deviation) and deviation > 0):
        raise UserError("the VAE's training diverged; other --steps, --batch-size or --seed may help")
    vae.register_to_config(scaling_factor=1 / deviation)
    real, seen = [], []
    for part in held_out.split(64):
        real.append(to_floats(part, device))
        seen.append(vae.decode(vae.encode(real[-1]).latent).sample.clamp(-1, 1))
    both = torch.stack([torch.cat(real), torch.cat(seen)]).cpu()
    error = ((both[0] - both[1]) / 2).square().flatten(1).mean(1)
    shown = torch.linspace(0, len(held_out) - 1, 12).round().long()
    return both[:, shown], (-10 * error.log10()).mean().item()


def to_floats(images: Tensor, device: torch.device) -> Tensor:
    """uint8 images as float32 in [-1, 1]."""
    return images.to(device).float() / 127.5 - 1


# Text ----------------------------------------------------------------------------------------------------------------


def gemma_tokenizer(texts: Sequence[str], vocabulary: int = 2048) -> Any:
    """A GemmaTokenizer (byte pairs, other characters byte by byte) whose merges are learned from `texts`.

    Merges stay within words: a space only begins a token, and punctuation is apart.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import GemmaTokenizer

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("▁", behavior="merged_with_next"), pre_tokenizers.Punctuation()]
    )
    fixed = SPECIAL_TOKENS + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=fixed, show_progress=False)
    # A caption comes first in a prompt, or after the instruction and a space.
    tokenizer.train_from_iterator([*texts, *(f" {text}" for text in texts)], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in model["merges"]]
    return GemmaTokenizer(vocab=model["vocab"], merges=merges, add_bos_token=True)


def gemma_encoder(vocabulary: int, pad_token_id: int) -> nn.Module:
    """A Gemma2Model of 2 layers and width 128 with random weights.

    Its embeddings are large beside what the layers add, so that each position says mostly which token stands there,
    and a little of those before it.
    """
    from transformers import Gemma2Config, Gemma2Model

    config = Gemma2Config(
        vocab_size=vocabulary,
        pad_token_id=pad_token_id,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        initializer_range=0.2,
        attn_implementation="eager",
    )
    return Gemma2Model(config).requires_grad_(False).eval()


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
