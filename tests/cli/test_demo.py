"""`unbroken demo`: a mistake in what was asked is one paragraph, and costs no earlier story."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from unbroken.cli.main import dispatch
from unbroken.cli.runs.demo import _MARK
from unbroken.progress import RunDir
from unbroken.testing.faults import RunFaults


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """What an earlier demo left."""
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / _MARK).touch()
    (folder / "story.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("option", "says"),
    [(["--limit", "soon"], "not a duration"), (["--train", "--device 'cuda"], "--train cannot be split")],
)
def test_a_mistake_leaves_the_earlier_story(
    earlier: Path, option: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dispatch(["demo", "--dir", str(earlier), *option]) == 2
    err = capsys.readouterr().err
    assert says in err and "Traceback" not in err
    assert (earlier / "story.json").exists()


def test_a_folder_of_something_else_is_not_emptied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").touch()
    assert dispatch(["demo", "--dir", str(tmp_path)]) == 2
    assert "not made by a demo" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()


def test_a_file_where_the_folder_should_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "demo"):
        assert dispatch(["demo", "--dir", str(folder)]) == 34
        err = capsys.readouterr().err
        assert "cannot be written" in err and "Traceback" not in err


@pytest.mark.integration
@pytest.mark.parametrize("sig", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_demo_that_is_stopped_leaves_no_run_going(
    tmp_path: Path, eventually: Callable[..., None], sig: signal.Signals
) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-m", "unbroken", "demo", "--dir", "demo", "--nproc", "1"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    run_dir = RunDir(tmp_path / "demo" / "reference")
    try:
        eventually(lambda: run_dir.spec.exists() and bool(RunFaults(run_dir).processes("agent")), within=30)
    finally:
        demo.send_signal(sig)
        _, err = demo.communicate(timeout=90)
    assert demo.returncode == 11, err
    assert "stopped on request" in err and "Traceback" not in err
    assert RunFaults(run_dir).left_over() == []


def test_the_bug_of_the_demo_is_where_the_trainer_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its script is text, in which no tool that renames or moves sees a name."""
    from unbroken.testing.scenario import BUG
    from unbroken.train import command, trainer

    monkeypatch.setattr(trainer, "learning_rate", trainer.learning_rate)
    monkeypatch.setattr(command, "main", lambda: 0)  # the real one would train here, and end this process
    with pytest.raises(SystemExit, match=r"^0$"):
        exec(compile(BUG, "bug.py", "exec"), {})
    with pytest.raises(KeyError, match="warm_up_steps"):
        trainer.learning_rate(None, 12, 100)  # type: ignore[arg-type]


def test_the_table_names_a_verdict_as_the_page_does() -> None:
    """A kill that no log explains is "Killed" on the page and was "Unknown" here."""
    from unbroken.cli.runs.demo import _table
    from unbroken.progress.records.verdict import KILLED, UNKNOWN, Outcome, Verdict
    from unbroken.testing.scenario import InjectedFault, Scenario

    killed = Verdict(Outcome.FAILED, reason=UNKNOWN, confidence=0.9, decided_by=KILLED)
    kill = InjectedFault(
        "kill", 5, 0.0, verdict=killed.as_json(), action="restart", what="kill -9 of one rank"
    )
    out = io.StringIO()
    _table(Scenario(1, 10, incidents=[kill, InjectedFault("hang", 7, 0.0, what="SIGSTOP")]), out)
    assert "Killed (90%)" in out.getvalue() and "Unknown" not in out.getvalue()
