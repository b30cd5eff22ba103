"""Encode a training config's images or videos, and their captions, once, so that training reads what came out.

    accelerate launch scripts/cache_latents.py --config configs/dit_s2_256.yaml data.train=imagenet --out latents
    accelerate launch scripts/finetune.py --config configs/dit_s2_256.yaml data.train=latents

What was cut goes on with the same command. Sizes, buckets, flips and the form of captions are those of the config, VAE
and text encoder those of its model; a cache that does not fit the config it is trained with is refused.
"""

from __future__ import annotations

import argparse
import os
import sys

from mhla_diffusion.errors import UserError
from mhla_diffusion.training.config import load_config


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", metavar="FILE", help="recipe, a YAML file as in configs/")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder of the cache, for data.train")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="samples per pass of the VAE (32)")
    parser.add_argument(
        "--dtype", default="float32", help="of what is stored: float32 (default), float16, bfloat16"
    )
    parser.add_argument("--shard-size", type=int, metavar="N", help="samples per file (1024; of videos 64)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options of the recipe, as data.size=512")
    arguments = parser.parse_intermixed_args(argv)

    is_main = os.environ.get("RANK", "0") == "0"
    try:
        config = load_config(arguments.config, arguments.overrides)
        from mhla_diffusion.training.cache import cache_latents

        report = cache_latents(config, arguments.out, arguments.batch_size, arguments.dtype, arguments.shard_size)
    except UserError as error:
        if is_main or getattr(error, "of_one_process", False):
            print(f"error: {error}", file=sys.stderr)
        return 2
    if is_main:
        print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
