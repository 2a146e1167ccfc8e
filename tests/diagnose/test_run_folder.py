"""A run directory given to `unbroken diagnose`: its last attempt's logs, and its journal where nothing went wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.run_folder import RunFolder
from unbroken.diagnose import Outcome, diagnose
from unbroken.progress import RunDir

from .logs import steps, traceback

pytestmark = pytest.mark.made_up


def ran(tmp_path: Path, log: str, end: str) -> Path:
    """A run whose second attempt printed `log` and that ended so."""
    made = RunFolder(RunDir(tmp_path / "run"), nodes=1, nproc=1, spares=0)
    made.attempt()
    made.steps(10)
    made.incident("failed", rank=0, back_to=8)
    made.steps(10)
    for number, text in ((1, traceback("KeyError: 'old'", 0)), (2, log)):
        path = made.run_dir.rank_log(number, made.slots[0], 0)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    made.end(end)
    return made.run_dir.path


@pytest.mark.parametrize(
    ("end", "outcome"), [("completed", Outcome.COMPLETED), ("interrupted", Outcome.CANCELLED)]
)
def test_what_the_journal_knows_is_the_answer(tmp_path: Path, end: str, outcome: Outcome) -> None:
    verdict = diagnose([ran(tmp_path, steps(30), end)])
    assert (verdict.outcome, verdict.reason) == (outcome, None)
    assert verdict.root is not None and "journal" in verdict.root.text


def test_a_run_that_was_stopped_is_judged_by_its_last_attempt(tmp_path: Path) -> None:
    verdict = diagnose(
        [ran(tmp_path, steps(30) + traceback("TypeError: 'int' is not iterable", 0), "stopped")]
    )
    assert verdict.root is not None and "TypeError" in verdict.root.text


def test_a_run_without_logs_or_journal_is_read_as_any_folder(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    (tmp_path / "log.txt").write_text(steps(5) + traceback("TypeError: 'int' is not iterable", 0))
    verdict = diagnose([tmp_path])
    assert verdict.root is not None and "TypeError" in verdict.root.text
