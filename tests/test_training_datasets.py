"""The data sets that scripts/prepare_data.py writes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits
from training_runs import ROOT

from mhla_diffusion.errors import UserError
from mhla_diffusion.training import datasets
from mhla_diffusion.training.datasets import write_digits, write_emoji
from mhla_diffusion.training.images import ImageFolder


def test_the_digits_are_scikit_learns_each_in_one_split_and_its_class(tmp_path):
    counts = write_digits(tmp_path / "digits", size=8)
    digits = load_digits()
    files = sorted((tmp_path / "digits").rglob("*.png"), key=lambda path: path.name)
    assert counts["train"] + counts["test"] == len(files) == 1797
    for number in (0, 17, 444, 1796):
        path = files[number]
        assert path.parent.name == str(digits.target[number])
        assert np.abs(np.asarray(Image.open(path)) / 255 * 16 - digits.images[number]).max() < 0.05
    shares = [len(list((tmp_path / "digits" / "test" / str(d)).iterdir())) for d in range(10)]
    assert min(shares) >= 34 and max(shares) <= 37


def test_the_split_is_the_same_every_time_and_at_every_size(tmp_path):
    listings = []
    for size in (8, 16):
        write_digits(tmp_path / str(size), size)
        listings.append({path.relative_to(tmp_path / str(size)) for path in (tmp_path / str(size)).rglob("*.png")})
    assert listings[0] == listings[1]
    assert Image.open(tmp_path / "16" / "train" / "0" / "0000.png").size == (16, 16)


def test_a_folder_that_is_in_use_and_a_size_that_is_not_there_are_refused(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(UserError, match="is not empty"):
        write_digits(tmp_path)
    with pytest.raises(UserError, match="--size 9"):
        write_digits(tmp_path / "new", size=9)


def emoji_archive(folder) -> None:
    """A package of the form of emoji-datasource-google, with twenty smileys and one hand in two skin tones."""
    rows = [
        {"name": f"FACE {i}", "short_name": "f", "image": f"f{i}.png", "category": "Smileys & Emotion", "sort_order": i}
        for i in range(20)
    ]
    tone = {"1F3FB": {"image": "hand-1f3fb.png"}}
    rows.append({"name": None, "short_name": "raised_hand", "image": "hand.png", "category": "People & Body",
                 "sort_order": 99, "skin_variations": tone})  # fmt: skip
    picture = io.BytesIO()
    Image.new("RGBA", (64, 64), (255, 0, 0, 0)).save(picture, "png")
    with tarfile.open(folder / "package.tgz", "w:gz") as archive:
        contents = {"emoji.json": json.dumps(rows).encode()}
        contents |= {f"img/google/64/f{i}.png": picture.getvalue() for i in range(20)}
        contents |= {f"img/google/64/{name}.png": picture.getvalue() for name in ("hand", "hand-1f3fb")}
        for name, content in contents.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_emoji_become_category_folders_with_their_names_as_captions(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(
        datasets, "_npm_pack", lambda package, folder: (emoji_archive(folder), folder / "package.tgz")[1]
    )
    assert write_emoji(tmp_path / "emoji", size=32) == {"train": 20, "test": 2}
    source = ImageFolder(tmp_path / "emoji" / "train", size=32)
    assert source.class_names == ["people-body", "smileys-emotion"]
    captions = {name: source.captions[name] for name, _ in source.files}
    assert captions["people-body/hand-1f3fb.png"] == "raised hand, light skin"
    assert captions["smileys-emotion/f0.png"] == "face 0"
    assert (np.asarray(Image.open(tmp_path / "emoji" / "train" / "smileys-emotion" / "f0.png")) == 255).all()


def test_without_npm_the_emoji_say_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="npm, which is not installed"):
        write_emoji(tmp_path / "emoji")


def test_the_script_writes_the_digits_and_says_how_many(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "prepare_data.py", "digits", tmp_path / "digits", "--size", "8"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1,442 training and 355 held-out samples" in done.stdout
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 2 and again.stderr.startswith("error: ") and again.stderr.count("\n") == 1
