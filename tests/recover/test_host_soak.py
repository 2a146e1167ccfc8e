"""What the random faults on hosts are judged by (tests/support/host_soak.py): each fault of a lineage is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("asyncssh", reason="needs asyncssh: pip install -r requirements/all.txt")

from ..support.host_soak import judge_samples, read_lineage


def write(folder: Path, attempt: int, rank: int, steps: dict[int, list[list[int]]]) -> None:
    lines = [json.dumps({"step": s, "samples": samples}) for s, samples in steps.items()]
    (folder / f"attempt-{attempt:04d}-rank-{rank:05d}.jsonl").write_text("\n".join(lines) + "\n")


def batches(first: int, last: int) -> dict[int, list[list[int]]]:
    """Steps of four samples: each rank writes those of all."""
    return {s: [[4 * (s - 1), 4 * s]] for s in range(first, last + 1)}


RECORDS: list[dict[str, Any]] = [
    {"kind": "attempt", "attempt": 1},
    {"kind": "attempt", "attempt": 2},
    {"kind": "restored", "attempt": 2, "of": 1, "step": 3},
    {"kind": "attempt", "attempt": 3},
    {"kind": "restored", "attempt": 3, "of": 2, "step": 5},
]


def run(folder: Path, skips: tuple[tuple[int, int], ...] = ()) -> list[str]:
    return judge_samples(list(read_lineage(RECORDS, folder)), skips, 32)


def lay(folder: Path) -> None:
    for rank in (0, 1):
        write(folder, 1, rank, batches(1, 5))
        write(folder, 2, rank, batches(4, 7))
        write(folder, 3, rank, batches(6, 8))


def test_steps_that_do_not_survive_count_for_nothing(tmp_path: Path) -> None:
    lay(tmp_path)
    assert run(tmp_path) == []
    assert [s for s, _ in read_lineage(RECORDS, tmp_path)] == [8, 7, 6, 5, 4, 3, 2, 1]


def test_a_sample_that_is_missing_or_comes_twice_is_found(tmp_path: Path) -> None:
    lay(tmp_path)
    for rank in (0, 1):
        write(tmp_path, 3, rank, batches(6, 7))
    assert run(tmp_path) == ["4 samples were neither consumed nor skipped: ((28, 32),)"]
    assert run(tmp_path, ((28, 32),)) == []
    lay(tmp_path)
    for rank in (0, 1):
        write(tmp_path, 3, rank, batches(6, 8) | {8: [[0, 4]]})
    assert "4 samples were consumed twice" in run(tmp_path)
    lay(tmp_path)
    assert run(tmp_path, ((0, 1),)) == ["1 samples are skipped and were consumed in steps that survive"]


def test_ranks_that_do_not_agree_are_found(tmp_path: Path) -> None:
    lay(tmp_path)
    write(tmp_path, 3, 1, batches(6, 8) | {8: [[24, 28]]})
    assert "1 steps survive twice" in run(tmp_path)


def test_a_resume_that_lost_steps_is_found(tmp_path: Path) -> None:
    lay(tmp_path)
    for rank in (0, 1):
        write(tmp_path, 2, rank, batches(5, 7))
    assert run(tmp_path) == ["4 samples were neither consumed nor skipped: ((12, 16),)"]
