"""Compare ways to retrofit a softmax model with MHLA: all combinations of the given choices, with several seeds.

    python scripts/prepare_data.py digits data/digits --size 8
    python scripts/compare_retrofit.py --out outputs/retrofit --feature-map relu,hedgehog --cpe false,true \\
        --align-steps 0,50 train.steps=200

The teacher is trained by its own recipe, or given with --teacher. Alignment steps count as steps. OUT/results.jsonl,
the table and the plot hold all results so far: what is finished is not run again, and the same OUT takes more choices.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import yaml

from mhla_diffusion.command_line import exit_code

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
QUIET = ["validation.images=0", "logging.progress=false", "logging.tensorboard=false", "checkpoint.every=0"]


def listed(text: str) -> list[Any]:
    return yaml.safe_load(f"[{text}]")


def counts(text: str) -> list[tuple[int, ...]]:
    return [tuple(int(count) for count in part.split("x")) for part in text.split(",")]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder of results")
    parser.add_argument("--teacher", metavar="PIPELINE", help="softmax pipeline (default: trained into OUT/teacher)")
    parser.add_argument("--teacher-config", default=CONFIGS / "dit_digits.yaml", metavar="FILE", help="its recipe")
    parser.add_argument(
        "--config", default=CONFIGS / "dit_digits_mhla.yaml", metavar="FILE", help="recipe of retrofits"
    )
    for name, default, help in (
        ("--feature-map", "relu", "feature maps by name"),
        ("--cpe", "false", "false, true or both"),
        ("--gate", "false", "false, true or both"),
        ("--blocks", "4x4", "block counts"),
        ("--mixing", "full", "full, separable or both"),
        ("--align-steps", "0", "steps of the alignment"),
        ("--locality", "null", "of the first mixing, 0 to 1; null: the family's"),
        ("--normalize", "null", "false, true, both or null"),
        ("--head-norm", "null", "false, true, both or null"),
        ("--rope", "null", "after or before the feature map, both or null"),
        ("--seeds", "0,1,2", "each choice is run with each"),
    ):
        kind = counts if name == "--blocks" else listed
        parser.add_argument(name, type=kind, default=default, metavar="A,B", help=f"{help} (default: {default})")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options of the recipes, as train.steps=200")
    return parser.parse_intermixed_args(argv)


def compare(args: argparse.Namespace) -> str:
    from mhla_diffusion.plots import plot_ranges
    from mhla_diffusion.training import finetune, load_config
    from mhla_diffusion.training.comparison import Retrofit, by_choice, compare_retrofits, grid, results_table

    teacher = args.teacher
    if teacher is None:
        data = [item for item in args.overrides if item.startswith("data.")]
        recipe = load_config(args.teacher_config, [f"output_dir={args.out / 'teacher'}", *data])
        finished = args.out / "teacher" / "pipeline"
        teacher = finished if finished.is_dir() else finetune(recipe, resume="latest").pipeline
    config = load_config(args.config, [*QUIET, f"model.pretrained={teacher}", *args.overrides])
    choices = grid(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Retrofit)})
    rows = compare_retrofits(choices, args.seeds, config, args.out)
    curves = {name: [row["curve"] for row in group] for name, group in by_choice(rows).items()}
    plot = plot_ranges(curves, {"teacher": rows[0]["teacher_loss"]}, args.out / "curves.png")
    return f"\n{results_table(rows)}\n\ncurves: {plot}"


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_code(lambda: compare(args), "; the same command goes on")


if __name__ == "__main__":
    sys.exit(main())
