"""Score a folder of generated images: FID, sFID, Inception score, precision, recall, KID.

    python scripts/evaluate_fid.py --generated samples/ --reference imagenet/train --json scores.json
    python scripts/evaluate_fid.py --generated samples/ --reference VIRTUAL_imagenet256_labeled.npz
    python scripts/evaluate_fid.py --generated samples/ --reference digits/ --features digits

Inception's weights are downloaded once by torch-fidelity; without a network, name the file with --inception-weights.
"""

from __future__ import annotations

import argparse
import sys

from mhla_diffusion.command_line import exit_code
from mhla_diffusion.errors import check_writable
from mhla_diffusion.text_files import write_json


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generated", required=True, metavar="DIR", help="generated images, or an .npz with arr_0")
    parser.add_argument(
        "--reference", required=True, metavar="DIR|FILE.npz", help="real images, their statistics, or an ADM .npz"
    )
    parser.add_argument("--features", default="inception", help="inception (default), digits, or a registered name")
    parser.add_argument("--inception-weights", metavar="FILE", help="Inception's weights (default: downloaded)")
    parser.add_argument("--metrics", metavar="A,B", help="only these, e.g. fid,kid (default: all)")
    parser.add_argument("--save-statistics", metavar="FILE.npz", help="keep the reference's statistics for later use")
    parser.add_argument("--json", metavar="FILE", help="also write the result here")
    parser.add_argument("--batch-size", type=int, default=64, help="images per forward pass (default: 64)")
    parser.add_argument("--workers", type=int, default=4, help="threads that decode images (default: 4)")
    parser.add_argument("--device", help="cuda, cpu, … (default: the GPU if there is one)")
    return parser.parse_args(argv)


def evaluate(args: argparse.Namespace) -> None:
    from mhla_diffusion.evaluation import evaluate_images, format_table

    if args.json:
        check_writable("--json", args.json)
    result = evaluate_images(
        args.generated,
        args.reference,
        args.features,
        args.metrics.split(",") if args.metrics else None,
        inception_weights=args.inception_weights,
        save_statistics=args.save_statistics,
        batch_size=args.batch_size,
        workers=args.workers,
        device=args.device,
    )
    print(format_table(result))
    if args.json:
        write_json("--json", args.json, result)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_code(lambda: evaluate(args))


if __name__ == "__main__":
    sys.exit(main())
