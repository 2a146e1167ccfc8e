"""Every path of an evaluation, in one class.

OUT/
  evaluation.json          what was asked; another question in the same folder is refused
  lock                     held by the live coordinator
  cluster.json             where workers find it (address, token; readable by its owner alone)
  journal.jsonl            what happened
  logs/w0.log              what workers print
  scores/KEY/TASK.json     one Score each
  report.json, report.html, table.txt, lm_eval.json
SHARED/                    OUT itself, or the folder that the evaluations of a run's checkpoints share
  tasks/TASK/              prepared.json, requests.jsonl, ... : independent of the weights
  answers/KEY/TASK/        what the model said, by model key
  landed/KEY/TASK.jsonl    a task's exact set of answers, for scoring
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ... import atomic
from ...errors import ContractError, EvaluationError, EvaluationInUse, UnbrokenError, UsageError
from ..contracts import Json, Report
from .journal import events

LOOK_S = 0.5
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""No defect of ours, whatever could not be written."""


class EvalDir:
    """The folder of one evaluation."""

    def __init__(self, root: Path, shared: Path | None = None) -> None:
        self.root = root
        self.shared = shared or root

    @property
    def asked(self) -> Path:
        """What was asked."""
        return self.root / "evaluation.json"

    @property
    def journal(self) -> Path:
        """The events."""
        return self.root / "journal.jsonl"

    @property
    def cluster(self) -> Path:
        """Where workers connect to."""
        return self.root / "cluster.json"

    @property
    def report(self) -> Path:
        """The report as JSON."""
        return self.root / "report.json"

    @property
    def page(self) -> Path:
        """The report as a page."""
        return self.root / "report.html"

    @property
    def table(self) -> Path:
        """The result table as text."""
        return self.root / "table.txt"

    @property
    def lm_eval(self) -> Path:
        """The scores as lm_eval writes its results_*.json."""
        return self.root / "lm_eval.json"

    @property
    def model_files(self) -> Path:
        """The model's small files (tokenizer, configuration) where its source is remote."""
        return self.shared / "model"

    def log(self, worker: str) -> Path:
        """What a worker prints."""
        return self.root / "logs" / f"{worker}.log"

    def task(self, name: str) -> Path:
        """Where a task's prompts lie."""
        return self.shared / "tasks" / name

    def prepared(self, name: str) -> Path:
        """The PreparedTask as JSON."""
        return self.task(name) / "prepared.json"

    def answers(self, key: str) -> Path:
        """What the model with this key said."""
        return self.shared / "answers" / key

    @property
    def landed(self) -> Path:
        """The exact sets of all models' answers, a folder for each model's key."""
        return self.shared / "landed"

    def exact_answers(self, key: str, task: str) -> Path:
        """The exact set of a task's answers."""
        return self.landed / key / f"{task}.jsonl"

    def score(self, key: str, task: str) -> Path:
        """A task's score."""
        return self.root / "scores" / key / f"{task}.json"

    def claim(self, asked: Json) -> None:
        """Creates the folder for this question, or goes on with it; one that no model ever answered may be put again.

        Raises UsageError if the folder holds another one.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        self.compare(asked, whole=True)
        if not self.asked.exists() or not self._answered():
            atomic.write_json(self.asked, json.loads(json.dumps(asked, default=str)))

    def compare(self, asked: Json, *, whole: bool = False) -> None:
        """Raises UsageError if the folder holds another question; unless it is `whole`, what is not known yet may be missing."""
        if not self.asked.exists() or not self._answered():
            return
        there = read_json(self.asked)
        text = json.loads(json.dumps(asked, default=str))
        if isinstance(m := there.get("model"), dict) and m.get("exact") != text.get("model", {}).get("exact"):
            began, now = ("--fast", "--exact") if "exact" in m else ("--exact", "--fast")
            raise UsageError(
                f"the folder holds an evaluation with {began}: its answers are never mixed with those of {now}",
                where=str(self.root), hint=f"Say {began} to go on with it, or give another --out",
            )  # fmt: skip
        differs = [k for k in sorted({*there, *text} if whole else text) if there.get(k) != text.get(k)]
        if differs:
            raise UsageError(
                f"the folder holds an evaluation with another {differs[0]}", where=str(self.root),
                hint="Give another --out",
            )  # fmt: skip

    def _answered(self) -> bool:
        """Whether a model was ever ready to answer here, or answers of other evaluations were scored."""
        return (self.root / "scores").exists() or any(e["event"] == "ready" for e in events(self.journal))

    def began_exact(self) -> bool | None:
        """Whether the evaluation in the folder was begun in the harness's own batches; None where there is none."""
        if not self.asked.exists() or not self._answered():
            return None
        return bool(read_json(self.asked).get("model", {}).get("exact", True))

    def began_with(self) -> str:
        """The backend of the evaluation in the folder; empty where there is none."""
        if not self.asked.exists() or not self._answered():
            return ""
        return str(read_json(self.asked).get("model", {}).get("backend", ""))

    def last_report(self) -> Report | None:
        """The report that is in the folder; None where there is none that can be read."""
        from ...journal.codec import decode

        try:
            return decode(Report, read_json(self.report), where=str(self.report))
        except (FileNotFoundError, UnbrokenError):
            return None

    def refuse_file(self) -> None:
        """Raises UsageError where a file is in the folder's place."""
        if self.root.exists() and not self.root.is_dir():
            raise UsageError("--out is a file, not a folder", where=str(self.root), hint="Give a folder")

    def open(self) -> None:
        """Creates the folder. Raises UsageError if it is a file, EvaluationError if it cannot be written."""
        self.refuse_file()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if not os.access(self.root, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as e:
            raise EvaluationError(f"the evaluation's folder cannot be written: {e.strerror or e}", where=str(self.root),
                                  hint="Give another --out, or fix its rights") from e  # fmt: skip

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the folder. Raises EvaluationInUse if a live coordinator does."""
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.root / "lock", "a+") as f:
            try:
                _take(f.fileno())
            except OSError as e:
                f.seek(0)
                raise EvaluationInUse("an evaluation is running in this folder", where=f"{self.root}, {f.read().strip()}",
                                      hint="Wait for it, or stop it; `unbroken eval status` shows it") from e  # fmt: skip
            f.truncate(0)
            f.write(f"process {os.getpid()} on {os.uname().nodename}")
            f.flush()
            yield


def _take(fd: int) -> None:
    """The exclusive lock. Raises BlockingIOError only after `LOOK_S`: `eval status` holds it, shared, while it looks."""
    until = time.monotonic() + LOOK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        time.sleep(0.01)


def unwritable(e: OSError, root: Path) -> EvaluationError:
    """What a full or forbidden disk is told as."""
    return EvaluationError(f"the evaluation's files cannot be written: {e.strerror or e}", where=str(root),
                           hint="Make room, then run the same command: what was answered so far is kept")  # fmt: skip


def read_json(path: Path) -> Json:
    """JSON of a file of ours. Raises ContractError with the path if it is not."""
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
        return found
    except ValueError as e:
        raise ContractError("a file of the evaluation cannot be read", where=str(path),
                            hint="Remove it and run the same command") from e  # fmt: skip
