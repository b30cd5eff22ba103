"""CLIP score and caption sets: the number against CLIP taken apart, texts that belong to their images, bad input."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from clip_models import MAX_TOKENS, save_tiny_clip
from PIL import Image

from mhla_diffusion.errors import UserError
from mhla_diffusion.evaluation.captions import caption_set, read_captions
from mhla_diffusion.evaluation.clip import CLIPScorer, clip_score, format_clip_score
from mhla_diffusion.evaluation.images import ImageSet
from mhla_diffusion.evaluation.text_image import evaluate_text_image

SCRIPT = Path(__file__).parent.parent / "scripts" / "evaluate_text_image.py"
TEXTS = ["a red cat", "two dogs", "9 birds.", "it's 5", "a very long caption of many letters", "blue"]


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return save_tiny_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def scorer(clip):
    return CLIPScorer(clip, device="cpu")


@pytest.fixture
def generated(tmp_path):
    """Six images of three sizes, with the labels.jsonl that generation writes."""
    folder = tmp_path / "generated"
    folder.mkdir()
    random = np.random.default_rng(0)
    sizes = [(16, 16), (16, 16), (24, 16), (24, 16), (30, 41), (16, 16)]
    for index, size in enumerate(sizes):
        pixels = random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR).save(folder / f"{index:06d}.png")
    write_labels(folder, [{"file": f"{i:06d}.png", "prompt": text} for i, text in enumerate(TEXTS)])
    return folder


def write_labels(folder, entries, name="labels.jsonl"):
    (folder / name).write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")


def score(folder, scorer, captions=None, **options):
    return clip_score(folder, captions, scorer, **({"progress": False, "workers": 1} | options))


def cosine_by_hand(scorer, path, text):
    """Preprocessing as OpenAI's with Pillow, then CLIP's two towers and projections one after the other."""
    image = Image.open(path).convert("RGB")
    scale = 16 / min(image.size)
    image = image.resize([int(side * scale) for side in image.size], Image.Resampling.BICUBIC)
    left, top = (image.width - 16) // 2, (image.height - 16) // 2
    pixels = torch.from_numpy(np.array(image.crop((left, top, left + 16, top + 16)))).permute(2, 0, 1) / 255
    mean, std = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
    pixels = (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    vocab = scorer.tokenizer.get_vocab()
    letters = [
        vocab[letter + ("</w>" if last else "")]
        for word in text.replace("'s", " 's").replace(".", " .").replace("5", " 5 ").replace("9", " 9 ").split()
        for letter, last in zip(word, [False] * (len(word) - 1) + [True], strict=True)
    ]
    ids = [vocab["<|startoftext|>"], *letters[: MAX_TOKENS - 2], vocab["<|endoftext|>"]]
    model = scorer.model
    with torch.no_grad():
        x = model.visual_projection(model.vision_model(pixel_values=pixels[None]).pooler_output)[0]
        hidden = model.text_model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
        y = model.text_projection(hidden)
    return float(x @ y / x.norm() / y.norm())


def test_score_is_the_clamped_mean_cosine_of_the_two_towers(generated, scorer):
    cosines = [cosine_by_hand(scorer, generated / f"{i:06d}.png", text) for i, text in enumerate(TEXTS)]
    assert min(cosines) < 0 < max(cosines)  # so that clamping matters
    expected = 100 * np.clip(cosines, 0, None)
    result = score(generated, scorer)
    assert result["clip_score"] == pytest.approx(expected.mean(), abs=0.2)  # Pillow and torchvision resize differently
    assert result["clip_score_error"] == pytest.approx(expected.std(ddof=1) / np.sqrt(6), abs=0.2)
    same_size = [0, 1, 5]  # 16×16: nothing is resized
    images = torch.stack([torch.from_numpy(np.array(Image.open(generated / f"{i:06d}.png"))) for i in same_size])
    found = scorer(images.permute(0, 3, 1, 2), [TEXTS[i] for i in same_size])
    np.testing.assert_allclose(found, expected[same_size], atol=1e-3)
    assert found.dtype == torch.float64


def test_score_does_not_depend_on_batch_size(generated, scorer):
    one, many = score(generated, scorer, batch_size=1), score(generated, scorer, batch_size=64)
    assert one["clip_score"] == pytest.approx(many["clip_score"], rel=1e-5)
    assert one["num_images"] == many["num_images"] == 6


def test_swapped_captions_change_the_score(generated, scorer):
    before = score(generated, scorer)["clip_score"]
    write_labels(generated, [{"file": f"{i:06d}.png", "prompt": text} for i, text in enumerate(TEXTS[::-1])])
    assert score(generated, scorer)["clip_score"] != pytest.approx(before, abs=0.1)


def test_long_captions_are_cut_and_counted(generated, scorer):
    result = score(generated, scorer)
    lengths = scorer.count_tokens(TEXTS)
    assert lengths[1] == 9 and lengths[4] == 31 and result["num_truncated"] == sum(n > MAX_TOKENS for n in lengths) == 1
    assert "of 6 captions 1 had more than 12 tokens" in format_clip_score(result)
    write_labels(
        generated,
        [{"file": f"{i:06d}.png", "prompt": text + " and more" * (i == 4)} for i, text in enumerate(TEXTS)],
    )
    assert score(generated, scorer)["clip_score"] == result["clip_score"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_near_float32(generated, clip, scorer, dtype):
    half = score(generated, CLIPScorer(clip, dtype, "cpu"))
    assert half["clip_score"] == pytest.approx(score(generated, scorer)["clip_score"], abs=1.0)
    assert dtype in half["protocol"]


def test_unreadable_image_is_left_out_and_told(generated, scorer):
    whole = score(generated, scorer)
    (generated / "000003.png").write_bytes(b"no image")
    result = score(generated, scorer)
    assert result["num_images"] == 5 and any("000003.png" in note for note in result["notes"])
    assert result["clip_score"] != whole["clip_score"]


def test_captions_are_found_wherever_they_lie(generated, tmp_path):
    images = ImageSet(generated)
    assert read_captions(images) == TEXTS
    metadata = [{"file_name": f"./{i:06d}.png", "text": f" {text}\n"} for i, text in enumerate(TEXTS)][::-1]
    write_labels(tmp_path, metadata, "captions.jsonl")
    assert read_captions(images, tmp_path / "captions.jsonl") == TEXTS
    (tmp_path / "captions.txt").write_text("\n".join(TEXTS) + "\n")
    assert read_captions(images, tmp_path / "captions.txt") == TEXTS
    write_labels(tmp_path, [{"prompt": text} for text in TEXTS], "prompts.jsonl")
    assert read_captions(images, tmp_path / "prompts.jsonl") == TEXTS
    named = [{"prompt": text, "name": f"{i:06d}"} for i, text in enumerate(TEXTS)][::-1]
    write_labels(tmp_path, named, "named.jsonl")
    assert read_captions(images, tmp_path / "named.jsonl") == TEXTS
    (generated / "labels.jsonl").unlink()
    for i, text in enumerate(TEXTS):
        (generated / f"{i:06d}.txt").write_text(text + "\n")
    assert read_captions(images) == TEXTS
    write_labels(generated, metadata, "metadata.jsonl")
    assert read_captions(images) == TEXTS


def entries(**changes):
    found = {f"{i:06d}.png": text for i, text in enumerate(TEXTS)} | changes
    return [{"file": name, "prompt": text} for name, text in found.items() if text is not None]


@pytest.mark.parametrize(
    "labels, words",
    [
        (entries(**{"000002.png": None}), ["1 of 6 images", "000002.png"]),
        (entries(**{"more.png": "a cat"}), ["1 of the 7 images", "more.png", "missing"]),
        (entries(**{"000001.png": " "}), ["line 2", "not empty"]),
        (entries(**{"000001.png": 3}), ["line 2", "3", "not empty"]),
        (entries() + [{"file": "000000.png", "prompt": "another"}], ["two captions", "000000.png"]),
        (entries() + [{"prompt": "nameless"}], ["caption 7", "names no file"]),
        ([{"file": "000000.png"}], ["line 1", "prompt, text, caption"]),
        (["a cat"], ["line 1", "JSON object"]),
        ([{"prompt": "a"}, {"prompt": "b"}], ["2 captions", "6 images"]),
        ([], ["empty"]),
    ],
)
def test_bad_captions_are_refused_in_one_sentence(generated, labels, words):
    write_labels(generated, labels)
    with pytest.raises(UserError) as error:
        read_captions(ImageSet(generated))
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_folder_without_captions_says_what_is_looked_for(generated, scorer):
    (generated / "labels.jsonl").unlink()
    with pytest.raises(UserError, match="has no captions; a metadata.jsonl .* or NAME.txt"):
        score(generated, scorer)
    (generated / "000000.txt").write_text("a cat")
    with pytest.raises(UserError, match="000001.png has no caption .*the first of 5"):
        score(generated, scorer)
    with pytest.raises(UserError, match="cannot be read"):
        score(generated, scorer, generated / "nowhere.jsonl")


def test_missing_clip_is_told_without_a_traceback(generated, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="does not exist, and it is not a hub id"):
        CLIPScorer("./nowhere/clip", device="cpu")
    with pytest.raises(UserError, match="without config.json"):
        CLIPScorer(tmp_path, device="cpu")
    with pytest.raises(UserError, match="'nobody/no-such-clip' could not be loaded"):
        CLIPScorer("nobody/no-such-clip", device="cpu")
    with pytest.raises(UserError, match="dtype='half'"):
        CLIPScorer(tmp_path, "half", "cpu")


def test_caption_set_is_the_images_that_its_metadata_names(generated):
    assert len(caption_set(generated)) == 6
    write_labels(generated, [{"file_name": f"{i:06d}.png", "text": "x"} for i in (4, 1, 2)], "metadata.jsonl")
    images = caption_set(generated)
    assert [images.name(i) for i in range(len(images))] == ["000001.png", "000002.png", "000004.png"]
    write_labels(generated, [{"file_name": "gone.png", "text": "x"}], "metadata.jsonl")
    with pytest.raises(UserError, match="names 'gone.png', which is missing"):
        caption_set(generated)


@pytest.fixture
def digit_sets(tmp_path, monkeypatch, tmp_path_factory):
    """Generated: 60 digits with prompts; reference: 60 others with metadata.jsonl, and noise that it does not name."""
    from mhla_diffusion.evaluation.digits import digit_split

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    images, labels, _, _ = digit_split()
    noise = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    groups = {"generated": images[:60], "reference": torch.cat([images[60:120], noise])}
    for name, group in groups.items():
        (tmp_path / name).mkdir()
        for i, image in enumerate(group):
            Image.fromarray((image[0] * 255).byte().numpy()).save(tmp_path / name / f"{i:06d}.png")
    write_labels(tmp_path / "generated", [{"file": f"{i:06d}.png", "prompt": f"a {labels[i]}"} for i in range(60)])
    captions = [{"file_name": f"{i:06d}.png", "text": f"a {labels[60 + i]}"} for i in range(60)]
    write_labels(tmp_path / "reference", captions, "metadata.jsonl")
    return tmp_path


def run_script(*arguments):
    spec = importlib.util.spec_from_file_location("evaluate_text_image", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main([str(argument) for argument in arguments])


def test_fid_is_against_the_captioned_images_only(digit_sets, clip, capsys):
    options = ["--features", "digits", "--clip", clip, "--device", "cpu", "--json", digit_sets / "scores.json"]
    folders = ["--generated", digit_sets / "generated", "--reference", digit_sets / "reference"]
    assert run_script(*folders, *options) == 0
    printed = capsys.readouterr().out
    result = json.loads((digit_sets / "scores.json").read_text())
    assert result["reference"]["num_reference"] == 60 and result["clip"]["num_images"] == 60
    assert "CLIP score" in printed and f"{result['reference']['fid']:.4f}" in printed
    options = {"clip": None, "features": "digits", "device": "cpu", "progress": False}
    (digit_sets / "reference" / "metadata.jsonl").unlink()
    everything = evaluate_text_image(digit_sets / "generated", digit_sets / "reference", **options)
    assert everything["reference"]["num_reference"] == 80 and "clip" not in everything
    assert any("80" in note and "60" in note for note in everything["reference"]["notes"])
    for i in range(60, 80):
        (digit_sets / "reference" / f"{i:06d}.png").unlink()
    named = evaluate_text_image(digit_sets / "generated", digit_sets / "reference", **options)
    assert named["reference"]["fid"] == result["reference"]["fid"] != everything["reference"]["fid"]


def test_script_tells_errors_in_one_line(digit_sets, clip, capsys):
    assert run_script("--generated", digit_sets / "nowhere", "--clip", clip) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "nowhere" in error
    assert run_script("--generated", digit_sets / "generated", "--clip", "nobody/no/clip") == 2
    assert "is not a hub id" in capsys.readouterr().err
    for arguments in ([], ["--generated", "x", "--geneval-results", "y"], ["--generated", "x", "--no-clip"]):
        with pytest.raises(SystemExit):
            run_script(*arguments)
