"""The generators of Python, numpy and torch (CPU and this process's GPU), as plain JSON and back. Needs torch."""

from __future__ import annotations

import base64
import importlib.util
import random
import sys
from array import array
from typing import Any

import torch

from ..format.memory import memory_of
from ..format.values import decode, encode


def capture_rng() -> dict[str, Any]:
    """The state of every global generator now. Waits for no GPU: a CUDA generator's state is a seed and an offset."""
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "python": {"version": version, "words": _pack(array("I", words)), "gauss": gauss},
        "torch": _bytes_of(torch.get_rng_state()),
    }
    if (np := sys.modules.get("numpy")) is not None:
        found["numpy"] = encode(np.random.get_state(legacy=False))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = _bytes_of(torch.cuda.get_rng_state())
    return found


def restore_rng(saved: dict[str, Any]) -> None:
    """Puts the generators back to where `capture_rng` found them; those that are not here now are left out."""
    if python := saved.get("python"):
        words = array("I")
        words.frombytes(base64.b64decode(python["words"]))
        random.setstate((python["version"], tuple(words), python["gauss"]))
    if "torch" in saved:
        torch.set_rng_state(_tensor_of(saved["torch"]))
    if "numpy" in saved and importlib.util.find_spec("numpy") is not None:
        import numpy as np

        np.random.set_state(decode(saved["numpy"], where="rng"))
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor_of(saved["cuda"]))


def _pack(words: array[int]) -> str:
    return base64.b64encode(words.tobytes()).decode()


def _bytes_of(t: torch.Tensor) -> str:
    return base64.b64encode(memory_of(t.contiguous())).decode()


def _tensor_of(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
