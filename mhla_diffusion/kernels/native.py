"""The operator on CPUs in C++ (native.cpp and its headers), compiled by this machine's compiler when it is first used.

Products of blocks of a few tokens, and mixing with matrices of a few rows, are too small for libraries of matrix
products to be fast. Here they run in registers, next to the copies into blocks and back.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ..layout import BlockLayout

logger = logging.getLogger(__name__)

SOURCES = sorted(Path(__file__).parent.glob("native*.?pp"))
COMPILERS = ("g++", "c++")  # GCC; the first one that is there, unless the environment variable CXX names another
FLAGS = ("-O3", "-march=native", "-std=gnu++17", "-fPIC", "-fopenmp")
LONGEST_COMPILATION = 120  # seconds; it takes two or three
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
FEATURE_MAPS = {"identity": 0, "relu": 1, "relu_eps": 2}


class CannotCompile(Exception):
    """Why there is no compiled code on this machine."""


class _Tokens(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "token", "head", "dtype"))]

    @classmethod
    def of(cls, x: Tensor) -> _Tokens:
        return cls(x.data_ptr(), *x.stride()[:3], DTYPES[x.dtype])


class _Call(ctypes.Structure):
    """`Call` of native_call.hpp."""

    _fields_ = [
        *((name, _Tokens) for name in ("query", "key", "value")),
        *((name, ctypes.c_void_p) for name in ("key_mask", "token_of_place", "first_place")),
        ("factors", ctypes.c_void_p * 3),
        ("counts", ctypes.c_int64 * 3),
        ("num_factors", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("batch", "tokens", "heads", "dim", "width", "blocks", "block_size")),
        *((name, ctypes.c_int64) for name in ("feature_map", "normalize")),
        ("eps", ctypes.c_float),
        ("threads", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("scratch", "kept", "out")),
        ("out_grad", _Tokens),
        *((name, ctypes.c_void_p) for name in ("query_grad", "key_grad", "value_grad")),
        ("factor_grads", ctypes.c_void_p * 3),
    ]


class NativeKernel:
    """One call: its tensors, and the structure that tells the compiled code where they lie."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        factors: Sequence[Tensor],
        normalize: bool,
        eps: float,
        layout: BlockLayout,
        key_mask: Tensor | None,
        feature_map: str,
    ) -> None:
        self.inputs = tuple(map(_readable, (query, key, value)))
        self.factors = [factor.to(torch.float32).contiguous() for factor in factors]
        self.places = _places(layout)
        self.key_mask = None if key_mask is None else key_mask.contiguous()
        batch, tokens, heads, dim = query.shape
        self.call = call = _Call()
        call.query, call.key, call.value = map(_Tokens.of, self.inputs)
        call.key_mask = _address(self.key_mask)
        call.token_of_place, call.first_place = map(_address, self.places)
        call.num_factors = len(self.factors)
        for axis, factor in enumerate(self.factors):
            call.factors[axis], call.counts[axis] = factor.data_ptr(), len(factor)
        call.batch, call.tokens, call.heads, call.dim, call.width = batch, tokens, heads, dim, value.shape[-1]
        call.blocks, call.block_size = layout.num_blocks, layout.largest_block
        call.feature_map, call.normalize, call.eps = FEATURE_MAPS[feature_map], normalize, eps
        call.threads = torch.get_num_threads()

    def outputs(self, keep: bool) -> tuple[Tensor, Tensor | None]:
        """The attention (B, N, H, E), and its denominators (B, H, M, L) if they are to be kept and there are any."""
        call, value = self.call, self.inputs[2]
        out = torch.empty(value.shape, dtype=value.dtype)
        denominators = None
        if keep and call.normalize:
            denominators = torch.empty(call.batch, call.heads, call.blocks, call.block_size)
        call.out, call.kept = out.data_ptr(), _address(denominators)
        self._run("forward")
        return out, denominators

    def gradients(self, grad: Tensor, denominators: Tensor | None, needed: Sequence[bool]) -> list[Tensor | None]:
        """Of query, key, value and the mixing factors, where `needed`, from the gradient of the output."""
        call = self.call
        wanted = zip(self.inputs, needed[:3], strict=True)
        grads = [torch.empty(x.shape, dtype=x.dtype) if need else None for x, need in wanted]
        wanted = zip(self.factors, needed[3:], strict=True)
        by_thread = [torch.zeros(call.threads, *x.shape) if need else None for x, need in wanted]
        grad = _readable(grad)
        call.kept, call.out_grad = _address(denominators), _Tokens.of(grad)
        call.query_grad, call.key_grad, call.value_grad = map(_address, grads)
        for axis, sums in enumerate(by_thread):
            call.factor_grads[axis] = _address(sums)
        self._run("backward")
        return [*grads, *(None if sums is None else sums.sum(0) for sums in by_thread)]

    def _run(self, direction: str) -> None:
        library, call = load(), ctypes.byref(self.call)
        scratch = torch.empty(getattr(library, f"mhla_{direction}_scratch")(call) + 16)
        self.call.scratch = -(-scratch.data_ptr() // 64) * 64  # where a cache line begins
        getattr(library, f"mhla_{direction}")(call)


def _readable(x: Tensor) -> Tensor:
    """`x`, or a copy if the elements of a head do not lie side by side, or not as they are."""
    x = x.resolve_neg()
    return x if x.stride(-1) == 1 else x.contiguous()


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


@lru_cache(maxsize=64)
def _places(layout: BlockLayout) -> tuple[Tensor, Tensor]:
    """The tokens in the order of their blocks, (N,) int64, and where in it each block begins and the last ends."""
    with torch.inference_mode(False):
        first = torch.tensor((0, *layout.block_sizes)).cumsum(0)
        return torch.argsort(layout.block_of_token, stable=True), first


def obstacle() -> str | None:
    """Why there is no compiled code on this machine; None if there is. Compiles it if that was not done before."""
    try:
        load()
    except CannotCompile as error:
        return str(error)
    return None


def load() -> ctypes.CDLL:
    """The compiled code, compiled now if no process did so before on a processor like this one.

    Raises:
        CannotCompile: if there is no compiler, or it fails, or what it makes cannot be loaded.
    """
    result = _load_once()
    if isinstance(result, CannotCompile):
        raise result
    return result


@lru_cache(maxsize=1)
def _load_once() -> ctypes.CDLL | CannotCompile:
    """`load`, but a failure is returned and so remembered."""
    try:
        compiler = _compiler()
        what = [*(source.read_text(encoding="utf-8") for source in SOURCES), *compiler, *FLAGS, _processor()]
        name = f"attention-{hashlib.sha256(chr(0).join(what).encode()).hexdigest()[:16]}.so"
        folder = _cache()
        if folder is not None and (folder / name).exists():
            try:
                return _open(folder / name)
            except OSError:
                logger.warning("%s is damaged and is compiled again.", folder / name)
        with tempfile.TemporaryDirectory(prefix="mhla_diffusion_", dir=folder) as workshop:
            made = Path(workshop, name)
            _compile(compiler, made)
            if folder is not None:
                made = made.replace(folder / name)  # only whole files appear there
            return _open(made)  # it stays open when a temporary file goes
    except (CannotCompile, OSError, ValueError) as error:  # ValueError: CXX is no command
        logger.info("There is no compiled attention, and so the slower code for CPUs is used: it %s.", error)
        return error if isinstance(error, CannotCompile) else CannotCompile(f"could not be compiled or loaded: {error}")


def _compiler() -> list[str]:
    """The command of the compiler."""
    named = os.environ.get("CXX")
    command = shlex.split(named) if named else next(([name] for name in COMPILERS if shutil.which(name)), [])
    if not command:
        raise CannotCompile(f"needs a C++ compiler, and there is none of {', '.join(COMPILERS)}")
    return command


def _processor() -> str:
    """What tells processors apart, whose instructions differ although they share a home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return "\n".join(sorted({x for x in lines if x.startswith(("model name", "flags", "Features", "CPU part"))}))


def _cache() -> Path | None:
    """Where compiled code is kept; None if that cannot be written to."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "mhla_diffusion")
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    return folder if os.access(folder, os.W_OK) else None


def _compile(compiler: Sequence[str], library: Path) -> None:
    """Compile to a file.

    It is not linked with OpenMP: the functions of the one that torch has loaded are found when it is opened, so that
    both have the same threads.
    """
    objects = library.with_suffix(".o")
    for arguments in (
        (*FLAGS, "-c", Path(__file__).with_suffix(".cpp"), "-o", objects),
        ("-shared", objects, "-o", library),
    ):
        command = [*compiler, *map(str, arguments)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=LONGEST_COMPILATION)
        except subprocess.CalledProcessError as error:
            last = (error.stderr.strip().splitlines() or ["no message"])[-1]
            raise CannotCompile(f"could not be compiled by {compiler[0]}: {last}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotCompile(f"could not be compiled by {compiler[0]}: {error}") from error


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for direction in ("forward", "backward"):
        for name, result in ((f"mhla_{direction}", None), (f"mhla_{direction}_scratch", ctypes.c_int64)):
            getattr(library, name).argtypes, getattr(library, name).restype = [ctypes.POINTER(_Call)], result
    return library
