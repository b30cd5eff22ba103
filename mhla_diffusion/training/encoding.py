"""What a transformer sees of the data: latents of the pixels, and conditions from captions or class labels.

The parts of the pipeline that make them (VAE, tokenizer, text encoder) are frozen, and those that a run does not need,
because a cache holds what they would say, are not kept in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..backbones.family import Family, Objective
from ..errors import UserError
from .cached import CachedLatents
from .checkpoints import on_main_process
from .config import DataOptions, ModelOptions
from .data import Batch, ImageSource, read_batches
from .known_parts import files_signature, is_known, remember
from .model import load_components
from .sources import check_sources


class Encoder:
    """Turns the batches of one source into latents and conditions, on `device` and in float32.

    Args:
        components: of the pipeline, those that the source does not make unnecessary.
        say: told once when the end of a caption is cut off.

    Raises:
        UserError: when there is no text encoder for captions that are to be encoded.
    """

    def __init__(
        self,
        family: Family,
        components: Mapping[str, Any],
        options: DataOptions,
        source: ImageSource,
        device: torch.device,
        say: Callable[[str], None] = print,
    ) -> None:
        self.family, self.components, self.options = family, components, options
        self.source, self.device, self.say = source, device, say
        self.captions = self.cut = 0  # encoded so far, and of these without their end
        self.null: dict[str, Tensor] = {}
        if family.takes_text:
            if not source.text_cached:
                check_text_components(family, components)
            null = source.shared_conditions or family.null_conditions(components, options.max_tokens)
            self.null = self._placed(null)

    def __call__(self, batch: Batch, generators: list[torch.Generator]) -> tuple[Tensor, dict[str, Tensor]]:
        """Scaled latents, drawn with one CPU generator per sample, and what the objective takes as conditions."""
        return batch.latents(self.family, self.components, generators, self.device), self.conditions(batch)

    def inputs(self, batch: Batch, model: nn.Module, objective: Objective, seed: int) -> dict[str, Any]:
        """What `objective.loss` takes in training: everything random drawn from `seed` and each sample's epoch."""
        generators = batch.generators(seed)
        latents, conditions = self(batch, generators)
        return objective.prepare(model, latents, conditions, generators)

    def conditions(self, batch: Batch) -> dict[str, Tensor]:
        """The conditions of a batch, one row each, and the null conditions."""
        given = self._placed(batch.conditions)
        if self.family.takes_text and not self.source.text_cached:
            given |= self.encode([text or "" for text in batch.texts])
        return given | self.null

    def encode(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Captions as conditions, one row each."""
        how = (self.options.instruction, self.options.max_tokens)
        cut = [caption for caption, long in zip(captions, self._too_long(captions), strict=True) if long]
        if cut and not self.cut:
            self.say(f"captions are longer than the text encoder takes, and lose their end; the first: {cut[0]!r}")
        self.captions, self.cut = self.captions + len(captions), self.cut + len(cut)
        return self._placed(self.family.encode_prompts(self.components, captions, *how))

    def _too_long(self, captions: Sequence[str]) -> list[bool]:
        return self.family.too_long(self.components, captions, self.options.instruction, self.options.max_tokens)

    def _placed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        moved = {name: value.to(self.device, non_blocking=True) for name, value in tensors.items()}
        return {name: value.float() if value.is_floating_point() else value for name, value in moved.items()}


def check_conditions(family: Family, sources: Mapping[str, ImageSource | None]) -> None:
    """Raise `UserError` when the data at a config key do not have the captions or classes that the family takes."""
    for key, source in sources.items():
        if source is None:
            continue
        if family.takes_text and not source.captioned and not source.text_cached:
            raise UserError(
                f"model.family is {family.name!r}, which takes captions, but {key} has samples without one; give each "
                "a line with file_name and text in metadata.jsonl, or choose another family"
            )
        if not family.takes_text and not source.class_names:
            raise UserError(
                f"model.family is {family.name!r}, which takes classes, but {key} has none; sort the samples into one "
                "folder per class, or choose a family that takes captions"
            )


def check_labels(labels: Sequence[int], class_names: Sequence[str]) -> None:
    """Raise `UserError` when `validation.labels` names a class that data with classes do not have."""
    for label in labels if class_names else ():
        if not 0 <= label < len(class_names):
            raise UserError(
                f"validation.labels names class {label}, but data.train has {len(class_names)} classes; 0 to "
                f"{len(class_names) - 1} are accepted"
            )


def check_text_components(family: Family, components: Collection[str]) -> None:
    """Raise `UserError` when `components` lack what `family.encode_prompts` needs."""
    missing = [name for name in family.text_components if name not in components]
    if missing:
        raise UserError(
            f"neither model.components nor model.pretrained names a pipeline with a {missing[0]}, without which "
            "captions cannot be encoded; name one, or train on a cache (scripts/cache_latents.py)"
        )


def open_components(
    options: ModelOptions,
    data: DataOptions,
    family: Family,
    sources: Sequence[ImageSource | None],
    accelerator: Accelerator,
    pictures: bool,
) -> dict[str, Any]:
    """The parts of the pipeline besides its transformer that a run on `sources` uses, on the run's device.

    Caches among the sources are first checked against the parts that made them; those that are not kept are loaded for
    that by the main process only, and not at all when the same files have been checked before.

    Args:
        pictures: whether samples will be decoded.
    """
    given = [source for source in sources if source is not None]
    unused = set(family.text_components) if all(source.text_cached for source in given) else set()
    if not pictures and all(isinstance(source, CachedLatents) for source in given):
        unused.add("vae")
    caches = [source.root for source in given if isinstance(source, CachedLatents)]
    signature = files_signature(options, family.name, ("vae", *family.text_components)) if caches else None
    components = load_components(options, without=unused)

    def check() -> None:
        if all(is_known(cache, signature) for cache in caches):
            return
        others = load_components(options, only=unused) if unused else {}
        check_sources(given, family, {**others, **components})
        for cache in caches:
            remember(cache, signature)

    on_main_process(accelerator, check)
    for part in components.values():
        if isinstance(part, nn.Module):
            part.to(accelerator.device)
    return components


def encoded_shape(source: ImageSource) -> tuple[int, ...] | None:
    """The shape of the first latents of a cache; None for a source of pixels."""
    if not isinstance(source, CachedLatents):
        return None
    return source.latent_shape or tuple(source.read(0, torch.Generator()).posterior["mean"].shape)


def sample_conditions(encoder: Encoder, count: int, seed: int) -> dict[str, Tensor]:
    """The conditions of the first `count` samples of the encoder's source (all of them where it has fewer)."""
    plan = [[(0, index)] for index in range(min(count, len(encoder.source)))]  # one by one: their shapes may differ
    rows = [encoder.conditions(batch) for batch in read_batches(encoder.source, plan, seed, num_workers=0)]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0] if name not in encoder.null} | encoder.null
