"""Runs whose record lies in an object store, in simulated time: taken over from another host, and never by two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unbroken.checkpoint.storage.s3 import S3Storage
from unbroken.errors import StorageError
from unbroken.progress import RunDir, read_journal
from unbroken.recover.record import objects
from unbroken.recover.record.base import Superseded
from unbroken.recover.record.objects import ObjectRecord
from unbroken.testing.fake_cluster.simulated_run import SimulatedRun

from ..simulating import Simulate, reach, simulate_in


class Store(S3Storage):
    """A store in memory, that can be cut off."""

    def __init__(self) -> None:
        super().__init__(pytest.importorskip("obstore").store.MemoryStore(), "memory://run")
        self.cut = False

    def create(self, name: str, data: Any) -> bool:
        if self.cut:
            raise StorageError("the store does not answer", where=self.url)
        return super().create(name, data)

    def of(self, run_dir: RunDir) -> ObjectRecord:
        return ObjectRecord(self, run_dir)


@pytest.fixture
def simulate(tmp_path: Path) -> Simulate:
    return simulate_in(tmp_path)


@pytest.mark.slow
def test_a_run_with_its_record_in_a_store_completes_and_says_where_it_lies(simulate: Simulate) -> None:
    store = Store()

    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.hang_rank("node-00005", 1)
        await run.until(lambda: run.journal("resumed"))
        run.supervisor.request_stop()
        assert await run.task == "interrupted"
        assert any("memory://run" in line for line in run.screen.lines)
        assert store.of(run.run_dir).read().records == read_journal(run.run_dir).records
        assert {"run", "attempt", "incident", "status"} <= {r["kind"] for r in run.journal_text()}

    simulate(act, 8, record_of=store.of)


def test_another_host_takes_the_run_over_and_no_rank_stops(simulate: Simulate, tmp_path: Path) -> None:
    store = Store()

    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.kill_supervisor()
        first = run.run_dir
        run.restart_supervisor(tmp_path / "another-host")
        await run.until(lambda: run.journal("adopted"))
        await reach(run, 1, 20)
        assert len(run.journal("attempt")) == 1 and len(run.journal("epoch")) == 2
        (incident,) = run.incidents()
        assert incident["kind"] == "supervisor_lost" and incident["steps_lost"] == 0
        before = [r for r in run.journal_text() if r["epoch"] == 1]
        assert before == read_journal(first).records, "what the lost host knew is known here"

    simulate(act, 8, record_of=store.of, spares=1)


@pytest.mark.slow
def test_of_two_supervisors_one_goes_and_what_it_adds_never_counts(
    simulate: Simulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first was only stopped for a while; it learns of its successor from its own next record."""
    monkeypatch.setattr(objects, "CLAIM_S", 0.05)
    store = Store()

    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        old, journal = run.task, store.of(run.run_dir)
        run.restart_supervisor(tmp_path / "another-host")
        await run.until(old.done)
        assert isinstance(old.exception(), Superseded)
        await reach(run, 1, 20)
        late = journal.open(journal.terms()[0], lambda: 0.0)
        for _ in range(3):
            with pytest.raises(Superseded):
                while True:
                    late.append("status", status="completed")
        assert not [r for r in store.of(run.run_dir).read().records if r["kind"] == "status"]

    simulate(act, 8, record_of=store.of)


@pytest.mark.slow
def test_a_store_that_does_not_answer_for_a_while_holds_decisions_up_and_nothing_else(
    simulate: Simulate,
) -> None:
    store = Store()

    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 5)
        store.cut = True
        await reach(run, 1, 12)
        run.faults.hang_rank("node-00005", 1)
        began = run.loop.time()
        while run.loop.time() < began + 300:
            await run.until(lambda: run.loop.time() > began + 300)
        assert len(run.journal("attempt")) == 1, "nothing is started that is not written down"
        store.cut = False
        await run.until(lambda: run.journal("resumed"))
        await reach(run, 2, 20)
        assert [r["attempt"] for r in run.journal("attempt")] == [1, 2]
        assert any("record cannot be written" in line for line in run.screen.lines)

    simulate(act, 8, record_of=store.of)
