"""Folders of captioned videos as training clips: lengths, rates, sizes, captions, and files that are not right."""

import json
import struct

import numpy as np
import pytest
import torch
from PIL import Image
from test_video_files import clock, numbers

from mhla_diffusion.backbones import family_named
from mhla_diffusion.errors import UserError
from mhla_diffusion.randomness import sample_generator
from mhla_diffusion.training.config import DataOptions
from mhla_diffusion.training.data import UnreadableSample, read_batches
from mhla_diffusion.training.images import ImageFolder
from mhla_diffusion.training.moving_digits import write_moving_digits
from mhla_diffusion.training.sources import open_source
from mhla_diffusion.training.video_files import write_mp4
from mhla_diffusion.training.videos import VideoFolder, holds_videos


def options(**changes) -> DataOptions:
    return DataOptions(**{"size": 32, "num_frames": 5, "fps": 10.0, **changes})


def folder_of(root, caption=True, **videos):
    """A folder of clock videos at 10 frames per second: name=frames or name=(frames, height, width)."""
    root.mkdir(exist_ok=True)
    for name, shape in videos.items():
        write_mp4(clock(*((shape,) if isinstance(shape, int) else shape)), root / f"{name}.mp4", 10)
        if caption:
            (root / f"{name}.txt").write_text(f"a clock named {name}\n")
    return root


def levels(video: torch.Tensor) -> list[int]:
    """The frame numbers that a clip (C, T, H, W) of a clock shows."""
    return numbers(((video.permute(1, 2, 3, 0) + 1) * 127.5).numpy())


def test_moving_digits_are_clips_with_captions(tmp_path):
    write_moving_digits(tmp_path / "digits", size=32, videos=5, frames=9)
    folder = tmp_path / "digits" / "train"
    assert holds_videos(folder) and holds_videos(tmp_path)
    source = VideoFolder(folder, options(fps=16.0))
    assert len(source) == 4 and source.captioned and source.class_names == []
    sample = source.read(0, sample_generator(0))
    assert sample.image.shape == (3, 5, 32, 32) and sample.image.dtype == torch.float32
    assert sample.image.min() < -0.9 and 0.2 < sample.image.max() <= 1
    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    assert [source.read(i, sample_generator(0)).text for i in range(4)] == [row["text"] for row in rows]


def test_clips_begin_at_moments_that_the_generator_draws(tmp_path):
    source = VideoFolder(folder_of(tmp_path / "v", a=20), options())
    starts = set()
    for epoch in range(60):
        first = levels(source.read(0, sample_generator(0, epoch)).image)
        assert first == list(range(first[0], first[0] + 5))
        assert levels(source.read(0, sample_generator(0, epoch)).image) == first
        starts.add(first[0])
    assert min(starts) == 0 and max(starts) == 15 and len(starts) > 10


def test_half_of_the_clips_are_mirrored_as_a_whole(tmp_path):
    (tmp_path / "v").mkdir()
    frames = np.zeros((5, 32, 32, 3), dtype=np.uint8)
    frames[:, :, :16] = 255
    write_mp4(frames, tmp_path / "v" / "a.mp4", 10)
    (tmp_path / "v" / "a.txt").write_text("left")
    source = VideoFolder(tmp_path / "v", options(), flip=True)
    mirrored = 0
    for epoch in range(40):
        left = source.read(0, sample_generator(0, epoch)).image[0, :, :, 4] > 0
        assert left.all() or not left.any()
        mirrored += not left.any()
    assert 8 < mirrored < 32


def test_videos_are_read_at_the_rate_asked_for(tmp_path):
    source = VideoFolder(folder_of(tmp_path / "v", a=9), options(fps=5.0))
    assert levels(source.read(0, sample_generator(0)).image) == [0, 2, 4, 6, 8]


def test_one_frame_is_an_image(tmp_path):
    source = VideoFolder(folder_of(tmp_path / "v", a=20), options(num_frames=1))
    assert source.read(0, sample_generator(0)).image.shape == (3, 32, 32)
    assert source.shapes == [(32, 32)]


def test_greyscale_has_one_channel(tmp_path):
    source = VideoFolder(folder_of(tmp_path / "v", a=5), options(channels=1))
    video = source.read(0, sample_generator(0)).image
    assert video.shape == (1, 5, 32, 32) and levels(video) == [0, 1, 2, 3, 4]


def test_each_video_gets_the_bucket_of_its_shape_portrait_too(tmp_path):
    root = folder_of(tmp_path / "v", tall=(5, 64, 32), wide=(5, 32, 64), square=(5, 48, 48), wider=(5, 32, 80))
    source = VideoFolder(root, options(buckets=[[32, 64], [64, 32], [16, 160], [40, 40]]))
    shape = {name: source.shapes[source.shape_of(i)] for i, name in enumerate(source.files)}
    assert shape == {
        "tall.mp4": (5, 64, 32), "wide.mp4": (5, 32, 64), "wider.mp4": (5, 32, 64), "square.mp4": (5, 40, 40)
    }  # fmt: skip
    assert (5, 16, 160) not in source.shapes  # no video has it
    for i in range(4):
        video = source.read(i, sample_generator(0)).image
        assert tuple(video.shape[1:]) == source.shapes[source.shape_of(i)]
    with pytest.raises(UserError, match=r"data.buckets is \[\[32\]\]; .* \[\[height, width\], …\] in pixels"):
        VideoFolder(root, options(buckets=[[32]]))


def test_short_videos_are_skipped_looped_or_held_by_rule(tmp_path):
    root = folder_of(tmp_path / "v", long=9, short=3)
    with pytest.warns(UserWarning, match="1 of the 2 videos of data.train .* are shorter than 5 frames at 10 per "
                      "second and are left out .data.short_clips=skip.; the first is short.mp4"):  # fmt: skip
        assert VideoFolder(root, options()).files == ["long.mp4"]
    for rule, shown in (("loop", [0, 1, 2, 0, 1]), ("hold", [0, 1, 2, 2, 2])):
        with pytest.warns(UserWarning, match=f"data.short_clips={rule}"):
            source = VideoFolder(root, options(short_clips=rule))
        assert source.files == ["long.mp4", "short.mp4"]
        assert levels(source.read(1, sample_generator(0)).image) == shown


def test_only_short_videos_are_refused(tmp_path):
    root = folder_of(tmp_path / "v", a=3, b=4)
    with pytest.raises(UserError, match="all 2 videos of data.train .* shorter than 5 frames .* the longest has 4"):
        VideoFolder(root, options())


@pytest.mark.parametrize(("frames", "near"), [(82, 81), (80, 81), (78, 77), (2, 1), (84, 85)])
def test_other_frame_counts_than_4k_plus_1_are_refused_with_the_nearest(tmp_path, frames, near):
    root = folder_of(tmp_path / "v", a=5)
    with pytest.raises(UserError, match=f"data.num_frames is {frames}; 4k . 1 frames are accepted, such as {near}$"):
        VideoFolder(root, options(num_frames=frames))


def test_captions_come_from_metadata_and_from_files_beside(tmp_path):
    root = folder_of(tmp_path / "v", a=5, b=5)
    source = VideoFolder(root, options())
    assert source.texts == ["a clock named a", "a clock named b"]
    (root / "sub").mkdir()
    (root / "b.mp4").rename(root / "sub" / "b.mp4")
    rows = [{"file_name": "sub/b.mp4", "text": "in a sub-folder"}, {"file_name": "a.mp4", "text": "from the metadata"}]
    (root / "metadata.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    source = VideoFolder(root, options())
    assert dict(zip(source.files, source.texts, strict=True)) == {row["file_name"]: row["text"] for row in rows}


def test_missing_captions_and_files_are_told_at_the_start(tmp_path):
    root = folder_of(tmp_path / "v", caption=False, a=5, b=5)
    with pytest.raises(UserError, match=r"video folder .* has no captions; a metadata.jsonl .* beside each NAME.mp4"):
        VideoFolder(root, options())
    (root / "a.txt").write_text("only this one")
    with pytest.raises(UserError, match=r"video .*b.mp4 has no caption \(no .txt beside it\)"):
        VideoFolder(root, options())
    lines = [json.dumps({"file_name": f"{name}.mp4", "text": "x"}) for name in "ab"]
    for line, reason in (
        (json.dumps({"file_name": "c.mp4", "text": "x"}), "line 3, names 'c.mp4', which is no video in that folder"),
        (json.dumps({"file_name": "a.mp4", "text": None}), "metadata.jsonl, line 3, is not a JSON object"),
        ("{", "metadata.jsonl, line 3, is not a JSON object"),
    ):
        (root / "metadata.jsonl").write_text("\n".join([*lines, line]))
        with pytest.raises(UserError, match=reason):
            VideoFolder(root, options())
    with pytest.raises(UserError, match="data.validation is .*nowhere.*, which is not a folder"):
        VideoFolder(tmp_path / "nowhere", options(), "data.validation")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no videos"):
        VideoFolder(tmp_path / "empty", options())
    assert not holds_videos(tmp_path / "empty")
    with pytest.raises(UserError, match="data.fps is 0"):
        VideoFolder(root, options(fps=0.0))


def test_another_video_stands_in_for_one_that_cannot_be_opened(tmp_path):
    root = folder_of(tmp_path / "v", a=5, b=5, c=5)
    (root / "b.mp4").write_bytes((root / "b.mp4").read_bytes()[:400])
    source = VideoFolder(root, options())
    with pytest.raises(UnreadableSample, match="b.mp4 cannot be read"):
        source.read(1, sample_generator(0))
    with pytest.warns(UserWarning, match="b.mp4 cannot be read: .*; another one is used in its place"):
        (batch,) = read_batches(source, [[(0, 0), (0, 1), (0, 2)]], seed=0, num_workers=0)
    assert batch.images.shape == (3, 3, 5, 32, 32)
    assert batch.texts == ["a clock named a", "a clock named c", "a clock named c"]
    for name in "ac":
        (root / f"{name}.mp4").write_bytes(b"")
    with pytest.raises(UserError, match="3 or more of 3 samples cannot be read, .* the first: video .*a.mp4"):
        VideoFolder(root, options())


def test_hidden_folders_are_left_out(tmp_path):
    folder_of(tmp_path / "v", a=5)
    folder_of(tmp_path / "v" / ".trash", b=5)
    assert VideoFolder(tmp_path / "v", options()).files == ["a.mp4"]


def test_images_among_which_there_are_videos_are_images_unless_clips_are_asked_for(tmp_path):
    root = folder_of(tmp_path / "v", a=5)
    Image.new("RGB", (32, 32)).save(root / "b.png")
    (root / "b.txt").write_text("black")
    sana = family_named("sana")
    assert isinstance(open_source(str(root), "data.train", options(num_frames=1), sana, flip=False), ImageFolder)
    assert isinstance(open_source(str(root), "data.train", options(), sana, flip=False), VideoFolder)


def test_a_video_that_is_damaged_after_its_start_is_told_when_it_is_read(tmp_path):
    root = folder_of(tmp_path / "v", a=40)
    content = bytearray((root / "a.mp4").read_bytes())
    place = content.index(b"mdat")  # the index says forty frames, most of which are overwritten
    size = struct.unpack(">I", content[place - 4 : place])[0]
    content[place + size // 2 : place + size - 4] = bytes(size - 4 - size // 2)
    (root / "a.mp4").write_bytes(content)
    source = VideoFolder(root, options(num_frames=37))
    with pytest.raises(UnreadableSample, match="a.mp4 (is damaged|ends at|cannot be read)"):
        source.read(0, sample_generator(0))


def test_the_fingerprint_says_what_is_read_and_how(tmp_path):
    root = folder_of(tmp_path / "v", a=9, b=9)
    prints = {VideoFolder(root, options()).fingerprint, VideoFolder(root, options()).fingerprint}
    assert len(prints) == 1
    for changes in ({"fps": 5.0}, {"num_frames": 9}, {"size": 16}, {"channels": 1}):
        prints.add(VideoFolder(root, options(**changes)).fingerprint)
    (root / "a.txt").write_text("another caption")
    prints.add(VideoFolder(root, options()).fingerprint)
    assert len(prints) == 6
