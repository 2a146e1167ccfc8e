"""The bytes of tensors and the addresses of views, had without numpy."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch

from unbroken.checkpoint.format.memory import address_of, memory_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_the_memory_of_a_tensor_is_the_tensor(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).reshape(2, 3, 4).to(dtype)
    view = memory_of(tensor)
    assert (view.format, view.ndim, len(view)) == ("B", 1, 24 * tensor.element_size())
    assert view.tobytes() == bytes(tensor.view(torch.uint8).flatten().tolist())
    view[:] = bytes(len(view))
    assert not tensor.any()
    assert address_of(view) == tensor.data_ptr()


def test_a_view_keeps_its_tensor() -> None:
    view = memory_of(torch.full((1 << 20,), 7, dtype=torch.uint8))
    gc.collect()
    torch.zeros(1 << 20, dtype=torch.uint8)  # would take the place of one that is gone
    assert view[:100].tobytes() == bytes([7] * 100) and view[-1] == 7


def test_an_empty_tensor_has_no_bytes() -> None:
    assert len(memory_of(torch.empty(0, 3))) == 0


def test_the_address_of_a_view_that_is_read_only() -> None:
    pages = memoryview(mmap.mmap(-1, 8192))
    assert address_of(pages) % mmap.PAGESIZE == 0
    assert address_of(pages.toreadonly()[5:]) == address_of(pages) + 5
    pages[3:5] = b"ab"
