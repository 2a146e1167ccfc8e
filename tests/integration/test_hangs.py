"""Hangs made on purpose are suspected within ten seconds with the right ranks: some of the twenty of `benchmarks/hangs.py`, and two that
are only slow. Those that are one of a kind that another stands for are run by `make soak`."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.hangs import judge_hang, judge_healthy

pytestmark = [pytest.mark.slow, pytest.mark.made_up]


@pytest.mark.parametrize(
    "name",
    [
        "lock_held_in_c",
        "two_of_four",
        *(pytest.param(n, marks=pytest.mark.soak) for n in ("loader_worker_stopped", "one_collective_more")),
    ],
)
def test_a_hang_is_suspected_and_its_ranks_are_named(tmp_path: Path, name: str) -> None:
    found = judge_hang(name, tmp_path / "run")
    assert found["right"] and found["recognised"], found
    assert found["suspected_s"] <= 10


@pytest.mark.parametrize(
    "name", ["stopped_for_a_while", pytest.param("checkpoint_by_one", marks=pytest.mark.soak)]
)
def test_one_that_is_only_slow_is_let_alone(tmp_path: Path, name: str) -> None:
    found = judge_healthy(name, tmp_path / "run")
    assert found["completed"] and not found["killed"], found
