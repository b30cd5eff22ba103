"""Runs one dimension of the package `vbench` on given videos; started by `vbench.py`, in a process of its own.

    python vbench_runner.py JOB.json

`vbench` pins versions of transformers and numpy that a recent diffusers does not work with, so it usually lives in an
environment of its own. That is why this file imports nothing but the standard library and, there, torch and `vbench`.

The job holds `dimension`, `entries` (VBench's prompts, each with its `video_list`), `folder` to write to, `device`, and
`local`: whether VBench's weights are on this machine. The result is `folder/DIMENSION_eval_results.json`.
"""

import json
import os
import sys


def main(job_path: str) -> None:
    # Python puts this file's folder first, and there another vbench.py would be taken for the package.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    import torch
    from vbench import VBench

    with open(job_path, encoding="utf-8") as file:
        job = json.load(file)

    class OnGivenVideos(VBench):
        """VBench looks for `{prompt}-{k}` itself, which fails for a prompt that is no file name; here it is told."""

        def build_full_info_json(self, videos_path, name, *args, **kwargs):
            path = os.path.join(self.output_path, f"{name}_full_info.json")
            with open(path, "w", encoding="utf-8") as file:
                json.dump(job["entries"], file)
            return path

    device = torch.device(job["device"] or ("cuda" if torch.cuda.is_available() else "cpu"))
    OnGivenVideos(device, job_path, job["folder"]).evaluate(
        videos_path=job["folder"], name=job["dimension"], dimension_list=[job["dimension"]], local=job["local"]
    )


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except KeyboardInterrupt:  # which the process that started this one says
        sys.exit(130)
