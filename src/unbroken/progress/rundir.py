"""The run directory: one folder that holds everything about a run, and the one class that owns its paths."""

from __future__ import annotations

import re
from pathlib import Path

WAITING = "waiting.json"
"""In the evidence of an incident that was a hang: who waits for whom."""
_ATTEMPT = re.compile(r"\d{4,}")


class RunDir:
    """Every path of a run. Nothing else in the package joins names below a run directory.

    run.toml                             what was asked
    token                                the secret that supervisor and agents share (mode 0600)
    identity.pem                         off one machine: the run's certificate and its key (mode 0600)
    epochs/000001.json                   who supervised, from when, and what it counts of its predecessor
    journal/000001.jsonl                 append-only events of that term: the truth
    attempts/0001/node-000/rank-0.log    what a rank printed
    attempts/0001/node-000/agent.log     what the node's agent did
    attempts/0001/output/                what the script itself saves in this attempt (UNBROKEN_OUTPUT)
    attempts/0001/node-001/gone          made by a person: nothing of this attempt is left on that node
    attempts/0001/facts.json             what was seen of its end, where that was an incident: what a verdict comes from
    attempts/0001/steps.jsonl            step, loss, tokens, time as the supervisor received them
    checkpoints/                         step-00001200.a0003/ and so on
    incidents/0001.json                  one interruption: verdict, action, cost
    incidents/0001/                      stacks and other evidence; waiting.json: who waits for whom
    report.html
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    def create(self) -> None:
        """Makes the folder and its sub-folders where they are missing. Raises OSError."""
        for folder in (
            self.path,
            self.terms,
            self.journals,
            self.attempts,
            self.checkpoints,
            self.incidents,
        ):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def spec(self) -> Path:
        return self.path / "run.toml"

    @property
    def token(self) -> Path:
        return self.path / "token"

    @property
    def identity(self) -> Path:
        return self.path / "identity.pem"

    @property
    def terms(self) -> Path:
        return self.path / "epochs"

    def term(self, number: int) -> Path:
        return self.terms / f"{number:06d}.json"

    @property
    def journals(self) -> Path:
        return self.path / "journal"

    def journal(self, epoch: int) -> Path:
        return self.journals / f"{epoch:06d}.jsonl"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    def attempt(self, number: int) -> Path:
        return self.attempts / f"{number:04d}"

    def attempt_numbers(self) -> list[int]:
        """Attempts that left a folder, oldest first."""
        if not self.attempts.is_dir():
            return []
        return sorted(int(p.name) for p in self.attempts.iterdir() if _ATTEMPT.fullmatch(p.name))

    def node(self, attempt: int, node: str) -> Path:
        return self.attempt(attempt) / node

    def output(self, attempt: int) -> Path:
        return self.attempt(attempt) / "output"

    def made_sure(self, attempt: int, node: str) -> Path:
        return self.node(attempt, node) / "gone"

    def rank_log(self, attempt: int, node: str, rank: int) -> Path:
        return self.node(attempt, node) / f"rank-{rank}.log"

    def code(self, attempt: int) -> Path:
        """What it was launched with, in digests."""
        return self.attempt(attempt) / "code.json"

    def flights(self, attempt: int) -> list[Path]:
        """What NCCL's flight recorders have written of an attempt, as far as it lies here."""
        return sorted(self.attempt(attempt).glob("*/flight-rank-*"))

    def agent_log(self, node: str) -> Path:
        return self.path / "agents" / f"{node}.log"

    def facts(self, attempt: int) -> Path:
        """What the supervisor saw of its end, beside the logs."""
        return self.attempt(attempt) / "facts.json"

    def steps(self, attempt: int) -> Path:
        return self.attempt(attempt) / "steps.jsonl"

    def profile(self, attempt: int) -> Path:
        """What the training measured of itself (`unbroken train` writes it)."""
        return self.attempt(attempt) / "profile.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def data(self) -> Path:
        """What each step was given, where the training asks for that (unbroken.data.Journal)."""
        return self.path / "data"

    @property
    def metrics(self) -> Path:
        """The run in Prometheus' text format."""
        return self.path / "metrics.prom"

    @property
    def incidents(self) -> Path:
        return self.path / "incidents"

    def incident(self, number: int) -> Path:
        return self.incidents / f"{number:04d}.json"

    def evidence(self, incident: int) -> Path:
        return self.incidents / f"{incident:04d}"

    @property
    def report(self) -> Path:
        return self.path / "report.html"
