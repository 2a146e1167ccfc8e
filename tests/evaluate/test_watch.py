from __future__ import annotations

import math
import re
import threading
import time
from pathlib import Path

import pytest

from tests.support.keepers import until
from unbroken.checkpoint.catalogue.contents import Found
from unbroken.checkpoint.catalogue.holds import holds
from unbroken.checkpoint.catalogue.retention import Retention, apply, read_pins
from unbroken.checkpoint.storage import open_storage
from unbroken.checkpoint.storage.base import Storage
from unbroken.errors import (
    EvaluationError,
    EvaluationInUse,
    InputError,
    ModelDoesNotLoad,
    NoCheckpoint,
    RunInterrupted,
    UnbrokenError,
    UsageError,
)
from unbroken.evaluate.contracts import Metric, ModelSpec, Report, Score, Suite, Task
from unbroken.evaluate.result.folder import EvalDir
from unbroken.evaluate.run.watching import watch as module
from unbroken.evaluate.run.watching.curves import CurvePoint, curves_page, curves_text
from unbroken.evaluate.run.watching.hold import Holding
from unbroken.evaluate.run.watching.watch import (
    Watch,
    checkpoints_of,
    hold_pin,
    read_curve,
    refuse_unloadable,
    shortfall,
    wait_for_checkpoints,
    watch,
)

SUITE = Suite("s", (Task("t"),))


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """Folders that pass for checkpoints; `listing` is replaced, leases are the real ones."""
    store = open_storage(tmp_path / "checkpoints")
    for step in (10, 20, 30):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}.a0001"
        folder.mkdir(parents=True)
        (folder / "COMMITTED").write_text("{}")

    def listing(s: Storage, *, quick: bool = False) -> list[Found]:
        names = sorted((n for n in s.folders() if n.startswith("step-")), reverse=True)
        return [
            Found(
                n,
                int(n[5:13]),
                1,
                "committed" if s.list(n) and "COMMITTED" in s.list(n) else "incomplete",
                0.0,
                1,
                1,
                "disk",
            )
            for n in names
        ]

    monkeypatch.setattr(module, "listing", listing)
    # Nothing lies in them that could say how Hugging Face calls its tensors.
    monkeypatch.setattr(module, "_says_its_form", lambda storage, name: False)
    return store


class Evaluator:
    """Scores a checkpoint by its step; notes what was leased meanwhile."""

    def __init__(self, storage: Storage, values: dict[int, float]) -> None:
        self.storage = storage
        self.values = values
        self.asked: list[str] = []
        self.held: list[list[str]] = []
        self.fail: set[str] = set()
        self.errors: list[UnbrokenError] = []
        """Raised one after the other by whatever is asked."""

    def __call__(self, suite: Suite, spec: ModelSpec, folder: EvalDir) -> Report:
        name = Path(spec.source).name
        self.asked.append(name)
        self.held.append([lease.holder for lease in read_pins(self.storage, name)])
        if self.errors:
            raise self.errors.pop(0)
        if name in self.fail:
            raise EvaluationError("no worker is left")
        value = self.values[int(name[5:13])]
        s = Score("t", (Metric("acc", value, 0.01),), 100, 100, checkpoint=name)
        return Report("s", name, name, 0.0, 1.0, (s,), {}, (), (), (), 1.0, 1.0, 1.0)


def ask(tmp_path: Path, **more: object) -> Watch:
    return Watch(SUITE, ModelSpec("x"), tmp_path / "out", poll_s=0.05, **more)  # type: ignore[arg-type]


def test_each_checkpoint_once_in_order_leased_and_regressions_flagged(
    tmp_path: Path, storage: Storage
) -> None:
    evaluate = Evaluator(storage, {10: 0.5, 20: 0.6, 30: 0.3})
    said: list[str] = []
    points = watch(ask(tmp_path, once=True), storage, evaluate, said.append)
    assert [p.step for p in points] == [10, 20, 30]
    assert evaluate.held == [["eval-s"]] * 3
    assert all(read_pins(storage, n) == [] for n in storage.folders()) and holds(storage) == []
    assert [p.worse for p in points] == [(), (), ("t",)]
    assert any("REGRESSION in t: acc 0.6000 -> 0.3000" in x for x in said)
    watch(ask(tmp_path, once=True), storage, evaluate, said.append)
    assert len(evaluate.asked) == 3  # nothing twice
    assert "0.3000!" in (tmp_path / "out" / "curves.txt").read_text()
    assert (tmp_path / "out" / "curves.html").read_text().count('class="fall"') == 1


def test_two_into_one_folder_are_kept_apart(tmp_path: Path, storage: Storage) -> None:
    evaluate = Evaluator(storage, {10: 0.5, 20: 0.6, 30: 0.3})
    asked = ask(tmp_path, once=True)
    asked.out.mkdir()
    (asked.out / "models").mkdir()
    with EvalDir(asked.out).lock(), pytest.raises(EvaluationInUse):
        watch(asked, storage, evaluate, lambda _: None)
    assert not evaluate.asked and [p.name for p in asked.out.iterdir() if p.name != "lock"] == ["models"]


def test_a_failure_is_tried_again_then_passed_over(tmp_path: Path, storage: Storage) -> None:
    evaluate = Evaluator(storage, {10: 0.5, 20: 0.6, 30: 0.7})
    evaluate.fail = {"step-00000020.a0001"}
    points = watch(ask(tmp_path, once=True), storage, evaluate, lambda _: None)
    assert [bool(p.failed) for p in points] == [False, True, False]
    assert evaluate.asked.count("step-00000020.a0001") == 2
    assert read_pins(storage, "step-00000020.a0001") == []
    assert "no worker is left" in curves_text(points)


def test_the_first_error_is_shown_and_what_lasts_is_not_tried_again(tmp_path: Path, storage: Storage) -> None:
    evaluate = Evaluator(storage, {10: 0.5, 20: 0.6, 30: 0.7})
    evaluate.errors = [
        EvaluationError("the node went away"),
        UsageError("the folder holds an evaluation with another model"),
        ModelDoesNotLoad("the weights have other names"),
        EvaluationError("no worker is left"),
    ]
    said: list[str] = []
    points = watch(ask(tmp_path, once=True), storage, evaluate, said.append)
    assert evaluate.asked == [f"step-000000{n}.a0001" for n in (10, 10, 20, 30, 30)]
    assert [(p.failed, p.code, p.tries) for p in points] == [
        ("the node went away.", 50, 2),
        ("the weights have other names.", 53, 2),
        ("", 0, 2),
    ]
    assert "step-00000010.a0001: not evaluated: the node went away. It is tried again." in said
    assert "another model" not in curves_text(points)
    assert shortfall(points) == (
        "2 of 3 checkpoints were not evaluated. step-00000010.a0001: the node went away.",
        56,
    )
    assert shortfall(points[1:2])[1] == 53 and shortfall(points[2:]) == ("", 0)
    again = watch(ask(tmp_path, once=True), storage, evaluate, said.append)
    assert shortfall(again) == ("", 0) and [p.scores[0].metrics[0].value for p in again] == [0.5, 0.6, 0.7]


def test_no_task_with_a_score_is_a_failure(tmp_path: Path, storage: Storage) -> None:
    def nothing(suite: Suite, spec: ModelSpec, folder: EvalDir) -> Report:
        return Report("s", "m", "c", 0.0, 1.0, (), {"t": "its data are gone"}, (), (), (), 1.0, 1.0, 1.0)

    points = watch(ask(tmp_path, once=True), storage, nothing, lambda _: None)
    assert {p.code for p in points} == {56} and "t: its data are gone" in shortfall(points)[0]


def test_ctrl_c_ends_it_and_is_no_failure_of_the_checkpoint(tmp_path: Path, storage: Storage) -> None:
    def stopped(*_: object) -> Report:
        raise RunInterrupted("stopped: SIGINT")

    asked = Watch(SUITE, ModelSpec("checkpoint"), tmp_path / "out", once=True)
    with pytest.raises(RunInterrupted):
        watch(asked, storage, stopped, print)
    assert read_curve(tmp_path / "out") == []


def test_one_that_goes_before_it_is_leased_is_passed_over(
    tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.pin_checkpoint

    def gone(s: Storage, name: str, *rest: object, **more: object) -> object:
        if "20" in name[5:13]:
            raise NoCheckpoint("it was just removed", where=name)
        return real(s, name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "pin_checkpoint", gone)
    evaluate = Evaluator(storage, {10: 0.5, 30: 0.7})
    points = watch(ask(tmp_path, once=True), storage, evaluate, lambda _: None)
    assert [(p.step, bool(p.failed)) for p in points] == [(10, False), (20, True), (30, False)]


def test_it_waits_for_more_and_ends_at_the_last_step(tmp_path: Path, storage: Storage) -> None:
    evaluate = Evaluator(storage, {10: 0.5, 20: 0.5, 30: 0.5, 40: 0.5})

    def run(suite: Suite, spec: ModelSpec, folder: EvalDir) -> Report:
        if len(evaluate.asked) == 2:
            late = tmp_path / "checkpoints" / "step-00000040.a0001"
            late.mkdir()
            (late / "COMMITTED").write_text("{}")
        return evaluate(suite, spec, folder)

    points = watch(ask(tmp_path, last_step=40), storage, run, lambda _: None)
    assert [p.step for p in points] == [10, 20, 30, 40]


def test_newest_only(tmp_path: Path, storage: Storage) -> None:
    evaluate = Evaluator(storage, {10: 0.5, 20: 0.5, 30: 0.5})
    watch(ask(tmp_path, last_step=30, newest_only=True), storage, evaluate, lambda _: None)
    assert evaluate.asked == ["step-00000030.a0001"]


def test_newest_only_leaves_what_was_superseded(tmp_path: Path, storage: Storage) -> None:
    def committed(name: str) -> None:
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / "COMMITTED").write_text("{}")

    evaluate = Evaluator(storage, {10: 0.5, 20: 0.5, 30: 0.5, 40: 0.5})
    once = ask(tmp_path, once=True, newest_only=True)
    points = watch(once, storage, evaluate, lambda _: None)
    assert [p.step for p in points] == [30]
    (tmp_path / "checkpoints" / "step-00000030.a0001" / "COMMITTED").unlink()
    watch(once, storage, evaluate, lambda _: None)
    assert len(evaluate.asked) == 1, "that the newest went does not bring an older one back"
    committed("step-00000040.a0001")
    watch(once, storage, evaluate, lambda _: None)
    assert evaluate.asked[1:] == ["step-00000040.a0001"]


def test_a_lease_is_renewed_while_it_is_held(storage: Storage) -> None:
    name = storage.folders()[0]
    with hold_pin(storage, name, "me", seconds=3.0):
        first = read_pins(storage, name)[0].until
        deadline = time.monotonic() + 10
        while read_pins(storage, name)[0].until <= first and time.monotonic() < deadline:
            time.sleep(0.02)
        assert read_pins(storage, name)[0].until > first
    assert read_pins(storage, name) == []


def test_where_checkpoints_lie(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert checkpoints_of(str(tmp_path / "run")).url.endswith("checkpoints")
    assert checkpoints_of(str(tmp_path / "run" / "checkpoints")).url.endswith("checkpoints")
    with pytest.raises(InputError, match="no such run directory"):
        checkpoints_of(str(tmp_path / "nowhere"))
    (tmp_path / "other").mkdir()
    assert checkpoints_of(str(tmp_path / "other")).folders() == [], "before its first commit"
    (tmp_path / "other" / "train.py").touch()
    with pytest.raises(InputError, match="no run directory, and it holds no checkpoints"):
        checkpoints_of(str(tmp_path / "other"))
    (tmp_path / "other" / "step-00000010.a0001").mkdir()  # being written
    assert checkpoints_of(str(tmp_path / "other")).url.endswith("other")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "run.toml").touch()
    assert checkpoints_of(str(tmp_path / "new")).folders() == []
    (tmp_path / "new" / "checkpoints").mkdir()
    assert checkpoints_of(str(tmp_path / "new" / "checkpoints")).folders() == []


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("inner", ["step-00000010.a0001", "checkpoints", "run.toml"])
def test_a_folder_that_is_made_later_is_waited_for(tmp_path: Path, inner: str, made: bool) -> None:
    run, said, found = tmp_path / "runs" / "7b", [], []
    if made:
        run.mkdir(parents=True)
    waiting = threading.Thread(target=lambda: found.append(wait_for_checkpoints(str(run), said.append)))
    waiting.start()
    until(lambda: said)
    assert ("waiting for the first" if made else "there is no folder") in said[0]
    assert run.exists() == made, "only the training makes its folder"
    run.mkdir(parents=True, exist_ok=True)
    (run / "attempts").mkdir()  # not what shows it
    (run / "run.toml").touch() if inner == "run.toml" else (run / inner).mkdir()
    waiting.join(timeout=10)
    assert found and found[0].url.endswith("7b" if inner.startswith("step") else "7b/checkpoints")


def test_waiting_ends_at_a_file_and_when_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="this is a file"):
        wait_for_checkpoints(str(tmp_path / "file"), print)
    with pytest.raises(InputError, match="no such run directory"):
        wait_for_checkpoints(str(tmp_path / "nowhere"), print, stop=lambda: True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.py").touch()
    with pytest.raises(InputError, match="no run directory, and it holds no checkpoints"):
        wait_for_checkpoints(str(tmp_path / "other"), print)


def test_what_no_backend_could_load_is_refused(tmp_path: Path, storage: Storage) -> None:
    with pytest.raises(UsageError, match=r"no config\.json, and no --like is given .*step-00000030"):
        refuse_unloadable(ask(tmp_path), storage)
    for engine in ("vllm", "sglang"):  # they load Hugging Face's layout too
        with pytest.raises(UsageError, match=r"no config\.json, and no --like is given"):
            refuse_unloadable(Watch(SUITE, ModelSpec("x", engine), tmp_path / "out"), storage)
    with pytest.raises(UsageError, match="--like names no folder"):
        refuse_unloadable(ask(tmp_path, like=tmp_path / "nosuch"), storage)
    (tmp_path / "like").mkdir()
    with pytest.raises(UsageError, match=r"--like names a folder without a config\.json"):
        refuse_unloadable(ask(tmp_path, like=tmp_path / "like"), storage)
    (tmp_path / "like" / "config.json").write_text("{}")
    refuse_unloadable(ask(tmp_path, like=tmp_path / "like"), storage)
    refuse_unloadable(Watch(SUITE, ModelSpec("x", "my.own:Backend"), tmp_path / "out"), storage)
    refuse_unloadable(ask(tmp_path), open_storage(tmp_path / "empty"))
    assert not (tmp_path / "out").exists()


def test_the_page_escapes_names(tmp_path: Path) -> None:
    points = [
        CurvePoint("n", 1, 1, 0.0, (Score("<b>", (Metric("a", 1.0),), 1, 1),)),
        CurvePoint("m", 2, 1, 0.0, failed="<script>"),
    ]
    page = curves_page("<i>", points)
    assert "<b>" not in page and "<script>" not in page and "<i>" not in page
    assert read_curve(tmp_path) == []


def labels(*values: float, stderr: float | None = None) -> list[str]:
    """The two ends of the axis of a task with these values."""
    points = [
        CurvePoint(f"n{i}", i, 1, 0.0, (Score("t", (Metric("acc", v, stderr),), 9, 9),))
        for i, v in enumerate(values)
    ]
    page = curves_page("s", points)
    assert "nan" not in page + curves_text(points)
    return [found[1] for found in re.finditer(r'<text x="0" y="\d+">([^<]+)</text>', page)]


def test_an_axis_has_ends_that_mean_something() -> None:
    assert labels(0.0, 0.0) == ["1", "0"]
    assert labels(0.5, 0.5) == ["0.75", "0.25"]
    assert labels(-2.0) == ["-1", "-3"]
    assert labels(0.01, 0.5, stderr=0.02)[1] == "0", "no share is below zero, whatever its standard error"
    assert labels(-0.5, 0.5) == ["0.55", "-0.55"]
    assert labels(0.2, math.nan, 0.4, stderr=math.nan) == ["0.41", "0.19"]
    assert labels(math.nan) == []


def commit(storage: Storage, step: int, *, keep: int = 3) -> None:
    """Saves a checkpoint as a keeper does, and removes what the rule does not keep."""
    folder = Path(storage.root) / f"step-{step:08d}.a0001"  # type: ignore[attr-defined]
    folder.mkdir(parents=True)
    (folder / "COMMITTED").write_text("{}")
    apply(storage, Retention(keep), verified=[folder.name])


@pytest.fixture
def run_of_twenty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """A folder of checkpoints before its first commit."""
    store = open_storage(tmp_path / "checkpoints")

    def listing(s: Storage, *, quick: bool = False) -> list[Found]:
        there = [(n, "COMMITTED" in s.list(n)) for n in sorted(s.folders(), reverse=True) if n[:5] == "step-"]
        return [Found(n, int(n[5:13]), 1, "committed" if ok else "incomplete", 0.0, 1, 1, "disk") for n, ok in there]  # fmt: skip

    monkeypatch.setattr(module, "listing", listing)
    monkeypatch.setattr("unbroken.checkpoint.catalogue.retention.listing", listing)
    monkeypatch.setattr(module, "_says_its_form", lambda storage, name: False)
    return store


def test_twenty_in_a_row_with_three_kept_are_all_evaluated(tmp_path: Path, run_of_twenty: Storage) -> None:
    """Nineteen are committed while the first is evaluated."""
    evaluate = Evaluator(run_of_twenty, dict.fromkeys(range(1, 21), 0.5))
    said: list[str] = []

    def slow(suite: Suite, spec: ModelSpec, folder: EvalDir) -> Report:
        if not evaluate.asked:
            for step in range(2, 21):
                commit(run_of_twenty, step)
        return evaluate(suite, spec, folder)

    commit(run_of_twenty, 1)
    points = watch(ask(tmp_path, last_step=20), run_of_twenty, slow, said.append)
    assert [p.step for p in points if p.scores] == [*range(1, 21)], said
    assert holds(run_of_twenty) == []
    commit(run_of_twenty, 21)
    left = [n for n in run_of_twenty.folders() if n.startswith("step-")]
    assert len(left) == 3, "what was evaluated goes"


def test_what_is_left_out_is_said(tmp_path: Path, run_of_twenty: Storage) -> None:
    evaluate = Evaluator(run_of_twenty, dict.fromkeys(range(1, 21), 0.5))
    said: list[str] = []

    def slow(suite: Suite, spec: ModelSpec, folder: EvalDir) -> Report:
        if not evaluate.asked:
            for step in range(2, 21):
                commit(run_of_twenty, step)
                until(
                    lambda n=step: (
                        len(holds(run_of_twenty)) == 1
                        and any(
                            f"{n - 4:08d}" in d
                            for d in (*holds(run_of_twenty)[0].done, f"{n - 4:08d}" if n < 6 else "")
                        )
                    ),
                    10,
                )  # type: ignore[misc]
        return evaluate(suite, spec, folder)

    commit(run_of_twenty, 1)
    points = watch(ask(tmp_path, last_step=20, hold=4), run_of_twenty, slow, said.append)
    had = [p.step for p in points if p.scores]
    assert had[0] == 1 and had[-4:] == [17, 18, 19, 20]
    assert {p.step for p in points} == {*range(1, 21)}, "each has a point: with scores, or with the reason"
    assert all("--hold" in p.failed for p in points if not p.scores)
    assert sum("not evaluated: more than 4 waited" in s for s in said) == 20 - len(had)


def test_a_full_disk_lets_go_the_oldest_and_what_vanished_is_said(
    tmp_path: Path, run_of_twenty: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        commit(run_of_twenty, step)
    look = lambda: module.listing(run_of_twenty, quick=True)  # noqa: E731
    said: list[str] = []
    usage = lambda free: lambda _: type("Usage", (), {"free": free})()  # noqa: E731
    monkeypatch.setattr("unbroken.evaluate.run.watching.hold.shutil.disk_usage", usage(3))
    holding = Holding(run_of_twenty, "me", look, said.append)
    holding.poll()
    lost = holding.lost()
    assert [f.step for f, _ in lost] == [1, 2] and "nearly full" in lost[0][1]
    monkeypatch.setattr("unbroken.evaluate.run.watching.hold.shutil.disk_usage", usage(1000))
    holding.poll()
    run_of_twenty.delete_folder("step-00000003.a0001")
    holding.poll()
    assert [(f.step, why) for f, why in holding.lost()] == [(3, "removed before it was evaluated")]
    assert holding.end() == [] and not said
