"""What travels through the folder: tables of results, and notes on what was assumed or rejected."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

NoteKind = Literal["assumption", "set aside", "repaired", "missing", "difference", "info"]


@dataclass(frozen=True)
class Note:
    """One sentence about the data: what was assumed, repaired, rejected or is missing.

    `count` is the number of rows it is about (0: the whole file), `of` how many there were, `examples` up to
    three of them as text.
    """

    kind: NoteKind
    text: str
    count: int = 0
    of: int = 0
    source: str = ""
    examples: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The kind in words; "set aside" is the name that files and JSON keep for what is rejected."""
        return "rejected" if self.kind == "set aside" else self.kind

    def as_json(self) -> dict[str, Any]:
        """The note as a JSON object."""
        return {
            "kind": self.kind,
            "text": self.text,
            "count": self.count,
            "of": self.of,
            "source": self.source,
            "examples": list(self.examples),
        }


@dataclass(frozen=True)
class Result:
    """A small table: what a statistic returns, a figure draws and JSON carries.

    `title` is what it shows; `columns` name the units at their end, as the schema does.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    remark: str = ""

    def __bool__(self) -> bool:
        return bool(self.rows)

    def column(self, name: str) -> list[Any]:
        """The values of one column; ValueError if there is none of that name."""
        i = self.columns.index(name)
        return [r[i] for r in self.rows]

    def dicts(self) -> Iterator[dict[str, Any]]:
        """The rows as dictionaries."""
        for r in self.rows:
            yield dict(zip(self.columns, r, strict=True))

    def where(self, **wanted: Any) -> Result:
        """The rows whose columns have these values."""
        at = [(self.columns.index(k), v) for k, v in wanted.items()]
        rows = tuple(r for r in self.rows if all(r[i] == v for i, v in at))
        return Result(self.name, self.title, self.columns, rows, self.remark)

    def distinct(self, column: str) -> list[Any]:
        """The different values of a column, in order of appearance."""
        return list(dict.fromkeys(self.column(column)))

    def as_json(self) -> dict[str, Any]:
        """The table as a JSON object; not-a-number and infinity become null, times ISO text in UTC."""
        return {
            "name": self.name,
            "title": self.title,
            "columns": list(self.columns),
            "rows": [[plain(v) for v in r] for r in self.rows],
            "remark": self.remark,
        }


@dataclass(frozen=True)
class Rejected:
    """A row that was rejected: the file, the reason and the row's own text."""

    source: str
    reason: str
    text: str


@dataclass
class Findings:
    """Everything that was computed for one report, by name, in the order of computation."""

    results: dict[str, Result] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def __getitem__(self, name: str) -> Result:
        return self.results[name]

    def get(self, name: str) -> Result:
        """The result of that name, or an empty one."""
        return self.results.get(name) or Result(name, "", (), ())

    def add(self, result: Result) -> None:
        """Keeps a result under its name."""
        self.results[result.name] = result


def plain(value: Any) -> Any:
    """The value as JSON can carry it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dt.datetime):
        return value.isoformat(timespec="seconds") + "Z"
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def empty(name: str, title: str, columns: Sequence[str]) -> Result:
    """A result without rows."""
    return Result(name, title, tuple(columns), ())
