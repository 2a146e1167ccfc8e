"""The progress page: layout, ring, torn records, and a writer in another process."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.errors import ContractError
from unbroken.progress import PageReader, Phase, Run, StepRecord
from unbroken.progress import page as layout


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "pages" / "rank-3.page"
    layout.create(place, rank=3, attempt=7)
    return place


def test_a_new_page_says_nothing_yet(path: Path) -> None:
    reader = PageReader(path)
    p = reader.read()
    assert (p.rank, p.attempt, p.pid, p.total_steps) == (3, 7, 0, None)
    assert (p.phase, p.count, p.last) == (Phase.STARTING, 0, None)
    assert reader.take() == []
    reader.close()


def test_what_is_written_is_read(path: Path) -> None:
    run = Run(path, total_steps=99)
    reader = PageReader(path)
    before = time.monotonic()
    run.step(5, loss=2.5, tokens=4096)
    p = reader.read()
    assert p.total_steps == 99 and p.pid > 0 and p.count == 1 and p.phase is Phase.TRAINING
    assert p.last is not None and (p.last.step, p.last.loss, p.last.tokens) == (5, 2.5, 4096)
    assert before <= p.last.time <= time.monotonic()
    run.step(6)
    assert math.isnan(reader.take()[-1].loss)


@given(st.lists(st.integers(0, 1500), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_the_ring_gives_every_step_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, batches: list[int]
) -> None:
    """Whatever the writer does between two looks: nothing comes twice, and only what was overwritten is missing."""
    place = tmp_path_factory.mktemp("page") / "p"
    layout.create(place, rank=0, attempt=1)
    run, reader = Run(place), PageReader(place)
    step = 0
    for batch in batches:
        for _ in range(batch):
            run.step(step, loss=step / 7)
            step += 1
        taken = reader.take()
        assert [r.step for r in taken] == list(range(step - min(batch, layout.RING), step))
        assert all(r.loss == r.step / 7 for r in taken)
    reader.close()


def test_a_torn_record_is_not_believed(path: Path) -> None:
    run, reader = Run(path), PageReader(path)
    for step in range(4):
        run.step(step, loss=1.0)
    raw = layout.open_map(path)
    at = layout.RING_AT + 3 * layout.RECORD.size
    # The writer was inside record 3: its first number is new, its last one is not written yet.
    struct.pack_into("<Q", raw, at + layout.RECORD.size - 8, 0)
    assert [r.step for r in reader.take()] == [0, 1, 3]
    run.step(4, loss=2.0)
    assert reader.take() == [StepRecord(4, 0, 2.0, pytest.approx(time.monotonic(), abs=5))]


def test_a_torn_newest_record_gives_no_last_step(path: Path) -> None:
    run, reader = Run(path), PageReader(path)
    run.step(9)
    raw = layout.open_map(path)
    struct.pack_into("<Q", raw, layout.RING_AT + layout.RECORD.size, 77)
    assert reader.read().count == 1
    assert reader.read().last is None


def test_an_unknown_phase_counts_as_training(path: Path) -> None:
    raw = layout.open_map(path)
    struct.pack_into("<Q", raw, layout.STATE_AT + 8, 250)
    assert PageReader(path).read().phase is Phase.TRAINING


@pytest.mark.parametrize(
    "spoil",
    [
        lambda p: p.write_bytes(b""),
        lambda p: p.write_bytes(p.read_bytes()[:-1]),
        lambda p: p.write_bytes(b"SOMETHNG" + p.read_bytes()[8:]),
        lambda p: p.write_bytes(
            p.read_bytes()[:8] + struct.pack("<I", layout.VERSION + 1) + p.read_bytes()[12:]
        ),
    ],
)
def test_what_is_no_page_of_this_version_is_refused(path: Path, spoil: object) -> None:
    spoil(path)  # type: ignore[operator]
    with pytest.raises(ContractError):
        PageReader(path)
    with pytest.raises(ContractError):
        Run(path)


def test_the_layout_is_frozen() -> None:
    """Another version of the trainer's library may write this page: offsets and sizes never change silently."""
    assert (layout.VERSION, layout.SIZE, layout.RING_AT, layout.RING) == (2, 36864, 4096, 512)
    assert (layout.HEADER.size, layout.STATE.size, layout.CONTROL.size, layout.RECORD.size) == (
        40,
        32,
        24,
        64,
    )
    assert [(p.name, p.value) for p in Phase] == [
        ("STARTING", 0), ("COMPILING", 1), ("TRAINING", 2), ("EVALUATING", 3), ("CHECKPOINTING", 4),
        ("STOPPING", 5), ("EXITING", 6),
    ]  # fmt: skip


def test_a_writer_in_another_process_is_read_without_its_help(path: Path) -> None:
    """The writer runs as fast as it can; every record that is read is one that was written, whole."""
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        from unbroken.progress import Run
        run = Run(Path(sys.argv[1]))
        for step in range(10**9):
            run.step(step, loss=step * 0.5, tokens=step * 3)
    """)
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)])
    try:
        reader = PageReader(path)
        seen = -1
        records = 0
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and records < 10_000:
            for r in reader.take():
                assert r.step > seen
                assert (r.loss, r.tokens) == (r.step * 0.5, r.step * 3)
                seen = r.step
                records += 1
            last = reader.read().last
            assert last is None or last.loss == last.step * 0.5
        assert records >= 10_000
    finally:
        writer.kill()
        writer.wait()
    # A killed writer leaves a page that can be read, and a successor goes on counting in it.
    count = reader.read().count
    Run(path).step(1)
    assert reader.read().count == count + 1
