"""Reading and writing of video files: rates, sizes, orientation, and files that are not what they should be."""

import struct
from fractions import Fraction

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusion.errors import UserError
from mhla_diffusion.training.moving_digits import _bounced, moving_digits, write_moving_digits
from mhla_diffusion.training.video_files import probe, read_clip, write_mp4


def clock(frames: int, height: int = 32, width: int = 48) -> np.ndarray:
    """Frames whose brightness says their number: 5 levels per frame."""
    levels = np.arange(frames, dtype=np.uint8) * 5
    return np.broadcast_to(levels[:, None, None, None], (frames, height, width, 3)).copy()


def numbers(clip: np.ndarray) -> list[int]:
    """The frame numbers that a clip of `clock` shows."""
    return [round(float(frame.mean()) / 5) for frame in clip]


def write_with_times(path, times_ms, format="matroska", codec="libx264", frames=None):
    """A video whose frames are shown at these milliseconds."""
    frames = clock(len(times_ms)) if frames is None else frames
    with av.open(str(path), "w", format=format) as container:
        stream = container.add_stream(codec, rate=30)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        for time, pixels in zip(times_ms, frames, strict=True):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


@settings(deadline=None, max_examples=12)
@given(
    frames=st.integers(1, 12),
    size=st.tuples(st.integers(8, 24), st.integers(8, 24)),
    fps=st.sampled_from([5.0, 16.0, 25.0, 30000 / 1001]),
)
def test_what_is_written_is_read_back(tmp_path_factory, frames, size, fps):
    path = tmp_path_factory.mktemp("video") / "clip.mp4"
    height, width = 2 * size[0], 2 * size[1]
    rows, columns = np.mgrid[:height, :width]
    video = np.stack([np.stack([rows * 2, columns * 2, 20 * t + rows * 0], -1) for t in range(frames)]).astype(np.uint8)
    write_mp4(video, path, fps)
    info = probe(path)
    assert (info.frames, info.height, info.width) == (frames, height, width)
    assert info.fps == pytest.approx(fps, rel=1e-4) and info.frames_at(fps) == frames
    back = read_clip(path, frames, fps, height, width)
    assert back.shape == video.shape and back.dtype == np.uint8
    assert np.abs(back.astype(int) - video).mean() < 4  # of 255: what H.264 and halved colour planes cost
    assert [p.name for p in path.parent.iterdir()] == ["clip.mp4"]


def test_colours_are_kept(tmp_path):
    for number, colour in enumerate([(255, 0, 0), (0, 160, 0), (30, 60, 250), (255, 255, 255)]):
        path = tmp_path / f"{number}.mp4"
        write_mp4(np.full((3, 16, 16, 3), colour, dtype=np.uint8), path, 16)
        np.testing.assert_allclose(read_clip(path, 3, 16, 16, 16).mean((0, 1, 2)), colour, atol=4)


def test_the_file_is_what_players_take(tmp_path):
    write_mp4(clock(10), tmp_path / "clip.mp4", 24)
    with av.open(str(tmp_path / "clip.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert stream.average_rate == 24 and stream.frames == 10


@pytest.mark.parametrize(("fps", "expected"), [(30, [0, 1, 2, 3, 4]), (15, [0, 2, 4, 6, 8]), (10, [0, 3, 6, 9, 12])])
def test_another_rate_takes_the_frames_at_its_times(tmp_path, fps, expected):
    write_mp4(clock(30), tmp_path / "clip.mp4", 30)
    assert numbers(read_clip(tmp_path / "clip.mp4", 5, fps, 32, 48)) == expected


def test_a_higher_rate_shows_frames_longer(tmp_path):
    write_mp4(clock(4), tmp_path / "clip.mp4", 10)
    assert probe(tmp_path / "clip.mp4").frames_at(20) == 8
    shown = numbers(read_clip(tmp_path / "clip.mp4", 8, 20, 32, 48))
    assert shown[::2] == [0, 1, 2, 3] and shown == sorted(shown)


@pytest.mark.parametrize("start", [0, 1, 7, 20, 37])
def test_a_clip_starts_where_it_should_whatever_the_key_frames(tmp_path, start):
    write_mp4(clock(50), tmp_path / "clip.mp4", 25)
    assert numbers(read_clip(tmp_path / "clip.mp4", 13, 25, 32, 48, start / 25)) == list(range(start, start + 13))


def test_frames_of_variable_rate_are_placed_by_their_time_stamps(tmp_path):
    # Ten frames of 100 ms, then five of 430 ms: at 10 frames per second the latter are seen four times or five.
    times = [100 * i for i in range(10)] + [1000 + 430 * i for i in range(5)]
    path = write_with_times(tmp_path / "clip.mkv", times)
    info = probe(path)
    assert info.frames == 15 and info.seconds == pytest.approx(2.72 * 15 / 14, abs=0.01)
    shown = numbers(read_clip(path, 26, 10, 32, 48))
    nearest = [int(np.abs(np.array(times) - 100 * i).argmin()) for i in range(26)]
    assert shown == nearest and shown[:11] == list(range(11)) and shown.count(12) == 4


def test_the_middle_is_cut_out_and_covers_the_size(tmp_path):
    frames = np.zeros((2, 64, 192, 3), dtype=np.uint8)
    frames[:, :, 64:128] = 255  # the middle third is white
    write_mp4(frames, tmp_path / "wide.mp4", 10)
    assert read_clip(tmp_path / "wide.mp4", 2, 10, 32, 32)[:, :, 2:-2].min() > 240
    write_mp4(frames.transpose(0, 2, 1, 3), tmp_path / "tall.mp4", 10)
    assert read_clip(tmp_path / "tall.mp4", 2, 10, 32, 32)[:, 2:-2].min() > 240
    assert read_clip(tmp_path / "tall.mp4", 2, 10, 96, 32).shape == (2, 96, 32, 3)


def test_a_phones_portrait_video_is_read_upright(tmp_path):
    path = tmp_path / "phone.mp4"
    frames = np.zeros((3, 32, 64, 3), dtype=np.uint8)
    frames[:, :, :32] = 255  # the left half is white
    write_mp4(frames, path, 10)
    content = bytearray(path.read_bytes())
    matrix = content.index(b"tkhd") + 4 + 40  # a version 0 track header; rotate by 90° clockwise to display
    content[matrix : matrix + 36] = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    path.write_bytes(content)
    info = probe(path)
    assert (info.height, info.width) == (64, 32)
    clip = read_clip(path, 3, 10, 64, 32)
    assert clip[:, 2:30].min() > 230 and clip[:, 34:].max() < 25  # the left of what was recorded is on top


def test_pixels_that_are_not_square_are_made_so(tmp_path):
    with av.open(str(tmp_path / "wide.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.height, stream.width, stream.pix_fmt = 32, 32, "yuv420p"
        stream.codec_context.sample_aspect_ratio = Fraction(2, 1)
        for pixels in clock(3, 32, 32):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    info = probe(tmp_path / "wide.mp4")
    assert (info.height, info.width) == (32, 64)


# Files that are not what they should be -------------------------------------------------------------------------------


def test_a_clip_beyond_the_end_is_told(tmp_path):
    write_mp4(clock(20), tmp_path / "clip.mp4", 10)
    with pytest.raises(UserError, match=r"clip.mp4 ends at 2.00 s, before the end of the 33 frames at 16 frames per"):
        read_clip(tmp_path / "clip.mp4", 33, 16, 32, 48)


@pytest.mark.parametrize("kept", [0.3, 0.6])
def test_a_file_cut_off_in_the_middle_is_told(tmp_path, kept):
    random = np.random.default_rng(0)
    noise = random.integers(0, 255, (60, 32, 48, 3), dtype=np.uint8)
    whole = tmp_path / "whole.mkv"  # as a download in progress: the header first, then the frames
    write_with_times(whole, [40 * i for i in range(60)], frames=noise)
    cut = tmp_path / "cut.mkv"
    cut.write_bytes(whole.read_bytes()[: int(whole.stat().st_size * kept)])
    with pytest.raises(UserError, match=r"cut.mkv (ends at|is damaged at|cannot be read)"):
        read_clip(cut, 60, 25, 32, 48)
    assert read_clip(cut, 5, 25, 32, 48).shape == (5, 32, 48, 3)  # what is there can be read


def test_a_title_that_is_no_utf8_does_not_matter(tmp_path):
    with av.open(str(tmp_path / "whole.avi"), "w") as container:
        container.metadata["title"] = "CAFE"
        stream = container.add_stream("mpeg4", rate=10)
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        for number, pixels in enumerate(clock(20)):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, 10)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    content = (tmp_path / "whole.avi").read_bytes()
    assert content.count(b"CAFE") == 1
    (tmp_path / "titled.avi").write_bytes(content.replace(b"CAFE", b"CAF\xc9"))
    assert probe(tmp_path / "titled.avi").height == 32
    assert read_clip(tmp_path / "titled.avi", 5, 10, 32, 48).shape == (5, 32, 48, 3)


def test_an_mp4_without_its_end_cannot_be_read(tmp_path):
    write_mp4(clock(20), tmp_path / "whole.mp4", 10)
    content = (tmp_path / "whole.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(content[: len(content) // 2])
    for read in (probe, lambda path: read_clip(path, 5, 10, 32, 48)):
        with pytest.raises(UserError, match="cut.mp4 cannot be read: [a-z]"):
            read(tmp_path / "cut.mp4")


def test_files_without_a_video_or_without_frames_are_told(tmp_path):
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono")
        frame.rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    (tmp_path / "text.mp4").write_text("not a video")
    write_mp4(clock(3), tmp_path / "short.mp4", 10)
    with av.open(str(tmp_path / "empty.avi"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        container.start_encoding()
    for name, reason in {
        "sound.mp4": "sound.mp4 holds no video",
        "text.mp4": "text.mp4 cannot be read",
        "missing.mp4": "missing.mp4 cannot be read: no such file",
        "empty.avi": "empty.avi (has no frames|holds no video|cannot be read)",
    }.items():
        for read in (probe, lambda path: read_clip(path, 5, 10, 32, 48)):
            with pytest.raises(UserError, match=reason):
                read(tmp_path / name)


def test_frames_that_make_no_video_are_told(tmp_path):
    path = tmp_path / "clip.mp4"
    for frames, reason in (
        (clock(3, 33, 48), "33×48 pixels; H.264 takes even"),
        (clock(3)[:0], "at least one frame"),
        (clock(3).astype(np.float32), "float32 array"),
        (clock(3)[..., 0], r"uint8 \(frames, height, width, 3\)"),
    ):
        with pytest.raises(UserError, match=reason):
            write_mp4(frames, path, 16)
    with pytest.raises(UserError, match="fps is 0"):
        write_mp4(clock(3), path, 0)
    with pytest.raises(UserError, match="nowhere/clip.mp4 cannot be written"):
        write_mp4(clock(3), tmp_path / "nowhere" / "clip.mp4", 16)
    assert list(tmp_path.iterdir()) == []


# Moving digits --------------------------------------------------------------------------------------------------------


def test_moving_digits_are_videos_with_captions_and_the_same_each_time(tmp_path):
    counts = write_moving_digits(tmp_path / "a", size=32, videos=6, frames=5)
    assert counts == {"train": 5, "test": 1}
    write_moving_digits(tmp_path / "b", size=32, videos=6, frames=5)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*"))
    assert len(files) == 8
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    info = probe(tmp_path / "a" / "train" / "0000.mp4")
    assert (info.frames, info.fps, info.height, info.width) == (5, 16.0, 32, 32)
    assert "that sets out" in (tmp_path / "a" / "test" / "metadata.jsonl").read_text()
    with pytest.raises(UserError, match="is not empty"):
        write_moving_digits(tmp_path / "a")
    with pytest.raises(UserError, match="--size 31 is not possible"):
        write_moving_digits(tmp_path / "c", size=31)


def test_digits_move_the_way_the_caption_says_and_stay_in_the_picture():
    blob = np.zeros((8, 8))
    blob[2:6, 2:6] = 1
    moved = 0
    for seed in range(20):
        video, text = moving_digits([(3, blob)], 64, 8, 16.0, np.random.default_rng(seed))
        first, _, way = text.split(" and a ")[0].partition(" that sets out ")
        colour = first.split()[1]
        if colour not in ("red", "green", "blue") or way not in ("right", "left", "up", "down"):
            continue
        mask = np.argmax(video.astype(int), -1) == ["red", "green", "blue"].index(colour)
        mask &= video.max(-1) > 60
        axis = 1 if way in ("right", "left") else 0
        centres = [np.argwhere(frame)[:, axis].mean() for frame in mask]
        if mask[0].sum() > 0.9 * mask[3].sum() and mask[3].sum() > 0.9 * mask[0].sum():  # not hidden by the other
            assert (centres[3] > centres[0]) == (way in ("right", "down")), text
            moved += 1
    assert moved >= 2


@given(st.floats(-500, 500), st.floats(1, 60))
def test_a_bounce_keeps_in_the_room_and_is_straight_inside_it(position, room):
    assert -1e-6 <= _bounced(position, room) <= room + 1e-6
    inside = position % room
    assert _bounced(inside, room) == pytest.approx(inside, abs=1e-6)
