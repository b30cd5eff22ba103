"""VBench's temporal flickering, computed here: it needs no network.

For each pair of neighbouring frames the mean absolute difference of their 8-bit RGB values; a video's score is
(255 − the mean over its pairs) / 255, the dimension's score the mean over videos (Vchitect/VBench,
`vbench/temporal_flickering.py`). 1 is a still image; motion lowers the score as flicker does, which is why VBench
measures it on videos of still scenes, those that pass its static filter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
from tqdm import tqdm

from ..errors import UserError


def video_flickering(path: str | Path) -> float:
    """The temporal flickering score of one video, from 0 to 1.

    Raises:
        UserError: the file cannot be read to its end, or has fewer than two frames.
    """
    differences = []
    before = None
    for frame in _frames(path):
        now = frame.astype(np.int16)
        if before is not None:
            if before.shape != now.shape:
                raise UserError(f"video {path} changes its size from {_size(before)} to {_size(now)}")
            differences.append(np.abs(now - before).mean(dtype=np.float64))
        before = now
    if not differences:
        count = "no frames" if before is None else "one frame"
        raise UserError(f"video {path} has {count}; temporal flickering needs at least two")
    return (255.0 - float(np.mean(differences))) / 255.0


def temporal_flickering(videos: Sequence[str | Path], progress: bool = True) -> tuple[float, list[dict[str, Any]]]:
    """The dimension's score over `videos`.

    Returns:
        The mean, and for each video `video_path` and `video_results`: what VBench's own function returns.

    Raises:
        UserError: no videos, or one that cannot be read. (VBench leaves unreadable ones out without counting them.)
    """
    if not videos:
        raise UserError("temporal flickering needs at least one video, got none")
    results = []
    for path in tqdm(videos, desc="temporal flickering", unit="video", disable=not progress, dynamic_ncols=True):
        results.append({"video_path": str(path), "video_results": video_flickering(path)})
    return float(np.mean([result["video_results"] for result in results])), results


def _frames(path: str | Path) -> Iterator[np.ndarray]:
    """Every frame in order, uint8 (H, W, 3), with the colour conversion of OpenCV, which VBench reads videos with."""
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise UserError(f"{path} holds no video")
            for frame in container.decode(container.streams.video[0]):
                if frame.is_corrupt:
                    raise UserError(f"video {path} is damaged at {frame.time or 0.0:.2f} s")
                yield frame.to_ndarray(format="rgb24")
    except (av.FFmpegError, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"video {path} cannot be read: {reason[:1].lower()}{reason[1:]}") from None


def _size(frame: np.ndarray) -> str:
    return f"{frame.shape[0]}×{frame.shape[1]}"
