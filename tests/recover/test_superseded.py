"""Nothing that a superseded supervisor or attempt writes is counted: the checker that every test's runs go through
finds each such use, and an incident's page of one is neither written nor shown."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.superseded import check_run, find_runs
from unbroken.progress import JournalWriter, RunDir, claim
from unbroken.progress.records.incident import Incident
from unbroken.progress.records.state import RunState
from unbroken.recover.supervise.record.clock import Clock
from unbroken.recover.supervise.record.recorder import Recorder
from unbroken.recover.supervise.record.stop_request import StopRequest
from unbroken.status.gather import gather

GOLDEN = Path(__file__).parents[1] / "golden" / "data" / "2026-11" / "runs"
pytestmark = pytest.mark.made_up


def change(run: Path, kind: str, how: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the last record of a kind in the run's only journal."""
    file = run / "journal" / "000001.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    how([r for r in records if r["kind"] == kind][-1])
    file.write_text("".join(json.dumps(r) + "\n" for r in records))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose second attempt went on from a checkpoint of the first."""
    shutil.copytree(GOLDEN / "finished", tmp_path / "run")
    return tmp_path / "run"


def test_runs_that_are_right_pass() -> None:
    found = list(find_runs(GOLDEN))
    assert len(found) == 3 and all(check_run(run) == [] for run in found)


def test_an_offer_that_no_seal_lists(run: Path) -> None:
    change(run, "attempt", lambda r: r["candidates"][0].update(attempt=9))
    assert "which no seal lists" in check_run(run)[0]


def test_an_offer_of_what_was_rolled_back(run: Path) -> None:
    file = run / "journal" / "000001.jsonl"
    lines = file.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"kind":"seal"' in line.replace(" ", "")) + 1
    lines.insert(at, json.dumps({"kind": "rollback", "attempt": 1, "before": 10, "skip": []}))
    file.write_text("\n".join(lines) + "\n")
    assert check_run(run) and all("which was rolled back" in problem for problem in check_run(run)[:1])


def test_a_restore_that_was_not_offered(run: Path) -> None:
    change(run, "restored", lambda r: r.update(step=99))
    assert check_run(run) == ["attempt 2 restored step 99 of attempt 1, which it was not offered"]


def test_what_a_term_wrote_after_it_was_sealed_is_no_record(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(GOLDEN / "taken_over", run)
    with open(run / "journal" / "000001.jsonl", "a") as f:
        f.write(json.dumps({"kind": "restored", "attempt": 1, "of": 7, "step": 77}) + "\n")
    assert check_run(run) == []
    assert not any(e.get("step") == 77 for e in gather(RunDir(run)).events)


def test_a_checkpoint_that_does_not_count_stands_in_for_those_that_do(run: Path) -> None:
    for folder in (run / "checkpoints").glob("step-*"):
        shutil.rmtree(folder)
    late = run / "checkpoints" / "step-00000090.a0001"
    late.mkdir()
    (late / "COMMITTED").touch()
    assert check_run(run) == [f"{late.name} is kept, which does not count, and nothing that does"]


def incident(number: int, why: str) -> Incident:
    return Incident(number, 1, "failed", 3, 1.0, 2.0, why=why)


def recorder(run_dir: RunDir, term: int) -> Recorder:
    journal = JournalWriter(run_dir, term)
    stop = StopRequest(Clock(), asyncio.Event())
    return Recorder(run_dir, journal, RunState(), stop, lambda _: None, Clock(), 1.0)


def test_a_superseded_supervisor_overwrites_no_incident_of_its_successor(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    for folder in (run_dir.terms, run_dir.incidents, run_dir.journal(1).parent):
        folder.mkdir(parents=True)
    assert claim(run_dir, 1, run_id="r", address="unix:a", sealed={})
    first = recorder(run_dir, 1)
    assert claim(run_dir, 2, run_id="r", address="unix:b", sealed={"1": 0})
    second = recorder(run_dir, 2)
    second.write_incident(incident(1, "the successor's"))
    first.write_incident(incident(1, "the superseded one's"))
    first.write_incident(incident(2, "the superseded one's"))
    assert [json.loads(p.read_bytes())["why"] for p in run_dir.incidents.iterdir()] == ["the successor's"]


def test_an_incident_that_the_record_does_not_know_is_not_shown(run: Path) -> None:
    run_dir = RunDir(run)
    incident(7, "nobody's").write(run_dir)
    assert [i.number for i in gather(run_dir).incidents] == [1]
