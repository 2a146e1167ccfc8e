"""`diagnose()`: logs in, verdict out. Deterministic, offline, one pass over each log."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..progress.records.verdict import Verdict
from .judge.chronology import Timeline, build_timeline
from .judge.decide import decide
from .judge.event_location import add_facts, from_paths
from .judge.facts import Facts
from .judge.known import with_flight
from .match.events import FileScan, Topology
from .match.kinds import Shared, patterns_of
from .match.partial import Limits, scan_within, tell
from .match.rules import RuleSet, builtin_set, load
from .match.scan import Scanner
from .match.sieve import with_counts
from .match.topology import TopologyReader
from .read import clock
from .read.flight_recorder import Flight, analyse
from .read.run_folder import logs_of_run
from .read.sources import Source, Sources, expand, head


@dataclass(frozen=True)
class Diagnosis:
    """A verdict with everything that led to it."""

    verdict: Verdict
    scans: tuple[FileScan, ...]
    timeline: Timeline
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
    limits: Limits | None = None,
) -> Verdict:
    """The verdict on the job whose logs lie in `paths` (files, folders, globs, '-').

    `facts` is what a supervisor knows beside the logs; `rules` are folders of your own signatures; with `now` a
    log that is still being written counts as running. `limits` bound time and bytes: then the head and the tail of
    each log are read first, and the verdict says what was left out (`unread`, and a note). It may be called from a
    thread: no single step holds the interpreter for long. Raises InputError where nothing can be read.
    """
    return examine(paths, facts=facts, rules=rules, now=now, limits=limits).verdict


def examine(
    paths: Sequence[Path | str],
    *,
    facts: Facts | None = None,
    rules: Sequence[Path | str] = (),
    now: float | None = None,
    limits: Limits | None = None,
) -> Diagnosis:
    """As `diagnose`, with the events, the topology and the notes."""
    ruleset = builtin_set().with_rules(load(rules)) if rules else builtin_set()
    return examine_paths(paths, ruleset, facts=facts, now=now, limits=limits)


def examine_paths(
    paths: Sequence[Path | str],
    ruleset: RuleSet,
    *,
    facts: Facts | None = None,
    now: float | None = None,
    limits: Limits | None = None,
) -> Diagnosis:
    """The diagnosis of `paths` with these rules; of a run directory its last attempt, and its journal's word."""
    since = time.monotonic()
    paths, end = logs_of_run(paths)
    found = examine_sources(expand(paths), ruleset, facts=facts, now=now, limits=limits, since=since)
    return found if end is None else replace(found, verdict=end.verdict())


def examine_sources(
    sources: Sources, ruleset: RuleSet, *, facts: Facts | None = None, now: float | None = None,
    limits: Limits | None = None, since: float | None = None,
) -> Diagnosis:  # fmt: skip
    """The diagnosis of sources that were already found; `limits` count from `since` (monotonic seconds), else now."""
    since = time.monotonic() if since is None else since
    reader = TopologyReader()
    from_paths(reader.topology, [(s.rank, s.node) for s in sources.logs])
    add_facts(reader.topology, facts)
    year = year_of(sources.logs)
    ran_out = ""
    shared = Shared(patterns_of(ruleset), len(sources.logs))

    def scanner(source: Source, index: int) -> Scanner:
        return Scanner(source, index, ruleset, reader, year, shared)

    if limits is None:
        scans = [scanner(source, i).run() for i, source in enumerate(sources.logs)]
    else:
        scans, ran_out = scan_within(sources.logs, scanner, limits, since)
    reader.settle()
    chron = build_timeline(scans, reader.topology)
    flight = analyse([s.path for s in sources.dumps if s.path]) if sources.dumps else None
    verdict = decide(chron, scans, reader.topology, facts, now)
    if flight is not None:
        verdict = with_flight(verdict, flight, reader.topology)
    verdict = with_counts(verdict, [s.counted for s in scans], ruleset)
    if limits is not None:
        verdict = tell(verdict, scans, ran_out, limits)
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
