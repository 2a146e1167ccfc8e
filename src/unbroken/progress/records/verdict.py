"""The verdict: what a diagnosis concludes, in one shape for files, command line and Python.

`outcome` says how the job ended, `reason` names one of the 29 published failure reasons (Acme, NSDI'24,
table 3) or Hang, LossSpike, Unknown, and is None where the outcome is no failure. "Unknown" is a first-class
answer; a wrong certain answer is the worst one. The JSON form is frozen: keys are added, never changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from ...errors import ContractError, InputError
from ...journal.codec import decode, encode

SCHEMA = 1
T = TypeVar("T")


class Outcome(StrEnum):
    """How the job ended, or that it has not."""

    FAILED = "failed"
    HUNG = "hung"
    LOSS_SPIKE = "loss_spike"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    TIME_LIMIT = "time_limit"
    PREEMPTED = "preempted"
    RUNNING = "running"
    UNKNOWN = "unknown"


class Category(StrEnum):
    """Whose failure it is."""

    INFRASTRUCTURE = "Infrastructure"
    FRAMEWORK = "Framework"
    SCRIPT = "Script"


class Action(StrEnum):
    """What the supervisor is to do. Nothing in a log can make it do anything else."""

    RESTART = "restart"
    RESTART_ELSEWHERE = "restart_elsewhere"
    ROLLBACK_SKIP = "rollback_skip"
    """Where the loss was watched and a checkpoint with its data position is left; elsewhere it is advice to a person."""
    STOP = "stop"
    NONE = "none"


_BY_CATEGORY = {
    Category.INFRASTRUCTURE: (
        "NVLinkError", "CUDAError", "NodeFailure", "ECCError", "NetworkError", "ConnectionError",
        "S3StorageError", "NCCLTimeoutError", "NCCLRemoteError",
    ),
    Category.FRAMEWORK: (
        "DataloaderKilled", "AttributeError", "OutOfMemoryError", "RuntimeError", "AssertionError",
        "ValueError", "ZeroDivisionError", "ModelLoadingError", "DatasetLoadingError",
    ),
    Category.SCRIPT: (
        "FileNotFoundError", "OSError", "TypeError", "NameError", "PermissionError", "ImportError",
        "KeyError", "SyntaxError", "ArgumentError", "CalledProcessError", "IndexError",
    ),
}  # fmt: skip

REASONS: dict[str, Category] = {reason: cat for cat, names in _BY_CATEGORY.items() for reason in names}
"""The 29 published failure reasons, each with its category."""

MACHINE_ONLY = "only logs of the machine were read, and no job's"
"""The note of a verdict that knows nothing of any job."""

HANG, LOSS_SPIKE, UNKNOWN = "Hang", "LossSpike", "Unknown"

KILLED = "signal"
"""`decided_by` of a verdict that a process was ended from outside, by a signal that nothing in the logs explains."""
PORT_TAKEN = "port-taken"
"""`decided_by` of a verdict that the port at which ranks meet was taken: the rule of that name."""

REFUSED = ("unbroken-refused", "unbroken-refused-input", "unbroken-usage")
"""`decided_by` of a verdict that a part of unbroken refused to train on what it was given: the rules of these names. What it said
is the answer, and is quoted wherever the run's end is told."""

CORRUPTED = "corruption"
"""`decided_by` of a verdict on wrong numbers: replicas that differ, or a card that does not agree with itself."""

_SEEN = {
    CORRUPTED: "SilentCorruption",
    KILLED: "Killed", "early-exit": "LeftEarly", "lost-agent": "AgentLost", "lapsed-lease": "LeaseExpired",
    "lost-supervisor": "SupervisorLost", "launch": "NotStarted",
}  # fmt: skip
"""By `decided_by`: how a verdict is called that no log and none of the published reasons explains."""
_WORD_LENGTH, _WORDS_OF = 160, 4


@dataclass(frozen=True)
class Root:
    """The line that came first. `line` counts from 1; `time` is seconds since the epoch, UTC."""

    file: str | None = None
    line: int | None = None
    text: str = ""
    rank: int | None = None
    node: str | None = None
    time: float | None = None


@dataclass(frozen=True)
class Faulty:
    """Where the fault sits, as far as it is known."""

    node: str | None = None
    rank: int | None = None
    gpu: int | None = None


@dataclass(frozen=True)
class Cascade:
    """A failure that the root caused, and how often it was seen."""

    reason: str
    count: int


@dataclass(frozen=True)
class Verdict:
    """What a diagnosis concludes. `confidence` lies in [0, 1]; `decided_by` is a rule id, 'retrieval',
    'model', or what was seen ('exit-code', 'signal', 'early-exit', 'hang-detector', 'lost-node', 'lost-agent'). `unread` is how many bytes of
    the logs a limit left out (0: everything was read); a note then says what they are."""

    outcome: Outcome
    category: Category | None = None
    reason: str | None = None
    root: Root | None = None
    evidence: tuple[Root, ...] = ()
    cascade: tuple[Cascade, ...] = ()
    faulty: Faulty | None = None
    recoverable: bool = False
    cordon: tuple[str, ...] = ()
    action: Action = Action.NONE
    mitigation: str = ""
    confidence: float = 0.0
    decided_by: str = ""
    notes: tuple[str, ...] = field(default=())
    unread: int = 0

    def __post_init__(self) -> None:
        if self.reason is not None and self.reason not in REASONS | {HANG: 0, LOSS_SPIKE: 0, UNKNOWN: 0}:
            raise ContractError(f"'{self.reason}' is not one of the failure reasons")
        if not 0.0 <= self.confidence <= 1.0:
            raise ContractError(f"confidence {self.confidence} lies outside 0 to 1")

    @property
    def title(self) -> str:
        """What to call it where people read: the reason, or what was seen where none of the published ones fits; where
        nothing failed, the outcome."""
        if self.decided_by in REFUSED:
            return "Refused"  # the published reasons know no checkpoint that does not fit
        if self.reason in (None, UNKNOWN) and self.decided_by in _SEEN:
            return _SEEN[self.decided_by]
        return str(self.reason or self.outcome)

    @property
    def last_words(self) -> str:
        """What the ranks printed last, where their ends alone are known and the root names several; else ""."""
        if self.decided_by != "exit-code" or self.root is None or self.root.file is not None:
            return ""
        said: dict[str, list[int]] = {}
        for rank, text in {e.rank: e.text.strip() for e in reversed(self.evidence)}.items():
            if rank is not None and text:
                said.setdefault(text[:_WORD_LENGTH], []).append(rank)
        told = sorted((sorted(ranks), text) for text, ranks in said.items())[:_WORDS_OF]
        return "; ".join(
            f"last line of rank{'s' if len(r) > 1 else ''} {', '.join(map(str, r))}: {t}" for r, t in told
        )

    def as_json(self) -> dict[str, Any]:
        """The frozen JSON form: plain values, lists for tuples, `schema` first."""
        return {"schema": SCHEMA, **encode(self)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Verdict:
        """Reads the JSON form; keys of a newer schema are ignored. Raises ContractError on a wrong shape."""
        try:
            return decode(cls, {k: v for k, v in value.items() if v is not None}, newer=True)
        except (InputError, AttributeError) as e:
            raise ContractError(f"not a verdict: {e}") from e
