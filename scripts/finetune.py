"""Train or fine-tune a diffusion transformer with MHLA.

    accelerate launch scripts/finetune.py --config configs/dit_digits.yaml train.steps=200 output_dir=runs/mine

Every option below can be set in the YAML file and, on top of it, as key=value on the command line.
"""

from __future__ import annotations

import argparse
import os
import sys

from mhla_diffusion.errors import UserError
from mhla_diffusion.training.config import config_help, config_to_yaml, load_config


def main() -> int:
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
    arguments = parser.parse_intermixed_args()

    is_main = os.environ.get("RANK", "0") == "0"
    try:
        config = load_config(arguments.config, arguments.overrides)
        if arguments.print_config:
            print(config_to_yaml(config), end="")
            return 0
        from mhla_diffusion.training import finetune

        result = finetune(config, arguments.resume, arguments.allow_config_change)
    except UserError as error:
        if is_main or getattr(error, "of_one_process", False):
            print(f"error: {error}", file=sys.stderr)
        return 2
    if is_main and result.stopped_by:
        print(f"stopped by {result.stopped_by} and saved at step {result.step}; --resume latest goes on")
    return 0


if __name__ == "__main__":
    sys.exit(main())
