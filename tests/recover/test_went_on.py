"""What an attempt went on from is in the journal, also where its nodes were cut off before anybody could tell."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unbroken.checkpoint.capture.direct import Stamp, commit, write_rank
from unbroken.checkpoint.catalogue.placement import elsewhere_of
from unbroken.checkpoint.storage.posix import PosixStorage
from unbroken.progress import RunDir
from unbroken.progress.records.state import RunState
from unbroken.recover.supervise.accept import placing
from unbroken.recover.supervise.accept.accepting import Accepting
from unbroken.recover.supervise.accept.placing import CheckpointPlace
from unbroken.recover.supervise.nodes.keepers import Keepers


class Asked:
    """A fleet whose keepers answer with these inventories."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = {f"n{i}": a for i, a in enumerate(answers)}
        self.nodes = {n: SimpleNamespace(hello={}) for n in self.answers}

    def up(self) -> list[str]:
        return list(self.answers)

    async def ask_all(self, names: list[str], op: str, **fields: Any) -> dict[str, Any]:
        return self.answers if fields["request"]["op"] == "inventory" else {}

    async def ask_each(self, requests: Any, op: str, **fields: Any) -> dict[str, Any]:
        return {}


def make(
    run_dir: RunDir, fleet: Asked, state: RunState, elsewhere: str = ""
) -> tuple[Accepting, list[dict[str, Any]]]:
    """What seals attempts, and what it has written."""
    written: list[dict[str, Any]] = []

    async def record(kind: str, **fields: Any) -> None:
        written.append({"kind": kind, **fields})
        state.apply({"kind": kind, "t": 0.0, **fields})

    recorder: Any = type("Recorder", (), {"state": state, "record": staticmethod(record)})()
    keepers: Any = Keepers.__new__(Keepers)
    keepers._fleet = fleet
    place = CheckpointPlace(run_dir, "r1", lambda: state, record, lambda _: None, lambda: False)
    spec: Any = type("Spec", (), {"nproc": 1, "room_elsewhere": elsewhere})()
    there = elsewhere_of(elsewhere, "r1")
    made: Any = Accepting(spec, fleet, keepers, recorder, place, lambda _: None, there)  # type: ignore[arg-type]
    return made, written


def seal(run_dir: RunDir, fleet: Asked, state: RunState) -> list[dict[str, Any]]:
    """Seals attempt 3; what the journal has of it then."""
    accepting, written = make(run_dir, fleet, state)
    asyncio.run(accepting._seal(3))
    return [r for r in written if r["kind"] in ("restored", "seal")]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def save(run_dir: RunDir, step: int, went_on: tuple[int, int] | None) -> None:
    storage = PosixStorage(run_dir.checkpoints)
    stamp = Stamp("r1", 3, step, went_on=went_on)
    commit(storage, [write_rank(storage, {"lr": 0.5}, stamp)])


STATE = {"attempt": 3, "slots": ("n0",), "places": {3: ""}}


def test_the_newest_checkpoint_says_it_where_all_keepers_are_gone(run_dir: RunDir) -> None:
    save(run_dir, 325, (1, 200))
    save(run_dir, 350, (2, 310))
    restored, sealed = seal(run_dir, Asked(), RunState(**STATE))
    assert (restored["attempt"], restored["of"], restored["step"]) == (3, 2, 310)
    assert len(sealed["checkpoints"]) == 2


def test_a_keeper_that_is_left_says_it(run_dir: RunDir) -> None:
    save(run_dir, 350, None)
    answers = [{"restored": [2, [1, 100]], "runs": []}, {"runs": []}, {"restored": [3, None], "runs": []}, {"restored": [3, [2, 310]], "runs": []}]  # fmt: skip
    restored, _ = seal(run_dir, Asked(*answers), RunState(**STATE))
    assert (restored["of"], restored["step"]) == (2, 310)


def test_what_was_told_is_not_told_again(run_dir: RunDir) -> None:
    save(run_dir, 350, (2, 310))
    (only,) = seal(run_dir, Asked(), RunState(**STATE, asked={3}))
    assert only["kind"] == "seal"


@pytest.mark.parametrize("torn", [False, True])
def test_what_nobody_knows_holds_nobody_up(
    torn: bool, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "_RETRY_S", 0.001)
    monkeypatch.setattr(placing, "_WENT_ON_S", 0.002)
    save(run_dir, 350, None)
    if torn:
        (manifest,) = run_dir.checkpoints.glob("*/manifest.json")
        manifest.write_bytes(manifest.read_bytes()[:-20])
    (only,) = seal(run_dir, Asked(), RunState(**STATE))
    assert only["kind"] == "seal"


def test_a_stop_writes_it_down_too(run_dir: RunDir) -> None:
    save(run_dir, 350, (2, 310))
    accepting, written = make(run_dir, Asked(), RunState(**STATE))
    asyncio.run(accepting.seal_last(3, []))
    asyncio.run(accepting.seal_before())  # of the next start
    assert [r["kind"] for r in written] == ["restored", "seal"]


def test_what_was_saved_elsewhere_says_it_too(run_dir: RunDir, tmp_path: Path) -> None:
    room = str(tmp_path / "room")
    storage = PosixStorage(Path(elsewhere_of(room, "r1")))
    commit(storage, [write_rank(storage, {"lr": 0.5}, Stamp("r1", 3, 350, went_on=(2, 310)))])
    accepting, written = make(run_dir, Asked(), RunState(**STATE), room)
    asyncio.run(accepting.seal_before())
    (restored,) = [r for r in written if r["kind"] == "restored"]
    assert (restored["of"], restored["step"]) == (2, 310)


def test_what_was_in_memory_alone_says_it_once_it_is_saved(run_dir: RunDir) -> None:
    """The keeper has the buffers of one before it, and knows nothing of a restore."""
    fleet = Asked({"runs": [[3, 350, 1, True, False, 1, [[0, 1]]]], "restored": None})
    state = RunState(**STATE)
    accepting, written = make(run_dir, fleet, state)
    asyncio.run(accepting.seal_before())
    assert written[-1]["memory"] == [[3, 350]] and not state.asked
    save(run_dir, 350, (2, 310))
    state.restored = (4, 3, 350)  # an attempt after it has told
    asyncio.run(accepting.seal_before())
    (restored,) = [r for r in written if r["kind"] == "restored"]
    assert (restored["attempt"], restored["of"], restored["step"]) == (3, 2, 310)
    assert state.restored == (4, 3, 350), "the newest answer"


def test_what_is_told_late_of_an_import_takes_no_step_back(run_dir: RunDir) -> None:
    offered = [{"attempt": 0, "step": 100, "brought": True}]
    state = RunState.of(
        [{"t": 0.0, **r} for r in (
            {"kind": "run"}, {"kind": "epoch"},
            {"kind": "accepted", "number": 0, "checkpoints": ["step-00000100.a0000"], "place": "", "before": 1},
            {"kind": "attempt", "attempt": 1, "slots": ["n0"], "candidates": offered},
            {"kind": "ended", "attempt": 1, "how": "node_lost", "step": 350},
        )]
    )  # fmt: skip
    storage = PosixStorage(run_dir.checkpoints)
    commit(storage, [write_rank(storage, {"lr": 0.5}, Stamp("r1", 1, 340, went_on=(0, 100)))])
    accepting, written = make(run_dir, Asked(), state)
    asyncio.run(accepting.seal_before())
    assert [r["kind"] for r in written] == ["restored", "seal"] and state.step == 350
