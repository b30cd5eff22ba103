"""Score a text-to-video pipeline with VBench: make the videos, measure them, sum the scores up.

    accelerate launch scripts/evaluate_vbench.py generate --pipeline wan-mhla --prompts VBench_full_info.json \\
        --out vbench/ --height 480 --width 832 --num-frames 81 --batch-size 1 --dtype bfloat16
    python scripts/evaluate_vbench.py run --videos vbench/videos --prompts VBench_full_info.json --out vbench/results \\
        --vbench-python vbench-env/bin/python
    python scripts/evaluate_vbench.py run --videos vbench/videos --dimensions temporal_flickering --out quick/
    python scripts/evaluate_vbench.py summarize vbench/results --json vbench.json

Running `generate` or `run` again goes on where they were stopped. Temporal flickering is computed here; the other
dimensions need the package `vbench`, whose requirements differ from ours, so give it an environment of its own.
"""

from __future__ import annotations

import argparse
import sys

from mhla_diffusion.command_line import add_generation_options, exit_code, generation_numbers
from mhla_diffusion.errors import check_writable
from mhla_diffusion.text_files import write_json


def listed(text: str) -> list[str]:
    return text.split(",")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="generate | run | summarize")
    generate = commands.add_parser("generate", help="five videos per prompt, 25 for temporal flickering")
    run = commands.add_parser("run", help="score the videos, one dimension after the other")
    summarize = commands.add_parser("summarize", help="quality, semantic and total score")
    for command in (generate, run):
        command.add_argument(
            "--prompts", metavar="FILE|DIR", help="VBench_full_info.json (default: the package's) or a folder of .txt"
        )
        command.add_argument(
            "--dimensions", type=listed, metavar="A,B", help="only these, e.g. scene,color (default: all)"
        )
        command.add_argument("--out", required=True, metavar="DIR", help="generate: OUT/videos/*.mp4; run: results")
        command.add_argument("--vbench-python", metavar="FILE", help="Python of the environment that has vbench")
    generate.add_argument("--pipeline", required=True, metavar="DIR_OR_ID", help="a saved pipeline, or a hub id")
    generate.add_argument("--augmented", metavar="FILE", help="longer versions of all prompts, one a line")
    add_generation_options(generate)
    run.add_argument("--videos", required=True, metavar="DIR", help="the folder of {prompt}-{k}.mp4")
    run.add_argument("--filtered-videos", metavar="DIR", help="what `vbench static_filter` kept, for the flickering")
    run.add_argument("--device", help="cuda, cpu, … (default: the GPU if there is one)")
    run.add_argument("--local-weights", action="store_true", help="VBench's weights are in its cache; no downloads")
    summarize.add_argument("results", nargs="+", metavar="FILE|DIR", help="*_eval_results.json, {dimension: score}")
    summarize.add_argument("--json", metavar="FILE", help="also write the result here")
    return parser.parse_args(argv)


def generate(args: argparse.Namespace) -> str:
    from mhla_diffusion.evaluation.vbench_generation import generate_videos

    names = ("out", "prompts", "dimensions", "augmented", "dtype", "device", "vae_dtype", "seed")
    options = {name: getattr(args, name) for name in names} | generation_numbers(args)
    return generate_videos(args.pipeline, python=args.vbench_python, **options)


def run(args: argparse.Namespace) -> str:
    from mhla_diffusion.evaluation import vbench, vbench_dimensions

    options = {"python": args.vbench_python, "local": args.local_weights, "device": args.device}
    paths = vbench.evaluate_with_suite(
        args.videos, args.prompts, args.out, args.dimensions, filtered=args.filtered_videos, **options
    )
    told = vbench_dimensions.format_totals(vbench.summarize_results(*paths.values()))
    if "temporal_flickering" in paths and not args.filtered_videos:
        told += f"\nnote: {vbench.STATIC_FILTER_NOTE}"
    return told


def summarize(args: argparse.Namespace) -> None:
    from mhla_diffusion.evaluation import vbench, vbench_dimensions

    if args.json:
        check_writable("--json", args.json)
    result = vbench.summarize_results(*args.results)
    print(vbench_dimensions.format_totals(result))
    if args.json:
        write_json("--json", args.json, result)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    work = {"generate": generate, "run": run, "summarize": summarize}[args.command]
    return exit_code(lambda: work(args), "; the same command goes on")


if __name__ == "__main__":
    sys.exit(main())
