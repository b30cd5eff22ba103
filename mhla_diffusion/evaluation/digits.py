"""A small feature network for handwritten digits, so that FID, KID and the Inception score need no download.

A convolutional network is trained on the digits that ship inside scikit-learn (8×8 pixels, four fifths of them, a few
seconds on a CPU, fixed seed) and kept as safetensors in the user's cache. It is registered with torch-fidelity as
`"digits"`: 64 features before the last layer ("64") and the ten class scores ("logits").
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch_fidelity import register_feature_extractor
from torch_fidelity.feature_extractor_base import FeatureExtractorBase
from torch_fidelity.registry import FEATURE_EXTRACTORS_REGISTRY
from tqdm import trange

from ..errors import UserError

VERSION = "1"  # raised when the network or its training changes, so that an old file in the cache is not used


class DigitNetwork(nn.Module):
    """Grey images (B, 1, 8, 8) in [0, 1] → features (B, 64) and class scores (B, 10), float32."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.GELU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(64 * 16, 64),
            nn.GELU(),
        )
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(images)
        return features, self.head(features)


def prepare_digits(images: Tensor) -> Tensor:
    """uint8 images (B, 1 or 3, H, W) of any size → what the network takes, float32 (B, 1, 8, 8) in [0, 1]."""
    images = images.float().mean(1, keepdim=True) / 255
    if images.shape[-2:] != (8, 8):
        images = F.interpolate(images, (8, 8), mode="bilinear", antialias=True, align_corners=False)
    return images


def digit_split() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images (1437, 1, 8, 8) in [0, 1] and labels, held-out images (360, 1, 8, 8) and labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.RandomState(0).permutation(len(digits.images))
    images = torch.tensor(digits.images[order] / 16, dtype=torch.float32)[:, None]
    labels = torch.tensor(digits.target[order], dtype=torch.long)
    return images[:-360], labels[:-360], images[-360:], labels[-360:]


def train_digit_network(epochs: int = 24, seed: int = 0) -> tuple[DigitNetwork, float]:
    """Train on the CPU; return the network in eval mode and its accuracy on the 360 held-out digits.

    One thread and a private random state make the weights the same on every call on a machine.
    """
    images, labels, held_images, held_labels = digit_split()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(seed)
            network = DigitNetwork()
            batch, steps = 64, epochs * len(images) // 64
            optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=0.05)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
            # The bar is for terminals only: this happens once, in the middle of something else.
            for _ in trange(steps, desc="training the digit network, once", leave=False, disable=None):
                chosen = torch.randint(len(images), (batch,))
                inputs = images[chosen]
                inputs = torch.where(torch.rand(batch, 1, 1, 1) < 0.5, inputs, _jitter(inputs))
                _, scores = network(inputs)
                loss = F.cross_entropy(scores, labels[chosen], label_smoothing=0.05)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
        network.eval().requires_grad_(False)
        accuracy = (network(held_images)[1].argmax(1) == held_labels).double().mean().item()
    finally:
        torch.set_num_threads(threads)
    return network, accuracy


def _jitter(images: Tensor) -> Tensor:
    """Small random rotations, scalings and shifts, so that the features do not hang on single pixels."""
    count = len(images)
    angle = (torch.rand(count) - 0.5) * 0.35
    scale = 1 + (torch.rand(count) - 0.5) * 0.2
    cos, sin = scale * angle.cos(), scale * angle.sin()
    shift = (torch.rand(2, count) - 0.5) * 0.3
    matrix = torch.stack([torch.stack([cos, -sin, shift[0]], -1), torch.stack([sin, cos, shift[1]], -1)], -2)
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def digit_network_path() -> Path:
    """Where the trained network is kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "mhla_diffusion" / f"digit_network_v{VERSION}.safetensors"


def load_digit_network(path: str | Path | None = None) -> tuple[DigitNetwork, float]:
    """Load the network and its held-out accuracy from `path` (default: the user's cache), or train and keep it.

    Raises:
        UserError: `path` was given and holds something else.
    """
    target = Path(path) if path is not None else digit_network_path()
    if target.is_file():
        try:
            with safe_open(target, "pt") as file:
                network = DigitNetwork()
                network.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
                return network.eval().requires_grad_(False), float(file.metadata()["accuracy"])
        except (SafetensorError, RuntimeError, KeyError, TypeError, OSError):
            # A damaged file in our own cache is made anew; one that the user named is not ours to replace.
            if path is not None:
                raise UserError(f"{str(path)!r} does not hold the digit feature network") from None
    network, accuracy = train_digit_network()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        save_file(network.state_dict(), temporary, {"version": VERSION, "accuracy": repr(accuracy)})
        os.replace(temporary, target)
    except (OSError, SafetensorError):
        if path is not None:
            raise UserError(f"the digit feature network cannot be written to {str(path)!r}") from None
        # Without a writable cache it is trained again next time.
    return network, accuracy


class FeatureExtractorDigits(FeatureExtractorBase):
    """The digit network for torch-fidelity: uint8 images (B, 3 or 1, H, W) of any size → a tuple of features."""

    def __init__(self, name: str, features_list: list[str], feature_extractor_weights_path=None, **kwargs):
        super().__init__(name, features_list)
        self.network, self.accuracy = load_digit_network(feature_extractor_weights_path)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        features, logits = self.network(prepare_digits(images))
        found = {"64": features, "logits": logits}
        return tuple(found[name] for name in self.features_list)

    @staticmethod
    def get_provided_features_list() -> tuple[str, ...]:
        return "64", "logits"

    @staticmethod
    def get_default_feature_layer_for_metric(metric: str) -> str:
        return {"isc": "logits", "fid": "64", "kid": "64", "prc": "64"}[metric]

    @staticmethod
    def can_be_compiled() -> bool:
        return True

    @staticmethod
    def get_dummy_input_for_compile() -> Tensor:
        return torch.zeros(1, 3, 8, 8, dtype=torch.uint8)


if "digits" not in FEATURE_EXTRACTORS_REGISTRY:
    register_feature_extractor("digits", FeatureExtractorDigits)
