"""Generate a folder of images or videos from a saved pipeline.

    python scripts/generate.py --pipeline runs/digits/pipeline --num-images 100 --out samples/
    accelerate launch scripts/generate.py --pipeline out --num-images 50000 --steps 250 --guidance-scale 1.5 \\
        --out samples/ --npz
    python scripts/generate.py --pipeline sana-mhla --prompts captions.jsonl --out samples/ --height 1024 --width 768
    python scripts/generate.py --pipeline wan-mhla --prompts prompts.txt --out videos/ --num-frames 81

Item i is a function of the seed and i. Running the command again makes what is missing; a folder of other settings is
refused. Several processes on one folder, launched together or started by hand at any time, share the work.
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
    what.add_argument(
        "--prompts",
        metavar="FILE",
        help='one item per line: a prompt; in a .jsonl file {"prompt": …} or {"text": …}, if wanted with the "name" of '
        "its file",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="where the PNG or MP4 files go")
    parser.add_argument("--steps", type=int, help="denoising steps (default: the pipeline's; DiT 50, SANA 20, Wan 50)")
    parser.add_argument(
        "--guidance-scale", type=float, help="1: no guidance (default: the pipeline's; DiT 4, SANA 4.5, Wan 5)"
    )
    parser.add_argument("--height", type=int, help="in pixels (default: the pipeline's)")
    parser.add_argument("--width", type=int, help="in pixels (default: the pipeline's)")
    parser.add_argument("--num-frames", type=int, help="of a video; Wan: 4k + 1 (default: the pipeline's; Wan 81)")
    parser.add_argument("--fps", type=float, help="frames per second of a video file (default: 16, as Wan2.1)")
    parser.add_argument("--seed", type=int, default=0, help="everything depends on it (default: 0)")
    parser.add_argument("--batch-size", type=int, help="items per forward pass (default: at most 16 images, 1 video)")
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="of the weights (default: float32)")
    parser.add_argument("--vae-dtype", choices=dtypes, help="of the VAE (default: float32 for videos, else --dtype)")
    parser.add_argument("--device", help="cuda, cpu, … (default: the GPU of this process if there is one)")
    parser.add_argument("--npz", action="store_true", help="also write samples.npz, as the ADM suite reads it")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    is_main = os.environ.get("RANK", "0") == "0"
    names = ("guidance_scale", "height", "width", "num_frames", "fps", "batch_size")
    numbers = {name: getattr(args, name) for name in names} | {"num_inference_steps": args.steps}
    try:
        from mhla_diffusion.pipelines.generate import check_options, generate_images, load_pipeline
        from mhla_diffusion.pipelines.prompts import class_conditions, read_lines, read_prompts

        check_options(args.out, num_images=args.num_images, **numbers)
        if args.labels:
            read_lines(args.labels, "label file")
        conditions = read_prompts(args.prompts) if args.prompts else None
        pipeline = load_pipeline(args.pipeline, args.dtype, args.device, args.vae_dtype)
        conditions = conditions or class_conditions(pipeline, args.num_images, args.labels)
        report = generate_images(pipeline, conditions, args.out, seed=args.seed, npz=args.npz, **numbers)
    except UserError as error:
        if is_main or getattr(error, "of_one_process", False):
            print(f"error: {error}", file=sys.stderr)
        return 2
    if is_main:
        print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
