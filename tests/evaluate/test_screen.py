"""What is shown while an evaluation runs, and whether it runs at all."""

from __future__ import annotations

import fcntl
import io
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unbroken import atomic
from unbroken.errors import ContractError
from unbroken.evaluate.contracts import ModelSpec
from unbroken.evaluate.engines.live import EvaluationProgress
from unbroken.evaluate.result.folder import EvalDir
from unbroken.evaluate.run.progress import ProgressView
from unbroken.evaluate.run.screen import (
    STALE_S,
    Screen,
    as_json,
    is_running,
    line,
    read_progress,
    read_title,
    seen,
    status_text,
    text,
)
from unbroken.journal.codec import encode


def task(state: str, done: int = 0, blocks: int = 4) -> dict[str, object]:
    return {"state": state, "done": done, "blocks": blocks, "missing": 0}


def worker(at: str, state: str = "busy") -> dict[str, object]:
    return {"node": "n", "gpus": [], "state": state, "task": at, "busy": 0.5}


P = EvaluationProgress(
    "running", 165.0, 100.0,
    {
        "a_scored": task("scored", 4),
        "b_unprepared": task("waiting", 0, 0),
        "c_planned": task("running"),
        "d_left": task("running", 2),
        "e_landed": task("landed", 4),
        "f_loading": task("running"),
        "z_now": task("running", 1),
    },
    {"w0": worker("z_now"), "w1": worker("f_loading", "loading")}, 40.0, 20.0, {},
)  # fmt: skip


def shown(p: EvaluationProgress, **more: Any) -> list[tuple[str, str]]:
    lines = text(p, **more).splitlines()
    first = next(i for i, row in enumerate(lines) if row.startswith("task ")) + 2
    rows = [[c for c in row.split("  ") if c] for row in lines[first:] if not row.startswith("...")]
    return [(r[0].strip(), r[1].strip()) for r in rows]


def test_what_is_worked_on_comes_first_and_the_scored_last() -> None:
    assert shown(P) == [
        ("z_now", "running"),
        ("e_landed", "to score"),
        ("d_left", "begun"),
        ("b_unprepared", "waiting"),
        ("c_planned", "waiting"),
        ("f_loading", "waiting"),
        ("a_scored", "scored"),
    ]
    assert "0/0" not in text(P)
    assert shown(P, limit=2) == shown(P)[:2]
    assert text(P, limit=2).endswith("... and 5 more: 1 begun, 3 waiting, 1 scored")


def test_model_suite_and_time_are_shown() -> None:
    assert text(P, title="core-63 of llama").splitlines()[:2] == ["core-63 of llama", line(P)]
    assert line(P).startswith("running for 1m5s: 1/7 tasks scored")
    assert "1/1 worker busy" in line(replace(P, workers={"w0": worker("z_now")}))
    assert line(replace(P, started=0.0)).startswith("running: ")


def test_json_says_what_the_screen_says() -> None:
    found = as_json(P, True, "t")["progress"]
    assert found["tasks"]["c_planned"]["state"] == "waiting"
    assert (found["remaining_s"], found["remaining_worker_s"], found["elapsed_s"]) == (20.0, 40.0, 65.0)
    assert "about 20s left" in line(P) and "finish_s" not in found
    assert as_json(replace(P, workers={}), False, "t")["progress"]["remaining_s"] is None


ODD_TASK = {"state": "running", "blocks": "many", "done": 1}
ODD_WORKER = {"node": "n", "gpus": 5, "state": "busy", "task": "a", "busy": 0.5}


@pytest.mark.parametrize(
    "change",
    [{"tasks": {"a": {}}}, {"tasks": {"a": ODD_TASK}}, {"tasks": []}, {"workers": {"w": {}}}, {"workers": {"w": ODD_WORKER}},
     {"unheard_of": 1}],
)  # fmt: skip
def test_progress_of_another_shape_is_said_with_its_file(tmp_path: Path, change: dict[str, Any]) -> None:
    file = tmp_path / "progress.json"
    atomic.write_json(file, {**encode(P), **change})
    with pytest.raises(ContractError, match=r"does not say where the evaluation stands .*progress\.json"):
        read_progress(file)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_screen_shows_text_as_it_is_and_writes_it_for_status(tmp_path: Path) -> None:
    stream = Terminal()
    atomic.write_json(tmp_path / "evaluation.json", {"model": encode(ModelSpec("/models/llama-7b"))})
    odd = replace(P, errors={"x": "no such key [/oops]"})
    with Screen(tmp_path / "progress.json", stream=stream) as screen:
        screen(odd)
        screen._live.refresh()
    assert "[/oops]" in stream.getvalue() and "llama-7b" in stream.getvalue()
    assert read_progress(tmp_path / "progress.json") == odd
    assert read_title(EvalDir(tmp_path)) == "llama-7b"
    lines = io.StringIO()
    with Screen(tmp_path / "progress.json", title="core-63 of llama-7b", stream=lines) as screen:
        screen(P)
        screen(P)
    assert lines.getvalue().splitlines() == ["core-63 of llama-7b", line(P)]
    assert read_title(EvalDir(tmp_path)) == "core-63 of llama-7b"


@pytest.fixture
def folder(tmp_path: Path) -> EvalDir:
    """An evaluation that another host has left as a kill leaves it."""
    (tmp_path / "lock").write_text("process 7 on elsewhere")
    (tmp_path / "cluster.json").write_text("{}")
    atomic.write_json(tmp_path / "progress.json", encode(P))
    return EvalDir(tmp_path)


def age(folder: EvalDir, name: str, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(folder.root / name, (then, then))


def test_a_lock_that_is_held_says_that_it_runs(folder: EvalDir) -> None:
    age(folder, "progress.json", 10 * STALE_S)
    with folder.lock():
        assert is_running(folder)
        assert is_running(folder), "looking does not take it"
    assert not is_running(folder)


def test_a_free_lock_of_this_host_says_that_it_does_not(folder: EvalDir) -> None:
    (folder.root / "lock").write_text(f"process 7 on {os.uname().nodename}")
    assert not is_running(folder)
    with folder.lock():
        pass  # a look has left it free


@pytest.mark.parametrize("locks", [True, False])
def test_where_locks_may_not_reach_other_hosts_the_progress_tells(
    folder: EvalDir, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    def none(*_: object) -> None:
        raise OSError(37, "No locks available")

    if not locks:
        monkeypatch.setattr(fcntl, "flock", none)
    assert is_running(folder)
    age(folder, "progress.json", STALE_S + 1)
    assert not is_running(folder)
    age(folder, "progress.json", 0)
    folder.cluster.unlink()
    assert not is_running(folder), "it has ended as it should"


def test_a_run_that_has_not_shown_anything_yet_is_not_told_with_the_last_ones_progress(
    folder: EvalDir,
) -> None:
    age(folder, "progress.json", 100)
    with folder.lock():
        p, live = seen(folder)
        assert (p.phase, p.workers, live) == ("preparing", {}, True)
        assert "not running" not in status_text(p, live, "t")
        (folder.root / "progress.json").unlink()
        assert seen(folder)[0].phase == "preparing"
    with pytest.raises(FileNotFoundError):
        seen(folder)


def test_one_that_runs_and_says_nothing_is_said_to(folder: EvalDir) -> None:
    assert status_text(replace(P, at=time.time() - 300), True, "t").startswith(
        "it runs, but has said nothing for 5m"
    )


@pytest.mark.parametrize(("gpu_end", "phase"), [(0.0, "checking"), (5.0, "finished")])
def test_what_is_asked_both_ways_is_waited_for_under_a_name_of_its_own(gpu_end: float, phase: str) -> None:
    observed = SimpleNamespace(gpu_end=gpu_end, started=1.0, assignments=[])
    table = SimpleNamespace(finished=True, states={}, prepared={}, errors={})
    run = SimpleNamespace(observed=observed, table=table, settings=SimpleNamespace(slots=()))
    view = ProgressView(run, SimpleNamespace(remaining_s=lambda: 0.0), {}, {})  # type: ignore[arg-type]
    assert view.progress(staffed=True, prepared=True).phase == phase
