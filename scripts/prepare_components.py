"""Make the small parts that a pipeline on a small data set starts from: VAE, tokenizer, text encoder, scheduler.

    python scripts/prepare_data.py emoji data/emoji
    python scripts/prepare_components.py sana data/emoji_sana --data data/emoji/train --size 64

OUT is a diffusers pipeline folder without a transformer, for model.components of a training config. The VAE is trained
on the images (a few minutes on a CPU), the tokenizer is made of the captions, the text encoder has random weights. OUT
appears when all of it is done. OUT/reconstructions.png shows what the VAE keeps of images that it was not trained on.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mhla_diffusion.errors import UserError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=("sana",))
    parser.add_argument("out", metavar="OUT", help="folder to write; it must be new or empty")
    parser.add_argument("--data", required=True, metavar="DIR", help="captioned images, as data.train takes them")
    parser.add_argument("--size", type=int, default=64, help="side of the images in pixels (default: 64)")
    parser.add_argument("--steps", type=int, default=1500, help="of the VAE's training (default: 1500)")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="crops per step (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="all random numbers follow from it (default: 0)")
    args = parser.parse_intermixed_args(argv)
    try:
        from torchvision.transforms.functional import to_pil_image

        from mhla_diffusion.plots import plot_samples
        from mhla_diffusion.training.components import write_sana_components

        write = {"sana": write_sana_components}[args.family]
        report = write(args.out, args.data, args.size, args.steps, args.batch_size, args.seed)
        images, seen = ([to_pil_image((image + 1) / 2) for image in row] for row in report.pictures)
        picture = Path(args.out) / "reconstructions.png"
        plot_samples({"images": images, "reconstructed": seen}, [""] * len(images), picture)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{report}\nreconstructions: {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
