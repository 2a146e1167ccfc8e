"""A rank with GPUs is asked for NCCL's flight recorder from outside, and who never entered is named from the dumps."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from unbroken.detect import ProcessInfo, explain_hang
from unbroken.progress import RunDir
from unbroken.recover.node.ranks.flight import ask_for_dump, record_flight, remove_pipes
from unbroken.recover.supervise.attempt.hang import find_missing

WAITS = ("all_reduce (torch/distributed/distributed_c10d.py:1)", "main (train.py:3)")


def test_a_rank_that_listens_is_asked_and_one_that_does_not_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in os.environ if n.startswith(("TORCH_NCCL", "TORCH_FR"))]:
        monkeypatch.delenv(name)
    log = RunDir(tmp_path).rank_log(3, "node-001", 5)
    env = record_flight(log, tmp_path, 3)
    pipe = Path(f"{env['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}5.pipe")
    assert not ask_for_dump(env, 5) and not ask_for_dump({}, 5), "no pipe, no recorder"
    os.mkfifo(pipe)
    assert not ask_for_dump(env, 5), "nobody reads it: to open it would wait for ever"
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert ask_for_dump(env, 5) and os.read(reader, 10)
    finally:
        os.close(reader)
    remove_pipes(tmp_path, 5)
    assert not pipe.exists()
    dump = Path(f"{env['TORCH_NCCL_DEBUG_INFO_TEMP_FILE']}5")
    dump.parent.mkdir(parents=True)
    dump.write_bytes(b"")
    assert RunDir(tmp_path).flights(3) == [dump]
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    assert not record_flight(log, tmp_path, 3), "the user wants none"


def test_who_never_entered_is_named_where_everyone_that_can_run_has_written(tmp_path: Path) -> None:
    def entry(seq: int, state: str) -> dict[str, Any]:
        return {
            "process_group": ("0", "default_pg"), "collective_seq_id": seq, "record_id": seq, "state": state, "retired": False,
            "is_p2p": False, "profiling_name": "nccl:all_reduce",
        }  # fmt: skip

    entries = {r: [entry(7, "scheduled")] for r in (0, 1, 3)} | {2: [entry(6, "completed")]}
    for r, e in entries.items():
        value = {"version": "2.10", "pg_config": {"0": {"ranks": "[0, 1, 2, 3]"}}, "entries": e}
        (tmp_path / f"flight-rank-{r}").write_bytes(pickle.dumps(value))
    dumps = sorted(tmp_path.iterdir())
    # All seem to wait in the same place: the stacks name nobody.
    processes = {r: ProcessInfo(r, "S", "", WAITS, "", site=WAITS[1]) for r in range(4)}
    assert not explain_hang(processes, {}).culprits
    missing = find_missing(processes, dumps)
    assert missing == {2: "all_reduce"}
    (culprit,) = explain_hang(processes, {}, missing).culprits
    assert (culprit.rank, culprit.missed) == (2, "all_reduce")
    assert not find_missing(processes, dumps[:2]), "of two nothing is known: their dumps may lie elsewhere"
    stopped = {**processes, 2: ProcessInfo(2, "T", "", WAITS, "")}
    assert find_missing(stopped, [d for d in dumps if not d.name.endswith("2")]) == {2: "all_reduce"}
    assert not find_missing(processes, [])
