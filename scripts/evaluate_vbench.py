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
import json
import os
import sys
from pathlib import Path

from mhla_diffusion.errors import UserError, check_writable

NUMBERS = ("guidance_scale", "height", "width", "num_frames", "fps", "batch_size")


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
        command.add_argument("--dimensions", metavar="A,B", help="only these, e.g. scene,color (default: all)")
        command.add_argument("--out", required=True, metavar="DIR", help="generate: OUT/videos/*.mp4; run: results")
        command.add_argument("--device", help="cuda, cpu, … (default: the GPU if there is one)")
        command.add_argument("--vbench-python", metavar="FILE", help="Python of the environment that has vbench")
    generate.add_argument("--pipeline", required=True, metavar="DIR_OR_ID", help="a saved pipeline, or a hub id")
    generate.add_argument("--augmented", metavar="FILE", help="longer versions of all prompts, one a line")
    generate.add_argument("--steps", type=int, help="denoising steps (default: the pipeline's; Wan 50)")
    generate.add_argument("--guidance-scale", type=float, help="1: no guidance (default: the pipeline's; Wan 5)")
    generate.add_argument("--height", type=int, help="in pixels (default: the pipeline's)")
    generate.add_argument("--width", type=int, help="in pixels (default: the pipeline's)")
    generate.add_argument("--num-frames", type=int, help="Wan: 4k + 1 (default: the pipeline's; Wan 81)")
    generate.add_argument("--fps", type=float, help="frames per second of the files (default: 16, as Wan2.1)")
    generate.add_argument("--seed", type=int, default=0, help="every video depends on it (default: 0)")
    generate.add_argument("--batch-size", type=int, default=1, help="videos per forward pass (default: 1)")
    dtypes = ("float32", "bfloat16", "float16")
    generate.add_argument("--dtype", choices=dtypes, default="float32", help="of the weights (default: float32)")
    generate.add_argument("--vae-dtype", choices=dtypes, help="of the VAE (default: float32)")
    run.add_argument("--videos", required=True, metavar="DIR", help="the folder of {prompt}-{k}.mp4")
    run.add_argument("--filtered-videos", metavar="DIR", help="what `vbench static_filter` kept, for the flickering")
    run.add_argument("--local-weights", action="store_true", help="VBench's weights are in its cache; no downloads")
    summarize.add_argument("results", nargs="+", metavar="FILE|DIR", help="*_eval_results.json, {dimension: score}")
    summarize.add_argument("--json", metavar="FILE", help="also write the result here")
    return parser.parse_args(argv)


def generate(args: argparse.Namespace, dimensions: list[str] | None) -> None:
    from mhla_diffusion.evaluation import vbench, vbench_prompts
    from mhla_diffusion.pipelines.generate import check_options, generate_images, load_pipeline

    numbers = {name: getattr(args, name) for name in NUMBERS} | {"num_inference_steps": args.steps}
    check_options(args.out, **numbers)
    suite = vbench.required_suite(args.prompts, args.vbench_python)
    prompts = vbench_prompts.read_suite(suite, dimensions, args.augmented)
    vbench_prompts.check_file_system(prompts, args.out)
    pipeline = load_pipeline(args.pipeline, args.dtype, args.device, args.vae_dtype)
    report = generate_images(pipeline, vbench_prompts.conditions(prompts), args.out, seed=args.seed, **numbers)
    if os.environ.get("RANK", "0") == "0":
        print(report)
        for text, stem in vbench_prompts.awkward_names(prompts).items():
            print(f"note: {text!r} cannot be a file name; its videos are {stem}-0.mp4 and so on")


def run(args: argparse.Namespace, dimensions: list[str] | None) -> None:
    from mhla_diffusion.evaluation import vbench, vbench_dimensions, vbench_prompts

    names = [vbench_dimensions.dimension_named(name).name for name in dimensions or vbench_dimensions.DIMENSIONS]
    suite = vbench.find_suite(args.prompts, args.vbench_python)
    if suite is None and names == list(vbench.COMPUTED_HERE):
        paths = vbench.evaluate_folder(args.filtered_videos or args.videos, args.out)
    else:
        prompts = vbench_prompts.read_suite(vbench.required_suite(suite, args.vbench_python), names)
        options = {"python": args.vbench_python, "local": args.local_weights, "device": args.device}
        paths = vbench.evaluate_videos(args.videos, prompts, args.out, names, filtered=args.filtered_videos, **options)
    print(vbench_dimensions.format_totals(vbench.summarize_results(*paths.values())))
    if "temporal_flickering" in names and not args.filtered_videos:
        print(f"note: {vbench.STATIC_FILTER_NOTE}")


def summarize(args: argparse.Namespace) -> None:
    from mhla_diffusion.evaluation import vbench, vbench_dimensions

    if args.json:
        check_writable("--json", args.json)
    result = vbench.summarize_results(*args.results)
    print(vbench_dimensions.format_totals(result))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        if args.command == "summarize":
            summarize(args)
        else:
            dimensions = args.dimensions.split(",") if args.dimensions else None
            {"generate": generate, "run": run}[args.command](args, dimensions)
    except UserError as error:
        if os.environ.get("RANK", "0") == "0" or getattr(error, "of_one_process", False):
            print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
