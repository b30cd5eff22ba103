"""Side-by-side timing of the attention operators: all candidates in one run, interleaved, medians with their spread."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from .attention import linear_attention, mhla_attention
from .devices import usable_device
from .layout import BlockLayout
from .mixing import BlockMixing


@dataclass
class Timing:
    """Median and spread of one candidate, in seconds."""

    name: str
    median: float
    low: float  # 25th percentile
    high: float  # 75th percentile


def time_operators(
    grid: tuple[int, ...],
    heads: int,
    head_dim: int,
    blocks: tuple[int, ...],
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    repeats: int = 15,
    backward: bool = False,
    mixing: str = "full",
) -> list[Timing]:
    """Time MHLA, vanilla linear attention, the stock SANA core and SDPA on the same random q, k, v.

    Each takes (B, N, H, D) tensors before the feature map and returns contiguous (B, N, H*D), as inside a layer.

    Args:
        grid: tokens per axis.
        heads, head_dim: feature heads and their dimension.
        blocks: block counts per axis.
        backward: time forward and backward together.
        mixing: "full" or "separable".
    """
    device = str(usable_device(device))
    layout = BlockLayout(grid, blocks)
    weights = BlockMixing(blocks, mixing).to(device)
    shape = (batch, layout.num_tokens, heads, head_dim)
    # Inside a model larger tensors have come and gone, after which the C library's allocator keeps freed memory;
    # without this, what is timed for the first few megabytes is mostly page faults.
    torch.ones(8 * 2**20 - 1024)
    inputs = [torch.randn(shape, dtype=dtype, device=device, requires_grad=backward) for _ in range(3)]

    def mhla(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mhla_attention(F.relu(q), F.relu(k), v, weights(), layout).flatten(2)

    def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention(F.relu(q), F.relu(k), v).flatten(2)

    candidates = {"mhla": mhla, "linear": linear, "sana core": sana_core, "sdpa": softmax_core}
    return interleaved({name: _call(f, inputs, backward) for name, f in candidates.items()}, repeats, device)


def sana_core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What diffusers' SanaLinearAttnProcessor2_0 computes between its projections, from the same layout."""
    dtype = query.dtype
    query, key, value = (x.flatten(2).transpose(1, 2).unflatten(1, (x.shape[2], -1)) for x in (query, key, value))
    query, key, value = F.relu(query).float(), F.relu(key.transpose(2, 3)).float(), value.float()
    value = F.pad(value, (0, 0, 0, 1), mode="constant", value=1.0)
    out = torch.matmul(torch.matmul(value, key), query)
    out = out[:, :, :-1] / (out[:, :, -1:] + 1e-15)
    return out.flatten(1, 2).transpose(1, 2).to(dtype).contiguous()


def softmax_core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """torch's scaled dot-product attention from and to the same layout."""
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value)))
    return out.transpose(1, 2).flatten(2)


def interleaved(calls: Mapping[str, Callable[[], Any]], repeats: int, device: str = "cpu") -> list[Timing]:
    """Time the calls in turn, `repeats` rounds after a warm-up round, so that a busy moment hits all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in tqdm(range(repeats + 1), desc="rounds", leave=False):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            if round_number:
                seconds[name].append(time.perf_counter() - start)
    return [Timing(name, *_quartiles(values)) for name, values in seconds.items()]


def machine() -> dict[str, Any]:
    """What a figure depends on: processor, threads and versions."""
    return {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
    }


def format_timings(title: str, timings: list[Timing]) -> str:
    """A table with each candidate's time in relation to the first one's."""
    lines = [title, f"{'operator':<12} {'median ms':>10} {'25 %':>9} {'75 %':>9} {'× mhla':>8}"]
    first = timings[0].median
    for t in timings:
        low, high = t.low * 1e3, t.high * 1e3
        lines.append(f"{t.name:<12} {t.median * 1e3:>10.2f} {low:>9.2f} {high:>9.2f} {t.median / first:>8.2f}")
    return "\n".join(lines)


def as_json(settings: Mapping[str, Any], timings: list[Timing]) -> dict[str, Any]:
    """Settings, machine and timings, ready for a JSON file."""
    return {"settings": dict(settings), "machine": machine(), "timings": [asdict(t) for t in timings]}


def _call(function: Callable[..., Tensor], inputs: list[Tensor], backward: bool) -> Callable[[], None]:
    def call() -> None:
        if backward:
            function(*inputs).sum().backward()
        else:
            with torch.no_grad():
                function(*inputs)

    return call


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, low, high
