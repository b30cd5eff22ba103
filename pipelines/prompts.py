"""What to generate: prompts from a file, or the classes of a class-conditional pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline

from ..errors import UserError
from ..text_files import read_lines as read_lines
from .generation_folder import check_name


def read_prompts(path: str | Path) -> list[dict[str, str]]:
    """The prompts of a file as conditions for `generate_images`: `{"prompt": …}`, with "name" where the file has it.

    Args:
        path: a `.jsonl` file with an object in each line: "prompt" or "text", and optionally "name", the name of the
            item's file without suffix; other keys are left aside, so a caption set's metadata.jsonl will do. Any other
            suffix: text, one prompt per line. Empty lines are skipped.

    Raises:
        UserError: the file is missing, unreadable or without prompts; a line, by number, that holds no prompt, a bad
            name, or the name of an earlier line.
    """
    path = Path(path)
    lines = read_lines(path, "prompt file")
    as_json = path.suffix.lower() in (".jsonl", ".json")
    conditions: list[dict[str, str]] = []
    names: dict[str, int] = {}
    for number, line in lines:
        place = f"line {number} of {str(path)!r}"
        condition = _prompt_of_object(line, place) if as_json else {"prompt": line}
        if (name := condition.get("name")) is not None and names.setdefault(name, number) != number:
            raise UserError(f"{place} has the name {name!r} of line {names[name]}; names must differ")
        conditions.append(condition)
    return conditions


def _prompt_of_object(line: str, place: str) -> dict[str, str]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise UserError(f'{place} is not JSON ({error}); {{"prompt": "…"}} is expected') from None
    if not isinstance(entry, dict) or not {"prompt", "text"} & entry.keys():
        raise UserError(f"{place} must be a JSON object with 'prompt' or 'text', got {line[:60]!r}")
    prompt = entry.get("prompt", entry.get("text"))
    if not isinstance(prompt, str) or not prompt.strip():
        raise UserError(f"{place} has the prompt {prompt!r}; text that is not empty is expected")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError(f"{place} has a prompt that is not valid Unicode: {prompt[:60]!r}") from None
    if (name := entry.get("name")) is None:
        return {"prompt": prompt}
    try:
        check_name(name)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    return {"prompt": prompt, "name": name}


def class_conditions(
    pipeline: DiffusionPipeline, num_images: int | None = None, labels: str | Path | None = None
) -> list[dict[str, Any]]:
    """Conditions of a class-conditional pipeline.

    Args:
        num_images: this many images, image i of class i modulo the number of classes.
        labels: or a text file with one class per line: its number, or its name where the pipeline has names.

    Raises:
        UserError: not exactly one of the two; a pipeline without classes; a line that is not one of its classes.
    """
    if (num_images is None) == (labels is None):
        raise UserError("give either num_images or labels")
    transformer = getattr(pipeline, "transformer", None)
    num_classes = getattr(getattr(transformer, "config", None), "num_embeds_ada_norm", None)
    if not num_classes:
        raise UserError(f"{type(pipeline).__name__} is not conditioned on classes; give it prompts")
    if num_images is not None:
        if num_images < 1:
            raise UserError(f"num_images={num_images} must be at least 1")
        return [{"class_labels": i % num_classes} for i in range(num_images)]
    names = getattr(pipeline, "labels", None) or {}
    conditions = []
    for number, text in read_lines(labels, "label file"):
        label = int(text) if text.isdecimal() else names.get(text)
        if label is None or label >= num_classes:
            raise UserError(
                f"line {number} of {str(labels)!r} is {text!r}; it must be a class from 0 to {num_classes - 1}"
                + (" or a class name of the pipeline" if names else "")
            )
        conditions.append({"class_labels": label})
    return conditions
