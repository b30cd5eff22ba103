"""CLIP score: how well images fit their captions.

The score of an image x with caption c is max(100 · cos(E(x), E(c)), 0), E being CLIP's image and text embeddings, and
that of a set is the mean over its images. This is the scale on which text-to-image models are reported (SANA's with
OpenAI's ViT-L/14). Hessel et al. 2021, "CLIPScore", have the same quantity times 2.5 in place of 100, with ViT-B/32.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

from ..devices import usable_device
from ..errors import UserError
from .captions import read_captions
from .images import ImageSet

DEFAULT_MODEL = "openai/clip-vit-large-patch14"
DTYPES = ("float32", "float16", "bfloat16")


class CLIPScorer:
    """CLIP with its preprocessing, from transformers.

    Args:
        model: a hub id, or a folder with the model, its tokenizer and its image processor.
        dtype: "float32", "float16" or "bfloat16"; embeddings are compared in float32 whichever it is.
        device: default: the GPU if there is one.

    Raises:
        UserError: an unknown dtype, or a model that cannot be had.
    """

    def __init__(
        self, model: str | Path = DEFAULT_MODEL, dtype: str = "float32", device: str | torch.device | None = None
    ):
        if dtype not in DTYPES:
            raise UserError(f"dtype={dtype!r} is not known; {', '.join(DTYPES)} are")
        self.name, self.dtype, self.device = str(model), getattr(torch, dtype), usable_device(device)
        _check_place(self.name)
        try:
            loaded = CLIPModel.from_pretrained(self.name)
            self.tokenizer = AutoTokenizer.from_pretrained(self.name)
            self.image_processor = AutoImageProcessor.from_pretrained(self.name)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            reason = str(error).strip().split("\n")[0]
            raise UserError(f"the CLIP model {self.name!r} could not be loaded: {reason}") from None
        self.model = loaded.to(self.device, self.dtype).eval().requires_grad_(False)
        self.max_tokens: int = loaded.config.text_config.max_position_embeddings

    def count_tokens(self, captions: list[str]) -> list[int]:
        """Tokens of each caption, with start and end; those beyond `max_tokens` do not count for the score."""
        return [len(ids) for ids in self.tokenizer(captions, truncation=False, verbose=False)["input_ids"]]

    @torch.no_grad()
    def __call__(self, images: Tensor, captions: list[str]) -> Tensor:
        """Scores of pairs.

        Args:
            images: uint8 (B, 3, H, W).
            captions: B texts; what exceeds `max_tokens` is cut off.

        Returns:
            (B,) float64 on the CPU, from 0 to 100.
        """
        texts = self.tokenizer(
            captions, padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt"
        ).to(self.device)
        pixels = self.image_processor(images=list(images), return_tensors="pt")["pixel_values"]
        # TF32 convolutions change the third digit of a score; where they are wanted there is a half precision.
        with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
            found = self.model(
                input_ids=texts["input_ids"],
                attention_mask=texts["attention_mask"],
                pixel_values=pixels.to(self.device, self.dtype),
            )
        cosine = torch.cosine_similarity(found.image_embeds.float(), found.text_embeds.float(), dim=-1)
        return 100 * cosine.double().clamp(min=0).cpu()


def clip_score(
    generated: str | Path | ImageSet,
    captions: str | Path | None = None,
    model: str | Path | CLIPScorer = DEFAULT_MODEL,
    *,
    dtype: str = "float32",
    batch_size: int = 64,
    workers: int = 4,
    device: str | torch.device | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Mean CLIP score of the images in a folder with the texts they were generated from.

    Args:
        generated: the folder.
        captions: a file with the texts; None: what lies in the folder. See `read_captions`.
        model: a hub id, a local folder, or a loaded scorer.
        dtype: precision of CLIP.
        batch_size: images per forward pass; does not change the result beyond rounding.
        workers: threads that decode images.
        device: default: the GPU if there is one.

    Returns:
        `clip_score`, its standard error `clip_score_error` (None for one image), `num_images`, `num_truncated`
        (captions longer than CLIP reads), `generated`, `protocol` and `notes`. All of it fits into JSON.

    Raises:
        UserError: missing images, captions or model; all of these before the first image is scored.
    """
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size} must be at least 1")
    images = generated if isinstance(generated, ImageSet) else ImageSet(generated, "generated")
    texts = read_captions(images, captions)
    scorer = model if isinstance(model, CLIPScorer) else CLIPScorer(model, dtype, device)
    scores: dict[int, float] = {}
    truncated = 0
    with tqdm(total=len(images), desc="CLIP score", unit="image", disable=not progress, dynamic_ncols=True) as bar:
        for indices, batch in images.batches(batch_size, workers):
            chosen = [texts[index] for index in indices]
            truncated += sum(count > scorer.max_tokens for count in scorer.count_tokens(chosen))
            scores.update(zip(indices, scorer(batch, chosen).tolist(), strict=True))
            bar.update(len(indices))
    if not scores:
        reason = f" ({images.unreadable[0]})" if images.unreadable else ""
        raise UserError(f"none of the images in {str(images.path)!r} can be read{reason}")
    values = [scores[index] for index in sorted(scores)]
    mean = math.fsum(values) / len(values)
    spread = math.fsum((value - mean) ** 2 for value in values)
    notes = images.notes()
    if truncated:
        notes.append(
            f"of {len(values)} captions {truncated} had more than {scorer.max_tokens} tokens, the rest cut off."
        )
    precision = str(scorer.dtype).removeprefix("torch.")
    return {
        "clip_score": mean,
        "clip_score_error": math.sqrt(spread / (len(values) - 1) / len(values)) if len(values) > 1 else None,
        "num_images": len(values),
        "num_truncated": truncated,
        "generated": str(images.path),
        "protocol": f"mean of max(100 cos, 0), {scorer.name}, {precision}",
        "notes": notes,
    }


def format_clip_score(result: dict[str, Any]) -> str:
    """The result of `clip_score` as text."""
    error = result["clip_score_error"]
    text = f"{result['clip_score']:.3f}" + (f" ± {error:.2g}" if error is not None else "")
    lines = [f"{'CLIP score':<16} {text:<20} {result['protocol']}", f"{'images':<16} {result['num_images']}"]
    return "\n".join(lines + [f"note: {note}" for note in result["notes"]])


def _check_place(name: str) -> None:
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        raise UserError(f"the CLIP model {name!r} is a folder without config.json")
    if not path.exists() and (name.count("/") > 1 or name.startswith((".", "/", "~"))):
        raise UserError(f"the CLIP model {name!r} does not exist, and it is not a hub id (owner/name)")
