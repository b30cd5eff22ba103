"""From nothing to a score on real digits: train a softmax DiT, retrofit it with MHLA, fine-tune it, compare all three.

    python scripts/quickstart.py --out outputs/quickstart

Every step is a call that the other scripts make; the command that does the same is printed before it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from mhla_diffusion.command_line import exit_code
from mhla_diffusion.quickstart import quickstart

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
MINIATURE = ["train.steps=4", "train.batch_size=8", "validation.images=10", "validation.num_inference_steps=2"]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder, or a former quickstart's")
    parser.add_argument("--num-images", type=int, default=300, help="images per model for the scores (default: 300)")
    parser.add_argument("--miniature", action="store_true", help="a few steps only, to see that all parts work")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> str:
    start = time.perf_counter()
    table = quickstart(args.out, CONFIGS, args.num_images, MINIATURE if args.miniature else [])
    return f"\n{table}\n\n{time.perf_counter() - start:.0f} seconds in all"


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_code(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
