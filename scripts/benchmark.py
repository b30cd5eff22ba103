"""Time and memory of attention: the operator alone, a transformer block, a whole model, and how they grow.

    python scripts/benchmark.py operator --standard
    python scripts/benchmark.py block --preset Wan2.1-1.3B --size 81 480 832 --repeats 3
    python scripts/benchmark.py model --preset DiT-XL/2 --size 256 --step --gradient-checkpointing
    python scripts/benchmark.py scaling --plot scaling.png --json scaling.jsonl

Candidates run in turn, in rounds, so that a busy moment hits all alike; the tables show medians and quartiles. Memory
is measured in a process of its own for each. With --json a benchmark that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mhla_diffusion.command_line import exit_code

SERIES = ("tokens", "blocks", "model")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    operator = commands.add_parser("operator", help="one attention operator on random q, k, v")
    block = commands.add_parser("block", help="the first transformer block of a model")
    model = commands.add_parser("model", help="a whole transformer with random weights")
    scaling = commands.add_parser("scaling", help="time and memory against tokens and blocks; the crossover")

    for command in (operator, scaling):
        one_or_more = {"type": int, "nargs": "+"}
        command.add_argument("--grid", **one_or_more, metavar="G", default=[64, 64], help="tokens per axis (64 64)")
        command.add_argument("--blocks", **one_or_more, metavar="n", default=[4, 4], help="blocks per axis (4 4)")
        command.add_argument("--heads", type=int, default=16, help="feature heads (default: 16)")
        command.add_argument("--head-dim", type=int, default=72, help="head dimension (default: 72)")
        command.add_argument("--mixing", choices=("full", "separable"), default="full")
        command.add_argument("--backward", action="store_true", help="forward and backward together")
    operator.add_argument("--standard", action="store_true", help="a list of usual sizes in place of one")
    operator.add_argument("--backend", nargs="+", default=[], metavar="NAME", help="MHLA with each of these backends")
    for command, default in ((block, None), (model, None), (scaling, "DiT-S/2")):
        needed = "" if default is None else f" (default: {default})"
        command.add_argument("--preset", required=default is None, default=default, help=f"as DiT-XL/2{needed}")
        command.add_argument("--step", action="store_true", help="a training step in place of a forward pass")
        command.add_argument("--mhla", nargs="+", default=[], metavar="KEY=VALUE", help="MHLA fields, as blocks=[8,8]")
        command.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="arguments of the model")
    for command in (block, model):
        command.add_argument("--size", type=int, nargs="+", required=True, metavar="P", help="pixels: [frames] H [W]")
        command.add_argument("--mixed-precision", choices=("no", "bf16", "fp16"), default="no")
        command.add_argument("--profile", action="store_true", help="also the share of attention in a forward pass")
        command.add_argument("--once", action="store_true", help="one call of each without warm-up, for very long ones")
    model.add_argument("--gradient-checkpointing", action="store_true")
    scaling.add_argument("--over", nargs="+", choices=SERIES, default=list(SERIES), help="which series (default: all)")
    scaling.add_argument("--sides", type=int, nargs="+", default=[16, 32, 64, 128, 256], help="of the token grids")
    scaling.add_argument("--block-counts", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="n of n×n blocks")
    scaling.add_argument(
        "--model-sizes", type=int, nargs="+", default=[128, 256, 512, 1024], help="image sides, pixels"
    )
    scaling.add_argument("--max-seconds", type=float, default=60.0, help="leave out what takes longer a call (60)")
    for command, repeats in ((operator, 15), (block, 5), (model, 5), (scaling, 7)):
        command.add_argument("--batch", type=int, default=1, help="batch size (default: 1)")
        command.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
        command.add_argument("--device", default="cpu", help="cpu (default) or cuda")
        command.add_argument("--repeats", type=int, default=repeats, help=f"timed calls of each ({repeats})")
        command.add_argument(
            "--budget", type=float, default=60.0, help="seconds of calls that end a candidate's part (60)"
        )
        command.add_argument("--no-memory", dest="memory", action="store_false", help="measure times only")
        if command is not scaling:
            command.add_argument("--variants", nargs="+", default=[], metavar="NAME", help="only these candidates")
        command.add_argument("--json", type=Path, metavar="FILE", help="keep measurements here, as JSON lines")
        command.add_argument("--plot", type=Path, metavar="FILE", help="draw them, as PNG")
    return parser.parse_args(argv)


def benchmark(args: argparse.Namespace) -> str:
    from mhla_diffusion.benchmarks.commands import run_command

    return run_command(args.command, {k: v for k, v in vars(args).items() if k != "command"})


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_code(lambda: benchmark(args))


if __name__ == "__main__":
    sys.exit(main())
