"""GenEval (Ghosh et al. 2023): the folders that its evaluator reads, and the scores from what it writes.

Its prompts stand in `evaluation_metadata.jsonl`, one JSON object a line with `tag`, `prompt` and what has to be seen
(`include`, `exclude`). Its evaluator (djghosh13/geneval, `evaluation/evaluate_images.py`, which needs its own
environment) reads

    OUT/00000/metadata.jsonl            line 0 of that file
    OUT/00000/samples/0000.png, …       four images of its prompt

and writes `results.jsonl`, one line an image. The score of a task is the share of its images that are correct, the
overall score the mean over the six tasks (`evaluation/summary_scores.py` there).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from ..errors import UserError, check_writable, nearest
from ..text_files import read_objects
from ..training.checkpoints import write_whole

TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
SAMPLES = 4
PROMPTS = 553  # in the published evaluation_metadata.jsonl
PROMPT_FILE = "prompts.jsonl"


def read_prompts(path: str | Path) -> list[dict[str, Any]]:
    """The prompts of an `evaluation_metadata.jsonl`.

    Raises:
        UserError: a missing or empty file, or a line without a prompt, one of the six tags and `include`.
    """
    entries = []
    for place, entry in read_objects(path, "GenEval metadata file"):
        _check_tag(entry, place)
        if not isinstance(entry.get("prompt"), str) or not entry["prompt"].strip():
            raise UserError(f"{place} has no 'prompt'")
        if not isinstance(entry.get("include"), list):
            raise UserError(f"{place} has no list 'include' of what has to be seen")
        entries.append(entry)
    return entries


def lay_out(metadata: str | Path, out: str | Path, samples: int = SAMPLES) -> Path:
    """Write each prompt's folder with its `metadata.jsonl`, and `prompts.jsonl` from which the images are generated.

    Args:
        metadata: GenEval's `evaluation_metadata.jsonl`.
        out: the folder that GenEval's evaluator will be given.
        samples: images per prompt; GenEval takes 4.

    Returns:
        `out/prompts.jsonl`, whose lines hold `prompt` and `name` (`00000/samples/0000`): generating from it into `out`
        puts every image in its place.

    Raises:
        UserError: bad metadata, `samples` below 1, or a folder that holds other prompts or cannot be written.
    """
    if samples < 1:
        raise UserError(f"samples={samples} must be at least 1")
    entries, out = read_prompts(metadata), Path(out)
    if out.exists() and not out.is_dir():
        raise UserError(f"the output folder {str(out)!r} is a file")
    check_writable("out", out / PROMPT_FILE)
    folders = [out / f"{index:05d}" for index in range(len(entries))]
    texts = [json.dumps(entry) for entry in entries]  # as GenEval writes it: ASCII, one line
    known = {path.name for path in out.iterdir() if path.is_dir() and path.name.isdigit()}
    if extra := sorted(known - {folder.name for folder in folders}):
        raise UserError(f"the output folder {str(out)!r} holds {extra[0]!r}, which {str(metadata)!r} has no line for")
    for folder, text in zip(folders, texts, strict=True):
        path = folder / "metadata.jsonl"
        if path.is_file() and path.read_text(encoding="utf-8") != text:
            raise UserError(f"{str(path)!r} holds another prompt; choose a new folder")
    lines = [
        {"prompt": entry["prompt"], "name": f"{folder.name}/samples/{sample:04d}"}
        for folder, entry in zip(folders, entries, strict=True)
        for sample in range(samples)
    ]
    try:
        for folder, text in zip(folders, texts, strict=True):
            (folder / "samples").mkdir(parents=True, exist_ok=True)
            (folder / "metadata.jsonl").write_text(text, encoding="utf-8")
        write_whole(out / PROMPT_FILE, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    except OSError as error:
        raise UserError(f"the output folder {str(out)!r} cannot be written ({error.strerror})") from None
    return out / PROMPT_FILE


def summarize_results(path: str | Path) -> dict[str, Any]:
    """GenEval's scores from the `results.jsonl` of its evaluator.

    Returns:
        `tasks` (task → share of correct images, from 0 to 1), `overall` (their mean; None unless all six are there),
        `missing` (tasks without images), `images` (task → how many), `correct_images`, `correct_prompts` (shares),
        `num_images`, `num_prompts` and `notes`. All of it fits into JSON.

    Raises:
        UserError: a missing or empty file, a line without `tag`, `correct` and `metadata` or `prompt`, an unknown tag,
            `correct` other than true or false, or an image that stands twice.
    """
    correct: dict[str, list[bool]] = {}
    prompts: dict[str, list[bool]] = {}
    files: dict[str, str] = {}
    for place, entry in read_objects(path, "GenEval results file"):
        tag = _check_tag(entry, place)
        value = entry.get("correct")
        if not isinstance(value, bool):
            raise UserError(f"{place} has correct={value!r}; true or false is accepted")
        prompt = entry.get("metadata", entry.get("prompt"))
        if not isinstance(prompt, str):
            raise UserError(f"{place} has neither 'metadata' nor 'prompt'")
        file = entry.get("filename")
        if file is not None and files.setdefault(file, place) != place:
            raise UserError(f"{place} is about {file!r}, as {files[file]} is; each image is to stand once")
        correct.setdefault(tag, []).append(value)
        prompts.setdefault(prompt, []).append(value)
    tasks = {task: _share(correct[task]) for task in TASKS if task in correct}
    missing = [task for task in TASKS if task not in correct]
    everything = [value for values in correct.values() for value in values]
    return {
        "tasks": tasks,
        "overall": None if missing else math.fsum(tasks.values()) / len(TASKS),
        "missing": missing,
        "images": {task: len(correct[task]) for task in tasks},
        "correct_images": _share(everything),
        "correct_prompts": _share([any(values) for values in prompts.values()]),
        "num_images": len(everything),
        "num_prompts": len(prompts),
        "notes": _notes(prompts),
    }


def format_results(result: dict[str, Any]) -> str:
    """The result of `summarize_results` as a table."""
    lines = [f"{'task':<16}{'score':>8}{'images':>8}"]
    lines += [f"{task:<16}{score:>8.4f}{result['images'][task]:>8}" for task, score in result["tasks"].items()]
    overall = result["overall"]
    lines.append(f"{'overall':<16}{'–' if overall is None else f'{overall:.4f}':>8}{result['num_images']:>8}")
    lines.append(
        f"{result['correct_images']:.2%} of the images are correct, and for {result['correct_prompts']:.2%} of the "
        f"{result['num_prompts']} prompts at least one"
    )
    if result["missing"]:
        lines.append(f"missing, so that there is no overall score: {', '.join(result['missing'])}")
    return "\n".join(lines + [f"note: {note}" for note in result["notes"]])


def _notes(prompts: dict[str, list[bool]]) -> list[str]:
    notes = []
    if len(prompts) != PROMPTS:
        notes.append(f"The results are of {len(prompts)} prompts, GenEval has {PROMPTS}.")
    counts = Counter(len(values) for values in prompts.values())
    if set(counts) != {SAMPLES}:
        shown = ", ".join(f"{count} prompts with {size}" for size, count in sorted(counts.items()))
        notes.append(f"GenEval takes {SAMPLES} images per prompt; here are {shown}.")
    return notes


def _share(values: list[bool]) -> float:
    return sum(values) / len(values)


def _check_tag(entry: dict[str, Any], place: str) -> str:
    tag = entry.get("tag")
    if tag not in TASKS:
        raise UserError(f"{place} has tag={tag!r}{nearest(str(tag), TASKS)}; GenEval's tags are {', '.join(TASKS)}")
    return tag
