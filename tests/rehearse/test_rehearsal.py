"""A rehearsal says exact where it is, and names each of ten mistakes."""

from __future__ import annotations

import ast
import contextlib
import gc
import json
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unbroken.errors import RunError, UsageError
from unbroken.rehearse import launch
from unbroken.rehearse.compare import compare
from unbroken.rehearse.guard import Guard, WouldOverwrite, freeze_time
from unbroken.rehearse.launch import Ended, Plain, Trial
from unbroken.rehearse.plan import RehearsalPlan
from unbroken.rehearse.rehearsal import Rehearsal, RehearsalReport, kill_points
from unbroken.rehearse.report import lines
from unbroken.rehearse.trace import Batch, Save, Trace, TracedStep, Writer, read_traces

HERE = Path(__file__).parent


class Forked:
    """As `Plain`, in forks of this process: nothing has to be imported again."""

    def run(self, trial: Trial) -> Ended:
        work, words = trial.prepare()
        began = time.monotonic()
        code = 0
        for attempt in range(3):
            log = trial.folder / f"rank-0.{attempt}.log"
            pid = os.fork()
            if pid == 0:
                try:
                    self._child(trial, work, words, log)
                finally:
                    os._exit(1)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if code != -9:
                break
        return Ended(code == 0, log.read_text(), time.monotonic() - began)

    def _child(self, trial: Trial, work: Path, words: list[str], log: Path) -> None:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(fd, 1), os.dup2(fd, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        os.chdir(work)
        os.environ.update(RANK="0", WORLD_SIZE="1", UNBROKEN_RUN_DIR=str(trial.folder / "run"), **trial.env)
        from unbroken.rehearse import probe

        # Modules that other tests left in this process are none of the script's: what is frozen is in no list of objects.
        gc.freeze()
        try:
            probe.main(words[1:])
        except BaseException:  # noqa: BLE001  a fork must never come back into pytest
            import traceback

            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)


def rehearse(tmp_path: Path, *options: str, launcher: Any = None, **more: Any) -> RehearsalReport:
    import torch
    import torch._dynamo  # an optimizer imports it: once here, not in each fork

    torch.set_num_threads(1)
    folder = tmp_path / "rehearsal"
    folder.mkdir()
    words = ("training.py", "--out", "{dir}", *options)
    return Rehearsal(words, folder, steps=14, launcher=launcher or Forked(), source=HERE, **more).run()


def test_a_training_that_resumes_exactly_is_exact(tmp_path: Path) -> None:
    report = rehearse(tmp_path)
    assert report.exact, lines(report)
    assert [k.epoch for k in report.kills] == [0, 1], "both epochs are tried"
    assert all(k.lost == 2 for k in report.kills) and report.save_every == 3 and report.steps == 14
    assert report.saved_by == "torch.save" and report.snapshot_bytes > 1000 and report.stall_s > 0
    text = "\n".join(lines(report))
    assert text.startswith("exact: 14 steps") and "a save every 3 steps" in text
    assert json.dumps(report.as_json())


MISTAKES = {
    "position": ("position", "position in the data"),
    "generator": ("generator", "torch's generator"),
    "scheduler": ("scheduler", "scheduler.last_epoch"),
    "ema": ("copy", "ema["),
    "dropout": ("settings", "3.p"),
    "set_epoch": ("set_epoch", "epoch of the order"),
    "accumulation": ("accumulation", "gradients"),
    "augmentation": ("unseeded", "content"),
    "time": ("time", "content"),
    "dict order": ("hash order", "content"),
}
HARDEST = ("set_epoch", "augmentation")
"""One that only the second epoch shows, and one of chance; `make soak` has the others."""
IN_FORKS = [m for m in MISTAKES if m != "dict order"]  # forks have one hash seed


def check(report: RehearsalReport, mistake: str) -> None:
    kind, piece = MISTAKES[mistake]
    f = report.finding
    assert not report.exact and f is not None
    assert f.kind == kind and piece in f.piece, lines(report)
    assert f.hint and lines(report)[0].startswith("not exact")
    chance = kind in ("unseeded", "time", "hash order")
    assert (report.deterministic is not None) == chance
    if kind == "set_epoch":
        assert [k.finding is None for k in report.kills] == [True, False], "only the second epoch shows it"


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(m, marks=[pytest.mark.slow, *([] if m in HARDEST else [pytest.mark.soak])])
        for m in IN_FORKS
    ],
)
def test_each_planted_mistake_is_named(tmp_path: Path, mistake: str) -> None:
    check(rehearse(tmp_path, "--mistake", mistake), mistake)


@pytest.mark.slow
@pytest.mark.integration
def test_the_order_of_a_set_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)  # our own test runs set it
    check(rehearse(tmp_path, "--mistake", "dict order", launcher=Plain()), "dict order")


def test_a_script_that_would_write_to_real_files_is_stopped(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "out").mkdir(parents=True)
    (source / "training.py").write_text((HERE / "training.py").read_text())
    (tmp_path / "r").mkdir()
    rehearsal = Rehearsal(("training.py",), tmp_path / "r", steps=6, launcher=Forked(), source=source)
    with pytest.raises(UsageError, match=r"\{dir\}"):
        rehearsal.run()
    assert list((source / "out").iterdir()) == []


def test_a_script_that_fails_or_has_no_steps_is_said(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for n, (code, error, words) in enumerate([
        ("raise ValueError('bad')", RunError, "bad"),
        ("print(1)", UsageError, "no step of a torch optimizer"),
        ("import torch; p = torch.nn.Parameter(torch.zeros(1)); torch.optim.SGD([p], 1.0).step()", UsageError, "1 step only"),
    ]):  # fmt: skip
        (source / "t.py").write_text(code)
        folder = tmp_path / str(n)
        folder.mkdir()
        with pytest.raises(error, match=words):
            Rehearsal(("t.py",), folder, steps=6, launcher=Forked(), source=source).run()
    with pytest.raises(UsageError, match="4 steps"):
        Rehearsal(("t.py",), tmp_path, steps=3).run()


OWN_UPDATE = """
import os, sys, torch, unbroken
out, how = sys.argv[1:]
torch.manual_seed(0)
run = unbroken.attach()
w, momentum, first = torch.zeros(4, requires_grad=True), torch.zeros(4), 0
os.makedirs(out, exist_ok=True)
if os.path.exists(out + "/last.pt"):
    saved = torch.load(out + "/last.pt")
    w.data.copy_(saved["w"])
    first = saved["step"]
    if how != "momentum":
        momentum.copy_(saved["momentum"])
optimizer = torch.optim.SGD([w], 0.1)
for step in range(first + 1, 19):
    x = torch.randn(4, generator=torch.Generator().manual_seed(step))
    if how == "before":
        run.step(step)
    kept = torch.zeros(1) if how == "nothing" else w
    loss = ((kept - x) ** 2).sum()
    if how == "before":
        optimizer.zero_grad(), loss.backward(), optimizer.step()
    elif how != "nothing":
        momentum.mul_(0.9).add_(torch.autograd.grad(loss, w)[0])
        w.data.sub_(momentum, alpha=0.1)
        run.step(step, loss=loss.item())
    else:
        del w
        w = torch.zeros(4)
        run.step(step)
    if step % 3 == 0:
        torch.save({"w": w.detach(), "momentum": momentum, "step": step}, out + "/new.pt")
        os.replace(out + "/new.pt", out + "/last.pt")
"""
"""A script that updates its weights by itself, and reports each step."""


def rehearse_own_update(tmp_path: Path, how: str) -> RehearsalReport:
    source, folder = tmp_path / "source", tmp_path / "rehearsal"
    source.mkdir(), folder.mkdir()
    (source / "t.py").write_text(OWN_UPDATE)
    return Rehearsal(("t.py", "{dir}", how), folder, steps=14, launcher=Forked(), source=source).run()


def test_a_script_without_an_optimizer_is_counted_as_it_reports_its_steps(tmp_path: Path) -> None:
    report = rehearse_own_update(tmp_path, "right")
    assert report.exact and report.steps == 14 and report.save_every == 3, lines(report)
    assert all(k.lost == 2 and k.resumed_at > 0 for k in report.kills)
    first = read_traces(tmp_path / "rehearsal" / "trial-01" / "trace")[0, 1].steps
    assert all(s.reported and s.number == n and s.weights == f"step {n + 1}" for n, s in enumerate(first))
    assert len({s.state["parameter w"] for s in first}) == 15


def test_what_a_script_without_an_optimizer_forgets_is_found(tmp_path: Path) -> None:
    report = rehearse_own_update(tmp_path, "momentum")
    found = report.finding
    assert found is not None and (found.kind, found.piece) == ("step", "parameter w"), lines(report)
    assert found.step == report.kills[0].resumed_at + 1, "the first step after the resume"
    assert "first step that was made again" in found.text and report.deterministic is None


def test_steps_reported_before_those_of_an_optimizer_are_not_counted(tmp_path: Path) -> None:
    report = rehearse_own_update(tmp_path, "before")
    assert report.exact, lines(report)
    first = read_traces(tmp_path / "rehearsal" / "trial-01" / "trace")[0, 1].steps
    assert len(first) == 15 and not any(s.reported for s in first)


def test_a_script_that_shows_nothing_to_compare_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"neither a loss with them nor weights.*step\(step, loss=loss\)"):
        rehearse_own_update(tmp_path, "nothing")


# --- the parts


def step(n: int, **more: Any) -> TracedStep:
    batch = Batch("loader", n // 6, n % 6, f"i{n}", f"c{n}")
    return TracedStep(n, 0, f"w{n}", (batch,), {"torch": f"g{n}"}, {"drop.p": "0.1"}, {"parameter a": f"p{n}"}, {"0": f"d{n}"}, (f"l{n}",), **more)  # fmt: skip


STEPS = [step(n) for n in range(12)]


def resumed(at: int, **changes: Any) -> list[TracedStep]:
    return [replace(s, number=i, **changes) for i, s in enumerate(STEPS[at:])]


def test_a_resumed_process_is_found_by_its_weights() -> None:
    found = compare(STEPS, resumed(5), 0, limit=8)
    assert (found.resumed_at, found.finding, found.compared) == (5, None, 7)
    assert compare(STEPS, [], 0).compared == 0


def test_a_generator_that_moved_and_did_no_harm_is_a_note() -> None:
    found = compare(STEPS, resumed(5, generators={"torch": "x", "numpy": "y"}), 0, limit=8)
    assert found.finding is None and any("nothing drew from it" in n for n in found.notes)


@pytest.mark.parametrize(
    "changes, kind, words",
    [
        ({"batches": (Batch("loader", 0, 0, "i0", "c0"),)}, "position", "step 1"),
        ({"batches": (Batch("loader", 0, 0, "x", "y"),)}, "order", "never had"),
        ({"batches": (Batch("loader", 0, 0, "i7", "y"),)}, "content", "content"),
        ({"batches": ()}, "order", "has 0 batches"),
        ({"state": {"parameter a": "zzz"}, "weights": "other"}, "parameter", "weights"),
        ({"settings": {"drop.p": "0.3"}}, "settings", "is 0.3, it was 0.1"),
        ({"losses": ("other",), "generators": {"torch": "moved"}}, "generator", "torch's generator"),
        ({"losses": ("other",)}, "forward", "another loss"),
    ],
)  # fmt: skip
def test_what_differs_is_named(changes: dict[str, Any], kind: str, words: str) -> None:
    steps = resumed(7)
    steps[0] = replace(steps[0], **changes)
    if "weights" in changes:
        steps[0] = replace(steps[0], losses=STEPS[7].losses)
    found = compare(STEPS, steps, 2, limit=7).finding
    assert found is not None and found.kind == kind and words in found.text and found.rank == 2


def test_batches_that_are_skipped_to_come_to_the_place_are_no_difference() -> None:
    """As with `islice(loader, n, None)`, or `if i < n: continue`."""
    before = tuple(b for s in STEPS[:5] for b in s.batches)
    first = STEPS[5].batches[0]

    def found(*batches: Batch, losses: tuple[str, ...] = STEPS[5].losses) -> Any:
        steps = resumed(5)
        steps[0] = replace(steps[0], batches=batches, losses=losses)
        return compare(STEPS, steps, 0, limit=7).finding

    assert found(*before, first) is None
    one_too_many, one_too_few = found(*before, first, STEPS[6].batches[0]), found(*before)
    assert one_too_many.kind == one_too_few.kind == "position"
    assert "that of step 7" in one_too_many.text and "that of step 5" in one_too_few.text
    trained_on = found(*before, first, losses=(*(f"l{n}" for n in range(5)), *STEPS[5].losses))
    assert trained_on.kind == "position" and "began again at the beginning of the epoch" in trained_on.text


@pytest.mark.parametrize("failing", [{"frozen_time"}, {"fixed_entropy"}, {"frozen_time", "fixed_entropy"}])
def test_an_experiment_that_the_script_does_not_bear_costs_nothing_that_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: set[str]
) -> None:
    chance = iter(range(100))

    def trial(**how: Any) -> dict[tuple[int, int], Trace]:
        if failing & set(how):
            raise RunError("the training failed in the rehearsal")
        loss = 0 if "frozen_time" in how else next(chance)
        return {(0, 1): Trace(0, 1, [replace(s, losses=(f"{loss}",)) for s in STEPS])}

    rehearsal = Rehearsal(("x.py",), tmp_path, launcher=Forked())
    monkeypatch.setattr(rehearsal, "_trial", trial)
    report = RehearsalReport(12, 1)
    rehearsal._tell_chance_apart(report, [STEPS])
    found = report.deterministic
    assert found is not None
    if "frozen_time" in failing:
        assert (
            "failed with" in found.text
            and "the clock stopped, so whether" in found.text
            and found.kind != "time"
        )
    else:
        assert found.kind == "time" and found.text.endswith("with the clock stopped they do not")


def test_the_training_is_killed_between_saves_and_in_two_epochs() -> None:
    saves = [Save(n, 0.1, "torch.save") for n in (3, 6, 9)]
    assert kill_points(STEPS, saves) == [5, 8]
    assert kill_points(STEPS, []) == [6, 10]
    assert kill_points(STEPS, [Save(n, 0.1, "x") for n in range(12)]) == [4, 8]


def test_traces_survive_a_torn_line(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 3)
    writer.write("step", STEPS[0]), writer.write("save", Save(1, 0.5, "x")), writer.write("warning", "w")
    assert Writer(tmp_path, 3).attempt == 2
    with open(tmp_path / "rank-00003.0001.jsonl", "ab") as f:
        f.write(b'{"kind": "st')
    trace = read_traces(tmp_path)[3, 1]
    assert trace.steps == [STEPS[0]] and trace.saves == [Save(1, 0.5, "x")] and not trace.finished


def test_a_stopped_clock_says_the_same_in_each_process_and_libraries_can_still_wait() -> None:
    def looked() -> list[float]:
        clocks = (time.time, time.monotonic, time.perf_counter, time.perf_counter_ns, time.process_time)
        return [c() for c in clocks for _ in range(2)]

    pid = os.fork()
    if pid == 0:  # the clock is stopped for the rest of a process
        try:
            freeze_time()
            found: list[list[float]] = []
            for _ in range(2):  # each thread counts its own looks, as each process does
                thread = threading.Thread(target=lambda: found.append(looked()))
                thread.start(), thread.join()
            with contextlib.suppress(queue.Empty):
                queue.Queue[int]().get(timeout=0.01)
            moves = all(b > a for a, b in zip(found[0][2::2], found[0][3::2], strict=True))
            end, waits = time.monotonic() + 0.05, 0
            while time.monotonic() < end:  # each look alone is a millisecond: it would wait ten times as long
                time.sleep(0.01)
                waits += 1
            os._exit(0 if found[0] == found[1] and moves and waits <= 5 else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_guard_lets_only_the_rehearsal_be_written(tmp_path: Path) -> None:
    said: list[str] = []
    guard = Guard(str(tmp_path), str(tmp_path / "mine"), said.append)
    guard.check(tmp_path / "mine" / "x"), guard.check("/tmp/else"), guard.check(3)
    with pytest.raises(WouldOverwrite, match=r"\{dir\}"):
        guard.check(tmp_path / "other" / "x")
    assert len(said) == 1


@pytest.mark.parametrize("how", ["rename", "replace", "link", "symlink", "move"])
def test_a_file_that_is_put_in_place_from_elsewhere_is_refused_too(tmp_path: Path, how: str) -> None:
    mine, real = tmp_path / "source" / "r-1", tmp_path / "source"
    mine.mkdir(parents=True)
    (real / "last.pt").write_text("real")
    (mine / "last.pt").symlink_to(real / "last.pt")
    (real / "r-10").mkdir()
    code = f"""
import os, shutil, sys
from unbroken.rehearse.guard import Guard, WouldOverwrite
Guard({str(real)!r}, {str(mine)!r}, print).install()
how = shutil.move if {how!r} == "move" else getattr(os, {how!r})
os.chdir({str(mine)!r})
for place in ({str(real / "last.pt")!r}, {str(real / "r-10" / "new.pt")!r}):
    open("new", "w").write("new")
    try:
        how(os.path.abspath("new"), place)
        sys.exit("it was let")
    except WouldOverwrite:
        pass
if {how!r} == "replace":
    os.replace("new", "last.pt")  # the link is the rehearsal's own
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)
    assert (real / "last.pt").read_text() == "real" and not list((real / "r-10").iterdir())
    assert (mine / "last.pt").read_text() == ("new" if how == "replace" else "real")


def test_a_rehearsal_in_a_rank_of_a_run_has_nothing_of_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KEEPER", "ATTEMPT", "PAGE", "OUTPUT", "NODE", "RUN_DIR", "RUN_ID"):
        monkeypatch.setenv(f"UNBROKEN_{name}", "of the run outside")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    (tmp_path / "t.py").write_text("import os; open(os.environ['OUT'], 'w').write(repr(dict(os.environ)))")
    (tmp_path / "probe.py").write_text("import runpy, sys; runpy.run_path(sys.argv[2])")
    monkeypatch.setattr(launch, "PROBE", tmp_path / "probe.py")
    trial = Trial(
        tmp_path / "trial", ("t.py",), tmp_path, RehearsalPlan("", 4), env={"OUT": str(tmp_path / "found")}
    )
    ended = Plain().run(trial)
    assert ended.ok, ended.output
    env = ast.literal_eval((tmp_path / "found").read_text())
    assert [k for k, v in env.items() if v == "of the run outside"] == ["UNBROKEN_RUN_ID"]
    assert "TORCHELASTIC_USE_AGENT_STORE" not in env
    assert env["UNBROKEN_RUN_DIR"] == str(tmp_path / "trial" / "run")


def test_a_checkpoint_beside_real_ones_is_refused_wherever_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    guard = Guard(str(tmp_path / "source"), str(tmp_path / "mine"), print)
    for free in ("mine", "tmp", "cache"):
        guard.check_save(tmp_path / free / "last.pt")
    guard.check(
        tmp_path / "data" / "log.txt"
    )  # what is no checkpoint is looked at in the present folder only
    for real in ("data", "source", "mine-2"):
        with pytest.raises(WouldOverwrite, match=r"last.pt.*\{dir\}"):
            guard.check_save(tmp_path / real / "last.pt")
    guard.check_save(os.fsencode(tmp_path / "tmp" / "last.pt")), guard.check_save(3)
    with pytest.raises(WouldOverwrite):
        guard.check_save(os.fsencode(tmp_path / "data" / "last.pt"))
