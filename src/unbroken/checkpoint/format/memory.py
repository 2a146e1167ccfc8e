"""Where the bytes of a tensor or of a view lie, without numpy: an image with no more than torch needs may lack it."""

from __future__ import annotations

import ctypes
from typing import Any


def memory_of(tensor: Any) -> memoryview:
    """The memory of a contiguous tensor on the CPU as bytes that can be written; the view keeps the tensor alive."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    array = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    array.tensor = tensor
    return memoryview(array).cast("B")


class _Buffer(ctypes.Structure):
    """`Py_buffer` of CPython."""

    _fields_ = (
        ("buf", ctypes.c_void_p), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t), ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int), ("ndim", ctypes.c_int), ("format", ctypes.c_char_p), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    )  # fmt: skip


def address_of(view: memoryview) -> int:
    """Where the memory of a view begins, also of one that can only be read."""
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
