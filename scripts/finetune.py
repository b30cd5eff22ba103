"""Train or fine-tune a diffusion transformer with MHLA.

    accelerate launch scripts/finetune.py --config configs/dit_digits.yaml train.steps=200 output_dir=runs/mine

Every option below can be set in the YAML file and, on top of it, as key=value on the command line.
"""

from __future__ import annotations

import argparse
import sys

from mhla_diffusion.command_line import exit_code
from mhla_diffusion.training.config import config_help, config_to_yaml, load_config


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="options, with their defaults:\n" + config_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="recipe, a YAML file as in configs/")
    parser.add_argument(
        "--resume", metavar="latest|DIR", help="go on from the newest checkpoint, or from the one in DIR"
    )
    parser.add_argument("--allow-config-change", action="store_true", help="go on although the config has changed")
    parser.add_argument("--print-config", action="store_true", help="print the full config that results, and end")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options, as train.lr=1e-4")
    return parser.parse_intermixed_args(argv)


def train(args: argparse.Namespace) -> str | None:
    config = load_config(args.config, args.overrides)
    if args.print_config:
        return config_to_yaml(config).rstrip("\n")
    from mhla_diffusion.training import finetune

    result = finetune(config, args.resume, args.allow_config_change)
    if not result.stopped_by:
        return None
    where = f"at step {result.step}" if result.step else "before the first step"
    return f"stopped by {result.stopped_by} and saved {where}; --resume latest goes on"


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_code(lambda: train(args), "; --resume latest goes on from the last checkpoint, if there is one")


if __name__ == "__main__":
    sys.exit(main())
