"""Matrix products of 16 bits by cuBLASLt: of each shape the algorithm that a measurement finds fastest, a sum in the same kernel.

torch takes the first algorithm that cuBLAS proposes, and adds in a pass of its own. Here the proposals are timed once for each shape
and layout, on the matrices at hand, and what is added is read where the product is written. The library is the one that torch has
loaded; where there is none (no GPU, another type) torch's own products run. Its functions and numbers: NVIDIA's cuBLAS documentation,
"Using the cuBLASLt API".
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_WORKSPACE = 64 << 20
_PROPOSALS = 16
_BF16, _FLOAT, _COMPUTE_FLOAT = 14, 0, 68  # CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F
_TRANSPOSE_A, _TRANSPOSE_B, _MOST_WORKSPACE = 3, 4, 1


class _Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass
class _Problem:
    """One product as cuBLASLt describes it, and what was chosen for it."""

    description: ctypes.c_void_p
    a: ctypes.c_void_p
    b: ctypes.c_void_p
    out: ctypes.c_void_p
    beta: ctypes.c_float
    chosen: _Proposal
    seconds: list[float]
    """Of each proposal, in cuBLAS's order."""


class Products:
    """What was chosen on one device."""

    def __init__(self, device: torch.device) -> None:
        self._lib = _library()
        self._handle = ctypes.c_void_p()
        _check(self._lib.cublasLtCreate(ctypes.byref(self._handle)), "cublasLtCreate")
        self._workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)
        self._one = ctypes.c_float(1.0)
        self.problems: dict[tuple[object, ...], _Problem] = {}

    def multiply(self, a: Tensor, b: Tensor, base: Tensor | None, out: Tensor) -> Tensor:
        """out = a @ b (+ base): a (m, k), b (k, n), base and out (m, n), whose rows are contiguous."""
        key = (a.shape, a.stride(), b.shape, b.stride(), base is not None, out.stride())
        problem = self.problems.get(key)
        if problem is None:
            problem = self.problems[key] = self._choose(a, b, base, out)
        self._run(problem, problem.chosen, a, b, base, out)
        return out

    def _run(self, p: _Problem, proposal: _Proposal, a: Tensor, b: Tensor, base: Tensor | None, out: Tensor) -> None:  # fmt: skip
        to = out.data_ptr()
        # cuBLAS has columns where torch has rows: it makes the transposed product of the transposed factors.
        status = self._lib.cublasLtMatmul(
            self._handle, p.description, ctypes.byref(self._one), ctypes.c_void_p(b.data_ptr()), p.b, ctypes.c_void_p(a.data_ptr()), p.a,
            ctypes.byref(p.beta), ctypes.c_void_p(to if base is None else base.data_ptr()), p.out, ctypes.c_void_p(to), p.out,
            ctypes.byref(proposal.algorithm), ctypes.c_void_p(self._workspace.data_ptr()), ctypes.c_size_t(_WORKSPACE),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip
        _check(status, "cublasLtMatmul")

    def _choose(self, a: Tensor, b: Tensor, base: Tensor | None, out: Tensor) -> _Problem:
        description = ctypes.c_void_p()
        _check(self._lib.cublasLtMatmulDescCreate(ctypes.byref(description), _COMPUTE_FLOAT, _FLOAT), "cublasLtMatmulDescCreate")  # fmt: skip
        for which, matrix in ((_TRANSPOSE_A, b), (_TRANSPOSE_B, a)):
            value = ctypes.c_int(int(matrix.stride(1) != 1))
            _check(self._lib.cublasLtMatmulDescSetAttribute(description, which, ctypes.byref(value), ctypes.c_size_t(4)), "cublasLtMatmulDescSetAttribute")  # fmt: skip
        p = _Problem(
            description, self._layout(a), self._layout(b), self._layout(out), ctypes.c_float(0.0 if base is None else 1.0), _Proposal(), []
        )  # fmt: skip
        found = self._proposals(p)
        # Twice: all shortly, then the best three longer, since a card at its power limit slows down.
        p.seconds = [self._time(p, f, a, b, base, out, 4) for f in found]
        best = sorted(range(len(found)), key=lambda i: p.seconds[i])[:3]
        for i in best:
            p.seconds[i] = min(self._time(p, found[i], a, b, base, out, 12) for _ in range(2))
        p.chosen = found[min(best, key=lambda i: p.seconds[i])]
        return p

    def _layout(self, t: Tensor) -> ctypes.c_void_p:
        rows = t.stride(1) == 1
        made = ctypes.c_void_p()
        size = (t.shape[1], t.shape[0]) if rows else (t.shape[0], t.shape[1])
        _check(self._lib.cublasLtMatrixLayoutCreate(ctypes.byref(made), _BF16, ctypes.c_uint64(size[0]), ctypes.c_uint64(size[1]), ctypes.c_int64(t.stride(0) if rows else t.stride(1))), "cublasLtMatrixLayoutCreate")  # fmt: skip
        return made

    def _proposals(self, p: _Problem) -> list[_Proposal]:
        preference = ctypes.c_void_p()
        _check(self._lib.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)), "cublasLtMatmulPreferenceCreate")  # fmt: skip
        most = ctypes.c_size_t(_WORKSPACE)
        _check(self._lib.cublasLtMatmulPreferenceSetAttribute(preference, _MOST_WORKSPACE, ctypes.byref(most), ctypes.c_size_t(8)), "cublasLtMatmulPreferenceSetAttribute")  # fmt: skip
        found, count = (_Proposal * _PROPOSALS)(), ctypes.c_int()
        status = self._lib.cublasLtMatmulAlgoGetHeuristic(
            self._handle,
            p.description,
            p.b,
            p.a,
            p.out,
            p.out,
            preference,
            _PROPOSALS,
            found,
            ctypes.byref(count),
        )
        self._lib.cublasLtMatmulPreferenceDestroy(preference)
        _check(status, "cublasLtMatmulAlgoGetHeuristic")
        return [f for f in found[: count.value] if f.state == 0]

    def _time(self, p: _Problem, proposal: _Proposal, a: Tensor, b: Tensor, base: Tensor | None, out: Tensor, times: int) -> float:  # fmt: skip
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._run(p, proposal, a, b, base, out)
        began.record()
        for _ in range(times):
            self._run(p, proposal, a, b, base, out)
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3 / times


@cache
def products_of(device: torch.device) -> Products:
    """What was chosen on this device so far."""
    return Products(device)


def fits(*tensors: Tensor) -> bool:
    """Whether these are matrices that cuBLASLt takes as they lie."""
    return all(
        t.is_cuda and t.dtype == torch.bfloat16 and t.ndim == 2 and 1 in t.stride() and min(t.shape) > 1 and t.data_ptr() % 16 == 0
        for t in tensors
    )  # fmt: skip


@torch.library.custom_op("unbroken::product", mutates_args=())
def product(a: Tensor, b: Tensor) -> Tensor:
    """a (m, k) @ b (k, n)."""
    if not fits(a, b):
        return torch.mm(a, b)
    return products_of(a.device).multiply(a, b, None, a.new_empty(a.shape[0], b.shape[1]))


@torch.library.custom_op("unbroken::add_product", mutates_args=())
def add_product(base: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """base (m, n) + a (m, k) @ b (k, n), rounded once."""
    if not fits(base, a, b) or base.stride(1) != 1:
        return torch.addmm(base, a, b)
    out = torch.empty_like(base, memory_format=torch.contiguous_format)
    if base.stride() != out.stride():
        return torch.addmm(base, a, b)
    return products_of(a.device).multiply(a, b, base, out)


@product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


@add_product.register_fake
def _(base: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return base.new_empty(a.shape[0], b.shape[1])


def _check(status: int, call: str) -> None:
    if status:
        raise RuntimeError(f"{call} of cuBLASLt gave status {status}")


@cache
def _library() -> ctypes.CDLL:
    """The cuBLASLt that torch has loaded."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    found = next((line.split()[-1] for line in maps if "libcublasLt.so" in line), "libcublasLt.so")
    return ctypes.CDLL(found)
