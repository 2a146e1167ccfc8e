"""The real coordinator, real worker processes and real sockets; fake tasks and models."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.keepers import until
from unbroken.errors import (
    ContractError,
    DatasetMissing,
    EvaluationError,
    EvaluationInUse,
    ModelChanged,
    ModelDoesNotLoad,
    NoRoomForModel,
    RunInterrupted,
    UnknownKey,
    UnknownTask,
    UsageError,
)
from unbroken.evaluate.contracts import ModelSpec, PreparedTask, Report, Suite, Task, TaskPrior
from unbroken.evaluate.model import locate
from unbroken.evaluate.model.sources import PARALLEL, FolderSource
from unbroken.evaluate.preparation.prepare import Preparers
from unbroken.evaluate.result.answers import AnswerStore
from unbroken.evaluate.result.folder import EvalDir
from unbroken.evaluate.result.journal import events
from unbroken.evaluate.result.results import summary
from unbroken.evaluate.run import coordinator as module
from unbroken.evaluate.run.tasks import checks, preparation
from unbroken.testing.evaluation import BACKEND, fake_model

from .evaluating import coordinator, evaluate, fake_suite, fake_task, numbers

SUITE = fake_suite(
    fake_task("a", samples=70),
    fake_task("b", samples=9, requests=3),
    fake_task("c", samples=33),
    fake_task("g", samples=12, leaves=2),
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, float, float | None]]]:
    """Scores with one worker."""
    return numbers(evaluate(tmp_path_factory.mktemp("alone"), SUITE, workers=1))


@pytest.mark.parametrize("workers", [2, pytest.param(7, marks=pytest.mark.slow)])
def test_scores_do_not_depend_on_the_number_of_workers(tmp_path: Path, workers: int, alone: object) -> None:
    report = evaluate(tmp_path, SUITE, workers=workers)
    assert numbers(report) == alone
    assert not report.errors
    assert report.lower_bound_s <= report.makespan_s
    assert {"a", "b", "c", "g_0", "g_1", "g"} == set(numbers(report))


def test_a_worker_killed_in_the_middle_costs_one_block(tmp_path: Path, alone: object) -> None:
    marker = tmp_path / "killed"
    plain = fake_suite(fake_task("a", samples=70, seconds=0.001))
    faulty = fake_suite(fake_task("a", samples=70, seconds=0.001, kill={"37": str(marker)}))
    report = evaluate(tmp_path, faulty, workers=2, out="faulty")
    assert marker.exists()
    assert [t.outcome for t in report.trials].count("lost") == 1
    assert report.scores[0].scored == 70
    assert numbers(report) == numbers(evaluate(tmp_path, plain, workers=1, out="plain"))
    answered = [b for t in report.trials for b in t.blocks]
    assert sorted(answered) == list(range(9))  # nothing was answered twice


def test_a_block_that_kills_every_worker_is_given_up_and_the_rest_scored(tmp_path: Path) -> None:
    suite = fake_suite(fake_task("a", samples=40, kill={"9": ""}), fake_task("b", samples=20))
    report = evaluate(tmp_path, suite, workers=2)
    a, b = report.scores
    assert (a.scored, a.samples, b.scored) == (32, 40, 20)
    assert {n.status for n in a.notes} == {"unanswered"}
    assert "died" in a.notes[0].why


@pytest.mark.slow
def test_a_block_that_raises_is_tried_again_then_given_up(tmp_path: Path) -> None:
    once = fake_suite(fake_task("a", samples=24, **{"raise": {"3": str(tmp_path / "raised")}}))
    assert evaluate(tmp_path, once, workers=1, out="once").scores[0].scored == 24
    always = fake_suite(fake_task("a", samples=24, **{"raise": {"3": ""}}))
    report = evaluate(tmp_path, always, workers=1, out="always")
    assert report.scores[0].scored == 16
    assert "a kernel failed" in report.scores[0].notes[0].why


def test_a_sample_without_an_answer_is_asked_again_and_then_reported_alone(tmp_path: Path) -> None:
    once = fake_suite(fake_task("a", samples=24, problem={"3": str(tmp_path / "refused")}))
    assert evaluate(tmp_path, once, workers=1, out="once").scores[0].scored == 24
    always = fake_suite(fake_task("a", samples=24, problem={"3": ""}))
    report = evaluate(tmp_path, always, workers=1, out="always")
    assert [(n.sample, n.status) for n in report.scores[0].notes] == [(3, "unanswered")]
    assert report.scores[0].coverage == 23 / 24


def test_out_of_memory_halves_the_batch_for_that_shard(tmp_path: Path) -> None:
    model = fake_model(tmp_path / "model")
    spec = ModelSpec(str(model), BACKEND, block=8, batch_size=8, options={"fits": 2})
    report = evaluate(tmp_path, fake_suite(fake_task("a", samples=20)), spec=spec)
    assert [c.batch_size for c in report.scores[0].conditions] == [2]
    nothing = ModelSpec(str(model), BACKEND, block=8, batch_size=8, options={"fits": 0})
    report = evaluate(tmp_path, fake_suite(fake_task("a", samples=20)), spec=nothing, out="nothing")
    assert report.scores[0].scored == 0
    assert "does not fit" in report.scores[0].notes[0].why


@pytest.mark.slow
def test_the_model_is_loaded_once_per_worker(tmp_path: Path) -> None:
    model = fake_model(tmp_path / "model")
    spec = ModelSpec(str(model), BACKEND, block=8, options={"log": str(tmp_path / "loads")})
    evaluate(tmp_path, fake_suite(*(fake_task(f"t{i}", samples=30) for i in range(10))), spec=spec, workers=2)
    assert len((tmp_path / "loads").read_text().split("\n")) - 1 <= 2


def test_what_is_wrong_is_said_before_a_worker_starts(tmp_path: Path) -> None:
    with pytest.raises(UnknownTask, match="known_task"):
        evaluate(tmp_path, fake_suite(fake_task("a"), fake_task("unknown_task")), out="unknown")
    missing = fake_suite(fake_task("a"), fake_task("b", missing=True), fake_task("c", missing=True))
    with pytest.raises(DatasetMissing, match="1 more tasks cannot run: c"):
        evaluate(tmp_path, missing, out="missing")
    assert not [e for e in events(EvalDir(tmp_path / "missing").journal) if e["event"] == "join"]
    report = evaluate(tmp_path, missing, out="missing", keep_going=True)
    assert set(report.errors) == {"b", "c"}
    assert report.scores[0].scored == 10


@pytest.mark.slow
def test_what_is_missing_is_said_without_waiting_long_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "PATIENCE_S", 0.2)
    suite = fake_suite(
        fake_task("a", missing=True),
        fake_task("b"),
        fake_task("slow", check_s=3600),
        fake_task("c", check_s=3600),
    )
    seen: list[str] = []
    began = time.monotonic()
    ask = Preparers.ask

    async def ask_in_turn(self: Preparers, op: str, suite: Suite, **fields: Any) -> Any:
        """`a` is looked at when it was shown that `b` has been: how fast either is says nothing here."""
        if op == "check" and fields["task"]["name"] == "a":
            while "looking at the data: 1 of 4 tasks" not in seen and time.monotonic() - began < 25:
                await asyncio.sleep(0.01)
        return await ask(self, op, suite, **fields)

    monkeypatch.setattr(Preparers, "ask", ask_in_turn)
    c = coordinator(tmp_path, suite, prepare_workers=3, watcher=lambda p: seen.append(p.phase))
    with pytest.raises(DatasetMissing, match="'a' is not on this machine; 2 not looked at"):
        c.run()
    assert time.monotonic() - began < 30
    assert any(s.startswith("looking at the data: ") and s.endswith("of 4 tasks") for s in seen)


@pytest.fixture
def slow_model(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Makes finding the model last until something has happened."""

    def wait_for(what: Callable[[], object]) -> None:
        find = module.locate

        def slowly(*a: Any, **k: Any) -> Any:
            until(lambda: bool(what()))
            return find(*a, **k)

        monkeypatch.setattr(module, "locate", slowly)

    return wait_for


def warm_pids(out: Path, said: str = "warm") -> list[int]:
    return [
        int(line.split()[1])
        for log in sorted((out / "logs").glob("w*.log"))
        for line in log.read_text().splitlines()
        if line.startswith(f"{said} ")
    ]


@pytest.mark.slow
def test_workers_import_while_the_model_is_on_its_way(
    tmp_path: Path, slow_model: Callable[[Callable[[], object]], None]
) -> None:
    slow_model(lambda: len(warm_pids(tmp_path / "out")) == 2)
    report = evaluate(tmp_path, SUITE)
    joined = {e["pid"] for e in events(EvalDir(tmp_path / "out").journal) if e["event"] == "join"}
    assert joined == set(warm_pids(tmp_path / "out"))
    assert numbers(report) == numbers(evaluate(tmp_path, SUITE, workers=1, out="undisturbed"))
    again = evaluate(tmp_path, SUITE)  # all is there: nobody is asked to stand by
    assert not again.trials and len(warm_pids(tmp_path / "out")) == 2


@pytest.mark.slow
def test_devices_are_made_ready_while_the_model_is_on_its_way_once_the_data_are_there(
    tmp_path: Path, slow_model: Callable[[Callable[[], object]], None]
) -> None:
    slow_model(lambda: len(warm_pids(tmp_path / "out", "devices")) == 2)
    report = evaluate(tmp_path, SUITE)
    assert sorted(warm_pids(tmp_path / "out", "devices")) == sorted(warm_pids(tmp_path / "out"))
    assert all(0 <= w.start_s < w.ready - w.started for w in report.workers)


@pytest.mark.slow
def test_missing_data_are_said_while_the_model_is_on_its_way_and_end_its_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halted: list[bool] = []

    def endless(*_: Any, halt: threading.Event, **__: Any) -> None:
        halted.append(halt.wait(100))
        raise RunInterrupted("the model is not fetched further")

    evaluate(tmp_path, fake_suite(fake_task("a")), out="other")
    monkeypatch.setattr(module, "locate", endless)
    with pytest.raises(DatasetMissing):
        evaluate(tmp_path, fake_suite(fake_task("a"), fake_task("b", missing=True)))
    assert not warm_pids(tmp_path / "out", "devices"), "and no device was taken"
    with pytest.raises(UsageError, match="another suite"):
        evaluate(tmp_path, fake_suite(fake_task("b")), out="other")
    assert halted == [True, True]


@pytest.mark.slow
def test_what_could_not_begin_does_not_claim_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelDoesNotLoad):
        evaluate(tmp_path, fake_suite(fake_task("a")), spec=ModelSpec(str(tmp_path / "nowhere"), BACKEND))
    with pytest.raises(DatasetMissing):
        evaluate(tmp_path, fake_suite(fake_task("a"), fake_task("b", missing=True)))
    assert not evaluate(tmp_path, fake_suite(fake_task("a"))).errors


class Waits(FolderSource):
    """Gives nothing until something has happened."""

    def __init__(self, folder: Path, until_then: Callable[[], object]) -> None:
        super().__init__(folder)
        self.until_then = until_then

    def read(self, name: str, offset: int, size: int) -> bytes:
        until(lambda: bool(self.until_then()))
        return super().read(name, offset, size)


@pytest.mark.slow
def test_prompts_are_built_while_the_model_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate(tmp_path, fake_suite(fake_task("first")), out="before")  # whose hash is known from now on
    folder = EvalDir(tmp_path / "out")
    source = Waits(
        tmp_path / "model", lambda: folder.prepared("a").exists() and folder.prepared("b").exists()
    )
    monkeypatch.setattr(locate, "open_source", lambda _: source)
    report = evaluate(tmp_path, fake_suite(fake_task("a"), fake_task("b")), cache="always")
    assert [s.scored for s in report.scores] == [10, 10]
    assert not list((tmp_path / "shm").rglob("*.safetensors")), "the copy went with the evaluation"


@pytest.mark.parametrize("store", [pytest.param("gives it", marks=pytest.mark.slow), "breaks"])
@pytest.mark.parametrize("known", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_stop_ends_the_fetch_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, known: bool, store: str
) -> None:
    """Whether it is read for its hash, or because it is known; and whatever becomes of the reads in flight."""
    model = fake_model(tmp_path / "model")
    for i in range(60):
        (model / f"part-{i}.safetensors").write_bytes(b"weights")
    if known:
        evaluate(tmp_path, fake_suite(fake_task("a")), out="before")
    c = coordinator(tmp_path, fake_suite(fake_task("a")), cache="always")
    halts: list[threading.Event] = []
    reads: list[int] = []
    find = module.locate

    def finding(*a: Any, halt: threading.Event, **k: Any) -> Any:
        halts.append(halt)
        return find(*a, halt=halt, **k)

    def stopped() -> bool:
        c.stop("SIGINT")
        return halts[0].is_set()

    class Stops(Waits):
        def read(self, name: str, offset: int, size: int) -> bytes:
            reads.append(size)
            data = super().read(name, offset, size)
            if store == "breaks":
                raise ArithmeticError("an error of no class that is known here")
            return data

    monkeypatch.setattr(module, "locate", finding)
    monkeypatch.setattr(locate, "open_source", lambda _: Stops(model, stopped))
    with pytest.raises(RunInterrupted, match="SIGINT"):
        c.run()
    assert 1 <= len(reads) <= PARALLEL, "those in flight, and no more"
    assert not list((tmp_path / "shm").rglob("*.safetensors"))
    gc.collect()
    assert not caplog.records, "nothing that asyncio has to tell of futures that nobody asked"


@pytest.mark.slow
def test_who_joins_may_be_faster_than_the_fetch_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    """Its place is another one, as on another node; the fetch here ends when all is answered."""
    model = fake_model(tmp_path / "model")
    for i in range(2 * PARALLEL):
        (model / f"note-{i}.txt").write_text("x")
    evaluate(tmp_path, fake_suite(fake_task("first")), out="before")  # whose hash is known from now on
    c = coordinator(tmp_path, fake_suite(fake_task("a"), fake_task("b")), cache="always")
    told = locate.Located.for_worker
    monkeypatch.setattr(
        locate.Located, "for_worker", lambda *a: {**told(*a), "memory": str(tmp_path / "there"), "disks": []}
    )
    source = Waits(model, lambda: c.observed.gpu_end)
    monkeypatch.setattr(locate, "open_source", lambda _: source)
    found: list[Report] = []
    thread = threading.Thread(target=lambda: found.append(c.run()))
    thread.start()
    cluster = tmp_path / "out" / "cluster.json"
    eventually(cluster.exists, within=20)
    joiner = subprocess.run(
        [sys.executable, "-m", "unbroken", "eval", "join", str(cluster.parent), "--name", "joiner"],
        check=False,
        capture_output=True,
        text=True,
    )
    thread.join(60)
    assert joiner.returncode == 0
    said = [line.split()[0] for line in joiner.stdout.splitlines()]
    assert said == ["warm", "devices"], "it made itself ready beside its fetch, once"
    assert f"joined as joiner: suite fakes, model model, folder {tmp_path / 'out'}" in joiner.stderr
    assert joiner.stderr.rstrip().endswith("ended after 4 blocks that it answered: every answer is here")
    (report,) = found
    assert {t.worker for t in report.trials} == {"joiner"} == {w.name for w in report.workers}
    assert [s.scored for s in report.scores] == [10, 10]
    assert report.makespan_s >= report.lower_bound_s > 0
    assert all(t.started >= report.started for t in report.trials)
    assert not list((tmp_path / "shm").rglob("*.safetensors"))


@pytest.mark.slow
def test_what_cannot_be_written_for_a_task_fails_that_task(tmp_path: Path) -> None:
    (tmp_path / "out" / "tasks").mkdir(parents=True)
    (tmp_path / "out" / "tasks" / "a").write_text("in the way")
    suite = fake_suite(fake_task("a"), fake_task("b"))
    with pytest.raises(EvaluationError, match=r"FileExistsError|NotADirectoryError"):
        evaluate(tmp_path, suite)
    report = evaluate(tmp_path, suite, keep_going=True)
    assert set(report.errors) == {"a"} and [s.scored for s in report.scores] == [10]


@pytest.mark.slow
def test_keep_going_gives_the_same_report_again(tmp_path: Path) -> None:
    suite = fake_suite(fake_task("a"), fake_task("b", missing=True))
    first = evaluate(tmp_path, suite, keep_going=True)
    again = evaluate(tmp_path, suite, keep_going=True)
    assert numbers(again) == numbers(first)
    assert again.errors == first.errors and not again.trials
    with pytest.raises(DatasetMissing):
        evaluate(tmp_path, fake_suite(fake_task("b", missing=True)), keep_going=True, out="none is left")


@pytest.mark.slow
def test_one_that_died_while_it_stood_by_is_replaced(
    tmp_path: Path, slow_model: Callable[[Callable[[], object]], None]
) -> None:
    killed: list[int] = []

    def kill_one() -> bool:
        pids = warm_pids(tmp_path / "out")
        if len(pids) == 2 and not killed:
            os.kill(pids[0], signal.SIGKILL)
            killed.append(pids[0])
        return bool(killed) and not alive(killed[0])

    slow_model(kill_one)
    report = evaluate(tmp_path, SUITE)
    assert not report.errors and len(report.workers) >= 1
    assert killed[0] not in {e.get("pid") for e in events(EvalDir(tmp_path / "out").journal)}


@pytest.mark.slow
def test_nobody_stands_by_after_an_end(
    tmp_path: Path, slow_model: Callable[[Callable[[], object]], None]
) -> None:
    slow_model(lambda: len(warm_pids(tmp_path / "out")) == 2)
    with pytest.raises(ModelDoesNotLoad, match="cannot be read"):
        evaluate(tmp_path, SUITE, spec=ModelSpec(str(tmp_path / "nowhere"), BACKEND))
    assert not any(alive(p) for p in warm_pids(tmp_path / "out"))


STANDING = """
import sys, time
from pathlib import Path
from unbroken.evaluate.engines import Slot
from unbroken.evaluate.engines.local import LocalEngine
from unbroken.testing.evaluation import BACKEND
out = Path(sys.argv[1])
LocalEngine(out / "logs", threads=1).stand_by([Slot("w0")], out / "cluster.json", BACKEND)
time.sleep(1000)
"""


@pytest.mark.slow
def test_who_stands_by_ends_with_a_coordinator_that_is_killed(
    tmp_path: Path, eventually: Callable[..., None]
) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}
    with subprocess.Popen([sys.executable, "-c", STANDING, str(tmp_path)], env=env) as process:
        eventually(lambda: len(warm_pids(tmp_path)) == 1, within=40)
        (pid,) = warm_pids(tmp_path)
        assert alive(pid)
        process.kill()
    eventually(lambda: not alive(pid), within=20)


@pytest.mark.slow
@pytest.mark.parametrize(
    "trouble",
    ["exits", *(pytest.param(trouble, marks=pytest.mark.slow) for trouble in ("no input", "raises"))],
)
def test_a_backend_whose_imports_misbehave_is_used_all_the_same(
    tmp_path: Path, slow_model: Callable[[Callable[[], object]], None], trouble: str
) -> None:
    model = fake_model(tmp_path / "model")
    slow_model(lambda: len(warm_pids(tmp_path / "out")) == 2)
    spec = ModelSpec(str(model), f"tests.evaluate.misbehaving:{trouble.title().replace(' ', '')}", block=8)
    report = evaluate(tmp_path, SUITE, spec=spec)
    assert numbers(report) == numbers(evaluate(tmp_path, SUITE, workers=1, out="undisturbed"))


@pytest.mark.slow
def test_who_hangs_in_an_import_ends_with_the_coordinator(
    tmp_path: Path, eventually: Callable[..., None]
) -> None:
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}"}
    script = STANDING.replace("BACKEND)", "'tests.evaluate.misbehaving:Hangs')")
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], env=env) as process:
        eventually(lambda: len(warm_pids(tmp_path)) == 1, within=40)
        (pid,) = warm_pids(tmp_path)
        process.kill()
    eventually(lambda: not alive(pid), within=20)


@pytest.mark.slow
def test_one_that_never_connects_is_ended_and_replaced(
    tmp_path: Path, slow_model: Callable[[Callable[[], object]], None]
) -> None:
    slow_model(lambda: len(warm_pids(tmp_path / "out")) == 2)
    spec = ModelSpec(str(fake_model(tmp_path / "model")), "tests.evaluate.misbehaving:Hangs", block=8)
    report = evaluate(tmp_path, SUITE, spec=spec, stall_s=2.0)
    assert not report.errors
    hung = [e["worker"] for e in events(EvalDir(tmp_path / "out").journal) if e["event"] == "hang"]
    assert sorted(hung) == ["w0", "w1"]


def test_a_model_that_does_not_load_ends_it_with_the_reason(tmp_path: Path) -> None:
    spec = ModelSpec(str(fake_model(tmp_path / "model")), BACKEND, options={"broken": True})
    with pytest.raises(ModelDoesNotLoad, match="wrong shape"):
        evaluate(tmp_path, fake_suite(fake_task("a")), spec=spec)
    gone = ModelSpec(str(tmp_path / "nowhere"), BACKEND)
    with pytest.raises(ModelDoesNotLoad, match="cannot be read"):
        evaluate(tmp_path, fake_suite(fake_task("a")), spec=gone, out="gone")


@pytest.mark.slow
def test_a_model_that_did_not_load_leaves_the_folder_to_the_right_one(tmp_path: Path) -> None:
    suite = fake_suite(fake_task("a"))
    with pytest.raises(ModelDoesNotLoad):
        evaluate(tmp_path, suite, spec=ModelSpec(str(fake_model(tmp_path / "model")), BACKEND, options={"broken": True}))  # fmt: skip
    assert evaluate(tmp_path, suite).scores[0].scored == 10
    with pytest.raises(UsageError, match="another suite"):  # now it has answers
        evaluate(tmp_path, fake_suite(fake_task("b")))


def test_an_option_that_the_backend_does_not_know_is_refused_before_the_model_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "locate", None)
    spec = ModelSpec("nowhere", options={"atn_implementation": "eager"})
    with pytest.raises(UnknownKey, match="unknown option 'atn_implementation'") as e:
        evaluate(tmp_path, SUITE, spec=spec)
    assert e.value.nearest == "attn_implementation" and not (tmp_path / "out" / "evaluation.json").exists()


@pytest.mark.slow
def test_a_model_that_is_replaced_while_it_is_evaluated_ends_it_and_leaves_no_answer_of_the_other(
    tmp_path: Path, eventually: Callable[..., None]
) -> None:
    suite = fake_suite(fake_task("a", samples=160, seconds=0.02))
    model, out = fake_model(tmp_path / "model"), tmp_path / "out"
    raised: list[BaseException] = []

    def run() -> None:
        try:
            evaluate(tmp_path, suite, cache="never")
        except ModelChanged as e:
            raised.append(e)

    def answers() -> int:
        return sum(p.read_bytes().count(b"\n") for p in (out / "answers").rglob("*.jsonl"))

    thread = threading.Thread(target=run)
    thread.start()
    eventually(lambda: answers() >= 2, within=30)
    fake_model(model, b"others!")
    thread.join(60)
    assert len(raised) == 1 and answers() < 20
    fake_model(model)  # other stamps, the same content
    assert numbers(evaluate(tmp_path, suite)) == numbers(evaluate(tmp_path, suite, out="undisturbed"))


@pytest.mark.slow
def test_a_joiner_that_was_started_elsewhere_finds_the_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    monkeypatch.chdir(tmp_path)
    suite = fake_suite(fake_task("a", samples=40))
    c = coordinator(
        Path(), suite, workers=0, spec=ModelSpec(str(fake_model(tmp_path / "model")), BACKEND, block=8)
    )
    found: list[Report] = []
    thread = threading.Thread(target=lambda: found.append(c.run()))
    thread.start()
    eventually((tmp_path / "out" / "cluster.json").exists, within=30)
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}"}
    subprocess.run([sys.executable, "-m", "unbroken", "eval", "join", str(tmp_path / "out")], cwd="/", env=env, check=True, timeout=60)  # fmt: skip
    thread.join(60)
    assert [s.scored for s in found[0].scores] == [40]


@pytest.mark.slow
def test_a_joiner_that_cannot_load_the_model_ends_nothing(
    tmp_path: Path, eventually: Callable[..., None]
) -> None:
    c = coordinator(tmp_path, fake_suite(fake_task("a", samples=40)), workers=0, cache="never")
    found: list[Report] = []
    thread = threading.Thread(target=lambda: found.append(c.run()))
    thread.start()
    out = tmp_path / "out"
    eventually((out / "cluster.json").exists, within=30)

    def join(**more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "unbroken", "eval", "join", str(out)], env={**os.environ, **more},
                              check=False, timeout=60, text=True, capture_output=True)  # fmt: skip

    bad = join(UNBROKEN_FAKE_BROKEN="1")
    assert bad.returncode == 53 and "wrong shape" in bad.stderr and "Traceback" not in bad.stderr
    assert f"suite {c.job.suite.name}, " in bad.stderr
    assert join().returncode == 0
    thread.join(60)
    assert [s.scored for s in found[0].scores] == [40]


@pytest.mark.parametrize(
    "text", ["{", *(pytest.param(text, marks=pytest.mark.slow) for text in ("[]", "null", '"x"', "{}"))]
)
def test_damaged_files_of_ours_are_made_anew(tmp_path: Path, text: str) -> None:
    whole = evaluate(tmp_path, SUITE)
    damaged = [
        *(tmp_path / "out" / "scores").rglob("*.json"), *(tmp_path / "out" / "tasks").rglob("prepared.json")
    ]  # fmt: skip
    assert len(damaged) >= 4
    for path in damaged:
        path.write_text(text)
    again = evaluate(tmp_path, SUITE)
    assert numbers(again) == numbers(whole) and not again.trials and not again.errors


@pytest.mark.parametrize(
    "text", ["{", *(pytest.param(text, marks=pytest.mark.slow) for text in ("[]", "null", '"x"'))]
)
def test_what_was_asked_is_never_made_up_for(tmp_path: Path, text: str) -> None:
    evaluate(tmp_path, SUITE)
    (tmp_path / "out" / "evaluation.json").write_text(text)
    with pytest.raises(ContractError, match=r"cannot be read .*evaluation\.json.*Remove it"):
        evaluate(tmp_path, SUITE)


def test_the_same_command_asks_nothing_twice(tmp_path: Path) -> None:
    first = evaluate(tmp_path, SUITE)
    second = evaluate(tmp_path, SUITE)
    assert numbers(first) == numbers(second)
    assert not second.trials
    assert not second.workers  # no GPU is taken for it


def test_another_question_or_another_model_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    evaluate(tmp_path, fake_suite(fake_task("a")))
    with pytest.raises(UsageError, match="another suite"):
        evaluate(tmp_path, fake_suite(fake_task("b")))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises((UsageError, ModelChanged), match="checkpoint"):
        evaluate(tmp_path, fake_suite(fake_task("a")))


def test_a_changed_prompt_is_asked_again_and_only_that(tmp_path: Path) -> None:
    """Answers are keyed by prompt: the first 24 samples of a longer run are those of a shorter one."""
    short, long = fake_suite(fake_task("a", samples=24)), fake_suite(fake_task("a", samples=40))
    evaluate(tmp_path, short)
    (tmp_path / "out" / "evaluation.json").unlink()
    report = evaluate(tmp_path, long)
    assert sorted(b for t in report.trials for b in t.blocks) == [3, 4]
    other = fake_suite(fake_task("a", samples=40, version=2))
    (tmp_path / "out" / "evaluation.json").unlink()
    assert sorted(b for t in evaluate(tmp_path, other).trials for b in t.blocks) == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_answers_of_one_model_are_never_given_to_another(tmp_path: Path) -> None:
    suite = fake_suite(fake_task("a", samples=40))
    one = evaluate(
        tmp_path, suite, spec=ModelSpec(str(fake_model(tmp_path / "m1", b"one")), BACKEND, block=8)
    )
    (tmp_path / "out" / "evaluation.json").unlink()
    two = evaluate(
        tmp_path, suite, spec=ModelSpec(str(fake_model(tmp_path / "m2", b"two")), BACKEND, block=8)
    )
    assert numbers(one) != numbers(two)
    assert len([b for t in two.trials for b in t.blocks]) == 5


def test_work_is_stolen_at_the_tail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prior of one task is wrong by a lot: whoever has it would be last by far.

    Nothing is prepared before both workers are ready: one that starts seconds after the other finds little to steal.
    """
    tasks = [
        fake_task("slow", samples=64, seconds=0.08),
        *(fake_task(f"t{i}", samples=64, seconds=0.0005) for i in range(4)),
    ]
    priors = {t.name: TaskPrior(samples=64, seconds=0.5) for t in tasks}
    c = coordinator(tmp_path, Suite("fakes", tuple(tasks), priors=priors), workers=2)
    prepare = preparation.Preparation.prepare

    async def prepare_for_both(self: preparation.Preparation, task: Task) -> PreparedTask:
        async with asyncio.timeout(60):
            while sum(bool(link.ready) for link in c.links.values()) < 2:
                await asyncio.sleep(0.01)
        return await prepare(self, task)

    monkeypatch.setattr(preparation.Preparation, "prepare", prepare_for_both)
    report = c.run()
    shares = [
        sum(len(t.blocks) for t in report.trials if t.worker == w and t.task == "slow") for w in ("w0", "w1")
    ]
    assert sum(shares) == 8
    assert min(shares) >= 2, shares
    steals = [e for e in events(EvalDir(tmp_path / "out").journal) if e["event"] == "steal"]
    assert 1 <= len(steals) <= 8, "each one moves a block at least"


@pytest.mark.slow
def test_workers_join_and_leave_while_it_runs(tmp_path: Path, eventually: Callable[..., None]) -> None:
    """No slots at all: one worker joins by itself, is killed, and another one finishes."""
    suite = fake_suite(fake_task("a", samples=64, seconds=0.02))
    c = coordinator(tmp_path, suite, workers=0, wait_for_workers_s=30.0)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(c.run()))
    thread.start()
    cluster = tmp_path / "out" / "cluster.json"
    eventually(cluster.exists, within=20)
    worker = "unbroken.evaluate.engines.worker.process"
    join = [sys.executable, "-m", worker, "--cluster", str(cluster), "--name"]
    first = subprocess.Popen([*join, "first"])
    eventually(lambda: len(c.observed.blocks) >= 2, within=30)
    first.kill()
    second = subprocess.Popen([*join, "second"])
    thread.join(60)
    assert first.wait(10) == -signal.SIGKILL
    assert second.wait(10) == 0
    report = found[0]
    assert {t.worker for t in report.trials} == {"first", "second"}  # type: ignore[attr-defined]
    assert report.scores[0].scored == 64  # type: ignore[attr-defined]


SCRIPT = """
import sys
from pathlib import Path
from tests.evaluate.evaluating import coordinator, fake_suite, fake_task
suite = fake_suite(*(fake_task(f"t{i}", samples=40, seconds=0.005) for i in range(4)))
coordinator(Path(sys.argv[1]), suite, workers=2).run()
"""


def test_a_killed_coordinator_loses_only_what_was_in_flight(
    tmp_path: Path, eventually: Callable[..., None]
) -> None:
    suite = fake_suite(*(fake_task(f"t{i}", samples=40, seconds=0.005) for i in range(4)))
    folder = EvalDir(tmp_path / "out")
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}"}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path)], env=env, start_new_session=True)

    def lines() -> int:
        return sum(p.read_bytes().count(b"\n") for p in (tmp_path / "out" / "answers").rglob("*.jsonl"))

    eventually(lambda: lines() >= 4, within=40)
    pids = [e["pid"] for e in events(folder.journal) if e["event"] == "join"]
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    saved = lines()
    eventually(lambda: not any(alive(p) for p in pids), within=20)  # orphans give the GPU back
    report = evaluate(tmp_path, suite, workers=3)
    asked = sum(len(t.blocks) for t in report.trials)
    assert asked <= 20 - saved
    assert report.reused == sum(s.samples for s in report.scores) * (20 - asked) // 20
    assert f"{report.reused} answers were there before" in summary(report)
    assert numbers(report) == numbers(evaluate(tmp_path, suite, workers=1, out="undisturbed"))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_look_at_the_lock_keeps_nobody_out(tmp_path: Path) -> None:
    folder = EvalDir(tmp_path / "out")
    folder.open()
    with open(folder.root / "lock", "a") as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        timer = threading.Timer(0.1, fcntl.flock, (look, fcntl.LOCK_UN))
        timer.start()
        with folder.lock():
            timer.join()


def test_one_coordinator_per_folder(tmp_path: Path) -> None:
    with EvalDir(tmp_path / "out").lock(), pytest.raises(EvaluationInUse, match="running in this folder"):
        evaluate(tmp_path, fake_suite(fake_task("a")))


@pytest.mark.slow
def test_the_gap_between_shards_is_below_50_ms(tmp_path: Path) -> None:
    """The median: single gaps on a machine that does other things measure that machine."""
    suite = fake_suite(*(fake_task(f"t{i}", samples=80, seconds=0.002) for i in range(6)))
    c = coordinator(tmp_path, suite, workers=1, priors=tmp_path / "priors.json")
    c.run()
    gaps = sorted(c.observed.gaps)
    assert len(gaps) >= 4
    assert gaps[len(gaps) // 2] < 0.05


@pytest.mark.slow
def test_priors_are_learnt_from_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unbroken.evaluate.plan.priors import START, load_book

    monkeypatch.setattr(checks, "STAND_BY_S", 60.0)  # one that stood by meanwhile starts in milliseconds
    store = tmp_path / "priors.json"
    suite = fake_suite(
        fake_task("slow", samples=40, seconds=0.01, score_s=0.2),
        fake_task("quick", samples=40, seconds=0.001),
    )
    evaluate(tmp_path, suite, workers=1, priors=store)
    again = coordinator(tmp_path, suite, workers=1, priors=store, out="again")
    again.run()
    assert again.table.expected["slow"].source == "measured"
    assert 0.3 < again.table.expected["slow"].seconds < 2.0
    assert again.table.expected["slow"].seconds > 3 * again.table.expected["quick"].seconds
    assert again.table.expected["slow"].score_s > 0.15
    rows = {r.task: r for r in load_book(store).rows.values()}
    start = rows.pop(START)
    assert start.samples == 2 and 0.05 < load_book(store).start_s(start.model_b, start.device) < 60
    assert {t: r.samples for t, r in rows.items()} == {"slow": 80, "quick": 80}


def test_no_worker_left_is_an_error_and_nothing_is_lost(tmp_path: Path) -> None:
    c = coordinator(tmp_path, fake_suite(fake_task("a", samples=16)), workers=1)
    engine = c.launchers.engine
    engine.start = lambda slot, cluster: engine.processes.update({slot.name: subprocess.Popen(["false"])})  # type: ignore
    with pytest.raises(EvaluationError, match="no worker is left: exit code 1"):
        c.run()
    assert evaluate(tmp_path, fake_suite(fake_task("a", samples=16))).scores[0].scored == 16


@pytest.mark.slow
def test_a_full_disk_ends_it_with_a_reason_and_keeps_what_was_answered(tmp_path: Path) -> None:
    suite = fake_suite(fake_task("a", samples=40))
    c = coordinator(tmp_path, suite, workers=1)
    calls = 0

    def run() -> None:
        original = AnswerStore.append

        def append(self: AnswerStore, *args: object, **more: object) -> None:
            nonlocal calls
            calls += 1
            if calls > 2:
                raise OSError(28, "No space left on device")
            original(self, *args, **more)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as m:
            m.setattr(AnswerStore, "append", append)
            c.run()

    with pytest.raises(EvaluationError, match="No space left on device"):
        run()
    again = evaluate(tmp_path, suite, workers=1)
    assert sum(len(t.blocks) for t in again.trials) == 3


def test_a_scorer_that_crashes_as_a_whole_costs_its_task_only(tmp_path: Path) -> None:
    suite = fake_suite(fake_task("bad", samples=10, score_s="never"), fake_task("good", samples=10))
    report = evaluate(tmp_path, suite, workers=1)
    assert [s.task for s in report.scores] == ["good"]
    assert "ValueError" in report.errors["bad"]


def test_a_shared_copy_is_fetched_once_used_by_all_and_gone_at_the_end(tmp_path: Path) -> None:
    """Also when a worker is killed, and the hash is not known before: the node reads the source once."""
    (tmp_path / "shm").mkdir()
    suite = fake_suite(fake_task("a", samples=70, kill={"37": str(tmp_path / "killed")}))
    report = evaluate(tmp_path, suite, workers=2, cache="always", out="cached")
    assert (tmp_path / "killed").exists()
    assert numbers(report) == numbers(evaluate(tmp_path, suite, workers=1, out="mapped", cache="never"))
    assert all(w.fetch_s == 0 for w in report.workers)  # the coordinator's one fetch serves them all
    assert not list((tmp_path / "shm").rglob("*.safetensors"))


def test_no_place_for_the_copy_is_said_before_a_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "STAND_BY_S", 60.0)  # on a slow machine one would be importing by then
    (tmp_path / "shm").write_text("in the way")
    (tmp_path / "disk").write_text("in the way")
    with pytest.raises(NoRoomForModel, match="Enlarge /dev/shm"):
        evaluate(tmp_path, fake_suite(fake_task("a")), cache="always")
    assert not (tmp_path / "out" / "logs" / "w0.log").exists()
