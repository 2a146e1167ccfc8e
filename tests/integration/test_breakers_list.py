"""The breaker's list: each fault that real use found, in each place of the checkpoints, under each launcher.

    make breakers                                  all of it
    pytest -m "breakers and not slow"              the thin slice of `make test`

To add a fault, write a test that takes `stage` and is parametrised by `combinations(...)`:

    @combinations(launchers=("run",), thin=(("own", "run"),))
    def test_what_breaks(stage: Stage) -> None:
        stage.start().until_durable(10)      # hurt it: stage.kill_ranks(), stage.faults, stage.process ...
        ...
        assert stage.restored()[-1] == ...   # and say what must be true afterwards

`places` and `launchers` narrow it to where the fault can be; `thin` names the few that `make test` runs. What the
stage cannot do yet belongs into breakers.py. A fault with a lot of its own may have a file of its own
(`test_breakers_*.py`, with `pytestmark = pytest.mark.breakers`).
"""

from __future__ import annotations

import time

import pytest

from unbroken.testing.http_faults import Fault

from .breakers import Stage, combinations

pytestmark = [pytest.mark.breakers, pytest.mark.integration]


@combinations(thin=(("own", "run"),))
def test_a_killed_training_goes_on_from_memory(stage: Stage) -> None:
    stage.start().until_step(15)
    stage.kill_ranks()
    if stage.launcher != "run":
        stage.wait()
        stage.start()
    stage.until(lambda: len(stage.restored()) > 1, "a second start")
    step, source = stage.restored()[1]
    assert step >= 14 and source in ("memory", "disk", "remote"), stage.story()
    stage.until_durable(20)


@combinations()
def test_a_stopped_training_goes_on_from_its_last_checkpoint(stage: Stage) -> None:
    stage.start().until_durable(10)
    code = stage.stop()
    assert code == (11 if stage.launcher == "run" else 0), stage.story()
    last = max(stage.durable())
    stage.start().until(lambda: len(stage.restored()) > 1, "a second start")
    assert stage.restored()[1] == (last, "remote" if stage.place == "store" else "disk"), stage.story()


@combinations()
def test_what_was_on_disk_survives_the_death_of_everything(stage: Stage) -> None:
    stage.start().until_durable(20)
    stage.kill_everything()
    durable = max(stage.durable())
    stage.start().until(lambda: len(stage.restored()) > 1, "a second start")
    step, _ = stage.restored()[1]
    assert step >= durable, stage.story()
    stage.until_durable(step + 10)


@combinations(places=("store",))
def test_saves_faster_than_the_store_takes_them_neither_pile_up_nor_hold_training_up(stage: Stage) -> None:
    """The newest wins: what is durable stays near what is trained, however long it goes on, and a stop saves at once."""
    stage.steps, stage.seconds = 5000, 0.01
    stage.server.fault = lambda r: Fault(delay=0.05) if r.method in ("PUT", "POST") else None
    stage.start().until_step(400)
    for step in (600, 800, 1000):
        stage.until_step(step)
        assert stage.step() - max(stage.durable()) < 300, (stage.step(), stage.durable())
    began, step = time.monotonic(), stage.step()
    code = stage.stop()
    assert time.monotonic() - began < 20, stage.story()
    assert code == (11 if stage.launcher == "run" else 0), stage.story()
    assert max(stage.durable()) == stage.step() >= step
    assert (
        "is left out for step" in stage.output
        if stage.launcher != "run"
        else "are asked for faster" in stage.output
    )
    stage.goes_on(stage.step())
