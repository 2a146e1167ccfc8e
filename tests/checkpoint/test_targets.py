"""Where tensors go in a buffer: cut where a registered piece ends, made once for each buffer, let go of with the layout."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unbroken.checkpoint.device import targets as module
from unbroken.checkpoint.format.layout import Layout, plan, spec


def planned(tensors: dict[str, torch.Tensor]) -> tuple[Layout, torch.Tensor]:
    layout = plan([spec(n, str(t.dtype), t.shape) for n, t in tensors.items()])
    return layout, torch.full((layout.file_bytes,), 255, dtype=torch.uint8)


SHAPES = st.lists(
    st.tuples(
        st.sampled_from([torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool]),
        st.lists(st.integers(0, 40), max_size=3),
    ),
    min_size=1,
    max_size=8,
)


@given(shapes=SHAPES, pieces=st.integers(9, 14), limit=st.sampled_from([100.0, 5000.0, float("inf")]))
def test_all_bytes_arrive_and_no_copy_reaches_over_a_piece(
    shapes: list[tuple[torch.dtype, list[int]]], pieces: int, limit: float
) -> None:
    tensors = {
        f"t{i}": torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(i)).to(dtype)
        for i, (dtype, shape) in enumerate(shapes)
    }
    layout, buffer = planned(tensors)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(module, "PIECE_BYTES", 1 << pieces)
        targets = module.Targets().of(buffer, layout, tensors)
        pairs = [(targets[n], module.real(t).contiguous()) for n, t in tensors.items() if t.numel()]
        sent = 0
        for views, sources in module.batches(pairs, lambda: limit):
            assert sum(v.nbytes for v in views) <= limit
            for view, source in zip(views, sources, strict=True):
                assert view.nbytes == source.nbytes
                start = view.data_ptr() - buffer.data_ptr()
                assert start >> pieces == (start + max(view.nbytes, 1) - 1) >> pieces
                view.copy_(source)
                sent += view.nbytes
    assert sent == layout.data_bytes
    for name, t in tensors.items():
        start, stop = layout.span(name)
        stored = buffer[
            start:stop
        ].clone()  # a complex number must lie at a multiple of its size to be looked at
        assert torch.equal(module.typed_view(stored, t.dtype, t.shape), t)


def test_a_batch_is_no_larger_than_asked_even_of_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 1 << 12)
    tensors = {"w": torch.zeros(1 << 14)}
    layout, buffer = planned(tensors)
    target = module.Targets().of(buffer, layout, tensors)["w"]
    sizes = [
        sum(t.nbytes for t in targets)
        for targets, _ in module.batches([(target, tensors["w"])], lambda: 8192)
    ]
    assert sum(sizes) == 1 << 16 and max(sizes) <= 8192


def test_views_are_made_once_and_let_go_of_with_the_layout() -> None:
    tensors = {"w": torch.zeros(64)}
    layout, buffer = planned(tensors)
    targets = module.Targets()
    first = targets.of(buffer, layout, tensors)
    assert targets.of(buffer, layout, tensors) is first
    del first
    held = weakref.ref(buffer.untyped_storage())
    other = {"w": torch.zeros(32)}
    new_layout, new_buffer = planned(other)
    targets.of(new_buffer, new_layout, other)
    del buffer
    gc.collect()
    assert held() is None
