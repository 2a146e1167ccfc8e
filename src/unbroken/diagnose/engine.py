"""`diagnose()`: logs in, verdict out. Deterministic, offline, one pass over each log."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import clock
from .chronology import Chronicle, chronicle
from .decide import decide
from .events import FileScan, Topology
from .facts import Facts
from .flight_recorder import Flight, analyse
from .known import with_flight
from .placing import add_facts, from_paths
from .rules import RuleSet, builtin_set, load
from .scan import Scanner
from .sources import Source, Sources, expand, head
from .topology import TopologyReader
from .verdict import Verdict


@dataclass(frozen=True)
class Diagnosis:
    """A verdict with everything that led to it."""

    verdict: Verdict
    scans: tuple[FileScan, ...]
    chronicle: Chronicle
    topology: Topology
    sources: Sources
    notes: tuple[str, ...]
    flight: Flight | None = None


def diagnose(
    paths: Sequence[Path | str],
    *,
    facts: Facts | None = None,
    rules: Sequence[Path | str] = (),
    now: float | None = None,
) -> Verdict:
    """The verdict on the job whose logs lie in `paths` (files, folders, globs, '-').

    `facts` is what a supervisor knows beside the logs; `rules` are folders of your own signatures; with `now` a
    log that is still being written counts as running. Raises InputError where nothing can be read.
    """
    return examine(paths, facts=facts, rules=rules, now=now).verdict


def examine(
    paths: Sequence[Path | str],
    *,
    facts: Facts | None = None,
    rules: Sequence[Path | str] = (),
    now: float | None = None,
) -> Diagnosis:
    """As `diagnose`, with the events, the topology and the notes."""
    sources = expand(paths)
    ruleset = builtin_set().with_rules(load(rules)) if rules else builtin_set()
    return examine_sources(sources, ruleset, facts=facts, now=now)


def examine_sources(
    sources: Sources, ruleset: RuleSet, *, facts: Facts | None = None, now: float | None = None
) -> Diagnosis:
    """The diagnosis of sources that were already found."""
    reader = TopologyReader()
    from_paths(reader.topology, [(s.rank, s.node) for s in sources.logs])
    add_facts(reader.topology, facts)
    year = year_of(sources.logs)
    scans = [Scanner(source, i, ruleset, reader, year).run() for i, source in enumerate(sources.logs)]
    chron = chronicle(scans, reader.topology)
    flight = analyse([s.path for s in sources.dumps if s.path]) if sources.dumps else None
    verdict = decide(chron, scans, reader.topology, facts, now)
    if flight is not None:
        verdict = with_flight(verdict, flight, reader.topology)
    notes = tuple(sources.notes) + tuple(n for s in scans for n in s.notes) + (flight.notes if flight else ())
    return Diagnosis(verdict, tuple(scans), chron, reader.topology, sources, notes, flight)


def year_of(logs: Sequence[Source]) -> int:
    """The year for time stamps without one: from a full date in any log, else from the newest log's own time."""
    for source in logs[:64]:
        found = clock.year_in(head(source))
        if found:
            return found
    newest = max((s.mtime for s in logs), default=0.0)
    moment = (
        datetime.datetime.fromtimestamp(newest, datetime.UTC)
        if newest
        else datetime.datetime.now(datetime.UTC)
    )
    return moment.year
