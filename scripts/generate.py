"""Generate a folder of images from a saved pipeline.

    python scripts/generate.py --pipeline runs/digits/pipeline --num-images 100 --out samples/
    accelerate launch scripts/generate.py --pipeline out --num-images 50000 --steps 250 --guidance-scale 1.5 \\
        --out samples/ --npz

Image i is a function of the seed and i. Running the command again makes what is missing; a folder of other settings is
refused.
"""

from __future__ import annotations

import argparse
import os
import sys

from mhla_diffusion.errors import UserError


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", required=True, metavar="DIR_OR_ID", help="a saved pipeline, or a hub id")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--num-images", type=int, metavar="N", help="this many images, the classes in turn")
    what.add_argument("--labels", metavar="FILE", help="one image per line: a class number, or a class name")
    parser.add_argument("--out", required=True, metavar="DIR", help="where the PNG files go")
    parser.add_argument("--steps", type=int, default=50, help="denoising steps (default: 50)")
    parser.add_argument("--guidance-scale", type=float, default=4.0, help="1: no guidance (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="all images depend on it (default: 0)")
    parser.add_argument("--batch-size", type=int, default=16, help="images per forward pass (default: 16)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", help="cuda, cpu, … (default: the GPU of this process if there is one)")
    parser.add_argument("--npz", action="store_true", help="also write samples.npz, as the ADM suite reads it")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    is_main = os.environ.get("RANK", "0") == "0"
    try:
        from mhla_diffusion.pipelines.generate import (
            class_conditions,
            generate_images,
            load_pipeline,
        )

        pipeline = load_pipeline(args.pipeline, args.dtype, args.device)
        report = generate_images(
            pipeline,
            class_conditions(pipeline, args.num_images, args.labels),
            args.out,
            seed=args.seed,
            num_inference_steps=args.steps,
            guidance_scale=args.guidance_scale,
            batch_size=args.batch_size,
            npz=args.npz,
        )
    except UserError as error:
        if is_main or getattr(error, "of_one_process", False):
            print(f"error: {error}", file=sys.stderr)
        return 2
    if is_main:
        print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
