"""The digest of a sample or a batch: equal bytes, equal digest, whatever process, machine or GPU. Needs no torch itself."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import xxhash


def digest(value: Any) -> int:
    """64 bits of a value: tensors and arrays by type, shape and bytes, containers by their content."""
    h = xxhash.xxh3_64()
    _add(h, value, 0)
    return h.intdigest()


def _add(h: Any, v: Any, depth: int) -> None:
    kind = type(v)
    if depth > 50:
        h.update(b"deep")
    elif v is None or kind in (bool, int, str, complex):
        h.update(f"{kind.__name__}:{v!r};".encode("utf-8", "surrogatepass"))
    elif kind is float:
        h.update(b"f" + struct.pack("<d", v))
    elif isinstance(v, bytes | bytearray | memoryview):
        h.update(b"b%d:" % len(v))
        h.update(v)
    elif hasattr(v, "untyped_storage"):  # a torch tensor
        _add_tensor(h, v)
    elif isinstance(v, np.ndarray | np.generic):
        array = np.asarray(v)
        h.update(f"a{array.dtype.str}{array.shape}".encode())
        if array.dtype.hasobject:
            for x in array.ravel().tolist():
                _add(h, x, depth + 1)
        else:
            h.update(np.ascontiguousarray(array).tobytes())
    elif isinstance(v, Mapping):
        h.update(b"m%d:" % len(v))
        for k, x in v.items():
            _add(h, k, depth + 1)
            _add(h, x, depth + 1)
    elif isinstance(v, list | tuple):
        h.update(b"l%d:" % len(v))
        for x in v:
            _add(h, x, depth + 1)
    elif isinstance(v, set | frozenset):
        h.update(b"s%d:" % len(v))
        for n in sorted(digest(x) for x in v):
            h.update(struct.pack("<Q", n))
    elif is_dataclass(v) and not isinstance(v, type):
        h.update(kind.__qualname__.encode())
        for f in fields(v):
            _add(h, getattr(v, f.name), depth + 1)
    elif hasattr(v, "__dict__"):
        h.update(kind.__qualname__.encode())
        tobytes = getattr(v, "tobytes", None)
        if callable(tobytes):  # images
            h.update(tobytes())
        else:
            _add(h, vars(v), depth + 1)
    else:
        try:
            h.update(pickle.dumps(v, 4))
        except Exception:  # noqa: BLE001  somebody's type that cannot be pickled: its type alone
            h.update(kind.__qualname__.encode())


def _add_tensor(h: Any, t: Any) -> None:
    local = getattr(t, "_local_tensor", t).detach()
    h.update(f"t{local.dtype}{tuple(local.shape)}".encode())
    if local.layout is not _strided() or local.is_quantized:
        _add(h, local.coalesce().indices() if local.is_sparse else repr(local), 1)
        local = local.coalesce().values() if local.is_sparse else local.int_repr()
    if local.numel():
        h.update(local.cpu().contiguous().flatten().view(_uint8()).numpy())


def _strided() -> Any:
    import torch

    return torch.strided


def _uint8() -> Any:
    import torch

    return torch.uint8
