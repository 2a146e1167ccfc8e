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
from .match.events import FileScan, Topology
from .match.kinds import Shared, patterns_of
from .match.partial import Limits, scan_within, tell
from .match.rules import RuleSet, builtin_set, load
from .match.scan import Scanner
from .match.sieve import with_counts
from .match.topology import TopologyReader
from .observed.interruptions import judge_interruption, unread
from .observed.judgement import add_observations
from .observed.known import from_facts, with_flight
from .observed.one_clock import put_on_one_clock
from .observed.stored import find_facts
from .read import clock
from .read.flight_recorder import Flight, analyse
from .read.run_folder import logs_of_run, name_from
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
    folder: Path | None = None,
) -> Verdict:
    """The verdict on the job whose logs lie in `paths` (files, folders, globs, '-').

    `facts` is what a supervisor knows beside the logs: with them there may be no log at all, and where they say all that
    can be known none is read. With `folder` quoted files are named from there on. `rules` are folders of your own signatures; with `now` a
    log that is still being written counts as running. `limits` bound time and bytes: then the head and the tail of
    each log are read first, and the verdict says what was left out (`unread`, and a note). It may be called from a
    thread: no single step holds the interpreter for long. Raises InputError where nothing can be read.
    """
    interruption = judge_interruption(facts) if facts is not None else None
    if interruption is not None:
        return interruption
    found = examine(paths, facts=facts, rules=rules, now=now, limits=limits)
    return name_from(found.verdict, found.sources.logs, folder) if folder is not None else found.verdict


def judge_unread(facts: Facts, why: str) -> Verdict:
    """The verdict by facts alone, where the logs could not be read; `why` is among its notes."""
    interruption = judge_interruption(facts)
    if interruption is not None:
        return interruption
    if facts.lost_nodes or facts.hang is not None:
        found = examine_sources(Sources(()), builtin_set(), facts=facts).verdict
        return replace(found, notes=(why, *found.notes))
    return add_observations(unread(why), facts)


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
    """The diagnosis of `paths` with these rules; of a run directory its last attempt, its journal's word, and what its
    supervisor saw."""
    since = time.monotonic()
    stored, notes = find_facts(paths) if facts is None else (None, ())
    logs, end = logs_of_run(paths)
    if stored is not None and logs == list(paths):
        logs = []  # a run whose ranks wrote nothing
    facts = facts or stored
    sources = expand(logs) if logs or facts is None else Sources(())
    found = examine_sources(sources, ruleset, facts=facts, now=now, limits=limits, since=since)
    found = replace(found, notes=(*notes, *found.notes))
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
    if facts is not None:
        put_on_one_clock(scans, sources.logs, facts)
    chron = build_timeline(scans, reader.topology)
    flight = analyse([s.path for s in sources.dumps if s.path]) if sources.dumps else None
    known = from_facts(chron, scans, reader.topology, facts) if facts is not None else None
    verdict = known or decide(chron, scans, reader.topology, now)
    if flight is not None:
        verdict = with_flight(verdict, flight, reader.topology)
    verdict = with_counts(verdict, [s.counted for s in scans], ruleset)
    if facts is not None:
        verdict = judge_interruption(facts) or add_observations(verdict, facts)
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
