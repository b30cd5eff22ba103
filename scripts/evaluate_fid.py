"""Score a folder of generated images: FID, sFID, Inception score, precision, recall, KID.

    python scripts/evaluate_fid.py --generated samples/ --reference imagenet/train --json scores.json
    python scripts/evaluate_fid.py --generated samples/ --reference VIRTUAL_imagenet256_labeled.npz
    python scripts/evaluate_fid.py --generated samples/ --reference digits/ --features digits

Inception's weights are downloaded once by torch-fidelity; without a network, name the file with --inception-weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from mhla_diffusion.errors import UserError, check_writable


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


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
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
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(format_table(result))
    if args.json:
        try:
            Path(args.json).parent.mkdir(parents=True, exist_ok=True)
            Path(args.json).write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            print(f"error: the scores cannot be written to {args.json!r} ({error.strerror})", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
