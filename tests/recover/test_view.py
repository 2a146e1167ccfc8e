"""What a run shows: whole lines, a bar only on a terminal, and a terminal that goes away harms nothing."""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path

import pytest

from unbroken.detect import Hang, HangDetector, Level
from unbroken.diagnose import Facts, RankExit, diagnose
from unbroken.diagnose.observed.interruptions import judge_interruption
from unbroken.progress import Phase, RunDir, Timeouts
from unbroken.progress.records.incident import Incident
from unbroken.progress.records.steps import Step
from unbroken.recover.supervise.attempt.attempt import Attempt
from unbroken.recover.supervise.attempt.farewell import Farewell, Last
from unbroken.recover.supervise.attempt.ledger import SnapshotTracker
from unbroken.recover.supervise.screen.terminal_log import ToView, logged_to
from unbroken.recover.supervise.screen.view import Lines

LOST = judge_interruption(Facts(agents_lost=("node-000",)))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def shown(self) -> list[str]:
        """The lines as a terminal would show them: what follows a carriage return and an erase replaces the line."""
        return [line.split("\r\x1b[K")[-1] for line in self.getvalue().split("\n")]


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    made = Attempt.make(1, ("node-000",), 2, HangDetector(Timeouts()), -1, RunDir(tmp_path / "run"))
    made.last, made.total, made.step_time = Step(49, 2.5, 1000, 0.0), 100, 0.5
    return made


def plain(text: str) -> list[str]:
    return [re.sub(r"^\d\d:\d\d:\d\d  ", "", line) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("best", "says"),
    [
        (None, "from the beginning"),
        ({"step": 40, "memory": {}}, "from step 40 (disk)"),
        ({"step": 40, "memory": {"0": "a"}}, "from step 40 (memory and disk)"),
        ({"step": 40, "memory": {"0": "a", "1": "a"}}, "from step 40 (memory)"),
    ],
)
def test_attempt(best: dict[str, object] | None, says: str) -> None:
    out = io.StringIO()
    Lines(out).attempt(3, 2, ["node-000"], best)
    assert plain(out.getvalue()) == [f"attempt 3: 2 ranks on node-000, {says}"]


def test_an_attempt_that_goes_on_from_the_scripts_own_checkpoint_names_it() -> None:
    out = io.StringIO()
    lines = Lines(out)
    lines.attempt(2, 1, ["node-000"], None, own="from the script's own newest checkpoint, /o/ckpt_40.pt")
    lines.finished("interrupted", 50, [], "from the script's own newest checkpoint, /o/ckpt_40.pt")
    assert plain(out.getvalue()) == [
        "attempt 2: 1 rank on node-000, from the script's own newest checkpoint, /o/ckpt_40.pt",
        "the run is interrupted at step 50",
        "the same command goes on from the script's own newest checkpoint, /o/ckpt_40.pt",
    ]


def test_steps_are_told_now_and_then(attempt: Attempt) -> None:
    out = io.StringIO()
    lines = Lines(out, every_s=3600)
    tracker = SnapshotTracker(1, 1)
    tracker.on_host(45, [0])
    tracker.on_durable(40)
    lines.progress(attempt, tracker)
    for step in range(3):
        lines.steps(attempt, [Step(step, float("nan") if step else 2.5, 1000, 0.0)])
    assert plain(out.getvalue()) == [
        "step 0/100  loss 2.5000  500ms/step  2,000 tokens/s  saved: 45 in memory, 40 on disk"
    ]


def test_no_bar_without_a_terminal(attempt: Attempt) -> None:
    out = io.StringIO()
    Lines(out).progress(attempt, SnapshotTracker(1, 1))
    assert out.getvalue() == ""


def test_bar_stays_below_the_lines_and_goes_at_the_end(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = Terminal()
    lines = Lines(out)
    lines.progress(attempt, SnapshotTracker(1, 1))
    assert out.shown()[-1].startswith(f"[{'#' * 15}{'.' * 15}] step 49/100")
    assert len(out.shown()[-1]) < 60, "a line that wraps could not be cleared"
    lines.say("hello")
    assert out.shown()[-2].endswith("hello") and out.shown()[-1].startswith("[###")
    lines.finished("completed", attempt.step, ["step-00000040.a0001"])
    assert out.shown()[-1] == ""
    assert out.shown()[-2].endswith("newest checkpoint step-00000040.a0001")
    assert "[###" not in out.shown()[-2]


def test_incidents(attempt: Attempt) -> None:
    out = io.StringIO()
    lines = Lines(out)
    incident = Incident(2, 1, "agent_lost", 40, 1.0, 2.0, LOST, action="restart", why="free")
    lines.incident(incident, 0.5)
    incident.resumed, incident.steps_lost = 7.5, 3
    lines.resumed(incident)
    lines.suspect(Hang(Level.SUSPECT, 6.0, 5.0, 60.0, Phase.TRAINING))
    text = out.getvalue()
    assert "incident 2: AgentLost, confidence 90%" in text and "after step 40 -> restart [free]" in text
    assert "the agent of node-000 ended" in text
    assert "incident 2 is over: past step 40 after 5.5s, 3 steps replayed" in text
    assert "no progress for 6s: suspected to hang" in text and "declared after 1m" in text


def test_a_last_snapshot_that_is_not_on_disk_is_said() -> None:
    out = io.StringIO()
    closed = {"node-000": {"step": 80}, "node-001": {"step": None, "why": "Read-only file system"}}
    farewell = Farewell({n: {"closed": c} for n, c in closed.items()}, ["node-002"])
    Lines(out).kept(farewell, Last(1, 80, {}), 600.0)
    assert "node-001: its keeper ended without saving step 80: Read-only" in out.getvalue()
    assert "node-000" not in out.getvalue()
    assert (
        "step 80 is in memory only: the keepers of node-002 hold it and go on trying for 10m"
        in out.getvalue()
    )


def test_an_incident_before_the_first_step_names_no_step(attempt: Attempt) -> None:
    out = io.StringIO()
    lines = Lines(out)
    incident = Incident(1, 1, "failed", -1, 1.0, 2.0, LOST, action="restart", why="free")
    lines.incident(incident, 0.5)
    incident.resumed, incident.steps_lost = 7.5, 0
    lines.resumed(incident)
    assert "before the first step -> restart [free]" in out.getvalue()
    assert "is over: past the first step after 5.5s" in out.getvalue()


@pytest.mark.parametrize(
    ("exits", "says"),
    [
        (
            [(1, None, 9)],
            "rank 1 was killed by signal 9 (SIGKILL); no out-of-memory kill in the kernel's log",
        ),
        (
            [(1, 137, None)],
            "rank 1 was killed by signal 9 (SIGKILL); by its exit code, which stands for",
        ),
        ([(1, None, 15)], "rank 1 was killed by signal 15 (SIGTERM); no part of unbroken sent it"),
        ([(0, None, 9), (1, None, 9)], "ranks were killed by signal 9 (SIGKILL); no out-of-memory kill"),
    ],
)
def test_a_kill_is_named_by_its_signal(
    exits: list[tuple[int, int | None, int | None]], says: str, tmp_path: Path
) -> None:
    log = tmp_path / "empty.log"
    log.touch()
    ends = tuple(
        RankExit(r, f"node-{r:03d}", code, sig, 5.0, oom=None if code is not None else False)
        for r, code, sig in exits
    )
    verdict = diagnose([log], facts=Facts(exits=ends, nodes=((0, "node-000"), (1, "node-001"))))
    out = io.StringIO()
    Lines(out).incident(Incident(1, 1, "failed", 7, 1.0, 2.0, verdict, action="restart", why="killed"), 0.5)
    assert f"incident 1: {says}" in out.getvalue()


def test_a_terminal_that_went_away(attempt: Attempt) -> None:
    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    lines = Lines(Gone())
    lines.say("x")
    lines.progress(attempt, SnapshotTracker(1, 1))
    lines.finished("completed", attempt.step, [])
    closed = io.StringIO()
    lines = Lines(closed)
    closed.close()
    lines.say("x")


def test_what_an_attempt_lost_is_not_called_saved_any_more(attempt: Attempt) -> None:
    """The step in memory went with its keeper; the attempt after it starts from the disk."""
    out = io.StringIO()
    lines = Lines(out, every_s=0)
    tracker = SnapshotTracker(1, 1)
    tracker.on_host(45, [0])
    tracker.on_durable(40)
    lines.progress(attempt, tracker)
    lines.attempt(2, 1, ["node-000"], {"step": 40, "memory": {}}, 40)
    attempt.number = 2
    lines.progress(attempt, SnapshotTracker(2, 1))
    lines.steps(attempt, [Step(41, 2.5, 1000, 0.0)])
    assert plain(out.getvalue())[-1].endswith("saved: 40 on disk")
    lines.attempt(3, 1, ["node-000"], None)
    lines.steps(attempt, [Step(1, 2.5, 1000, 0.0)])
    assert "saved" not in plain(out.getvalue())[-1]


def test_a_damaged_checkpoint_that_is_passed_over_is_said(attempt: Attempt) -> None:
    out = io.StringIO()
    lines = Lines(out, every_s=0)
    lines.attempt(2, 1, ["node-000"], {"step": 60, "memory": {"0": "node-000"}}, 60)
    why = "the file differs from its own checksum"
    lines.restored({"step": 40, "of": 1, "skipped": [["step-00000060.a0001", why]]})
    lines.steps(attempt, [Step(41, 2.5, 1000, 0.0)])
    said = plain(out.getvalue())
    assert said[1] == f"step-00000060.a0001 is passed over, it cannot be used: {why}"
    assert said[2] == "training goes on from step 40"
    assert "60 in memory" not in said[3]
    lines.restored({"step": 40, "of": 1, "skipped": []})
    assert len(plain(out.getvalue())) == 4


def test_every_line_has_its_time(attempt: Attempt, tmp_path: Path) -> None:
    out = io.StringIO()
    lines = Lines(out)
    verdict = LOST
    incident = Incident(2, 1, "agent_lost", 40, 1.0, 2.0, verdict, action="restart", why="one\ntwo")
    lines.say("first\nsecond")
    lines.incident(incident, 0.5)
    lines.stopped(incident, RunDir(tmp_path / "run"))
    assert all(re.match(r"\d\d:\d\d:\d\d  ", line) for line in out.getvalue().splitlines()), out.getvalue()


def test_warnings_are_lines_of_the_view_and_the_same_one_is_not_said_over_and_over() -> None:
    out = io.StringIO()
    clock = [0.0]
    handler = ToView(Lines(out), clock=lambda: clock[0])
    logger = logging.Logger("unbroken.supervisor")
    logger.addHandler(handler)
    for n in range(106):
        logger.warning("the keeper did not answer: %d", n)
        logger.info("nobody needs this")
    logger.warning("something else")
    clock[0] = 61.0
    logger.warning("the keeper did not answer: %d", 106)
    assert plain(out.getvalue()) == [
        "the keeper did not answer: 0", "something else", "the keeper did not answer: 106 (105 more like it before)",
    ]  # fmt: skip


def test_logging_goes_to_the_view_only_while_the_run_lasts(capfd: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    with logged_to(Lines(out)):
        logging.getLogger("unbroken.supervisor").warning("inside")
        logging.getLogger("asyncio").warning("socket.send() raised exception.")
    logging.getLogger("unbroken.supervisor").warning("outside")
    assert plain(out.getvalue()) == ["inside", "socket.send() raised exception."]
    assert "inside" not in capfd.readouterr().err
