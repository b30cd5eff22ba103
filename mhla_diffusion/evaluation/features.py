"""From images to features: Inception through torch-fidelity, the digit network, or any extractor registered there."""

from __future__ import annotations

import contextlib
import hashlib
import io
import urllib.error
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch_fidelity.feature_extractor_base import FeatureExtractorBase
from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3, FeatureExtractorInceptionV3
from torch_fidelity.registry import FEATURE_EXTRACTORS_REGISTRY

from ..devices import usable_device
from ..errors import UserError, nearest
from . import digits  # noqa: F401  registers "digits" with torch-fidelity

ALIASES = {"inception": "inception-v3-compat"}
SPATIAL_CHANNELS = 7


@dataclass(frozen=True)
class Features:
    """What one batch of images gives, float32 on the network's device."""

    pooled: Tensor  # (B, D), for FID, KID, precision and recall
    spatial: Tensor | None = None  # (B, D'), for sFID; Inception only
    logits: Tensor | None = None  # (B, C), for the Inception score


class FeatureNetwork:
    """A torch-fidelity feature extractor and the layers that the metrics read.

    The spatial features of sFID are what the ADM evaluation suite takes from Inception: the first 7 of the 192 channels
    of `mixed_6/conv`, which is the 1×1 branch of `Mixed_6d` after its ReLU, flattened as (height, width, channel): 2023
    numbers.

    Attributes:
        name: the extractor's name in torch-fidelity.
        fingerprint: eight hex digits of its weights' hash; statistics of different weights cannot be compared.
        recommended_images: below this number of images a Fréchet distance is known to be biased or noisy.
    """

    def __init__(self, extractor: FeatureExtractorBase, layers: dict[str, str], device: str | torch.device):
        self.extractor = extractor.to(device).eval().requires_grad_(False)
        self.name = extractor.get_name()
        self.device = torch.device(device)
        self.fingerprint = _fingerprint(extractor)
        self._layers = layers
        self._spatial: Tensor | None = None
        self.has_spatial = isinstance(extractor, FeatureExtractorInceptionV3)
        self.has_logits = "logits" in layers
        self.classifies_labels = isinstance(extractor, digits.FeatureExtractorDigits)
        if self.has_spatial:
            extractor.Mixed_6d.branch1x1.register_forward_hook(self._keep_spatial)
        self.dim = self(torch.zeros(1, 3, 32, 32, dtype=torch.uint8)).pooled.shape[1]
        self.recommended_images = 10 * self.dim if self.classifies_labels else 50_000

    def _keep_spatial(self, module, inputs, output: Tensor) -> None:
        self._spatial = output[:, :SPATIAL_CHANNELS].permute(0, 2, 3, 1).flatten(1).float()

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Features:
        """uint8 images (B, 3, H, W) → their features."""
        # TF32 convolutions change Inception features in the fourth digit; scores are compared in the third.
        allow_tf32, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
        try:
            found = self.extractor.convert_features_tuple_to_dict(self.extractor(images.to(self.device)))
        finally:
            torch.backends.cudnn.allow_tf32 = allow_tf32
        logits = found[self._layers["logits"]] if self.has_logits else None
        spatial, self._spatial = self._spatial, None
        return Features(found[self._layers["pooled"]].float(), spatial, logits)


def load_feature_network(
    features: str = "inception", weights: str | Path | None = None, device: str | torch.device | None = None
) -> FeatureNetwork:
    """Load a feature network by name.

    Args:
        features: "inception", "digits", or the name of an extractor registered with torch-fidelity.
        weights: a weight file; None for the extractor's own default (Inception: downloaded once by torch-fidelity;
            digits: trained on the spot once).
        device: default: the GPU if there is one.

    Raises:
        UserError: an unknown name; a weight file that is missing or does not fit; a download that failed.
    """
    place = usable_device(device)
    name = ALIASES.get(features, features)
    if name not in FEATURE_EXTRACTORS_REGISTRY:
        known = sorted({*ALIASES, *FEATURE_EXTRACTORS_REGISTRY})
        raise UserError(
            f"features={features!r} is not a feature network{nearest(features, known)}; known: {', '.join(known)}"
        )
    if weights is not None and name not in (ALIASES["inception"], "digits"):
        raise UserError(f"a weight file goes with features 'inception' or 'digits', not with {features!r}")
    if weights is not None and not Path(weights).is_file() and name != "digits":
        raise UserError(f"the weight file {str(weights)!r} does not exist")
    cls = FEATURE_EXTRACTORS_REGISTRY[name]
    layers = {"pooled": cls.get_default_feature_layer_for_metric("fid")}
    with contextlib.suppress(KeyError, NotImplementedError):  # no Inception score with such an extractor
        layers["logits"] = cls.get_default_feature_layer_for_metric("isc")
    options = {}
    if weights is not None:
        # torch-fidelity unpickles a weight file without restrictions, so it is given one that has been read safely.
        options["feature_extractor_weights_path"] = str(weights) if name == "digits" else _safe_weights(weights)
    try:
        extractor = cls(name, list(dict.fromkeys(layers.values())), verbose=False, **options)
    except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
        hint = f"; fetch {URL_INCEPTION_V3} by other means and name the file with --inception-weights"
        raise UserError(
            f"the weights of {name!r} could not be downloaded ({error}){hint if 'inception' in name else ''}"
        ) from None
    except (RuntimeError, KeyError) as error:
        if weights is None:
            raise
        first = str(error).strip().splitlines()[0]
        raise UserError(f"the weight file {str(weights)!r} does not fit {name!r} ({first})") from None
    return FeatureNetwork(extractor, layers, place)


def _safe_weights(path: str | Path) -> io.BytesIO:
    try:
        if Path(path).suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged or foreign file makes the readers raise
        raise UserError(f"{str(path)!r} cannot be read as a weight file ({type(error).__name__})") from None
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer


def _fingerprint(module: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:8]
