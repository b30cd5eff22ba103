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
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ..layout import BlockLayout
from .cpu import CPUKernel

logger = logging.getLogger(__name__)

SOURCES = sorted(Path(__file__).parent.glob("native*.?pp"))
COMPILERS = ("g++", "c++")  # GCC; tried in this order, after the one that the environment variable CXX names
FLAGS = ("-O3", "-march=native", "-std=gnu++17", "-fPIC", "-fopenmp")
LONGEST_COMPILATION = 120  # seconds; it takes about five
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
FEATURE_MAPS = {"identity": 0, "relu": 1, "relu_eps": 2}


class CannotCompile(Exception):
    """Why there is no compiled code on this machine."""


def obstacle(tensors: Sequence[Tensor], others: Sequence[Tensor] = (), feature_map: str = "identity") -> str | None:
    """Why the compiled code cannot take a call; None if it can. Compiles it if that was not done before.

    Args:
        tensors: query, key, value and what is rotated; of a backward pass the gradient of the output.
        others: the mixing's factors and the mask.
    """
    if is_in_torch_dispatch_mode():
        return "cannot be followed by a dispatch mode, which sees operations of torch only"
    for x in (*tensors, *others):
        if x.device.type != "cpu":
            return f"takes tensors on the CPU, not on {x.device}"
        last = x.storage_offset() + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        if x._is_zerotensor() or x.untyped_storage().nbytes() < (last + 1) * x.element_size():
            return "takes tensors that have their numbers in memory"
    for x in tensors:
        if x.dtype not in DTYPES:
            return f"takes float32 and bfloat16, not {str(x.dtype).removeprefix('torch.')}"
    if feature_map not in FEATURE_MAPS:
        return f"takes the feature maps {', '.join(FEATURE_MAPS)}, not {feature_map}"
    return why_not_compiled()


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
        self.arguments = (query, key, value, factors, normalize, eps, layout, key_mask, feature_map)
        self.inputs = tuple(map(_readable, (query, key, value)))
        self.factors = [factor.resolve_neg().to(torch.float32).contiguous() for factor in factors]
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
        out = _empty(value.shape, value.dtype)
        denominators = None
        if keep and call.normalize:
            denominators = _empty((call.batch, call.heads, call.blocks, call.block_size))
        call.out, call.kept = out.data_ptr(), _address(denominators)
        self._run("forward")
        return out, denominators

    def gradients(self, grad: Tensor, denominators: Tensor | None, needed: Sequence[bool]) -> list[Tensor | None]:
        """Of query, key, value and the mixing factors, where `needed`, from the gradient of the output."""
        if obstacle((grad,)) is not None:
            return CPUKernel(*self.arguments).gradients(grad, denominators, needed)
        call = self.call
        inputs, factors = zip(self.inputs, needed[:3], strict=True), zip(self.factors, needed[3:], strict=True)
        grads = [_empty(x.shape, x.dtype) if need else None for x, need in inputs]
        by_thread = [_empty((call.threads, *x.shape)).zero_() if need else None for x, need in factors]
        grad = _readable(grad)
        call.kept, call.out_grad = _address(denominators), _Tokens.of(grad)
        call.query_grad, call.key_grad, call.value_grad = map(_address, grads)
        for axis, sums in enumerate(by_thread):
            call.factor_grads[axis] = _address(sums)
        self._run("backward")
        return [*grads, *(None if sums is None else sums.sum(0) for sums in by_thread)]

    def _run(self, direction: str) -> None:
        library, call = load(), ctypes.byref(self.call)
        scratch = _empty((getattr(library, f"mhla_{direction}_scratch")(call) + 16,))
        self.call.scratch = -(-scratch.data_ptr() // 64) * 64  # where a cache line begins
        getattr(library, f"mhla_{direction}")(call)


def _readable(x: Tensor) -> Tensor:
    """`x`, or a copy if the elements of a head do not lie side by side, or not as they are."""
    x = x.resolve_neg()
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory for the compiled code, whatever dtype and device are the default."""
    return torch.empty(tuple(shape), dtype=dtype, device="cpu")


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


@lru_cache(maxsize=64)
def _places(layout: BlockLayout) -> tuple[Tensor, Tensor]:
    """The tokens in the order of their blocks, (N,) int64, and where in it each block begins and the last ends."""
    with torch.inference_mode(False):
        first = torch.tensor((0, *layout.block_sizes), device="cpu").cumsum(0)
        return torch.argsort(layout.block_index("cpu"), stable=True), first


def why_not_compiled() -> str | None:
    """Why there is no compiled code on this machine; None if there is. Compiles it if that was not done before."""
    result = _load_once()
    return str(result) if isinstance(result, CannotCompile) else None


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
        return _load_from(_cache())
    except CannotCompile as error:
        problem = error
    except OSError as error:
        problem = CannotCompile(f"could not be compiled or loaded ({error})")
    logger.info("There is no compiled attention, and so the slower code for CPUs is used: it %s.", problem)
    return problem


def _load_from(cache: Path | None) -> ctypes.CDLL:
    """The code that was compiled earlier, if it is in the cache, which then need not have a compiler beside it."""
    what = [
        *(source.read_text(encoding="utf-8") for source in SOURCES),
        *FLAGS,
        os.environ.get("CXX", ""),
        _processor(),
    ]
    name = f"attention-{hashlib.sha256(chr(0).join(what).encode(errors='replace')).hexdigest()[:16]}.so"
    kept = None if cache is None else cache / name
    is_kept = kept is not None and _can_be_trusted(kept)
    if is_kept:
        with suppress(OSError):  # where programs are forbidden a copy of it may still be opened
            return _open(kept)
    with tempfile.TemporaryDirectory(prefix="mhla_diffusion_") as workshop:
        made = Path(workshop, name)
        if is_kept:
            shutil.copyfile(kept, made)
        else:
            _compile(made)
        library = _open(made)  # what is open can be used after its file is gone
        if kept is not None and not is_kept:
            _keep(made, kept)
        return library


def _compilers() -> list[list[str]]:
    """The commands of the compilers that may be there."""
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError:  # a quotation without an end
        named = []
    found = [[name] for name in COMPILERS if shutil.which(name) and [name] != named]
    return [named, *found] if named else found


def _processor() -> str:
    """What tells processors apart, whose instructions differ although they share a home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return "\n".join(sorted({x for x in lines if x.startswith(("model name", "flags", "Features", "CPU part"))}))


def _cache() -> Path | None:
    """Where compiled code is kept; None if there is no such folder."""
    try:
        named = Path(os.environ.get("XDG_CACHE_HOME") or "")
        folder = (named if named.is_absolute() else Path.home() / ".cache") / "mhla_diffusion"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    return folder


def _compile(library: Path) -> None:
    """Compile with the first compiler that can, to a file that ends with its own checksum.

    Raises:
        CannotCompile: with what the first compiler said.
    """
    problem = None
    for compiler in _compilers():
        try:
            _compile_with(compiler, library)
            break
        except CannotCompile as error:
            problem = problem or error
    else:
        raise problem or CannotCompile(f"needs a C++ compiler, and there is none of {', '.join(COMPILERS)}")
    code = library.read_bytes()
    library.write_bytes(code + hashlib.sha256(code).digest())  # what follows the code is not read as such


def _compile_with(compiler: Sequence[str], library: Path) -> None:
    """It is not linked with OpenMP: the functions of the one that torch has loaded are found when it is opened, so that
    both have the same threads. Nor with what GCC puts before and after it, which could change how the process computes.
    """
    objects, source = library.with_suffix(".o"), Path(__file__).with_suffix(".cpp")
    for arguments in ((*FLAGS, "-c", source, "-o", objects), ("-shared", "-nostartfiles", objects, "-o", library)):
        command = [*compiler, *map(str, arguments)]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=LONGEST_COMPILATION)
        except subprocess.CalledProcessError as error:
            lines = error.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
            first = next((line for line in lines if "error" in line), lines[-1])
            raise CannotCompile(f"could not be compiled by {compiler[0]} ({first})") from error
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise CannotCompile(f"could not be compiled by {compiler[0]} ({error})") from error
    if not library.exists():
        raise CannotCompile(f"could not be compiled by {compiler[0]} (it made no file)")


def _can_be_trusted(path: Path) -> bool:
    """Whether the file is there, nobody else's, and as it was written: half a library would crash the process."""
    try:
        content, owner = path.read_bytes(), path.stat().st_uid
    except OSError:
        return False
    return owner in (os.getuid(), 0) and hashlib.sha256(content[:-32]).digest() == content[-32:]


def _keep(made: Path, place: Path) -> None:
    """Copy a file to its place, if that is possible; it appears there whole."""
    with suppress(OSError), tempfile.NamedTemporaryFile(dir=place.parent, suffix=".part", delete=False) as part:
        try:
            part.write(made.read_bytes())
            part.close()
            os.chmod(part.name, 0o755)
            os.replace(part.name, place)
        except OSError:
            os.unlink(part.name)


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    try:
        for direction in ("forward", "backward"):
            for name, result in ((f"mhla_{direction}", None), (f"mhla_{direction}_scratch", ctypes.c_int64)):
                getattr(library, name).argtypes, getattr(library, name).restype = [ctypes.POINTER(_Call)], result
        library.mhla_call_size.restype = ctypes.c_int64
        size = library.mhla_call_size()
    except AttributeError as error:
        raise OSError(str(error)) from error
    if size != ctypes.sizeof(_Call):
        raise OSError("it does not have the structure that it is called with")
    return library
