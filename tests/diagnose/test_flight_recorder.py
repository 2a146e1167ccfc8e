"""Dumps are read without executing anything, and name who was missing."""

from __future__ import annotations

import io
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from unbroken.diagnose import Outcome, examine
from unbroken.diagnose.read.flight_recorder import analyse, analyse_dumps, read_dump
from unbroken.errors import InputError


def entry(group: str, seq: int, record: int, state: str = "scheduled") -> dict[str, Any]:
    return {
        "process_group": (group, "default_pg"),
        "collective_seq_id": seq,
        "record_id": record,
        "state": state,
        "retired": False,
        "is_p2p": False,
        "profiling_name": "nccl:all_reduce",
    }


def dump(entries: list[dict[str, Any]], ranks: list[int]) -> dict[str, Any]:
    return {"version": "2.9", "pg_config": {"0": {"ranks": str(ranks)}}, "entries": entries}


def test_the_rank_that_did_not_enter_is_the_suspect() -> None:
    world = [0, 1, 2, 3]
    dumps = {r: dump([entry("0", 7, 70)], world) for r in (0, 1, 3)} | {
        2: dump([entry("0", 6, 60, "completed")], world)
    }
    flight = analyse_dumps(dumps)
    assert flight.suspects == (2,)
    assert {w.rank for w in flight.waits} == {0, 1, 3} and flight.waits[0].seq == 7


def test_a_device_that_stands_still_is_the_suspect() -> None:
    world = [0, 1]
    stuck = dump([entry("0", 5, 50), entry("0", 6, 51)], world)
    ahead = dump([entry("0", 6, 51)], world)
    assert analyse_dumps({0: ahead, 1: stuck}).suspects == (1,)


def test_a_missing_dump_makes_its_rank_the_suspect() -> None:
    world = [0, 1, 2]
    assert analyse_dumps({r: dump([entry("0", 7, 70)], world) for r in (0, 1)}).suspects == (2,)


def test_everybody_inside_is_nobodys_fault() -> None:
    world = [0, 1]
    assert analyse_dumps({r: dump([entry("0", 7, 70)], world) for r in world}).suspects == ()


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/unbroken-was-here",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(_Evil()),
        pickle.dumps({"entries": [_Evil()]}),
        b"\x80\x04cposix\nsystem\n.",
        b"",
        b"\x80\x04",
        b"{" * 50_000,
        pickle.dumps([1, 2]),
        pickle.dumps({"entries": 3}),
        b"\x80\x04\x95" + b"\xff" * 40,
    ],
)
def test_hostile_dumps_are_refused(data: bytes) -> None:
    with pytest.raises(InputError, match="flight-recorder dump"):
        read_dump(io.BytesIO(data), "x")
    assert not Path("/tmp/unbroken-was-here").exists()


def test_odd_entries_are_passed_over() -> None:
    odd = {
        "pg_config": {"0": None, "1": {"ranks": 3}},
        "entries": [
            None,
            3,
            {},
            {"process_group": [], "collective_seq_id": "x"},
            {"pg_id": 0, "collective_seq_id": 1},
        ],
    }
    assert analyse_dumps({0: odd}).suspects == ()


def test_dumps_alone_make_a_verdict(tmp_path: Path) -> None:
    world = [0, 1, 2]
    for r in world:
        entries = [entry("0", 7, 70)] if r != 1 else []
        (tmp_path / f"nccl_trace_rank_{r}").write_bytes(pickle.dumps(dump(entries, world), protocol=2))
    v = examine([tmp_path]).verdict
    assert (v.outcome, v.reason, v.decided_by) == (Outcome.HUNG, "Hang", "flight-recorder")
    assert v.faulty is not None and v.faulty.rank == 1


@pytest.mark.parametrize("case", ["gpu_error_1st", "lock_gil_1st"])
def test_injected_faults_are_found(shared_data: Path, case: str) -> None:
    folder = shared_data / "flight_recorder" / case
    text = (folder / "fault_injection.log").read_text()
    injected = tuple(sorted(int(x) for x in re.findall(r"^Rank (\d+),", text, re.M)))
    assert analyse(sorted(folder.glob("_dump_*"))).suspects == injected
