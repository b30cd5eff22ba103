"""From nothing to a score on real digits: train a softmax DiT, retrofit it with MHLA, fine-tune it, compare all three.

    python scripts/quickstart.py --out outputs/quickstart

Every step is a call that the other scripts make; the command that does the same is printed before it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
import warnings
from pathlib import Path

from mhla_diffusion.errors import UserError

MINIATURE = ["train.steps=4", "train.batch_size=8", "validation.images=10", "validation.num_inference_steps=2"]
SAMPLING = {"num_inference_steps": 20, "guidance_scale": 2.0, "seed": 0}


def quickstart(out: Path, num_images: int, overrides: list[str]) -> str:
    """Run all steps into `out` and return the table."""
    import torch
    from PIL import Image

    from mhla_diffusion import MHLAProcessor
    from mhla_diffusion.evaluation import evaluate_images
    from mhla_diffusion.pipelines.generate import class_conditions, file_name, generate_images, load_pipeline
    from mhla_diffusion.plots import plot_losses, plot_samples
    from mhla_diffusion.training import finetune, held_out_loss, load_config
    from mhla_diffusion.training.datasets import write_digits

    torch.set_num_threads(1)  # for so small a model two threads wait for each other as long as they work
    data, configs = out / "digits", Path(__file__).resolve().parent.parent / "configs"
    say(f"python scripts/prepare_data.py digits {data} --size 8")
    write_digits(data, size=8)
    overrides = [f"data.train={data / 'train'}", f"data.validation={data / 'test'}", *overrides]

    def train(recipe: str, name: str, *more: str):
        arguments = [f"output_dir={out / name}", *more, *overrides]
        say(f"accelerate launch scripts/finetune.py --config configs/{recipe} {' '.join(arguments)}")
        return finetune(load_config(configs / recipe, arguments))

    teacher = train("dit_digits.yaml", "softmax")

    say("pipe.set_attn_processor(MHLAProcessor(cpe=True)), before any fine-tuning")
    pipe, fresh = load_pipeline(teacher.pipeline), out / "retrofitted" / "pipeline"
    config = load_config(configs / "dit_digits_mhla.yaml", overrides)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it makes noise: the table and the picture show it
        pipe.set_attn_processor(MHLAProcessor(**config.model.mhla))
    pipe.save_pretrained(fresh)

    student = train("dit_digits_mhla.yaml", "mhla", f"model.pretrained={teacher.pipeline}")

    models = {"softmax": teacher.pipeline, "retrofitted": fresh, "fine-tuned": student.pipeline}
    table = [f"{'model':<12} {'loss':>8} {'FID':>8} {'KID':>8} {'right class':>12} {'images/s':>9}"]
    pictures = {"real": [Image.open(min((data / "test" / str(digit)).iterdir())) for digit in range(10)]}
    for name, path in models.items():
        samples = out / "samples" / name
        say(
            f"python scripts/generate.py --pipeline {path} --num-images {num_images} --out {samples} "
            "--steps 20 --guidance-scale 2"
        )
        pipe = load_pipeline(path)
        conditions = class_conditions(pipe, num_images)
        report = generate_images(pipe, conditions, samples, batch_size=min(50, num_images), **SAMPLING)
        say(f"python scripts/evaluate_fid.py --generated {samples} --reference {data / 'train'} --features digits")
        score = evaluate_images(samples, data / "train", "digits", ["fid", "kid", "accuracy"])
        loss = held_out_loss(config, path)["loss"]
        table.append(
            f"{name:<12} {loss:>8.4f} {score['fid']:>8.2f} {score['kid']:>8.4f} {score['accuracy']:>12.1%} "
            f"{report.images_per_second:>9.1f}"
        )
        pictures[name] = [Image.open(samples / file_name(i)) for i in range(10)]

    curves = {"softmax": teacher.output_dir / "metrics.jsonl", "MHLA": student.output_dir / "metrics.jsonl"}
    grid = plot_samples(pictures, [str(digit) for digit in range(10)], out / "samples.png")
    curve = plot_losses(curves, out / "losses.png", starts={"MHLA": teacher.step})
    note = "64 tokens are few: softmax is the faster one here; compare at your size with scripts/benchmark.py operator"
    paths = [f"sample grid:    {grid}", f"loss curves:    {curve}", f"saved pipeline: {student.pipeline}"]
    return "\n".join([*table, note, "", *paths])


def clear(out: Path) -> None:
    """Make `out` an empty folder; only a former quickstart is removed for it."""
    mark = out / ".quickstart"
    if mark.exists():
        shutil.rmtree(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} holds something other than a former quickstart; choose a new folder.")
    out.mkdir(parents=True, exist_ok=True)
    mark.touch()


def say(command: str) -> None:
    print(f"\n$ {command}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder, or a former quickstart's")
    parser.add_argument("--num-images", type=int, default=300, help="images per model for the scores (default: 300)")
    parser.add_argument("--miniature", action="store_true", help="a few steps only, to see that all parts work")
    args = parser.parse_args()
    start = time.perf_counter()
    try:
        clear(args.out)
        table = quickstart(args.out, args.num_images, MINIATURE if args.miniature else [])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"\n{table}\n\n{time.perf_counter() - start:.0f} seconds in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
