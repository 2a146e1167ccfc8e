"""Looks through a run directory for anything that a superseded supervisor or attempt wrote and that was used.

It reads the files with nothing of the product but the form of their names, so that a fault of a reader is not its own
proof: what counts of each journal is worked out again from the terms, and what may be restored from the seals.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FOLDER = re.compile(r"step-(\d{8,})\.a(\d{4,})")

Record = dict[str, Any]
Snapshot = tuple[int, int]
"""(attempt, step)."""


def find_runs(folder: Path, depth: int = 3) -> Iterator[Path]:
    """The run directories in a folder that keep their record in files."""
    if (folder / "journal").is_dir() and (folder / "epochs").is_dir():
        yield folder
    elif depth and not folder.is_symlink():
        try:
            inside = [p for p in folder.iterdir() if p.is_dir()]
        except OSError:
            return
        for path in inside:
            yield from find_runs(path, depth - 1)


def read_counted(run: Path) -> list[Record]:
    """The records that count: of each term up to what its successor sealed, of the newest all."""
    terms = {int(p.stem): json.loads(p.read_bytes()) for p in sorted((run / "epochs").glob("[0-9]*.json"))}
    counted: list[Record] = []
    for number in sorted(terms):
        file = run / "journal" / f"{number:06d}.jsonl"
        text = file.read_bytes() if file.exists() else b""
        after = [terms[n] for n in sorted(terms) if n > number]
        limit = after[0]["sealed"].get(str(number)) if after else None
        for line in text[:limit].split(b"\n")[:-1]:
            try:
                record = json.loads(line)
            except ValueError:
                continue  # torn, or damaged on purpose
            if isinstance(record, dict):
                counted.append(record)
    return counted


@dataclass
class Lineage:
    """What counts so far, as the journal is gone through; `problems` says what was used although it does not."""

    counted: set[Snapshot] = field(default_factory=set)
    brought: set[str] = field(default_factory=set)
    offered: dict[int, list[Record]] = field(default_factory=dict)
    rollbacks: list[Snapshot] = field(default_factory=list)
    incidents: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def take(self, r: Record) -> None:
        """Takes the next record that counts."""
        kind = r.get("kind")
        if kind == "seal":
            self.counted |= {(int(m[2]), int(m[1])) for n in r["checkpoints"] if (m := _FOLDER.fullmatch(n))}
            self.counted |= {(int(a), int(s)) for a, s in r.get("memory") or ()}
        elif kind == "accepted":
            self.brought |= set(r["checkpoints"])
        elif kind == "rollback":
            self.rollbacks.append((int(r["attempt"]), int(r["before"])))
        elif kind == "incident":
            self.incidents.add(int(r["incident"]))
        elif kind == "attempt":
            self._offer(int(r["attempt"]), r.get("candidates") or [])
        elif kind == "restored":
            self._restore(r)

    def _offer(self, attempt: int, candidates: list[Record]) -> None:
        self.offered[attempt] = candidates
        for c in candidates:
            key = (int(c["attempt"]), int(c["step"]))
            if c.get("brought"):
                if not self.brought & {c["name"], c["folder"]}:
                    self.problems.append(f"attempt {attempt} was offered {c['name']}, which nobody brought")
            elif key not in self.counted:
                self.problems.append(f"attempt {attempt} was offered {c['name']}, which no seal lists")
            elif any(key[0] <= last and key[1] > before for last, before in self.rollbacks):
                self.problems.append(f"attempt {attempt} was offered {c['name']}, which was rolled back")

    def _restore(self, r: Record) -> None:
        if r.get("step") is None or r.get("of") is None:
            return
        offers = {(int(c["attempt"]), int(c["step"])) for c in self.offered.get(int(r["attempt"]), [])}
        if (int(r["of"]), int(r["step"])) not in offers:
            self.problems.append(
                f"attempt {r['attempt']} restored step {r['step']} of attempt {r['of']}, which it was not offered"
            )


def check_run(run: Path) -> list[str]:
    """What was used of a superseded supervisor or attempt: by a restore, a retention, an incident's page; [] is well."""
    lineage = Lineage()
    records = read_counted(run)
    for record in records:
        lineage.take(record)
    return lineage.problems + check_retention(run, records, lineage) + check_incidents(run, lineage)


def check_retention(run: Path, records: list[Record], lineage: Lineage) -> list[str]:
    """In a run's own folder nothing that counts may go to make room for what does not."""
    lying = {
        (int(m[2]), int(m[1])): p
        for p in (run / "checkpoints").glob("step-*")
        if (m := _FOLDER.fullmatch(p.name)) and (p / "COMMITTED").exists()
    }
    sealed = {int(r["attempt"]) for r in records if r.get("kind") == "seal"}
    named = [
        (int(m[2]), int(m[1]))
        for r in records if r.get("kind") == "seal"
        for n in r["checkpoints"] if (m := _FOLDER.fullmatch(n))
    ]  # fmt: skip
    uncounted = [p.name for key, p in lying.items() if key[0] in sealed and key not in lineage.counted]
    kept = [key for key in named if key in lying]
    if uncounted and named and not kept and not any(key[0] not in sealed for key in lying):
        return [f"{', '.join(uncounted)} is kept, which does not count, and nothing that does"]
    return []


def check_incidents(run: Path, lineage: Lineage) -> list[str]:
    """A page of an incident that no counted record knows would be shown in the report."""
    files = {int(p.stem): p for p in (run / "incidents").glob("[0-9]*.json")}
    newest = max(lineage.incidents, default=0)
    return [
        f"{path.name} tells of an incident that does not count"
        for number, path in files.items()
        if number not in lineage.incidents and number <= newest
    ]
