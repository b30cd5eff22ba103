"""Devices and files that are not to be had are told before any work."""

from __future__ import annotations

import pytest
import torch

from mhla_diffusion.devices import usable_device
from mhla_diffusion.errors import UserError, check_writable


def test_the_cpu_is_always_usable():
    assert usable_device("cpu") == torch.device("cpu")
    assert usable_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("device", ["warp", "meta", "cuda:99"])
def test_a_device_that_is_not_there_is_named(device):
    with pytest.raises(UserError, match=f"device='{device}' is not to be had on this machine; cpu"):
        usable_device(device)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    check_writable("json", tmp_path / "new" / "scores.json")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="json='.*scores.json' cannot be written"):
        check_writable("json", tmp_path / "file" / "scores.json")
    with pytest.raises(UserError, match="json='.*new' is a folder; name a file"):
        check_writable("json", tmp_path / "new")
