"""`unbroken status`: every state of a run, damaged ones, and one that is being written at this moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.support.run_folder import RunFolder
from unbroken.cli.main import dispatch
from unbroken.cli.runs.status import screen
from unbroken.errors import InputError
from unbroken.progress import RunDir, write_spec
from unbroken.recover.ask import ask_waits
from unbroken.status import gather, read_status, run_status

pytestmark = pytest.mark.made_up


@pytest.fixture
def made(tmp_path: Path) -> RunFolder:
    return RunFolder(RunDir(tmp_path / "run"))


def supervised_by(folder: RunFolder, **change: object) -> None:
    """Makes the newest epoch that of another process."""
    path = folder.run_dir.term(folder.term)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def test_running(made: RunFolder) -> None:
    made.attempt()
    made.steps(120)
    s = read_status(made.run_dir, now=made.now + 0.25)
    assert (s.status, s.attempt, s.step) == ("running", 1, 119)
    assert s.supervisor is not None and s.supervisor.alive and s.supervisor.pid == os.getpid()
    assert s.step_s == pytest.approx(0.5, rel=0.1)
    assert [n.doing for n in s.nodes] == ["training, ranks 0–1", "training, ranks 2–3", "spare"]
    text = screen(s)
    assert "0.25 s ago" in text and "alive" in text and "incidents   none" in text
    assert len(text.splitlines()) <= 24


def test_what_a_run_was_started_from_has_a_line_of_its_own(made: RunFolder) -> None:
    made.attempt()
    made.record("origin", origin="/data/old run", step=1200, checkpoint="step-00001200.a0000")
    s = read_status(made.run_dir)
    assert s.as_json()["started_from"] == "/data/old run, step 1200"
    assert "from        /data/old run, step 1200" in screen(s)


def test_a_stopped_supervisor_is_not_called_alive(made: RunFolder) -> None:
    made.attempt()
    made.steps(5)
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        started = psutil.Process(sleeper.pid).create_time()
        supervised_by(made, pid=sleeper.pid, pid_started=started)
        assert ", alive (" in screen(read_status(made.run_dir))
        os.kill(sleeper.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
        s = read_status(made.run_dir)
    finally:
        sleeper.kill()
        sleeper.wait()
    assert s.supervisor is not None and s.supervisor.stopped and s.as_json()["supervisor"]["stopped"]
    text = screen(s)
    assert "stopped by a signal: nobody supervises" in text and ", alive (" not in text
    assert f"kill -CONT {sleeper.pid}" in text


def test_a_checkpoint_that_was_passed_over_is_in_status_and_report(made: RunFolder) -> None:
    made.attempt()
    made.steps(5)
    made.record(
        "restored",
        attempt=1,
        step=40,
        of=1,
        skipped=[["step-00000060.a0001", "it differs from its checksum"]],
    )
    text = " ".join(screen(read_status(made.run_dir)).split())
    assert (
        "step-00000060.a0001 was passed over when attempt 1 started, which restored step 40: it differs"
        in text
    )
    assert any("step-00000060.a0001 was passed over" in p for p in gather(made.run_dir).problems)


def test_incidents_and_a_lost_node(made: RunFolder) -> None:
    made.attempt()
    for _ in range(4):
        made.steps(10)
        made.incident("failed", back_to=made.step - 2)
    made.steps(10)
    made.incident("node_lost", rank=3)
    made.steps(10)
    made.steps(5)
    made.incident("hung", rank=0)
    s = read_status(made.run_dir)
    assert [n.doing for n in s.nodes] == ["starting, ranks 0–1", "lost: NodeFailure", "starting, ranks 2–3"]
    text = screen(s)
    assert "incidents   6, the last 5:" in text
    assert "5: NodeFailure (node-001)" in text and "6: Hang (rank 0, node-000)" in text
    assert "not resumed" in text.split("6: Hang")[1].splitlines()[0]


@pytest.mark.parametrize(
    ("end", "status", "hint"),
    [
        ("completed", "completed", ""),
        (
            "interrupted",
            "interrupted",
            "goes on from what the script finds of its own, or from the beginning",
        ),
    ],
)
def test_ended(made: RunFolder, end: str, status: str, hint: str) -> None:
    made.attempt()
    made.steps(10)
    made.end(end)
    s = read_status(made.run_dir)
    assert s.status == status
    assert hint in s.hint and bool(hint) == bool(s.hint)
    assert s.wall_s == pytest.approx(made.now - made.began)


def test_a_script_that_asked_our_checkpointer_goes_on_without_a_checkpoint(made: RunFolder) -> None:
    made.attempt()
    made.record("restored", attempt=1, step=None, of=None)
    made.steps(10)
    made.end("interrupted")
    assert "goes on without a checkpoint: none was saved" in read_status(made.run_dir).hint


def test_a_checkpoint_of_the_script_itself_is_named(made: RunFolder) -> None:
    write_spec(made.run_dir, replace(made.spec, resume_from="out/*.pt"))
    made.attempt()
    made.steps(10)
    s = read_status(made.run_dir)
    assert "nothing by unbroken; what the script saves itself is looked for in out/*.pt" in screen(s)
    made.record("attempt", attempt=2, slots=made.slots, candidates=[])
    made.record("own_checkpoint", attempt=2, path="/w/out/7.pt")
    assert "by the script itself, as attempt 2 started: /w/out/7.pt" in screen(read_status(made.run_dir))
    assert [a.origin for a in gather(made.run_dir).attempts] == ["the beginning", "the script's own 7.pt"]
    made.end("interrupted")
    made.record("own_checkpoint", attempt=3, path="/w/out/9.pt")
    s = read_status(made.run_dir)
    assert "saved       nothing by unbroken; by the script itself: /w/out/9.pt" in screen(s)
    assert "it goes on from the script's own newest checkpoint, /w/out/9.pt." in s.hint


def test_stopped_names_the_reason_and_the_command(made: RunFolder) -> None:
    made.attempt()
    made.steps(10)
    made.incident("bug", rank=1)
    text = screen(read_status(made.run_dir))
    assert "stopped: KeyError: a restart cannot help" in text
    assert f"unbroken run --run-dir {made.run_dir.path}" in " ".join(text.split())
    assert "with --amend other arguments too" in " ".join(text.split())


def test_stopped_before_its_first_step_names_amend(made: RunFolder) -> None:
    made.record("status", status="stopped", why="the script does not exist")
    assert "same command again; with --amend other arguments too" in read_status(made.run_dir).hint


def test_supervisor_killed(made: RunFolder) -> None:
    made.attempt()
    made.steps(10)
    victim = subprocess.Popen([sys.executable, "-c", "pass"])
    victim.wait()
    supervised_by(made, pid=victim.pid)
    s = read_status(made.run_dir)
    assert s.status == "abandoned"
    assert s.supervisor is not None and s.supervisor.alive is False
    assert "Give the same command again: it takes over or restarts. In /home/user: unbroken run" in s.hint


def test_ranks_without_a_supervisor(made: RunFolder, eventually: Callable[..., None]) -> None:
    made.attempt()
    made.steps(2)
    supervised_by(made, pid_started=0.0)
    env = {
        **os.environ,
        "UNBROKEN_RUN_ID": made.spec.run_id,
        "UNBROKEN_NODE": "node-000",
        "UNBROKEN_ROLE": "rank",
    }
    rank = subprocess.Popen(["sleep", "60"], env=env)
    try:
        eventually(lambda: read_status(made.run_dir).nodes[0].processes == {"rank": 1})
        s = read_status(made.run_dir)
        assert s.nodes[0].doing == "still runs ranks 0–1, without a supervisor"
        assert s.nodes[1].doing == "had ranks 2–3"
        assert s.hint.startswith("1 of its processes still run: ranks end when their lease expires")
    finally:
        rank.kill()
        rank.wait()


def keepers_hold(monkeypatch: pytest.MonkeyPatch, step: int, attempt: int) -> None:
    monkeypatch.setattr(run_status, "_processes", lambda spec: {"node-000": Counter(keeper=1, rank=1)})
    monkeypatch.setattr(run_status, "_memory_step", lambda *_: (step, attempt))


def test_the_last_step_is_never_below_what_is_saved(made: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are written down by the supervisor: of one that is gone, and on a full disk, newer ones are known by snapshots."""
    made.attempt()
    made.steps(50)
    keepers_hold(monkeypatch, 115, 1)
    s = read_status(made.run_dir, now=made.now + 6.66)
    assert (s.step, s.told_step, s.memory_step) == (115, 49, 115)
    assert "115 at least, as it is saved; the last that is written down: 49, loss" in screen(s)
    assert "6.66 s ago (old: nothing newer is written down)" in screen(s)
    soon = screen(read_status(made.run_dir, now=made.now + 0.1))
    assert "last step   115, loss" in soon and " at 49, " in soon and "old" not in soon
    supervised_by(made, pid_started=0.0)
    text = screen(read_status(made.run_dir, now=made.now + 6.66))
    assert "6.66 s ago (old: its supervisor is gone)" in text
    keepers_hold(monkeypatch, 115, 0)
    assert read_status(made.run_dir).step == 49, "what it was taken back from is no step of it"


def test_a_full_disk_is_told(made: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    made.attempt()
    made.steps(50)
    assert read_status(made.run_dir).trouble == ""
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=0, f_bavail=3, f_frsize=4096))
    s = read_status(made.run_dir, now=made.now + 60)
    text = screen(s)
    assert f"disk        {made.run_dir.path} is full: what is to be written there waits" in text
    assert "60.0 s ago (old: newer ones cannot be written)" in text and "Make it take files again" in s.hint
    assert s.as_json()["trouble"] == f"{made.run_dir.path} is full"
    made.end("completed")
    assert read_status(made.run_dir).trouble == "", "nothing is to be written any more"


def test_what_a_run_waits_for_is_asked_of_its_supervisor_where_no_file_says_it(made: RunFolder) -> None:
    made.attempt()
    asked: list[RunDir] = []

    def ask(run_dir: RunDir) -> str:
        asked.append(run_dir)
        return "attempt 2 is not started: no room for its logs"

    s = read_status(made.run_dir, ask=ask)
    assert "running: attempt 2 is not started: no room for its logs" in screen(s) and s.waits in s.why
    made.record("waiting", why="no room", todo="Free space there")
    s = read_status(made.run_dir, ask=ask)
    assert (s.why, s.hint) == ("waits for a person: no room", "Free space there")
    supervised_by(made, pid_started=0.0)
    assert read_status(made.run_dir, ask=ask).status == "abandoned" and len(asked) == 1
    assert ask_waits(made.run_dir) == "", "nobody answers"


def test_supervisor_on_another_host(made: RunFolder) -> None:
    made.attempt()
    made.steps(10)
    supervised_by(made, host="far-away")
    s = read_status(made.run_dir)
    assert s.status == "unknown"
    assert "far-away" in s.hint
    assert all(n.processes is None for n in s.nodes)
    assert "cannot be seen from here" in screen(s)


def test_processes_of_the_run_are_counted(made: RunFolder, eventually: Callable[..., None]) -> None:
    made.attempt()
    env = {**os.environ, "UNBROKEN_RUN_ID": made.spec.run_id, "UNBROKEN_NODE": "node-001"}
    rank = subprocess.Popen(
        [sys.executable, "-c", "input()"], env={**env, "UNBROKEN_ROLE": "rank"}, stdin=subprocess.PIPE
    )
    try:
        eventually(lambda: read_status(made.run_dir).nodes[1].processes == {"rank": 1})
        assert "[1 rank]" in screen(read_status(made.run_dir))
        assert read_status(made.run_dir).nodes[0].processes == {}
        assert "no process of the run is left on it" in screen(read_status(made.run_dir))
    finally:
        rank.kill()
        rank.wait()


def test_only_the_folder_is_there(made: RunFolder, tmp_path: Path) -> None:
    """run.toml is written first; everything else may be missing yet."""
    bare = RunDir(tmp_path / "bare")
    bare.path.mkdir()
    bare.spec.write_text(made.run_dir.spec.read_text())
    s = read_status(bare)
    assert (s.status, s.step, s.supervisor) == ("new", -1, None)
    assert "Start it" in screen(s) and "none yet" in screen(s)


def test_no_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError):
        read_status(RunDir(tmp_path))
    assert dispatch(["status", str(tmp_path), "--json"]) == 3
    out = capsys.readouterr()
    assert json.loads(out.out)["error"]["kind"] == "InputError"
    assert dispatch(["status", str(tmp_path / "absent")]) == 3
    file = tmp_path / "file"
    file.touch()
    capsys.readouterr()
    assert dispatch(["status", str(file)]) == 3
    assert "no run directory" in capsys.readouterr().err


def test_unreadable_parts(made: RunFolder) -> None:
    made.attempt()
    made.steps(10)
    made.run_dir.term(1).write_text("{")
    made.run_dir.steps(1).write_bytes(
        b"\xff\xfe\n" * 10 + b'{"step": 7, "loss": "0x1p+1", "tokens": 1, "t": 5}\n{"st'
    )
    s = read_status(made.run_dir)
    assert s.step == 7 and s.loss == 2.0
    assert any("epoch 1 cannot be read" in p for p in s.problems)
    made.run_dir.spec.write_text("command = 3")
    assert "damaged" in screen(read_status(made.run_dir))


def test_many_nodes_stay_on_one_screen(tmp_path: Path) -> None:
    made = RunFolder(RunDir(tmp_path / "run"), nodes=200, nproc=1, spares=10)
    made.attempt()
    made.steps(2)
    text = screen(read_status(made.run_dir))
    assert "200 training: node-000, node-001, node-002 and 197 more" in text
    assert len(text.splitlines()) < 25


def test_json(made: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    made.attempt()
    made.steps(3, losses={2: float("nan")})
    assert dispatch(["status", str(made.run_dir.path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["status"] == "running" and told["step"] == 2 and told["loss"] is None
    assert told["supervisor"]["alive"] is True


def test_while_it_is_being_written(made: RunFolder) -> None:
    """Another process appends to journal and steps as fast as it can; every look is whole and moves on only."""
    made.attempt()
    code = textwrap.dedent("""
        import sys, json
        from unbroken.progress import JournalWriter, RunDir
        from unbroken.progress.records.steps import Step, step_record
        run_dir = RunDir(sys.argv[1])
        journal = JournalWriter(run_dir, 1)
        print("go", flush=True)
        with open(run_dir.steps(1), "a", buffering=1) as f:
            for n in range(10**9):
                f.write(json.dumps(step_record(Step(n, 1.0, 1, float(n)))) + "\\n")
                if n % 50 == 0:
                    journal.append("durable", attempt=1, step=n)
    """)
    writer = subprocess.Popen([sys.executable, "-c", code, str(made.run_dir.path)], stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None and writer.stdout.readline() == b"go\n"
        seen = -1
        deadline = time.monotonic() + 20
        looks = 0
        while time.monotonic() < deadline and (looks < 5 or seen < 100):
            s = read_status(made.run_dir)
            assert s.problems == ()
            assert s.step >= seen
            seen = s.step
            looks += 1
        assert seen >= 100
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        if writer.stdout is not None:
            writer.stdout.close()
