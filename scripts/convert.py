"""Convert a public checkpoint to a diffusers folder, or a diffusers folder back.

    python scripts/convert.py dit DiT-XL-2-256x256.pt converted/ --components facebook/DiT-XL-2-256
    python scripts/convert.py dit converted/ back.pt
    python scripts/convert.py wan wan_mhla.safetensors converted/ --components Wan-AI/Wan2.1-T2V-1.3B-Diffusers
    python scripts/convert.py wan converted/ wan_mhla.safetensors

The direction follows from the input: a .safetensors, .pt or .pth file, or a folder of .safetensors shards, is the
public format; a folder with a config.json or model_index.json is a diffusers transformer or pipeline.
"""

from __future__ import annotations

import argparse
import sys

from mhla_diffusion.command_line import exit_code


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", help="model family: dit or wan")
    parser.add_argument("input", metavar="INPUT", help="weights in the public format, or a diffusers folder")
    parser.add_argument("output", metavar="OUTPUT", help="folder to write; .safetensors or .pt file for the way back")
    parser.add_argument("--components", metavar="DIR_OR_ID", help="pipeline to take all but the transformer from: the "
                        "output is then a whole pipeline (default: the transformer alone)")  # fmt: skip
    parser.add_argument("--blocks", type=int, nargs="+", metavar="N", help="block counts of the weights, one per axis, "
                        "where they do not say (Wan: frames height width)")  # fmt: skip
    parser.add_argument(
        "--heads", type=int, metavar="N", help="attention heads, where the weights are of no known size"
    )
    parser.add_argument("--resize-blocks", type=int, nargs="+", metavar="N", help="interpolate the mixing to these")
    return parser.parse_args(argv)


def convert(args: argparse.Namespace) -> str:
    from mhla_diffusion.convert import from_public, is_diffusers_folder, to_public

    if is_diffusers_folder(args.input):
        return str(to_public(args.family, args.input, args.output, args.resize_blocks))
    return str(
        from_public(args.family, args.input, args.output, args.components, args.blocks, args.resize_blocks, args.heads)
    )


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_code(lambda: convert(args))


if __name__ == "__main__":
    sys.exit(main())
