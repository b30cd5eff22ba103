"""Write a small data set as folders of images or videos, ready for scripts/finetune.py and scripts/evaluate_fid.py.

    python scripts/prepare_data.py digits data/digits --size 16
    python scripts/prepare_data.py emoji data/emoji
    python scripts/prepare_data.py moving-digits data/moving_digits
    python scripts/prepare_data.py clips data/clips --videos DIR

OUT/train/CLASS/… holds the training images and OUT/test/CLASS/… the held-out ones; the split is always the same.
digits: 1,797 scanned handwritten digits that ship inside scikit-learn (no download), greyscale.
emoji: about 3,800 Noto emoji of 64 pixels in their categories, with their names as captions in metadata.jsonl; fetched
with npm.
moving-digits: 200 captioned MP4s of coloured digits that bounce about (no download), without class folders.
clips: short overlapping clips cut from a folder of longer captioned videos, whose last quarters are held out.
"""

from __future__ import annotations

import argparse
import sys

from mhla_diffusion.command_line import exit_code
from mhla_diffusion.errors import UserError
from mhla_diffusion.training.clips import cut_clips
from mhla_diffusion.training.datasets import write_digits, write_emoji
from mhla_diffusion.training.moving_digits import write_moving_digits

WRITERS = {"digits": write_digits, "emoji": write_emoji, "moving-digits": write_moving_digits, "clips": cut_clips}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=WRITERS)
    parser.add_argument("out", metavar="OUT", help="folder to write; it must be new or empty")
    parser.add_argument("--size", type=int, help="side in pixels: digits 8 or 16 (default), all others 64")
    parser.add_argument("--videos", metavar="DIR", help="clips: a folder of videos with captions in metadata.jsonl")
    parser.add_argument("--num-frames", type=int, metavar="N", help="clips: length of each, 4k + 1 (default: 33)")
    parser.add_argument("--fps", type=float, help="clips: frames per second (default: 24)")
    return parser.parse_intermixed_args(argv)


def prepare(args: argparse.Namespace) -> str:
    if (args.dataset == "clips") != (args.videos is not None):
        raise UserError("--videos names the videos that clips are cut from, and goes with no other data set")
    of_clips = {"num_frames": args.num_frames, "fps": args.fps}
    given = {key: value for key, value in {"size": args.size, **of_clips}.items() if value is not None}
    if args.dataset != "clips" and given.keys() & of_clips.keys():
        raise UserError("--num-frames and --fps are of clips, and go with no other data set")
    places = [args.out] if args.videos is None else [args.videos, args.out]
    counts = WRITERS[args.dataset](*places, **given)
    return f"{counts['train']:,} training and {counts['test']:,} held-out samples in {args.out}"


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_code(lambda: prepare(args))


if __name__ == "__main__":
    sys.exit(main())
