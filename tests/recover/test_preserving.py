"""A run that goes on with another number of nodes saves first what is in memory alone, and loses no state that is still anywhere."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from unbroken.errors import RunError
from unbroken.recover.supervise.attempt.farewell import Last
from unbroken.recover.supervise.nodes.keepers import Keepers
from unbroken.testing.fake_cluster.simulated_run import SimulatedRun

from .simulating import Simulate, reach


def told(run: SimulatedRun, words: str) -> bool:
    return any(words in line for line in run.screen.lines)


def restored(run: SimulatedRun) -> list[tuple[int, int]]:
    """Of what the newest attempt may restore: the steps, and of how many ranks that is in memory."""
    return [(c["step"], c["in_memory"]) for c in run.journal("attempt")[-1]["candidates"]]


async def lose_a_node_with_no_storage(run: SimulatedRun) -> None:
    """Until the run waits for the storage that refuses."""
    await reach(run, 1, 9)
    run.faults.refuse_storage()
    run.faults.lose("node-00001", proven=True)
    await run.until(lambda: run.journal("waiting"))


def test_a_storage_that_refuses_is_waited_for_however_long(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.refuse_storage()
        run.faults.lose("node-00001", proven=True)
        await run.until(lambda: told(run, "No space left on device"))
        await asyncio.sleep(900)
        assert len(run.journal("attempt")) == 1 and not run.task.done(), "nothing was given up"
        assert len(run.journal("waiting")) == 1 and "step 7" in run.journal("waiting")[0]["why"]
        run.faults.refuse_storage("")
        await run.until(lambda: len(run.journal("attempt")) == 2, 30)
        assert restored(run) == [(7, 0)] and len(run.journal("attempt")[1]["slots"]) == 2

    simulate(act, 3, min_nodes=2)


def test_a_stop_ends_the_wait_for_the_storage(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await lose_a_node_with_no_storage(run)
        run.supervisor.request_stop()
        asked = run.loop.time()
        assert await run.task == "interrupted" and run.loop.time() - asked < 30

    simulate(act, 3, min_nodes=2)


def test_a_node_that_is_back_meanwhile_needs_no_storage(simulate: Simulate) -> None:
    """With as many ranks as before they restore from memory."""

    async def act(run: SimulatedRun) -> None:
        await lose_a_node_with_no_storage(run)
        run.hardware.given["node-00001"] = None
        run.faults.return_node("node-00001")
        await run.until(lambda: len(run.journal("attempt")) == 2, 300)
        assert len(run.journal("attempt")[1]["slots"]) == 3 and restored(run)[0] == (7, 6)

    simulate(act, 3, min_nodes=2)


def test_a_snapshot_that_is_gone_is_said_and_the_next_one_saved(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await lose_a_node_with_no_storage(run)
        del run.hardware.nodes["node-00002"].snapshots[1, 7]
        await run.until(lambda: told(run, "step 7 was in memory"))
        assert told(run, "goes back to step 3")
        run.faults.refuse_storage("")
        await run.until(lambda: len(run.journal("attempt")) == 2)
        assert restored(run) == [(3, 0)]

    simulate(act, 3, min_nodes=2)


def test_a_snapshot_that_is_gone_as_nodes_come_is_said_too(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await lose_a_node_with_no_storage(run)
        del run.hardware.nodes["node-00002"].snapshots[1, 7]
        run.hardware.given["node-00001"] = None
        run.faults.return_node("node-00001")
        await run.until(lambda: len(run.journal("attempt")) == 2, 300)
        assert told(run, "step 7 was in memory") and restored(run)[0] == (3, 6)

    simulate(act, 3, min_nodes=2)


def test_a_keeper_that_is_slow_to_answer_is_waited_for(simulate: Simulate) -> None:
    """As its attempt is sealed too: what it holds counts all the same."""

    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.silence_keeper("node-00002")
        run.faults.lose("node-00001", proven=True)
        await run.until(lambda: told(run, "does not say what it holds"))
        assert run.journal("seal")[-1]["memory"] == []
        run.faults.silence_keeper("node-00002", silent=False)
        await run.until(lambda: len(run.journal("attempt")) == 2)
        assert restored(run) == [(7, 0)]

    simulate(act, 3, min_nodes=2)


def test_a_keeper_that_never_answers_holds_up_no_start_for_ever(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.silence_keeper("node-00002")
        run.faults.lose("node-00001", proven=True)
        await run.until(lambda: told(run, "does not say what it holds"))
        since = run.loop.time()
        await run.until(lambda: len(run.journal("attempt")) == 2)
        assert run.loop.time() - since < 120 and told(run, "is waited for no longer")
        run.faults.silence_keeper("node-00002", silent=False)

    simulate(act, 3, min_nodes=2)


def test_only_a_keeper_that_names_the_step_has_saved_it() -> None:
    answers: dict[str, Any] = {"a": {"step": 7, "attempt": 1}, "b": {"step": None}, "c": RunError("no room")}

    async def ask(name: str, op: str, **fields: Any) -> Any:
        if isinstance(answers[name], RunError):
            raise answers[name]
        return answers[name]

    keepers = Keepers(SimpleNamespace(ask=ask), None)  # type: ignore[arg-type]
    refused = asyncio.run(keepers.save(Last(1, 7, {"a": (0,), "b": (1,), "c": (2,)}), 1.0))
    assert refused.keys() == {"b", "c"} and refused["c"] == "no room"
