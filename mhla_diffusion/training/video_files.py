"""Video files: what is in one, a clip of it as an array, and an array as an MP4.

Frames are placed by their presentation timestamps, so that a video of variable frame rate is read at the right speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.video.reformatter import Colorspace

from ..errors import UserError
from .checkpoints import whole_file

VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg")
UNSPECIFIED = 2  # of ITU-T H.273, for colour matrices


@dataclass(frozen=True)
class VideoInfo:
    """What a video file holds: its size as it is displayed (upright, with square pixels), length and frame rate."""

    height: int
    width: int
    seconds: float
    fps: float  # the average, where it varies
    frames: int

    def frames_at(self, fps: float) -> int:
        """How many frames the video has when it is read at another rate; one at least."""
        return max(1, int(self.seconds * fps + 0.5))


def probe(path: str | Path) -> VideoInfo:
    """Size, length and frame rate of a video, without decoding more than its first frame.

    Raises `UserError` when the file cannot be read as a video or has no frames.
    """
    try:
        with _opened(path) as container:
            stream = _video_stream(container, path)
            first = next(container.decode(stream), None)
            if first is None:
                raise UserError(f"video {path} has no frames")
            height, width = _displayed_size(first, stream)
            if stream.duration and stream.average_rate:
                seconds, rate = float(stream.duration * stream.time_base), float(stream.average_rate)
                return VideoInfo(height, width, seconds, rate, stream.frames or round(seconds * rate))
        return VideoInfo(height, width, *_measured_length(path))
    except (av.FFmpegError, OSError) as error:
        raise _unreadable(path, error) from None


def read_clip(path: str | Path, num_frames: int, fps: float, height: int, width: int, start: float = 0.0) -> np.ndarray:
    """`num_frames` frames at `fps` frames per second from `start` seconds on: uint8 (T, H, W, 3), RGB.

    Each is the video's frame that is nearest in time. It is scaled so that it covers height × width, and the middle is
    cut out.

    Raises:
        UserError: when the file cannot be read, is damaged within the clip, has no frames or ends before the clip does.
    """
    times = [start + i / fps for i in range(num_frames)]
    clip = np.empty((num_frames, height, width, 3), dtype=np.uint8)
    done = 0
    shown: tuple[float, float, av.VideoFrame] | None = None  # time, duration and frame, not yet known to be nearest
    try:
        with _opened(path) as container:
            stream = _video_stream(container, path)

            def take(frame: av.VideoFrame, until: float) -> None:
                """`frame` stands for the times before `until`."""
                nonlocal done
                first = done
                while done < num_frames and times[done] < until:
                    done += 1
                if done > first:
                    if frame.is_corrupt:
                        raise UserError(f"video {path} is damaged at {frame.time or 0.0:.2f} s")
                    clip[first:done] = _fitted(frame, stream, height, width)

            for time, duration, frame in _frames(container, stream, start):
                if shown is not None:
                    take(shown[2], (shown[0] + time) / 2)
                    if done == num_frames:
                        return clip
                shown = time, duration, frame
            if shown is None:
                raise UserError(f"video {path} has no frames")
            # Half of the clip's last frame must lie within the video (nearly so: containers round their lengths).
            take(shown[2], max(shown[0] + 1e-6, shown[0] + shown[1] - 0.4 / fps))
    except (av.FFmpegError, OSError) as error:
        raise _unreadable(path, error) from None
    if done < num_frames:
        raise UserError(
            f"video {path} ends at {shown[0] + shown[1]:.2f} s, before the end of the {num_frames} frames at {fps:g} "
            f"frames per second from {start:.2f} s on"
        )
    return clip


def write_mp4(frames: np.ndarray, path: str | Path, fps: float, quality: int = 18) -> None:
    """Write RGB frames, uint8 (T, H, W, 3), as an H.264 video that any player plays (4:2:0, BT.709).

    The file appears whole or not at all.

    Args:
        fps: frames per second; 24000/1001 and the like are kept exactly.
        quality: x264's constant rate factor, 0 (lossless but for the colours) to 51; 18 looks like the original.

    Raises:
        UserError: for other arrays, odd sizes (4:2:0 halves the colour planes) and files that cannot be written.
    """
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not len(frames):
        raise UserError(
            f"frames are a {frames.dtype} array of shape {tuple(frames.shape)}; uint8 (frames, height, width, 3) with "
            "at least one frame is accepted"
        )
    height, width = frames.shape[1:3]
    if height % 2 or width % 2:
        raise UserError(f"frames are {height}×{width} pixels; H.264 takes even heights and widths")
    if not 0 < fps < 1000:
        raise UserError(f"fps is {fps}; frames per second between 0 and 1000 are accepted")
    path = Path(path)
    rate = Fraction(fps).limit_denominator(1001)
    try:
        with whole_file(path) as temporary, av.open(str(temporary), "w", format="mp4") as container:
            stream = container.add_stream("libx264", rate=rate, options={"crf": str(quality)})
            stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
            codec = stream.codec_context
            codec.colorspace = codec.color_primaries = codec.color_trc = Colorspace.ITU709.value
            codec.time_base = 1 / rate
            for number, pixels in enumerate(frames):
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
                frame = frame.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709)
                frame.pts, frame.time_base = number, 1 / rate
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
    except (av.FFmpegError, OSError) as error:
        raise UserError(f"video {path} cannot be written: {getattr(error, 'strerror', None) or error}") from None


def _opened(path: str | Path) -> av.container.InputContainer:
    # Titles and the like, which nobody asks for, may be in any encoding.
    return av.open(str(path), metadata_errors="replace")


def _video_stream(container: av.container.InputContainer, path: str | Path) -> av.VideoStream:
    if not container.streams.video:
        raise UserError(f"{path} holds no video")
    stream = container.streams.video[0]
    stream.codec_context.thread_count = 1  # whoever reads many videos reads several at once
    return stream


def _frames(
    container: av.container.InputContainer, stream: av.VideoStream, start: float
) -> Iterator[tuple[float, float, av.VideoFrame]]:
    """Frames with their time and duration in seconds since the video's beginning, none after `start` left out."""
    origin = float(stream.start_time * stream.time_base) if stream.start_time is not None else 0.0
    usual = 1 / float(stream.average_rate or 25)

    def decoded() -> Iterator[tuple[float, float, av.VideoFrame]]:
        for number, frame in enumerate(container.decode(stream)):
            time = number * usual if frame.time is None else frame.time - origin
            yield time, float(frame.duration * frame.time_base) if frame.duration else usual, frame

    if start > 0 and stream.start_time is not None:
        container.seek(int((origin + start) / stream.time_base), stream=stream)
        frames = decoded()
        first = next(frames, None)
        if first is not None and first[2].time is not None and first[0] <= start:
            yield first
            yield from frames
            return
        container.seek(stream.start_time, stream=stream)  # a container whose index leads astray
    yield from decoded()


def _measured_length(path: str | Path) -> tuple[float, float, int]:
    """Seconds, frames per second and frames of a container that does not say them."""
    with _opened(path) as container:
        stream = container.streams.video[0]
        times = [packet.pts for packet in container.demux(stream) if packet.pts is not None]
        rate = float(stream.average_rate or 25)
        if len(times) < 2:
            return max(1, len(times)) / rate, rate, max(1, len(times))
        span = float((max(times) - min(times)) * stream.time_base)
        seconds = span * len(times) / (len(times) - 1)  # the last frame lasts as long as the others do on average
        return seconds, len(times) / seconds, len(times)


def _displayed_size(frame: av.VideoFrame, stream: av.VideoStream) -> tuple[int, int]:
    aspect = float(stream.sample_aspect_ratio or 1) or 1.0
    height, width = frame.height, max(1, round(frame.width * aspect))
    return (width, height) if frame.rotation % 180 else (height, width)


def _fitted(frame: av.VideoFrame, stream: av.VideoStream, height: int, width: int) -> np.ndarray:
    """A frame, upright and with square pixels, scaled to cover height × width and cut in the middle."""
    shown_height, shown_width = _displayed_size(frame, stream)
    scale = max(height / shown_height, width / shown_width)
    size = max(height, round(shown_height * scale)), max(width, round(shown_width * scale))
    lying = bool(frame.rotation % 180)
    if frame.colorspace == UNSPECIFIED:  # as players take it: standard definition is BT.601, higher BT.709
        matrix = Colorspace.ITU601 if frame.height <= 576 else Colorspace.ITU709
    else:
        matrix = None
    pixels = frame.to_ndarray(
        format="rgb24", height=size[lying], width=size[not lying], interpolation="BICUBIC", src_colorspace=matrix
    )
    pixels = np.rot90(pixels, frame.rotation // 90)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return pixels[top : top + height, left : left + width]


def _unreadable(path: str | Path, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or str(error)
    return UserError(f"video {path} cannot be read: {reason[:1].lower()}{reason[1:]}")
