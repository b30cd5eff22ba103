"""Encode a training config's images or videos, and their captions, once, so that training reads what came out.

    accelerate launch scripts/cache_latents.py --config configs/dit_s2_256.yaml data.train=imagenet --out latents
    accelerate launch scripts/finetune.py --config configs/dit_s2_256.yaml data.train=latents

What was cut goes on with the same command. Sizes, buckets, flips and the form of captions are those of the config, VAE
and text encoder those of its model; a cache that does not fit the config it is trained with is refused.
"""

from __future__ import annotations

import argparse
import sys

from mhla_diffusion.command_line import exit_code


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", metavar="FILE", help="recipe, a YAML file as in configs/")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder of the cache, for data.train")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="samples per pass of the VAE (32)")
    parser.add_argument("--dtype", default="float32", help="of what is stored: float32 (default), float16, bfloat16")
    parser.add_argument("--shard-size", type=int, metavar="N", help="samples per file (1024; of videos 64)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options of the recipe, as data.size=512")
    return parser.parse_intermixed_args(argv)


def cache(args: argparse.Namespace) -> str:
    from mhla_diffusion.training.config import load_config

    config = load_config(args.config, args.overrides)
    from mhla_diffusion.training.cache import cache_latents

    return str(cache_latents(config, args.out, args.batch_size, args.dtype, args.shard_size))


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_code(lambda: cache(args), "; the same command goes on")


if __name__ == "__main__":
    sys.exit(main())
