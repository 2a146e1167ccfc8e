"""A run directory as input: the logs of its last attempt, and what its journal knows of the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import UnbrokenError
from ...progress import RunDir, read_journal
from ...progress.records.verdict import Action, Outcome, Root, Verdict
from .sources import Source


@dataclass(frozen=True)
class RunEnd:
    """How a run ended by its own journal, which no log knows better: `outcome` is completed or cancelled."""

    outcome: Outcome
    step: int
    file: str

    def verdict(self) -> Verdict:
        """The verdict of a run that nothing is wrong with."""
        done = self.outcome is Outcome.COMPLETED
        text = f"the run's journal: {'completed' if done else 'stopped on request'}"
        return Verdict(
            outcome=self.outcome,
            root=Root(text=text + (f" at step {self.step}" if self.step >= 0 else ""), file=self.file),
            recoverable=True,
            action=Action.NONE,
            mitigation="Nothing to do." if done else "The same `unbroken run` command goes on.",
            confidence=1.0,
            decided_by="run-journal",
        )


def logs_of_run(paths: Sequence[Path | str]) -> tuple[list[Path | str], RunEnd | None]:
    """What to read for `paths`: of a run directory, alone among them, the ranks' logs of its last attempt.

    With them how that run ended where its journal says so and nothing went wrong. Other paths come back as they are.
    """
    if len(paths) != 1 or str(paths[0]) == "-" or not (Path(paths[0]) / "run.toml").is_file():
        return list(paths), None
    run = RunDir(Path(paths[0]))
    try:
        records = read_journal(run).records
    except (UnbrokenError, OSError):
        return list(paths), None
    last = run.attempt_numbers()[-1:]
    logs: list[Path | str] = [p for n in last for p in sorted(run.attempt(n).glob("*/rank-*.log"))]
    outcomes = {"completed": Outcome.COMPLETED, "interrupted": Outcome.CANCELLED}
    status: dict[str, Any] = next(
        (r for r in reversed(records) if r.get("kind") in ("status", "attempt")), {}
    )
    outcome = outcomes.get(str(status.get("status")))
    if outcome is None or not logs:
        return logs or list(paths), None
    return logs, RunEnd(outcome, int(status.get("step", -1)), str(run.journals))


def name_from(verdict: Verdict, logs: Sequence[Source], folder: Path) -> Verdict:
    """The verdict with each quoted file that lies in `folder` named from there on, so that it can be opened."""
    lies = {s.name: s.path for s in logs if s.path is not None}

    def name(root: Root) -> Root:
        path = lies.get(root.file) if root.file else None
        inside = path is not None and path.is_relative_to(folder)
        return (
            replace(root, file=path.relative_to(folder).as_posix()) if path is not None and inside else root
        )

    return replace(
        verdict,
        root=name(verdict.root) if verdict.root else None,
        evidence=tuple(name(e) for e in verdict.evidence),
    )
