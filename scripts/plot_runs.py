"""Plot what training runs and generated folders hold.

    python scripts/plot_runs.py --run stock=runs/a --run "stock, trained on=runs/b" --run MHLA=runs/c --out losses.png
    python scripts/plot_runs.py --samples stock=samples/b --samples MHLA=samples/c --count 10 --out samples.png

Loss curves: training loss as lines, held-out loss as points, against optimiser steps; a run that starts from the
pipeline of another one that is shown begins at that one's last step. Samples: a row per folder of scripts/generate.py,
a column per prompt.
"""

from __future__ import annotations

import argparse
import sys

from mhla_diffusion.command_line import exit_code
from mhla_diffusion.errors import check_writable


def named(text: str) -> tuple[str, str]:
    name, found, path = text.rpartition("=")
    if not (name and found and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=DIR")
    return name, path


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", action="append", type=named, metavar="NAME=DIR", help="a run's folder; once per curve")
    what.add_argument(
        "--samples", action="append", type=named, metavar="NAME=DIR", help="a folder of images; once per row"
    )
    parser.add_argument("--count", type=int, default=8, metavar="N", help="samples per row (default: 8)")
    parser.add_argument("--linear", action="store_true", help="a linear instead of a logarithmic axis of losses")
    parser.add_argument("--out", required=True, metavar="FILE", help="the PNG file")
    args = parser.parse_intermixed_args(argv)
    names = [name for name, _ in args.run or args.samples]
    if repeated := [name for name in names if names.count(name) > 1]:
        parser.error(f"the name {repeated[0]!r} is given twice; names must differ")
    return args


def plot(args: argparse.Namespace) -> str:
    from mhla_diffusion.plots import plot_losses, plot_samples, read_samples, run_curves

    check_writable("--out", args.out)
    if args.run:
        metrics, starts = run_curves(dict(args.run))
        plot_losses(metrics, args.out, starts, log=not args.linear)
    else:
        rows, columns = read_samples(dict(args.samples), args.count)
        plot_samples(rows, columns, args.out)
    return args.out


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_code(lambda: plot(args))


if __name__ == "__main__":
    sys.exit(main())
