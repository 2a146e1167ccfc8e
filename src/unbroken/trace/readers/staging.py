"""The finish that every job reader shares: typed columns in, checked jobs out, nothing dropped silently.

A reader gives a FROM clause and, for each column of the schema that its format has, an SQL expression over it.
Here follow the final state, what can be computed from what (queue from start and submit, duration from end and
start), the checks, and the flags from which the notes are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...samples.schema import JOBS
from ...samples.tables import Note
from ..store import Store, literal, name

STATE_WORDS: Mapping[str, tuple[str, ...]] = {
    "COMPLETED": ("COMPLETED", "COMPLETE", "CD", "PASS", "PASSED", "SUCCEEDED", "SUCCESS", "FINISHED", "DONE"),
    "CANCELLED": ("CANCELLED", "CANCELED", "CA", "KILLED", "STOPPED", "ABORTED", "DELETED", "REVOKED", "RV"),
    "FAILED": (
        "FAILED", "FAIL", "F", "ERROR", "TIMEOUT", "TO", "NODE_FAIL", "NF", "OUT_OF_MEMORY", "OOM", "OOMKILLED",
        "BOOT_FAIL", "BF", "PREEMPTED", "PR", "DEADLINE", "DL", "EVICTED", "LAUNCH_FAILED", "RECONFIG_FAIL",
        "NODEFAIL", "CRASHED",
    ),
    "RUNNING": ("RUNNING", "R", "SUSPENDED", "S", "COMPLETING", "CG", "STOPPING", "SIGNALING", "RESIZING", "STAGE_OUT"),
    "PENDING": (
        "PENDING", "PD", "WAITING", "QUEUED", "REQUEUED", "REQUEUE_HOLD", "CONFIGURING", "CF", "SPECIAL_EXIT",
        "REQUEUE_FED", "RESV_DEL_HOLD",
    ),
}  # fmt: skip
"""The words that schedulers use for a state (upper case) and what they count as."""

FLAGS: Mapping[str, tuple[int, str, str]] = {
    "no_state": (1, "missing", "no final state: counted as UNKNOWN"),
    "odd_state": (2, "assumption", "a state that is not known to us: counted as UNKNOWN"),
    "no_queue": (4, "missing", "no queue time: left out of the queueing statistics"),
    "negative_queue": (8, "repaired", "start before submit (clock skew): the queue time is taken as unknown"),
    "duration_differs": (
        16,
        "repaired",
        "the file's duration differs from end minus start by more than 2 s: end minus start is used",
    ),
    "no_id": (32, "repaired", "no job id: numbered by us"),
    "unfinished": (64, "info", "still running or waiting: left out of durations and final states"),
    "never_started": (128, "info", "ended without ever starting: no duration"),
    "no_zone": (256, "assumption", "times without a zone beside times with one: taken as {zone}"),
    "no_gpu": (512, "missing", "no number of GPUs: left out of the GPU statistics"),
    "no_duration": (1024, "missing", "no duration can be computed"),
}
"""Bit, kind and sentence of what may be said of a row without setting it aside."""


@dataclass(frozen=True)
class Draft:
    """What a reader knows of its rows, as SQL over `source`.

    `columns`: schema column -> expression of the schema's type. `state_word`: the state as text.
    `queue_s`, `duration_s`: as the file gives them. `checks`: (reason, predicate) for which a row is rejected;
    `reads`: (reason, text, column): rejected where the text is there but the column (or _queue, _duration) is NULL.
    `text`: the row's own text for what is rejected. `zone_missing`: predicate, true where a time has no zone
    in a file where others have one.
    """

    source: str
    columns: Mapping[str, str]
    state_word: str | None = None
    queue_s: str | None = None
    duration_s: str | None = None
    checks: Sequence[tuple[str, str]] = ()
    reads: Sequence[tuple[str, str, str]] = ()
    text: str = "NULL"
    zone_missing: str | None = None
    state_extra: Mapping[str, str] = field(default_factory=dict)


def state_sql(word: str, extra: Mapping[str, str] | None = None) -> str:
    """An expression for the final state of a word in any case; NULL where the word is unknown."""
    w = f"upper(trim({word}))"
    # the usual words first: a long CASE is slow on millions of rows
    plain = ", ".join(literal(s) for s in ("COMPLETED", "CANCELLED", "FAILED"))
    cases = [f"WHEN {literal(k.upper())} THEN {literal(v)}" for k, v in (extra or {}).items()]
    cases += [f"WHEN {literal(x)} THEN {literal(s)}" for s, words in STATE_WORDS.items() for x in words]
    # sacct: "CANCELLED by 1000", and "CANCELLED+" or "OUT_OF_ME+" when it cut the column
    other = (
        f"coalesce(CASE {w} {' '.join(cases)} END, "
        f"CASE WHEN starts_with({w}, 'CANCEL') THEN 'CANCELLED' WHEN starts_with({w}, 'OUT_OF_ME') OR "
        f"starts_with({w}, 'NODE_FAI') OR starts_with({w}, 'PREEMPT') OR starts_with({w}, 'BOOT_FAI') THEN 'FAILED' END)"
    )
    return f"CASE WHEN {word} IN ({plain}) THEN {word} ELSE {other} END"


def finished_sql(draft: Draft, source: str, *, with_text: bool = False) -> str:
    """A SELECT of all job columns, `_reject` (reason or NULL), `_flags` and `_text`, from a draft."""
    have = dict(draft.columns)
    first = [f"{have.get(c.name, f'CAST(NULL AS {c.type})')} AS {name(c.name)}" for c in JOBS.columns]
    first += [
        f"{draft.state_word or 'CAST(NULL AS VARCHAR)'} AS _word",
        f"{draft.queue_s or 'CAST(NULL AS DOUBLE)'} AS _queue",
        f"{draft.duration_s or 'CAST(NULL AS DOUBLE)'} AS _duration",
        f"{draft.text if with_text else 'CAST(NULL AS VARCHAR)'} AS _text",
        f"{draft.zone_missing or 'false'} AS _zoneless",
        "CASE " + " ".join(f"WHEN {p} THEN {literal(r)}" for r, p in draft.checks) + " END AS _wrong"
        if draft.checks
        else "CAST(NULL AS VARCHAR) AS _wrong",
        *(f"({raw}) IS NOT NULL AS _has_{i}" for i, (_, raw, _) in enumerate(draft.reads)),
    ]
    unread = " ".join(
        f"WHEN _has_{i} AND {column} IS NULL THEN {literal(r)}"
        for i, (r, _, column) in enumerate(draft.reads)
    )
    bad = f"coalesce(_wrong, CASE {unread} END)" if unread else "_wrong"
    state = state_sql("_word", draft.state_extra) if draft.state_word else "state"
    # start, end and submit from each other where one is missing
    second = f"""
        SELECT * REPLACE (
            coalesce(start_utc, end_utc - to_microseconds(CAST(_duration * 1e6 AS BIGINT)),
                     submit_utc + to_microseconds(CAST(_queue * 1e6 AS BIGINT))) AS start_utc,
            coalesce(submit_utc, start_utc - to_microseconds(CAST(_queue * 1e6 AS BIGINT))) AS submit_utc,
            coalesce(state_raw, _word) AS state_raw,
            {state} AS state
        ), {bad} AS _bad FROM one"""
    third = """
        SELECT * REPLACE (
            coalesce(end_utc, start_utc + to_microseconds(CAST(_duration * 1e6 AS BIGINT))) AS end_utc
        ) FROM two"""
    fourth = """
        SELECT *,
            date_diff('microsecond', start_utc, end_utc) / 1e6 AS _span,
            date_diff('microsecond', submit_utc, start_utc) / 1e6 AS _wait,
            (state IN ('RUNNING', 'PENDING')) IS TRUE AS _open
        FROM three"""
    flags = " | ".join(
        f"CASE WHEN {predicate} THEN {FLAGS[flag][0]} ELSE 0 END"
        for flag, predicate in (
            ("no_state", "state IS NULL AND (_word IS NULL OR trim(_word) = '')"),
            ("odd_state", "state IS NULL AND trim(_word) <> ''"),
            ("no_queue", "coalesce(_wait, _queue) IS NULL AND NOT _open AND start_utc IS NOT NULL"),
            ("negative_queue", "coalesce(_wait, _queue) < 0"),
            ("duration_differs", "abs(_span - _duration) > 2"),
            ("no_id", "job_id IS NULL"),
            ("unfinished", "_open"),
            ("never_started", "start_utc IS NULL AND NOT _open AND coalesce(_duration, 0) = 0"),
            ("no_zone", "_zoneless"),
            ("no_gpu", "gpu_num IS NULL"),
            ("no_duration", "coalesce(_span, _duration) IS NULL AND NOT _open AND start_utc IS NOT NULL"),
        )
    )
    out = {c.name: name(c.name) for c in JOBS.columns}
    out["job_id"] = (
        "coalesce(job_id, 'row-' || row_number() OVER ())"
        if "job_id" not in have
        else ("coalesce(job_id, 'no-id-' || hash(submit_utc, start_utc, end_utc, name, \"user\"))")
    )
    out["state"] = "coalesce(state, 'UNKNOWN')"
    out["queue_s"] = (
        "CASE WHEN state = 'PENDING' THEN NULL WHEN coalesce(_wait, _queue) >= 0 THEN coalesce(_wait, _queue) END"
    )
    out["start_utc"] = "CASE WHEN state = 'PENDING' THEN NULL ELSE start_utc END"
    out["duration_s"] = "CASE WHEN _open THEN NULL ELSE coalesce(_span, _duration) END"
    out["end_utc"] = "CASE WHEN _open THEN NULL ELSE end_utc END"
    out["source"] = literal(source)
    reject = (
        "CASE WHEN _bad IS NOT NULL THEN _bad "
        "WHEN NOT _open AND coalesce(_span, _duration) < 0 THEN 'ends before it starts' "
        "WHEN end_utc < submit_utc AND NOT _open THEN 'ends before it was submitted' "
        "WHEN gpu_num < 0 OR node_num < 0 OR cpu_num < 0 THEN 'a negative number of GPUs, nodes or cores' "
        "WHEN submit_utc IS NULL AND start_utc IS NULL AND end_utc IS NULL AND _duration IS NULL "
        "THEN 'neither a time nor a duration' END"
    )
    last = ", ".join(f"{expr} AS {name(c)}" for c, expr in out.items())
    return (
        f"WITH one AS (SELECT {', '.join(first)} FROM {draft.source}), two AS ({second}), three AS ({third}), "
        f"four AS ({fourth}) SELECT {last}, {reject} AS _reject, CAST({flags} AS INTEGER) AS _flags, _text FROM four"
    )


def stage(store: Store, draft: Draft, source: str, zone: str = "UTC") -> str:
    """Reads a draft into the store, sets bad rows aside, notes what was found; returns the table's name."""
    table = store.fresh("stage")
    store.con.execute(f"SET TimeZone = {literal(zone)}")
    try:
        store.con.execute(f"CREATE TABLE {table} AS {finished_sql(draft, source)}")
        account(store, table, source, zone, with_text=finished_sql(draft, source, with_text=True))
    finally:
        store.con.execute("SET TimeZone = 'UTC'")
    view = store.fresh("jobs_part")
    cols = ", ".join(name(c) for c in JOBS.names)
    store.con.execute(f"CREATE VIEW {view} AS SELECT {cols} FROM {table} WHERE _reject IS NULL")
    store.add_part("jobs", view)
    return table


def account(store: Store, table: str, source: str, zone: str, *, with_text: str) -> None:
    """Moves rejected rows aside and turns flags into notes. `table` is a staged table or a query in brackets;
    `with_text` the same with the rows' own text, which is read only where there is a row to reject."""
    bits = ", ".join(
        f"sum((_flags >> {f[0].bit_length() - 1}) & 1) FILTER (_reject IS NULL)" for f in FLAGS.values()
    )
    row = store.one(f"SELECT count(*), count(_reject), {bits} FROM {table}")
    rows, bad, counts = int(row[0]), int(row[1]), row[2:]
    if bad:
        aside = store.fresh("aside")
        store.con.execute(
            f"CREATE TABLE {aside} AS SELECT _reject AS reason, coalesce(_text, job_id) AS text FROM ({with_text}) "
            "WHERE _reject IS NOT NULL"
        )
        store.con.execute(f"INSERT INTO rejected SELECT {literal(source)}, reason, text FROM {aside}")
        for reason, n in store.query(f"SELECT reason, count(*) FROM {aside} GROUP BY 1 ORDER BY 2 DESC, 1"):
            first = store.query(f"SELECT text FROM {aside} WHERE reason = {literal(reason)} LIMIT 3")
            store.note(Note("set aside", reason, n, rows, source, tuple(str(e[0])[:200] for e in first)))
        store.con.execute(f"DROP TABLE {aside}")
    for (flag, (_, kind, text)), n in zip(FLAGS.items(), counts, strict=True):
        if not n:
            continue
        examples: list[tuple[object, ...]] = []
        if flag == "no_zone" and n >= rows - bad:
            store.note(
                Note(
                    "assumption",
                    f"times carry no zone: taken as {zone} (--timezone says otherwise)",
                    0,
                    0,
                    source,
                )
            )
            continue
        if flag == "odd_state":
            examples = store.query(
                f"SELECT state_raw || ' (' || count(*) || ')' FROM {table} WHERE _flags & 2 > 0 "
                "GROUP BY state_raw ORDER BY count(*) DESC LIMIT 3"
            )
        store.note(
            Note(
                kind,  # type: ignore[arg-type]
                text.format(zone=zone),
                int(n),
                rows,
                source,
                tuple(str(e[0]) for e in examples),
            )
        )
