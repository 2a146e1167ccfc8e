"""Products of matrices of small whole numbers: each sum is exact in any order, so that one card alone can be judged.

Every partial sum of such a product is a whole number that the accumulator holds exactly, whatever the kernel, the split of the
sum and the kind of card. What rounds is only the result's type, once and to the nearest, which is the same everywhere.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..result import CheckResult, State

_LARGEST = 2
_SIZE_GPU, _SIZE_CPU = 4096, 256
After = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class _Kind:
    """How a product is made: the type of its factors, and whether a GPU may use TF32 for it."""

    name: str
    dtype: torch.dtype
    tf32: bool = False


_KINDS = (
    _Kind("float32", torch.float32), _Kind("tf32", torch.float32, True), _Kind("bfloat16", torch.bfloat16),
    _Kind("float16", torch.float16), _Kind("float64", torch.float64),
)  # fmt: skip


def check_products(
    device: torch.device, seconds: float = 10.0, after: After = lambda product: None
) -> list[CheckResult]:
    """Multiplies again and again for so many seconds, each kind of number for its share; every element of every product counts.

    `after` is called with each product before it is looked at: tests flip bits there.
    """
    size = _SIZE_GPU if device.type == "cuda" else _SIZE_CPU
    kinds = [k for k in _KINDS if not (k.tf32 and device.type != "cuda")]
    return [_check(device, size, kind, seconds / len(kinds), after) for kind in kinds]


def _check(device: torch.device, size: int, kind: _Kind, seconds: float, after: After) -> CheckResult:
    name, place = f"products {kind.name}", _name(device)
    a, b = (_numbers(size, seed).to(device, kind.dtype) for seed in (1, 2))
    expected = _expect(size, device, kind.dtype)
    began, made, wrong, where = time.monotonic(), 0, 0, ""
    with _exactly(kind.tf32), torch.no_grad():
        while not made or time.monotonic() - began < seconds:
            product = a @ b
            after(product)
            made += 1
            # Not the value alone: a NaN must count, and minus zero is no zero.
            if not torch.equal(_bits(product), expected):
                bad = (_bits(product) != expected).nonzero()
                wrong += 1
                where = where or f"row {int(bad[0, 0])}, column {int(bad[0, 1])}, {len(bad)} elements"
    if wrong:
        text = f"{wrong} of {made} products of {size} x {size} whole numbers are wrong (first: {where})"
        return CheckResult(name, State.BAD, text, place)
    return CheckResult(name, State.GOOD, f"{made} products of {size} x {size} whole numbers are exact", place)


def _numbers(size: int, seed: int) -> torch.Tensor:
    """Whole numbers from -2 to 2, the same on every machine: int8[size, size] (a multiplicative hash of the place)."""
    i = torch.arange(size * size, dtype=torch.int64) + seed * 0x9E3779B1
    mixed = (i * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return ((mixed >> 16) % (2 * _LARGEST + 1) - _LARGEST).to(torch.int8).view(size, size)


def _expect(size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The bits of the exact product in this type. It is made on the device in float64, and proven on the CPU: for five vectors w
    of whole numbers it must be (A B) w = A (B w), so that the device does not vouch for itself."""
    return _bits(_multiply_exactly(size, device).to(dtype).to(device))


@functools.lru_cache(2)
def _multiply_exactly(size: int, device: torch.device) -> torch.Tensor:
    """float64[size, size] on the host."""
    a, b = _numbers(size, 1), _numbers(size, 2)
    with _exactly(tf32=False):
        exact = a.to(device, torch.float64) @ b.to(device, torch.float64)
    on_host = exact.cpu()
    for seed in range(5):
        w = _numbers(size, 10 + seed)[0].double()
        if not torch.equal(on_host @ w, a.double() @ (b.double() @ w)):
            on_host = a.double() @ b.double()  # the device is wrong already: its products will not fit this
            break
    return on_host


def _bits(t: torch.Tensor) -> torch.Tensor:
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    # A product's zero may have either sign, by the order of its terms.
    return (t + 0.0).view(kinds[t.element_size()])


@contextlib.contextmanager
def _exactly(tf32: bool) -> Iterator[None]:
    """Lets products use TF32 or not, and never sum in half precision."""
    m = torch.backends.cuda.matmul
    names = ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = {n: getattr(m, n) for n in names}
    try:
        m.allow_tf32 = tf32
        m.allow_fp16_reduced_precision_reduction = m.allow_bf16_reduced_precision_reduction = False
        yield
    finally:
        for n, value in before.items():
            setattr(m, n, value)


def _name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else f"gpu {device.index or 0}"
