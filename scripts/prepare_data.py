"""Write a small real data set as image folders, ready for scripts/finetune.py and scripts/evaluate_fid.py.

    python scripts/prepare_data.py digits data/digits --size 16
    python scripts/prepare_data.py emoji data/emoji

OUT/train/CLASS/… holds the training images and OUT/test/CLASS/… the held-out ones; the split is always the same.
digits: 1,797 scanned handwritten digits that ship inside scikit-learn (no download), greyscale.
emoji: about 3,800 Noto emoji of 64 pixels in their categories, with their names as captions in metadata.jsonl; fetched
with npm.
"""

from __future__ import annotations

import argparse
import sys

from mhla_diffusion.errors import UserError
from mhla_diffusion.training.datasets import write_digits, write_emoji


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=("digits", "emoji"))
    parser.add_argument("out", metavar="OUT", help="folder to write; it must be new or empty")
    parser.add_argument("--size", type=int, help="side of the images in pixels: digits 8 or 16 (default), emoji 64")
    arguments = parser.parse_intermixed_args()
    try:
        write = {"digits": write_digits, "emoji": write_emoji}[arguments.dataset]
        counts = write(arguments.out, **({} if arguments.size is None else {"size": arguments.size}))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{counts['train']:,} training and {counts['test']:,} held-out images in {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
