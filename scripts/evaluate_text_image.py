"""Score text-to-image models: CLIP score, FID against a caption set, GenEval.

    python scripts/generate.py --pipeline sana-mhla --prompts coco/metadata.jsonl --out samples/
    python scripts/evaluate_text_image.py --generated samples/ --reference coco/ --json scores.json

    python scripts/evaluate_text_image.py --geneval-prompts evaluation_metadata.jsonl --out geneval/
    python scripts/generate.py --pipeline sana-mhla --prompts geneval/prompts.jsonl --out geneval/
    python scripts/evaluate_text_image.py --geneval-results results.jsonl      # of GenEval's own evaluator

The captions are those that generation wrote beside the images, or --captions FILE. FID is computed where a reference is
given. CLIP's and Inception's weights are downloaded once; without a network, name local ones.
"""

from __future__ import annotations

import argparse
import sys

from mhla_diffusion.command_line import exit_code
from mhla_diffusion.errors import check_writable
from mhla_diffusion.text_files import write_json


def listed(text: str) -> list[str]:
    return text.split(",")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--generated", metavar="DIR", help="generated images: CLIP score, and FID with --reference")
    what.add_argument("--geneval-prompts", metavar="FILE", help="evaluation_metadata.jsonl: lay out GenEval's folders")
    what.add_argument("--geneval-results", metavar="FILE", help="results.jsonl of GenEval's evaluator: its scores")
    parser.add_argument("--captions", metavar="FILE", help="texts of the images (default: those beside them)")
    parser.add_argument(
        "--clip", metavar="ID|DIR", help="CLIP of transformers (default: openai/clip-vit-large-patch14)"
    )
    parser.add_argument("--no-clip", action="store_true", help="only FID")
    parser.add_argument(
        "--reference", metavar="DIR|FILE.npz", help="FID against a caption set (the images of its metadata.jsonl)"
    )
    parser.add_argument("--features", default="inception", help="of FID: inception (default), digits, …")
    parser.add_argument("--inception-weights", metavar="FILE", help="Inception's weights (default: downloaded)")
    parser.add_argument(
        "--metrics", type=listed, metavar="A,B", default=["fid"], help="against the reference (default: fid)"
    )
    parser.add_argument("--out", metavar="DIR", help="of --geneval-prompts: the folder for GenEval's evaluator")
    parser.add_argument("--samples", type=int, default=4, help="of --geneval-prompts: images per prompt (default: 4)")
    parser.add_argument("--json", metavar="FILE", help="also write the result here")
    parser.add_argument("--batch-size", type=int, default=64, help="images per forward pass (default: 64)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of CLIP")
    parser.add_argument("--workers", type=int, default=4, help="threads that decode images (default: 4)")
    parser.add_argument("--device", help="cuda, cpu, … (default: the GPU if there is one)")
    args = parser.parse_args(argv)
    if args.geneval_prompts and not args.out:
        parser.error("--geneval-prompts needs --out")
    if args.no_clip and not args.reference:
        parser.error("--no-clip needs --reference")
    return args


def evaluate(args: argparse.Namespace) -> str | None:
    from mhla_diffusion.evaluation import clip, geneval
    from mhla_diffusion.evaluation.text_image import evaluate_text_image, format_scores

    if args.json:
        check_writable("--json", args.json)
    if args.geneval_prompts:
        path = geneval.lay_out(args.geneval_prompts, args.out, args.samples)
        return f"wrote {path}; generate with: scripts/generate.py --pipeline … --prompts {path} --out {args.out}"
    if args.geneval_results:
        result = geneval.summarize_results(args.geneval_results)
        print(geneval.format_results(result))
    else:
        names = ("dtype", "features", "metrics", "inception_weights", "batch_size", "workers", "device")
        model = None if args.no_clip else args.clip or clip.DEFAULT_MODEL
        options = {name: getattr(args, name) for name in names}
        result = evaluate_text_image(args.generated, args.reference, args.captions, model, **options)
        print(format_scores(result))
    if args.json:
        write_json("--json", args.json, result)
    return None


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_code(lambda: evaluate(args))


if __name__ == "__main__":
    sys.exit(main())
