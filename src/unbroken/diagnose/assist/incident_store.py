"""Past incidents in one SQLite file: kept, corrected, searched, and used where rules do not decide.

What is stored is redacted first (`redact`), and the file is its owner's alone: lines of one job's log may be shown
beside another's, or sent to a language model. The store is an index for one machine or team folder, not a source of truth; it can be deleted. Search is lexical
(FTS5, then the share of common words); where the user configures an embedding service, its vectors count too.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from ...errors import DiagnoseError, UsageError
from ...progress.records.verdict import HANG, LOSS_SPIKE, REASONS, UNKNOWN, Action, Outcome, Verdict
from ..compress import FilterRule
from ..engine import Diagnosis
from ..match.rules import Rule, RuleSet, candidate, compile_safe, defaults
from ..redact.redact import LONGEST, Redactor
from .incident_store_shape import Similar

_SCHEMA = """
create table if not exists incidents (
  id text primary key, at real, outcome text, reason text, action text, root text, signature text, lines text,
  verdict text, confirmed integer default 0, note text default '', vector blob);
create virtual table if not exists words using fts5(id unindexed, signature);
create table if not exists candidates (id text primary key, at real, rule text, state text, why text);
create table if not exists filters (task text, name text, rule text, primary key (task, name));
"""
_SCHEMA_VERSION = 1
"""`pragma user_version`: 0 held lines as they stood in the log; a store of that kind is redacted when it is opened."""
_WORD = re.compile(r"[A-Za-z_][A-Za-z_]{2,}")
ALIKE = 0.6
SAME = 0.9


class Embedder(Protocol):
    """Turns texts into vectors of one length."""

    def __call__(self, texts: Sequence[str]) -> list[list[float]]: ...


@dataclass(frozen=True)
class CandidateRule:
    """A rule that was proposed but not accepted. `state`: candidate, adopted, rejected."""

    rule: Rule
    state: str
    why: str
    at: float


def default_path() -> Path:
    """Where the store lies unless told otherwise: `$UNBROKEN_INCIDENTS`, or the user's state folder."""
    given = os.environ.get("UNBROKEN_INCIDENTS")
    if given:
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "unbroken" / "incidents.sqlite"


class IncidentStore:
    """The store of incidents, candidate rules and filter rules."""

    def __init__(
        self, path: Path | None = None, embed: Embedder | None = None, *, read_only: bool = False
    ) -> None:
        """`read_only`: nothing is written, not even the file is made (it is then as if empty)."""
        self.path = path or default_path()
        self._embed = embed
        self._read_only = read_only

    @contextmanager
    def _db(self) -> Iterator[sqlite3.Connection]:
        try:
            db = self._open()
        except (OSError, sqlite3.Error) as e:
            raise DiagnoseError(
                f"the store of incidents cannot be opened: {e}",
                where=str(self.path),
                hint="Choose another place with --store, or pass --no-memory",
            ) from None
        try:
            with db:
                if not self._read_only or not self.path.exists():
                    db.executescript(_SCHEMA)
                if not self._read_only:
                    _redact_old(db, self.path)
                yield db
        except sqlite3.Error as e:
            raise DiagnoseError(
                f"the store of incidents does not work: {e}",
                where=str(self.path),
                hint="Move the file away, or pass --no-memory",
            ) from None
        finally:
            db.close()

    def _open(self) -> sqlite3.Connection:
        if self._read_only:
            if not self.path.exists():
                return sqlite3.connect(":memory:")
            return sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # SQLite would make it with the umask; its journals take the file's own mode.
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        return sqlite3.connect(self.path, timeout=10)

    def record(self, d: Diagnosis, lines: Sequence[str] = ()) -> str:
        """Stores a diagnosis, redacted, and returns the incident's id; the same logs diagnosed again keep their id."""
        v = d.verdict
        redact = Redactor()
        kept = redact.lines([x[:LONGEST] for x in list(lines)[-400:]])
        sign = signature(d)
        root = v.root.text.strip() if v.root else ""
        incident = incident_id(d)
        vector = self._vector(sign)
        with self._db() as db:
            old = db.execute("select confirmed from incidents where id = ?", (incident,)).fetchone()
            if old and old[0]:
                return incident
            db.execute("delete from words where id = ?", (incident,))
            db.execute(
                "insert or replace into incidents values (?,?,?,?,?,?,?,?,?,0,'',?)",
                (
                    incident,
                    time.time(),
                    v.outcome.value,
                    v.reason,
                    v.action.value,
                    redact(root)[:2000],
                    sign,
                    json.dumps(kept),
                    json.dumps(redact.values(v.as_json())),
                    vector,
                ),
            )
            db.execute("insert into words values (?,?)", (incident, sign))
        return incident

    def correct(self, incident: str, reason: str, note: str = "") -> None:
        """Sets the reason of an incident as confirmed by a person. Raises UsageError for unknown ids or reasons."""
        check_reason(reason)
        with self._db() as db:
            done = db.execute(
                "update incidents set reason = ?, confirmed = 1, note = ? where id = ?",
                (None if reason == "None" else reason, note, incident),
            )
            if done.rowcount == 0:
                raise UsageError(
                    f"there is no incident '{incident}'",
                    where=str(self.path),
                    hint="`unbroken diagnose incidents` lists them",
                )

    def incidents(self, most: int = 50) -> list[Similar]:
        """The newest incidents."""
        with self._db() as db:
            rows = db.execute(
                "select id, outcome, reason, root, action, confirmed, at, note from incidents order by at desc limit ?",
                (most,),
            ).fetchall()
        return [Similar(r[0], 1.0, r[1], r[2], r[3], r[4], bool(r[5]), r[6], r[7]) for r in rows]

    def confirmed(self, incident: str) -> list[Similar]:
        """The incident itself, if a person has confirmed its reason before."""
        return [s for s in self.incidents(100_000) if s.id == incident and s.confirmed]

    def similar(self, d: Diagnosis, most: int = 3, *, but: str | None = None) -> list[Similar]:
        """Past incidents that resemble this one, most alike first."""
        sign = signature(d)
        words = sorted(set(_WORD.findall(sign)))
        if not words:
            return []
        query = " OR ".join(f'"{w}"' for w in words[:60])
        own = self._embed([sign])[0] if self._embed else None
        with self._db() as db:
            rows = db.execute(
                "select i.id, i.outcome, i.reason, i.root, i.action, i.confirmed, i.at, i.note, i.signature, i.vector from words w join incidents i on i.id = w.id"
                " where words match ? order by bm25(words) limit 40", (query,),
            ).fetchall()  # fmt: skip
            if own is not None:
                rows += db.execute(
                    "select id, outcome, reason, root, action, confirmed, at, note, signature, vector from incidents where vector is not null order by at desc limit 20000"
                ).fetchall()
        best: dict[str, Similar] = {}
        for r in rows:
            if r[0] == but:
                continue
            score = overlap(sign, r[8])
            if own is not None and r[9]:
                score = max(score, _cosine(own, json.loads(r[9])))
            if r[0] not in best or best[r[0]].score < score:
                best[r[0]] = Similar(r[0], score, r[1], r[2], r[3], r[4], bool(r[5]), r[6], r[7])
        found = sorted(best.values(), key=lambda s: (-s.score, -s.confirmed, -s.when))
        return [s for s in found if s.score >= 0.3][:most]

    def _vector(self, text: str) -> bytes | None:
        return json.dumps(self._embed([text])[0]).encode() if self._embed else None

    def propose(self, rule: Rule, why: str) -> None:
        """Keeps a rule as a candidate, its example redacted, unless one of that id was rejected."""
        redact = Redactor()
        rule, why = replace(rule, example=redact(rule.example)), redact(why)
        with self._db() as db:
            db.execute(
                "insert or ignore into candidates values (?,?,?,?,?)",
                (rule.id, time.time(), json.dumps(asdict(rule)), "candidate", why),
            )

    def rules(self, state: str | None = None) -> list[CandidateRule]:
        """Candidate rules, of one state or all."""
        with self._db() as db:
            rows = db.execute(
                "select rule, state, why, at from candidates where ? is null or state = ? order by at",
                (state, state),
            ).fetchall()
        return [CandidateRule(Rule(**json.loads(r[0])), r[1], r[2], r[3]) for r in rows]

    def accepted_rules(self) -> list[Rule]:
        """The rules that were accepted."""
        return [c.rule for c in self.rules("adopted")]

    def try_rule(self, rule: Rule) -> tuple[int, list[str]]:
        """(incidents that a rule confirms, incidents that it would break) among those stored."""
        compiled = compile_safe(rule.regex, f"rule '{rule.id}'")
        confirms, breaks = 0, []
        with self._db() as db:
            rows = db.execute("select id, reason, outcome, lines, root from incidents").fetchall()
        for incident, reason, outcome, lines, root in rows:
            if not any(compiled.search(x[:2000]) for x in [*json.loads(lines), root or ""]):
                continue
            if reason == rule.reason and (rule.outcome is None or outcome == rule.outcome):
                confirms += 1
            else:
                breaks.append(incident)
        return confirms, breaks

    def accept(self, rule_id: str) -> Rule:
        """Accepts a candidate that at least one stored incident confirms and that breaks none; else raises."""
        found = next((c for c in self.rules() if c.rule.id == rule_id), None)
        if found is None:
            raise UsageError(
                f"there is no candidate rule '{rule_id}'", hint="`unbroken diagnose rules list` lists them"
            )
        confirms, breaks = self.try_rule(found.rule)
        if breaks:
            raise UsageError(
                f"rule '{rule_id}' would break {len(breaks)} stored incidents: {', '.join(breaks[:5])}",
                hint="Reject it, or correct those incidents first",
            )
        if not confirms:
            raise UsageError(
                f"no stored incident confirms rule '{rule_id}'",
                hint=f"Correct an incident to {found.rule.reason} first, or reject the rule",
            )
        self._state(rule_id, "adopted", f"confirmed on {confirms} incidents")
        return found.rule

    def reject(self, rule_id: str) -> None:
        """Rejects a candidate for good."""
        if not any(c.rule.id == rule_id for c in self.rules()):
            raise UsageError(
                f"there is no candidate rule '{rule_id}'", hint="`unbroken diagnose rules list` lists them"
            )
        self._state(rule_id, "rejected", "rejected by a person")

    def _state(self, rule_id: str, state: str, why: str) -> None:
        with self._db() as db:
            db.execute("update candidates set state = ?, why = ? where id = ?", (state, why, rule_id))

    def filters(self, task: str) -> list[FilterRule]:
        """The filter rules stored for a task."""
        with self._db() as db:
            rows = db.execute("select rule from filters where task = ? order by rowid", (task,)).fetchall()
        return [FilterRule(**json.loads(r[0])) for r in rows]

    def keep_filters(self, task: str, rules: Sequence[FilterRule]) -> None:
        """Adds filter rules to a task's, their examples redacted; one that spells out a secret is left out."""
        redact = Redactor()
        rules = [replace(r, example=redact(r.example)) for r in rules if Redactor()(r.regex) == r.regex]
        with self._db() as db:
            db.executemany(
                "insert or replace into filters values (?,?,?)",
                [(task, r.name, json.dumps(asdict(r))) for r in rules],
            )


def incident_id(d: Diagnosis) -> str:
    """The id of a diagnosis: the same logs give the same."""
    root = d.verdict.root
    seed = json.dumps([root.file, root.line, root.text.strip(), root.time] if root else ["", 0, "", 0])
    return f"i{hashlib.sha256(seed.encode()).hexdigest()[:10]}"


def _redact_old(db: sqlite3.Connection, path: Path) -> None:
    """Redacts a store of the first version in place, once, and takes it from everybody but its owner."""
    if db.execute("pragma user_version").fetchone()[0] >= _SCHEMA_VERSION:
        return
    rows = db.execute("select id, root, lines, verdict, note, signature from incidents").fetchall()
    if rows:
        db.execute("pragma secure_delete = on")
    for incident, root, lines, verdict, note, sign in rows:
        redact = Redactor()
        sign = re.sub(r"<[a-z\-]+(?:-\d+)?>", " ", redact(sign or ""))
        db.execute("delete from words where id = ?", (incident,))
        db.execute("insert into words values (?,?)", (incident, sign))
        db.execute(
            "update incidents set signature = ?, root = ?, lines = ?, verdict = ?, note = ? where id = ?",
            (
                sign, redact(root or ""), json.dumps(redact.lines([str(x) for x in json.loads(lines)])),
                json.dumps(redact.values(json.loads(verdict))), redact(note or ""), incident,
            ),
        )  # fmt: skip
    for incident, rule, why in db.execute("select id, rule, why from candidates").fetchall():
        value = json.loads(rule)
        value["example"] = Redactor()(str(value.get("example", "")))
        db.execute("update candidates set rule = ?, why = ? where id = ?", (json.dumps(value), Redactor()(why or ""), incident))  # fmt: skip
    db.execute(f"pragma user_version = {_SCHEMA_VERSION}")
    try:
        path.chmod(0o600)
    except OSError:
        pass  # a colleague's file in a team folder: redacted it is, the mode is the owner's


def check_reason(reason: str) -> None:
    """Raises UsageError unless `reason` is one of the enumerated ones."""
    known = {*REASONS, HANG, LOSS_SPIKE, UNKNOWN}
    if reason not in known:
        import difflib

        near = difflib.get_close_matches(reason, known, n=1)
        raise UsageError(
            f"'{reason}' is no reason",
            hint=f"Did you mean '{near[0]}'?" if near else f"Use one of: {', '.join(sorted(known))}",
        )


def signature(d: Diagnosis) -> str:
    """What an incident is recognised by: its root's words without secrets, numbers, paths and hosts, and what it caused."""
    v = d.verdict
    parts = [v.root.text if v.root else ""]
    parts += [e.text for e in d.timeline.candidates[:6]]
    parts += [c.reason for c in v.cascade[:4]]
    text = re.sub(r"<[a-z\-]+>", " ", " ".join(Redactor().lines(parts)))
    text = re.sub(r"<[a-z\-]+-\d+>|0x[0-9a-fA-F]+|(?:/[\w.\-]+){2,}|\b[\w\-]*\d[\w\-]*\b", " ", text)
    seen: dict[str, None] = dict.fromkeys(_WORD.findall(text))
    return " ".join(seen)[:4000]


def overlap(a: str, b: str) -> float:
    """The share of common words, in [0, 1]."""
    x, y = set(a.split()), set(b.split())
    return len(x & y) / len(x | y) if x and y else 0.0


def _cosine(a: Sequence[float], b: Sequence[float]) -> float:
    if len(a) != len(b):
        return 0.0
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    norm = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(y * y for y in b))
    return max(0.0, dot / norm) if norm else 0.0


def recall(d: Diagnosis, similar: Sequence[Similar]) -> Verdict:
    """The verdict after the incident store was asked: unchanged where rules decided, unless a person corrected the very same."""
    v = d.verdict
    if v.outcome not in (Outcome.FAILED, Outcome.HUNG, Outcome.LOSS_SPIKE, Outcome.UNKNOWN):
        return v
    undecided = v.reason == UNKNOWN or v.confidence < 0.5
    for s in similar:
        if (
            s.confirmed
            and s.reason
            and s.reason != v.reason
            and (s.score >= SAME or (undecided and s.score >= ALIKE))
        ):
            base = defaults()[s.reason]
            return replace(
                v, outcome=Outcome.FAILED if v.outcome is Outcome.UNKNOWN else v.outcome, category=REASONS.get(s.reason), reason=s.reason, recoverable=base.recoverable,
                action=Action(base.action), mitigation=base.mitigation, confidence=round(0.4 + 0.4 * s.score, 3), decided_by="retrieval",
                notes=(*v.notes, f"as incident {s.id}, which a person confirmed ({s.score:.0%} alike)" + (f": {s.note}" if s.note else "")),
            )  # fmt: skip
    return v


def with_candidates(ruleset: RuleSet, rules: Sequence[Rule]) -> RuleSet:
    """The set with accepted rules, weaker than those that ship."""
    return (
        ruleset.with_rules([candidate(r) for r in rules if ruleset.get(r.id) is None]) if rules else ruleset
    )
