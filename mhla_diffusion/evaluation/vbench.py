"""VBench (Huang et al. 2024) from generated videos to the total score: one dimension at a time, in files.

    OUT/DIMENSION_full_info.json      the prompts of a dimension and their videos, as VBench writes it
    OUT/DIMENSION_eval_results.json   `{dimension: [score, [{"video_path", "video_results"}, …]]}`, as VBench writes it

Temporal flickering is computed here; the other dimensions by the package `vbench`, in whose environment they run.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError, check_writable
from ..training.checkpoints import write_whole
from .vbench_dimensions import DIMENSIONS, checked_score, dimension_named, total_scores
from .vbench_flickering import temporal_flickering
from .vbench_prompts import SAMPLES, SUFFIX, Prompt, read_suite, video_name

COMPUTED_HERE = ("temporal_flickering",)
VIDEO_LIST, RESULTS = "_full_info.json", "_eval_results.json"
RUNNER = Path(__file__).with_name("vbench_runner.py")
STATIC_FILTER_NOTE = (
    "VBench measures temporal flickering on videos of still scenes only: pass the 25 videos of each of its prompts "
    "through `vbench static_filter --videos_path VIDEOS --result_path DIR` and give DIR/filtered_videos as filtered "
    "videos; without that, motion counts as flicker and the score is not comparable with published ones"
)


# Evaluating ----------------------------------------------------------------------------------------------------------


def evaluate_videos(
    videos: str | Path,
    suite: Sequence[Prompt],
    out: str | Path,
    dimensions: Sequence[str] | None = None,
    *,
    filtered: str | Path | None = None,
    python: str | None = None,
    local: bool = False,
    device: str | None = None,
    progress: bool = True,
) -> dict[str, Path]:
    """Score the videos of a folder, one dimension after the other; a result of the same videos is left as it is.

    Several processes may fill one folder; they leave each other's results, and measure what is begun twice.

    Args:
        videos: a folder with `{prompt}-{k}.mp4`, k from 0 to 4.
        suite: the prompts, see `read_suite`.
        out: folder for the results.
        dimensions: names; None: all sixteen.
        filtered: for temporal flickering, the folder of videos that VBench's static filter let through; it may hold
            fewer than five of a prompt. None: the first five of each prompt in `videos`.
        python: the Python interpreter of the environment in which `vbench` is installed; None: this one.
        local: VBench's weights are on this machine, see there.
        device: torch's name of the device; None: the GPU if there is one.

    Returns:
        Dimension → the file of its result.

    Raises:
        UserError: an unknown dimension, missing videos, no `vbench` (all of these before anything is computed), or
            dimensions that failed, after all others have been tried. Results are kept and used by the next call.
    """
    chosen = list(
        dict.fromkeys(dimension_named(name).name for name in (DIMENSIONS if dimensions is None else dimensions))
    )
    if not Path(videos).is_dir():
        raise UserError(f"the folder of videos {str(videos)!r} does not exist")
    if filtered is not None and not Path(filtered).is_dir():
        raise UserError(f"the folder of filtered videos {str(filtered)!r} does not exist")
    entries = {name: _entries(name, suite, Path(videos), filtered) for name in chosen}
    out = Path(out)
    check_writable("out", out / "results.json")
    to_do = [name for name in chosen if not _is_current(out, name, entries[name])]
    if any(name not in COMPUTED_HERE for name in to_do):
        _check_vbench(python)
    failed = []
    for name in to_do:
        if _is_current(out, name, entries[name]):  # another process that fills this folder has been here meanwhile
            continue
        (out / f"{name}{RESULTS}").unlink(missing_ok=True)
        write_whole(out / f"{name}{VIDEO_LIST}", _json(entries[name]))
        if name in COMPUTED_HERE:
            result: Any = list(temporal_flickering(_video_list(entries[name]), progress))
        else:
            job = {"dimension": name, "entries": entries[name], "device": device, "local": local}
            result = _run_vbench(job, python or sys.executable)
        if result is None:
            failed.append(name)
        else:
            write_whole(out / f"{name}{RESULTS}", _json({name: result}))
    if failed:
        raise UserError(
            f"vbench failed on {', '.join(failed)}, its messages are above; the results of the other dimensions are "
            f"in {str(out)!r}"
        )
    return {name: out / f"{name}{RESULTS}" for name in chosen}


def evaluate_with_suite(
    videos: str | Path,
    prompts: str | Path | None,
    out: str | Path,
    dimensions: Sequence[str] | None = None,
    *,
    filtered: str | Path | None = None,
    python: str | None = None,
    **options: Any,
) -> dict[str, Path]:
    """As `evaluate_videos`, with the suite from a file, `prompts`, or where that is None from the package `vbench`.

    Where there is neither, temporal flickering alone is measured on all videos of the folder (`evaluate_folder`).
    """
    names = [dimension_named(name).name for name in dimensions or DIMENSIONS]
    file = find_suite(prompts, python)
    if file is None and names == list(COMPUTED_HERE):
        return evaluate_folder(filtered or videos, out)
    suite = read_suite(required_suite(file, python), names)
    return evaluate_videos(videos, suite, out, names, filtered=filtered, python=python, **options)


def vbench_package(python: str | None = None) -> Path | None:
    """The folder of the package `vbench`, or None where it is not installed.

    Args:
        python: an interpreter, in whose environment to look; None: this one's.

    Raises:
        UserError: `python` is not a program.
    """
    if python is None:
        spec = importlib.util.find_spec("vbench")
        return Path(spec.origin).parent if spec and spec.origin else None
    if shutil.which(python) is None:
        raise UserError(f"python={python!r} is not a program")
    code = "import importlib.util as u; s = u.find_spec('vbench'); print(s.origin if s and s.origin else '')"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()
    return Path(found).parent if found else None


def find_suite(path: str | Path | None = None, python: str | None = None) -> Path | None:
    """VBench's prompts: `path`, else the file in the package `vbench` (see `vbench_package`); None without either."""
    if path is not None:
        return Path(path)
    package = vbench_package(python)
    file = package / "VBench_full_info.json" if package else None
    return file if file and file.is_file() else None


def required_suite(path: str | Path | None = None, python: str | None = None) -> Path:
    """As `find_suite`, but without a suite a `UserError`."""
    found = find_suite(path, python)
    if found is None:
        raise UserError(
            "VBench's prompts are needed: name its VBench_full_info.json (it lies in the package and in the repository "
            "Vchitect/VBench) with --prompts"
        )
    return found


def evaluate_folder(videos: str | Path, out: str | Path, progress: bool = True) -> dict[str, Path]:
    """Temporal flickering of every `.mp4` of a folder, whatever its name: a quick check without prompts.

    Returns:
        `{"temporal_flickering": FILE}`, the result in `out`, of VBench's form.

    Raises:
        UserError: no videos, or one that cannot be read.
    """
    files = sorted(path for path in Path(videos).glob(f"*{SUFFIX}") if not path.name.startswith("."))
    if not files:
        raise UserError(f"the folder {str(videos)!r} holds no {SUFFIX} videos")
    path = Path(out) / f"temporal_flickering{RESULTS}"
    check_writable("out", path)
    write_whole(path, _json({"temporal_flickering": list(temporal_flickering(files, progress))}))
    return {"temporal_flickering": path}


def _entries(
    dimension: str, suite: Sequence[Prompt], videos: Path, filtered: str | Path | None
) -> list[dict[str, Any]]:
    """The suite's entries of a dimension with the paths of their videos, as VBench's functions read them."""
    prompts = [prompt for prompt in suite if dimension in prompt.dimensions]
    if not prompts:
        raise UserError(f"the prompts hold none of {dimension}")
    is_filtered = dimension == "temporal_flickering" and filtered is not None
    folder = (Path(filtered) if is_filtered else videos).absolute()
    entries, missing = [], []
    for prompt in prompts:
        paths = [folder / f"{video_name(prompt.text, sample)}{SUFFIX}" for sample in range(SAMPLES)]
        missing += [path for path in paths if not path.is_file()]
        entries.append({**prompt.entry, "video_list": [str(path) for path in paths if path.is_file()]})
    if is_filtered:
        entries = [entry for entry in entries if entry["video_list"]]
    if missing and not (is_filtered and entries):
        raise UserError(
            f"{len(missing)} of the {SAMPLES * len(prompts)} videos of {dimension} are missing in {str(folder)!r}, the "
            f"first is {missing[0].name!r}"
        )
    return entries


def _video_list(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    return [path for entry in entries for path in entry["video_list"]]


def _is_current(out: Path, dimension: str, entries: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there is a result of these videos already, none of which has been written since."""
    path = out / f"{dimension}{RESULTS}"
    try:
        known = json.loads((out / f"{dimension}{VIDEO_LIST}").read_text(encoding="utf-8"))
        json.loads(path.read_text(encoding="utf-8"))[dimension]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    written = path.stat().st_mtime
    return known == entries and all(Path(video).stat().st_mtime <= written for video in _video_list(entries))


def _check_vbench(python: str | None) -> None:
    if vbench_package(python) is None:
        raise UserError(
            f"the package 'vbench' is not installed for {python or 'this Python'}; install it in an environment of its "
            "own (it needs older versions of transformers and numpy) and name that environment's interpreter with "
            f"--vbench-python; {', '.join(COMPUTED_HERE)} works without it"
        )


def _run_vbench(job: dict[str, Any], python: str) -> Any:
    """VBench's result of one dimension, `[score, details]`; None if it failed."""
    with tempfile.TemporaryDirectory(prefix="vbench-") as folder:
        path = Path(folder) / "job.json"
        path.write_text(_json(job | {"folder": folder}), encoding="utf-8")
        subprocess.run([python, str(RUNNER), str(path)])
        try:
            return json.loads((Path(folder) / f"{job['dimension']}{RESULTS}").read_text(encoding="utf-8"))[
                job["dimension"]
            ]
        except (OSError, ValueError, KeyError):
            return None


def _json(content: Any) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


# Reading results -----------------------------------------------------------------------------------------------------


def read_scores(*paths: str | Path) -> dict[str, float]:
    """The dimensions' scores from result files.

    Args:
        paths: JSON files `{dimension: score}` or `{dimension: [score, …]}` (what VBench writes), or folders of them, in
            which files that do not end in `_eval_results.json` are left aside if any do.

    Raises:
        UserError: no file, one that is not of this form, an unknown dimension, a score that is no fraction, or two
            different scores of one dimension.
    """
    scores: dict[str, float] = {}
    origins: dict[str, Path] = {}
    for file in [file for path in paths for file in _result_files(Path(path))]:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"the results {str(file)!r} cannot be read ({error})") from None
        if not isinstance(content, dict) or not content:
            raise UserError(f"the results {str(file)!r} hold no object {{dimension: score}}")
        for name, value in content.items():
            try:
                dimension = dimension_named(name).name
                score = checked_score(dimension, value[0] if isinstance(value, list) and value else value)
            except UserError as error:
                raise UserError(f"{str(file)!r}: {error}") from None
            if scores.setdefault(dimension, score) != score:
                raise UserError(
                    f"{str(origins[dimension])!r} and {str(file)!r} have different scores of {dimension} "
                    f"({scores[dimension]:g} and {score:g})"
                )
            origins.setdefault(dimension, file)
    return scores


def summarize_results(*paths: str | Path) -> dict[str, Any]:
    """Quality, semantic and total score from result files; see `read_scores` and `total_scores`."""
    return total_scores(read_scores(*paths))


def _result_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"the results {str(path)!r} do not exist")
    files = sorted(file for file in path.glob("*.json") if not file.name.startswith("."))
    files = [file for file in files if file.name.endswith(RESULTS)] or files
    if not files:
        raise UserError(f"the folder {str(path)!r} holds no results (*.json)")
    return files
