"""The attention operator alone, on random q, k, v, beside its alternatives."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import linear_attention, mhla_attention
from ..errors import UserError
from ..layout import BlockLayout
from ..mixing import BlockMixing, check_mixing_kind
from .measure import Call

DTYPES = ("float32", "bfloat16", "float16")
FLOORS = ("copy", "gemm")  # what the machine does at best: not attention
Operator = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class OperatorCase:
    """One problem that all candidates solve: (B, N, H, D) tensors before the feature map to contiguous (B, N, H*D).

    Raises:
        UserError: naming the field and what it accepts.
    """

    grid: tuple[int, ...]  # tokens per axis
    blocks: tuple[int, ...]  # block counts per axis
    heads: int = 16
    head_dim: int = 72
    batch: int = 1
    mixing: str = "full"  # or "separable"
    dtype: str = "float32"
    device: str = "cpu"
    backward: bool = False  # forward and backward together

    def __post_init__(self) -> None:
        layout = BlockLayout(tuple(self.grid), tuple(self.blocks))
        object.__setattr__(self, "grid", layout.grid)
        object.__setattr__(self, "blocks", layout.blocks)
        check_mixing_kind(self.mixing)
        for name in ("heads", "head_dim", "batch"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be 1 or more.")
        check_dtype(self.dtype)

    @property
    def num_tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def num_blocks(self) -> int:
        return math.prod(self.blocks)

    @property
    def flops(self) -> int:
        """Of MHLA's matrix products in one forward pass (a multiply and an add are two)."""
        mixing = self.num_blocks if self.mixing == "full" else sum(self.blocks)
        per_head = 4 * self.num_tokens * self.head_dim**2 + 2 * self.num_blocks * mixing * self.head_dim**2
        return self.batch * self.heads * per_head

    @property
    def label(self) -> str:
        what = [f"{'×'.join(map(str, self.grid))} tokens", f"{self.heads}×{self.head_dim}"]
        what += [f"{'×'.join(map(str, self.blocks))} blocks"]
        what += [f"batch {self.batch}"] if self.batch > 1 else []
        what += ["separable"] if self.mixing == "separable" else []
        what += [self.dtype] if self.dtype != "float32" else []
        what += ["with backward"] if self.backward else []
        return ", ".join(what)


STANDARD_CASES = (
    {"grid": (64, 64), "heads": 16, "head_dim": 72, "blocks": (4, 4)},
    {"grid": (128, 128), "heads": 12, "head_dim": 64, "blocks": (8, 8)},
    {"grid": (32, 32), "heads": 16, "head_dim": 72, "blocks": (4, 4)},
    {"grid": (32, 32), "heads": 36, "head_dim": 32, "blocks": (4, 4)},
    {"grid": (16, 16), "heads": 6, "head_dim": 64, "blocks": (4, 4), "batch": 4},
    {"grid": (64, 64), "heads": 16, "head_dim": 72, "blocks": (16, 16), "mixing": "separable"},
    {"grid": (21, 30, 50), "heads": 12, "head_dim": 128, "blocks": (3, 5, 10)},
)


def check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}.")


def candidates(case: OperatorCase, backends: Sequence[str] = ()) -> list[str]:
    """Names of all that can be measured for a case: MHLA (once per backend if these are named), and the others."""
    names = [f"mhla-{backend}" for backend in backends] or ["mhla"]
    names += ["linear", "sana-core", "sdpa"]
    if case.device.startswith("cuda") and importlib.util.find_spec("fla") is not None:
        names.append("fla-causal")
    return names if case.backward else names + list(FLOORS)


def prepare(case: OperatorCase, names: Sequence[str]) -> dict[str, Call]:
    """The candidates of the given names on the same random inputs."""
    torch.manual_seed(0)
    layout = BlockLayout(case.grid, case.blocks)
    mixing = BlockMixing(case.blocks, case.mixing).to(case.device)
    dtype = getattr(torch, case.dtype)
    shape = (case.batch, case.num_tokens, case.heads, case.head_dim)
    # Inside a model larger tensors have come and gone, after which the C library's allocator keeps freed memory;
    # without this, what is timed for the first few megabytes is mostly page faults.
    torch.ones(8 * 2**20 - 1024)
    inputs = [torch.randn(shape, dtype=dtype, device=case.device, requires_grad=case.backward) for _ in range(3)]

    def mhla(q: Tensor, k: Tensor, v: Tensor, backend: str | None = None) -> Tensor:
        return mhla_attention(q, k, v, mixing(), layout, feature_map="relu", backend=backend).flatten(2)

    operators: dict[str, Operator] = {
        "linear": linear_core,
        "sana-core": sana_core,
        "sdpa": softmax_core,
        "fla-causal": fla_core,
        "copy": copies,
    }
    calls = {}
    for name in names:
        attention, _, backend = name.partition("-")
        if name == "gemm":
            calls[name] = Call(_gemm(case))
        elif attention == "mhla":
            calls[name] = Call(_call(partial(mhla, backend=backend or None), inputs, case.backward))
        else:
            calls[name] = Call(_call(operators[name], inputs, case.backward))
    return calls


def linear_core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Vanilla linear attention with ReLU features."""
    return linear_attention(F.relu(query), F.relu(key), value).flatten(2)


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


def fla_core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """flash-linear-attention's chunked kernel, which is causal: other values from about as many operations."""
    from fla.ops.linear_attn import chunk_linear_attn

    return chunk_linear_attn(F.relu(query), F.relu(key), value, normalize=True)[0].flatten(2)


def copies(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Two copies: as many bytes as reading q, k, v once and writing the output once, so a floor of the time."""
    query.clone()
    return key.clone().flatten(2)


def gemm_size(device: str) -> int:
    """Side of the square matrices whose product stands for the machine's best rate."""
    return 8192 if device.startswith("cuda") else 2048


def _gemm(case: OperatorCase) -> Callable[[], Any]:
    # The operator accumulates in float32; processors without half-precision units would make the product look slow.
    dtype = getattr(torch, case.dtype) if case.device.startswith("cuda") else torch.float32
    side = gemm_size(case.device)
    a, b = (torch.randn(side, side, dtype=dtype, device=case.device) for _ in range(2))
    return lambda: torch.mm(a, b)


def _call(function: Operator, inputs: list[Tensor], backward: bool) -> Callable[[], None]:
    def call() -> None:
        if backward:
            function(*inputs).sum().backward()
            for x in inputs:
                x.grad = None
        else:
            with torch.no_grad():
                function(*inputs)

    return call
