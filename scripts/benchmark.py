"""Time the attention operator beside its alternatives: vanilla linear attention, the stock SANA core, and SDPA.

    python scripts/benchmark.py operator --grid 64 64 --heads 16 --head-dim 72 --blocks 4 4

All candidates run in turn in one process; the table shows medians and quartiles.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from mhla_diffusion.errors import UserError


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    operator = commands.add_parser("operator", help="one attention operator on random q, k, v")
    operator.add_argument("--grid", type=int, nargs="+", required=True, metavar="G", help="tokens per axis")
    operator.add_argument("--blocks", type=int, nargs="+", required=True, metavar="n", help="block counts per axis")
    operator.add_argument("--heads", type=int, default=16, help="feature heads (default: 16)")
    operator.add_argument("--head-dim", type=int, default=72, help="head dimension (default: 72)")
    operator.add_argument("--batch", type=int, default=1, help="batch size (default: 1)")
    operator.add_argument("--mixing", choices=("full", "separable"), default="full")
    operator.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    operator.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    operator.add_argument("--repeats", type=int, default=15, help="timed rounds (default: 15)")
    operator.add_argument("--backward", action="store_true", help="time forward and backward together")
    operator.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        import torch

        from mhla_diffusion.benchmark import as_json, format_timings, machine, time_operators

        settings = {k: v for k, v in vars(args).items() if k not in ("command", "json")}
        options = settings | {"grid": tuple(args.grid), "blocks": tuple(args.blocks)}
        timings = time_operators(**options | {"dtype": getattr(torch, args.dtype)})
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(", ".join(f"{name} {value}" for name, value in machine().items() if value))
    print(format_timings(", ".join(f"{name}={value}" for name, value in settings.items()), timings))
    if args.json:
        args.json.write_text(json.dumps(as_json(settings, timings), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
