"""What scripts share: how they end, with what there is to say or one line on what went wrong; generation's options."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from .errors import UserError

REFUSED, STOPPED = 2, 130  # exit codes: what was asked for cannot be done; ended by Ctrl-C, as shells have it


def exit_code(work: Callable[[], str | None], interrupted: str = "") -> int:
    """Do a script's work, print what it returns, and return the exit code; 0 where all went well.

    A `UserError` becomes one line on standard error and code 2, Ctrl-C one line that ends with `interrupted` and code
    130. Of several processes that were launched together only the first one speaks, unless an error is known to this
    one alone (`of_one_process`).
    """
    is_main = os.environ.get("RANK", "0") == "0"
    try:
        told = work()
    except UserError as error:
        if is_main or getattr(error, "of_one_process", False):
            print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        if is_main:
            line = "\n" if sys.stderr.isatty() else ""
            print(f"{line}stopped by Ctrl-C{interrupted}", file=sys.stderr)
        return STOPPED
    if told and is_main:
        print(told)
    return 0


def add_generation_options(parser: argparse.ArgumentParser) -> None:
    """The options of everything that generates, but for what of and where to; see `generation_numbers`."""
    add, dtypes = parser.add_argument, ("float32", "bfloat16", "float16")
    add("--steps", type=int, help="denoising steps (default: the pipeline's; DiT 50, SANA 20, Wan 50)")
    add("--guidance-scale", type=float, help="1: no guidance (default: the pipeline's; DiT 4, SANA 4.5, Wan 5)")
    add("--height", type=int, help="in pixels (default: the pipeline's)")
    add("--width", type=int, help="in pixels (default: the pipeline's)")
    add("--num-frames", type=int, help="of a video; Wan: 4k + 1 (default: the pipeline's; Wan 81)")
    add("--fps", type=float, help="frames per second of a video file (default: 16, as Wan2.1)")
    add("--seed", type=int, default=0, help="everything depends on it (default: 0)")
    add("--batch-size", type=int, help="items per forward pass (default: at most 16 images, 1 video)")
    add("--dtype", choices=dtypes, default="float32", help="of the weights (default: float32)")
    add("--vae-dtype", choices=dtypes, help="of the VAE (default: float32 for videos, else --dtype)")
    add("--device", help="cuda, cpu, … (default: the GPU of this process if there is one)")


def generation_numbers(args: argparse.Namespace) -> dict[str, float | None]:
    """The numbers among these options, by the names that `generate_images` and `check_options` have for them."""
    names = ("guidance_scale", "height", "width", "num_frames", "fps", "batch_size")
    return {"num_inference_steps": args.steps, **{name: getattr(args, name) for name in names}}
