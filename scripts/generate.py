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
import sys

from mhla_diffusion.command_line import add_generation_options, exit_code, generation_numbers


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
    add_generation_options(parser)
    parser.add_argument(
        "--instruction",
        nargs="*",
        metavar="LINE",
        help="SANA: lines before each prompt, as data.instruction in training; no LINE: none (default: SANA's)",
    )
    parser.add_argument("--npz", action="store_true", help="also write samples.npz, as the ADM suite reads it")
    return parser.parse_args(argv)


def generate(args: argparse.Namespace) -> str:
    from mhla_diffusion.pipelines.generate import check_options, check_saved, generate_images, load_pipeline
    from mhla_diffusion.pipelines.prompts import class_conditions, read_lines, read_prompts

    numbers = generation_numbers(args)
    check_options(args.out, num_images=args.num_images, **numbers)
    if args.labels:
        read_lines(args.labels, "label file")
    conditions = read_prompts(args.prompts) if args.prompts else None
    extra = {"complex_human_instruction": args.instruction}
    check_saved(args.pipeline, ["prompt" if args.prompts else "class_labels"], **numbers, **extra)
    pipeline = load_pipeline(args.pipeline, args.dtype, args.device, args.vae_dtype)
    conditions = conditions or class_conditions(pipeline, args.num_images, args.labels)
    more = {"seed": args.seed, "instruction": args.instruction, "npz": args.npz}
    return str(generate_images(pipeline, conditions, args.out, **more, **numbers))


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_code(lambda: generate(args), "; the same command goes on")


if __name__ == "__main__":
    sys.exit(main())
