"""Make the small parts that a pipeline on a small data set starts from: VAE, tokenizer, text encoder, scheduler.

    python scripts/prepare_data.py emoji data/emoji
    python scripts/prepare_components.py sana data/emoji_sana --data data/emoji/train --size 64
    python scripts/prepare_components.py wan data/clips_wan --data data/clips/train --size 64

OUT is a diffusers pipeline folder without a transformer, for model.components of a training config. The VAE is trained
on the images or videos (a few minutes on a CPU), the tokenizer is made of the captions, the text encoder has random
weights. OUT appears when all of it is done. OUT/reconstructions.png shows what the VAE keeps of images (of videos the
middle frames) that it was not trained on.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mhla_diffusion.command_line import exit_code
from mhla_diffusion.errors import UserError


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=("sana", "wan"))
    parser.add_argument("out", metavar="OUT", help="folder to write; it must be new or empty")
    parser.add_argument("--data", required=True, metavar="DIR", help="what data.train names, with captions")
    parser.add_argument("--size", type=int, default=64, help="side of the images in pixels (default: 64)")
    parser.add_argument("--steps", type=int, help="of the VAE's training (default: sana 1500, wan 300)")
    parser.add_argument("--batch-size", type=int, metavar="N", help="crops or clips per step (default: sana 16, wan 2)")
    parser.add_argument("--num-frames", type=int, metavar="N", help="wan: of a clip, 4k + 1 (default: 33)")
    parser.add_argument("--fps", type=float, help="wan: frames per second at which videos are read (default: 24)")
    parser.add_argument("--seed", type=int, default=0, help="all random numbers follow from it (default: 0)")
    return parser.parse_intermixed_args(argv)


def prepare(args: argparse.Namespace) -> str:
    from torchvision.transforms.functional import to_pil_image

    from mhla_diffusion.plots import plot_samples
    from mhla_diffusion.training.components import write_sana_components
    from mhla_diffusion.training.components_wan import write_wan_components

    write = {"sana": write_sana_components, "wan": write_wan_components}[args.family]
    of_clips = {"num_frames": args.num_frames, "fps": args.fps}
    if args.family != "wan" and of_clips != {"num_frames": None, "fps": None}:
        raise UserError("--num-frames and --fps are of videos, and go with wan only")
    given = {"steps": args.steps, "batch_size": args.batch_size, **of_clips}
    given = {name: value for name, value in given.items() if value is not None}
    report = write(args.out, args.data, args.size, seed=args.seed, **given)
    images, seen = ([to_pil_image((image + 1) / 2) for image in row] for row in report.pictures)
    picture = Path(args.out) / "reconstructions.png"
    plot_samples({"images": images, "reconstructed": seen}, [""] * len(images), picture)
    return f"{report}\nreconstructions: {picture}"


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_code(lambda: prepare(args))


if __name__ == "__main__":
    sys.exit(main())
