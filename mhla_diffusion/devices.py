"""Devices by name."""

from __future__ import annotations

import torch

from .errors import UserError


def usable_device(device: str | torch.device | None = None) -> torch.device:
    """The torch device called `device`; None: the GPU if there is one, else the CPU.

    Raises:
        UserError: when this machine has no such device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError):
        known = "cpu and cuda" if torch.cuda.is_available() else "cpu"
        raise UserError(f"device={str(device)!r} is not to be had on this machine; {known} can be used") from None
    return torch.device(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is too little memory; torch has no class of its own for the CPU's."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error)
