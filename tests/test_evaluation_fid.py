"""Scoring folders of images: what is reported, what is refused, and Inception's features against the ADM definition."""

import importlib.util
import json
import pickle
import urllib.error
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

from mhla_diffusion.errors import UserError
from mhla_diffusion.evaluation import (
    ImageStatistics,
    compute_statistics,
    evaluate_images,
    fid_from_statistics,
    format_table,
    load_feature_network,
)
from mhla_diffusion.evaluation.digits import digit_split
from mhla_diffusion.evaluation.fid import METRICS, inception_score

SCRIPT = Path(__file__).parent.parent / "scripts" / "evaluate_fid.py"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Folders: `train` (150 digits), `held_out` (200 digits with labels.jsonl), `noise` (150 images)."""
    root = tmp_path_factory.mktemp("digits")
    images, labels, others, other_labels = digit_split()
    noise = torch.rand(150, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    groups = {"train": (images[:150], labels), "held_out": (others[:200], other_labels), "noise": (noise, None)}
    for name, (group, group_labels) in groups.items():
        (root / name).mkdir()
        lines = []
        for i, image in enumerate(group):
            Image.fromarray((image[0] * 255).byte().numpy()).save(root / name / f"{i:06d}.png")
            if name == "held_out":
                lines.append(json.dumps({"file": f"{i:06d}.png", "class_labels": int(group_labels[i])}) + "\n")
        if lines:
            (root / name / "labels.jsonl").write_text("".join(lines))
    return root


@pytest.fixture(scope="module")
def inception_weights(tmp_path_factory):
    """A weight file of Inception's structure with random values."""
    path = tmp_path_factory.mktemp("weights") / "inception.pth"
    with pytest.MonkeyPatch.context() as patch:
        module = "torch_fidelity.feature_extractor_inceptionv3."
        patch.setattr(module + "load_state_dict_from_url", lambda *args, **kwargs: {})
        patch.setattr(module + "FeatureExtractorInceptionV3.load_state_dict", lambda self, state: None)
        patch.setattr("torch.nn.init.trunc_normal_", lambda tensor, *args, **kwargs: tensor)
        torch.manual_seed(0)
        network = FeatureExtractorInceptionV3("inception-v3-compat", ["2048"])
    torch.save(network.state_dict(), path)
    return path


def score(generated, reference, **options):
    options = {"features": "digits", "device": "cpu", "progress": False, "kid_subsets": 5} | options
    return evaluate_images(generated, reference, **options)


def test_digits_score_better_than_noise(digits):
    good, bad = score(digits / "train", digits / "held_out"), score(digits / "noise", digits / "held_out")
    assert good["fid"] < bad["fid"] / 5
    assert good["kid"] < bad["kid"] / 10
    assert good["precision"] > 0.6 > bad["precision"] + 0.2 and good["recall"] > 0.6 > bad["recall"]
    assert good["inception_score"] > 6 > bad["inception_score"]
    assert good["num_generated"] == 150 and good["num_reference"] == 200
    assert good["protocol"]["kid"].startswith("5 subsets of 150, ")
    same = score(digits / "train", digits / "train", metrics=["kid"])
    assert same["protocol"]["kid"].startswith("all 150 images, ") and same["kid_std"] == 0


def test_accuracy_is_the_share_recognised_as_the_requested_class(digits, tmp_path):
    result = score(digits / "held_out", digits / "train", metrics=["accuracy"])
    assert result["accuracy"] >= 0.97 and "fid" not in result
    lines = [json.loads(line) for line in (digits / "held_out" / "labels.jsonl").read_text().splitlines()]
    for i, line in enumerate(lines):
        (tmp_path / line["file"]).write_bytes((digits / "held_out" / line["file"]).read_bytes())
        if i % 2:
            line["class_labels"] = (line["class_labels"] + 1) % 10
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, lines)))
    wrong = score(tmp_path, digits / "train", metrics=["accuracy"])
    assert wrong["accuracy"] == pytest.approx(result["accuracy"] / 2, abs=0.03)


def test_saved_reference_gives_the_same_scores(digits, tmp_path):
    direct = score(digits / "train", digits / "held_out", save_statistics=tmp_path / "reference.npz")
    saved = score(digits / "train", tmp_path / "reference.npz")
    for metric in METRICS:
        assert saved[metric] == direct[metric]
    with np.load(tmp_path / "reference.npz") as file:
        features = compute_statistics(digits / "held_out", "digits", device="cpu", progress=False).features.double()
        np.testing.assert_allclose(file["mu"], features.mean(0), rtol=1e-6)
        np.testing.assert_allclose(file["sigma"], np.cov(features, rowvar=False), atol=1e-6)


def test_fid_from_statistics_takes_objects_files_and_mappings(digits, tmp_path):
    first, second = (compute_statistics(digits / n, "digits", device="cpu", progress=False) for n in ("train", "noise"))
    expected = fid_from_statistics(first, second)
    second.save(tmp_path / "second.npz")
    assert fid_from_statistics(first, tmp_path / "second.npz") == expected
    mapping = {"mu": second.pooled.mean.numpy(), "sigma": second.pooled.covariance.numpy()}
    assert fid_from_statistics(first.pooled, mapping) == pytest.approx(expected, rel=1e-9)


def test_kept_features_are_evenly_spread_and_statistics_are_over_all(digits):
    everything = compute_statistics(digits / "held_out", "digits", keep_features=None, device="cpu", progress=False)
    few = compute_statistics(digits / "held_out", "digits", keep_features=5, device="cpu", progress=False)
    assert few.indices.tolist() == [0, 50, 100, 149, 199]
    torch.testing.assert_close(few.features, everything.features[few.indices])
    torch.testing.assert_close(few.pooled.mean, everything.pooled.mean)


def test_batch_size_does_not_change_the_scores(digits):
    first, second = (score(digits / "train", digits / "held_out", batch_size=b) for b in (7, 200))
    for metric in ("fid", "kid", "precision", "recall", "inception_score"):
        assert first[metric] == pytest.approx(second[metric], rel=1e-4)


def test_array_file_scores_as_the_folder(digits, tmp_path):
    array = np.stack([np.asarray(Image.open(f).convert("RGB")) for f in sorted((digits / "train").glob("*.png"))])
    np.savez(tmp_path / "samples.npz", array)
    metrics = ["fid", "kid", "precision", "recall", "inception_score"]
    first = score(tmp_path / "samples.npz", digits / "held_out", metrics=metrics)
    second = score(digits / "train", digits / "held_out", metrics=metrics)
    assert {m: first[m] for m in metrics} == {m: second[m] for m in metrics}


def test_too_few_images_and_odd_images_are_told(digits, tmp_path):
    for i in range(20):
        Image.open(digits / "train" / f"{i:06d}.png").resize((12, 12)).convert("RGB").save(tmp_path / f"{i}.jpg")
    (tmp_path / "broken.png").write_bytes(b"broken")
    result = score(tmp_path, digits / "held_out")
    notes = "\n".join(result["notes"])
    assert "20 generated images are fewer than the 65" in notes and "singular" in notes
    assert "lossy" in notes and "broken.png" in notes
    assert "12x12" in notes and "8x8" in notes
    assert result["num_generated"] == 20
    table = format_table(result)
    assert "20 generated, 200 reference" in table and "note: " in table and "not computed: sfid" in table
    json.dumps(result)
    asked = score(tmp_path, digits / "held_out", metrics="accuracy")
    assert asked["accuracy"] is None and "labels.jsonl" in asked["unavailable"]["accuracy"]


def test_inception_score_of_certain_and_even_predictions_is_the_number_of_classes():
    logits = torch.eye(10).repeat(30, 1) * 1000
    mean, deviation, splits = inception_score(logits, split=300)
    assert (mean, splits) == (pytest.approx(10), 1)
    assert inception_score(torch.zeros(50, 10))[0] == pytest.approx(1)
    assert inception_score(torch.randn(1000, 10), split=100)[2] == 10


# Inception ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inception(inception_weights):
    return load_feature_network("inception", inception_weights, "cpu")


def test_spatial_features_are_the_first_seven_channels_of_mixed_6_conv(inception):
    extractor, seen = inception.extractor, []
    handle = extractor.Mixed_6c.register_forward_hook(lambda module, inputs, output: seen.append(output))
    images = torch.randint(0, 256, (2, 3, 40, 40), dtype=torch.uint8)
    found = inception(images)
    handle.remove()
    branch = extractor.Mixed_6d.branch1x1
    bn = branch.bn
    values = F.conv2d(seen[0], branch.conv.weight)
    values = (values - bn.running_mean[:, None, None]) / (bn.running_var[:, None, None] + 1e-3).sqrt()
    values = (values * bn.weight[:, None, None] + bn.bias[:, None, None]).relu()
    expected = values.permute(0, 2, 3, 1)[..., :7].reshape(2, -1)
    assert found.spatial.shape == (2, 2023) and found.pooled.shape == (2, 2048) and found.logits.shape == (2, 1008)
    torch.testing.assert_close(found.spatial, expected)
    assert found.spatial.std() > 0


def test_adm_reference_batch_is_read(inception, tmp_path):
    """Published statistics, and a few images for precision, recall and KID."""
    rng = np.random.default_rng(0)
    for name in ("reference", "generated"):
        (tmp_path / name).mkdir()
        for i in range(5):
            pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{i}.png")
    array = np.stack([np.asarray(Image.open(f)) for f in sorted((tmp_path / "reference").glob("*.png"))])
    found = inception(torch.tensor(array).permute(0, 3, 1, 2))
    statistics = {
        "mu": found.pooled.numpy().mean(0),
        "sigma": np.cov(found.pooled.double(), rowvar=False),
        "mu_s": found.spatial.numpy().mean(0),
        "sigma_s": np.cov(found.spatial.double(), rowvar=False),
    }
    np.savez(tmp_path / "adm.npz", array, **statistics)
    options = {"features": inception, "kid_subsets": 2}
    published = score(tmp_path / "generated", tmp_path / "adm.npz", **options)
    direct = score(tmp_path / "generated", tmp_path / "reference", **options)
    for metric in ("fid", "sfid", "precision", "recall", "kid", "inception_score"):
        assert published[metric] == pytest.approx(direct[metric], rel=1e-5), metric
    assert published["num_reference"] is None and "unknown number" in format_table(published)
    assert published["unavailable"] == {}

    np.savez(tmp_path / "stats.npz", mu=statistics["mu"], sigma=statistics["sigma"])
    alone = score(tmp_path / "generated", tmp_path / "stats.npz", **options)
    assert alone["fid"] == pytest.approx(direct["fid"], rel=1e-5)
    assert {"sfid", "precision", "recall", "kid"} == set(alone["unavailable"])
    assert alone["kid"] is None


def test_weight_file_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / "evil.pth").write_bytes(pickle.dumps(Evil(), protocol=2))
    with pytest.raises(UserError, match="cannot be read as a weight file"):
        load_feature_network("inception", tmp_path / "evil.pth")
    assert not (tmp_path / "ran").exists()


def test_weight_files_that_do_not_fit_are_refused(tmp_path):
    torch.save({"fc.weight": torch.zeros(2)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match="does not fit 'inception-v3-compat'"):
        load_feature_network("inception", tmp_path / "other.pth")
    with pytest.raises(UserError, match="does not exist"):
        load_feature_network("inception", tmp_path / "none.pth")


def test_failed_download_names_the_option(monkeypatch):
    def fail(*args, **kwargs):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("torch_fidelity.feature_extractor_inceptionv3.load_state_dict_from_url", fail)
    with pytest.raises(UserError, match="could not be downloaded.*no network.*--inception-weights"):
        load_feature_network("inception")


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": "inceptoin"}, "did you mean 'inception'"),
        ({"metrics": ["fid", "precison"]}, "did you mean 'precision'"),
        ({"features": "vgg16", "inception_weights": "w.pth"}, "a weight file goes with"),
        ({"save_statistics": "reference.pt"}, "must end in .npz"),
    ],
)
def test_bad_options_are_refused_before_work(digits, options, message, monkeypatch):
    monkeypatch.setattr(
        "mhla_diffusion.evaluation.fid.compute_statistics", lambda *a, **k: pytest.fail("work was done")
    )
    with pytest.raises(UserError, match=message):
        score(digits / "train", digits / "held_out", **options)


def test_missing_and_empty_folders_are_refused_before_work(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "mhla_diffusion.evaluation.fid.load_feature_network", lambda *a, **k: pytest.fail("work was done")
    )
    with pytest.raises(UserError, match="reference folder .* holds no images"):
        score(digits / "train", tmp_path)
    with pytest.raises(UserError, match="reference .* does not exist"):
        score(digits / "train", tmp_path / "none")
    with pytest.raises(UserError, match="generated folder .* holds no images"):
        score(tmp_path, digits / "train")
    np.savez(tmp_path / "x.npz", y=np.zeros(2))
    with pytest.raises(UserError, match="neither 'mu' and 'sigma' nor images"):
        score(digits / "train", tmp_path / "x.npz")


def test_statistics_of_another_network_are_refused(digits, tmp_path):
    statistics = compute_statistics(digits / "train", "digits", device="cpu", progress=False)
    statistics.fingerprint = "01234567"
    statistics.save(tmp_path / "s.npz")
    with pytest.raises(UserError, match="cannot be compared"):
        score(digits / "train", tmp_path / "s.npz")
    np.savez(tmp_path / "other.npz", mu=np.zeros(100), sigma=np.eye(100))
    with pytest.raises(UserError, match="100 features, 'digits' has 64"):
        score(digits / "train", tmp_path / "other.npz")


def test_damaged_statistics_are_one_sentence(digits, tmp_path):
    path = tmp_path / "s.npz"
    compute_statistics(digits / "train", "digits", device="cpu", progress=False).save(path)
    content = bytearray(path.read_bytes())
    content[2000:2100] = bytes(255 - byte for byte in content[2000:2100])
    path.write_bytes(content)
    with pytest.raises(UserError, match="cannot be read as a statistics file"):
        score(digits / "train", path)


def test_a_batch_size_that_cannot_be_is_told(digits):
    with pytest.raises(UserError, match="batch_size=0 must be at least 1"):
        score(digits / "train", digits / "held_out", batch_size=0)


def test_statistics_are_written_whole_or_not_at_all(digits, tmp_path, monkeypatch):
    statistics = compute_statistics(digits / "train", "digits", device="cpu", progress=False)
    statistics.save(tmp_path / "s.npz")
    before = (tmp_path / "s.npz").read_bytes()

    def full(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(UserError, match="No space left on device"):
        statistics.save(tmp_path / "s.npz")
    assert (tmp_path / "s.npz").read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == ["s.npz"]
    assert ImageStatistics.load(tmp_path / "s.npz").count == 150


# The command ----------------------------------------------------------------------------------------------------------


def run_script(*arguments):
    spec = importlib.util.spec_from_file_location("evaluate_fid_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main([str(argument) for argument in arguments])


def test_command_prints_a_table_and_writes_json(digits, tmp_path, capsys):
    out = tmp_path / "scores" / "a.json"
    arguments = ["--generated", digits / "held_out", "--reference", digits / "train", "--features", "digits"]
    assert run_script(*arguments, "--metrics", "fid,accuracy", "--json", out, "--device", "cpu") == 0
    printed = capsys.readouterr().out
    result = json.loads(out.read_text())
    assert f"{result['fid']:.4f}" in printed and "Accuracy" in printed and "200 generated, 150 reference" in printed


def test_command_says_what_is_wrong_in_one_line(tmp_path, digits, capsys):
    assert run_script("--generated", digits / "train", "--reference", tmp_path) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the reference folder") and error.count("\n") == 1
