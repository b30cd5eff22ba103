"""The quickstart: train a softmax DiT on real digits, retrofit it with MHLA, fine-tune it, and compare all three.

Every step is a call that scripts make too; the command that does the same is printed before it.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import UserError

if TYPE_CHECKING:  # takes its time to import, and a wrong --out is told before
    from PIL import Image

    from .training import RunResult, TrainConfig

MARK = ".quickstart"
SAMPLING = {"num_inference_steps": 20, "guidance_scale": 2.0, "seed": 0}
NOTE = "64 tokens are few: softmax is the faster one here; compare at your size with scripts/benchmark.py operator"


def quickstart(out: Path, configs: Path, num_images: int, overrides: Sequence[str] = ()) -> str:
    """Run all steps into `out`, a folder that is new or a former quickstart's, and return the table.

    Args:
        configs: the folder of recipes.
        num_images: per model, for the scores.
        overrides: `key=value` on top of the recipes.

    Raises:
        UserError: `out` holds something else; and what the steps raise.
    """
    clear(out)
    import torch

    from .plots import plot_losses, plot_samples
    from .training import load_config
    from .training.datasets import write_digits

    torch.set_num_threads(1)  # for so small a model two threads wait for each other as long as they work
    data = out / "digits"
    say(f"python scripts/prepare_data.py digits {data} --size 8")
    write_digits(data, size=8)
    overrides = [f"data.train={data / 'train'}", f"data.validation={data / 'test'}", *overrides]

    teacher = train(configs / "dit_digits.yaml", [f"output_dir={out / 'softmax'}", *overrides])
    config = load_config(configs / "dit_digits_mhla.yaml", overrides)
    fresh = retrofit(teacher.pipeline, config, out / "retrofitted" / "pipeline")
    start = f"model.pretrained={teacher.pipeline}"
    student = train(configs / "dit_digits_mhla.yaml", [f"output_dir={out / 'mhla'}", start, *overrides])

    models = {"softmax": teacher.pipeline, "retrofitted": fresh, "fine-tuned": student.pipeline}
    table = [f"{'model':<12} {'loss':>8} {'FID':>8} {'KID':>8} {'right class':>12} {'images/s':>9}"]
    pictures = {"real": [opened(min((data / "test" / str(digit)).iterdir())) for digit in range(10)]}
    for name, path in models.items():
        numbers, pictures[name] = score(path, config, data / "train", out / "samples" / name, num_images)
        table.append(f"{name:<12} {numbers}")

    curves = {"softmax": teacher.output_dir / "metrics.jsonl", "MHLA": student.output_dir / "metrics.jsonl"}
    grid = plot_samples(pictures, [str(digit) for digit in range(10)], out / "samples.png")
    curve = plot_losses(curves, out / "losses.png", starts={"MHLA": teacher.step})
    paths = [f"sample grid:    {grid}", f"loss curves:    {curve}", f"saved pipeline: {student.pipeline}"]
    return "\n".join([*table, NOTE, "", *paths])


# The steps -----------------------------------------------------------------------------------------------------------


def clear(out: Path) -> None:
    """Make `out` an empty folder; only a former quickstart is removed for it."""
    mark = out / MARK
    if mark.exists():
        shutil.rmtree(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} holds something other than a former quickstart; choose a new folder.")
    out.mkdir(parents=True, exist_ok=True)
    mark.touch()


def train(recipe: Path, arguments: Sequence[str]) -> RunResult:
    """Train by a recipe with `arguments` on top."""
    from .training import finetune, load_config

    say(f"accelerate launch scripts/finetune.py --config configs/{recipe.name} {' '.join(arguments)}")
    return finetune(load_config(recipe, arguments))


def retrofit(pipeline: Path, config: TrainConfig, out: Path) -> Path:
    """Put MHLA in place of softmax, without fine-tuning, and save the pipeline as `out`."""
    from . import MHLAProcessor
    from .pipelines.generate import load_pipeline

    say("pipe.set_attn_processor(MHLAProcessor(cpe=True)), before any fine-tuning")
    pipe = load_pipeline(pipeline)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it makes noise: the table and the picture show it
        pipe.set_attn_processor(MHLAProcessor(**config.model.mhla))
    pipe.save_pretrained(out)
    return out


def score(
    path: Path, config: TrainConfig, reference: Path, samples: Path, num_images: int
) -> tuple[str, list[Image.Image]]:
    """Generate with the pipeline at `path`; its row of the table and its first ten images."""
    from .evaluation import evaluate_images
    from .pipelines.generate import class_conditions, file_name, generate_images, load_pipeline
    from .training import held_out_loss

    say(
        f"python scripts/generate.py --pipeline {path} --num-images {num_images} --out {samples} "
        "--steps 20 --guidance-scale 2"
    )
    pipe = load_pipeline(path)
    conditions = class_conditions(pipe, num_images)
    report = generate_images(pipe, conditions, samples, batch_size=min(50, num_images), **SAMPLING)
    say(f"python scripts/evaluate_fid.py --generated {samples} --reference {reference} --features digits")
    found = evaluate_images(samples, reference, "digits", ["fid", "kid", "accuracy"])
    loss = held_out_loss(config, path)["loss"]
    numbers = f"{loss:>8.4f} {found['fid']:>8.2f} {found['kid']:>8.4f} {found['accuracy']:>12.1%}"
    return f"{numbers} {report.images_per_second:>9.1f}", [opened(samples / file_name(i)) for i in range(10)]


def opened(path: Path) -> Image.Image:
    """The image in a file."""
    from PIL import Image

    return Image.open(path)


def say(command: str) -> None:
    """Print the command that does what comes next."""
    print(f"\n$ {command}", flush=True)
