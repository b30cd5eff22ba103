"""The digit feature network: accurate, repeatable, and an extractor that torch-fidelity can use by itself."""

import functools

import pytest
import torch
import torch.nn.functional as F
import torch_fidelity
from PIL import Image

from mhla_diffusion.errors import UserError
from mhla_diffusion.evaluation import evaluate_images, load_feature_network
from mhla_diffusion.evaluation.digits import (
    digit_network_path,
    digit_split,
    load_digit_network,
    prepare_digits,
    train_digit_network,
)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """One cache for the whole test run, not the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.mark.parametrize("size", [8, 16, 32])
def test_at_least_97_percent_of_held_out_digits_are_recognised(size):
    network, accuracy = load_digit_network()
    _, _, images, labels = digit_split()
    images = F.interpolate(images, (size, size), mode="bilinear") if size != 8 else images
    inputs = prepare_digits((images * 255).round().byte())
    measured = (network(inputs)[1].argmax(1) == labels).double().mean().item()
    assert measured >= 0.97
    if size == 8:
        assert accuracy == pytest.approx(measured, abs=0.005)


def test_held_out_digits_are_not_trained_on():
    train, _, held_out, _ = digit_split()
    assert len(train) + len(held_out) == 1797
    known = {image.numpy().tobytes() for image in train}
    assert not any(image.numpy().tobytes() in known for image in held_out)


def test_training_is_repeatable_and_leaves_the_random_state_alone():
    state = torch.get_rng_state()
    (first, _), (second, _) = train_digit_network(epochs=1), train_digit_network(epochs=1)
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_network_is_kept_and_made_anew_when_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    quick = functools.partial(train_digit_network, epochs=1)
    monkeypatch.setattr("mhla_diffusion.evaluation.digits.train_digit_network", quick)
    network, accuracy = load_digit_network()
    path = digit_network_path()
    assert path.is_file() and path.is_relative_to(tmp_path)
    written = path.stat().st_mtime_ns
    again, again_accuracy = load_digit_network()
    assert path.stat().st_mtime_ns == written and again_accuracy == accuracy
    path.write_bytes(path.read_bytes()[:1000])
    anew, _ = load_digit_network()
    for a, b, c in zip(network.parameters(), again.parameters(), anew.parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_named_file_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"something else")
    with pytest.raises(UserError, match="does not hold the digit feature network"):
        load_feature_network("digits", tmp_path / "x.safetensors")
    assert (tmp_path / "x.safetensors").read_bytes() == b"something else"


def test_grey_and_rgb_images_have_the_same_features():
    network = load_feature_network("digits", device="cpu")
    grey = torch.randint(0, 256, (5, 1, 16, 16), dtype=torch.uint8)
    torch.testing.assert_close(network(grey).pooled, network(grey.expand(-1, 3, -1, -1)).pooled)
    assert network.dim == 64 and network(grey).logits.shape == (5, 10)


def test_scores_equal_those_of_torch_fidelity_alone(tmp_path):
    images, _, others, _ = digit_split()
    for name, group in (("generated", images[:150]), ("reference", others[:200])):
        (tmp_path / name).mkdir()
        for i, image in enumerate(group):
            Image.fromarray((image[0] * 255).byte().numpy()).save(tmp_path / name / f"{i:04d}.png")
    theirs = torch_fidelity.calculate_metrics(
        input1=str(tmp_path / "generated"),
        input2=str(tmp_path / "reference"),
        feature_extractor="digits",
        fid=True,
        kid=True,
        isc=True,
        kid_subset_size=150,
        kid_subsets=10,
        isc_splits=1,
        cuda=False,
        cache=False,
        save_cpu_ram=True,
        verbose=False,
    )
    ours = evaluate_images(
        tmp_path / "generated", tmp_path / "reference", "digits", kid_subsets=10, device="cpu", progress=False
    )
    assert ours["fid"] == pytest.approx(theirs["frechet_inception_distance"], rel=1e-5)
    assert ours["kid"] == pytest.approx(theirs["kernel_inception_distance_mean"], rel=1e-4)
    assert ours["inception_score"] == pytest.approx(theirs["inception_score_mean"], rel=1e-5)
