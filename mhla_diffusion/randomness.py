"""Random numbers that belong to a thing, whoever draws them and whenever."""

from __future__ import annotations

import hashlib

import torch


def sample_generator(seed: int, *key: int | str) -> torch.Generator:
    """A CPU generator that depends on `seed` and `key` only, e.g. `sample_generator(0, "noise", epoch, index)`."""
    digest = hashlib.sha256(repr((seed, *key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
