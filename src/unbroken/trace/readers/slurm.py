"""Slurm: `sacct -P` (or `-p`) of any version and any list of fields.

Fields come and go between versions (AllocGRES and ReqGRES until 20.11, AllocTRES and ReqTRES since 16.05, ReqMem with
a trailing c or n until 21.05, Planned since 21.08, Restarts since 24.05), times are local without a zone, `Unknown`
and `None` stand for nothing, states carry more words (`CANCELLED by 1000`), and `|` inside a job's name is not
escaped. Field names: sacct(1).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations_with_replacement

from ...errors import InputError
from ...samples.tables import Note
from ..store import Store, literal
from .base import Head, ReadOptions
from .delimited import Delimited, collect_rejects, instant, missing, read_delimited, text
from .staging import Draft, stage

TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+|\d+|Unknown|None|")
STATE = re.compile(r"[A-Z_]+\+?( by \d+)?|")

KNOWN = frozenset(
    [
        "account",
        "allocgres",
        "allocnodes",
        "alloctres",
        "alloccpus",
        "associd",
        "cluster",
        "comment",
        "cputimeraw",
        "derivedexitcode",
        "elapsed",
        "elapsedraw",
        "eligible",
        "end",
        "exitcode",
        "group",
        "jobid",
        "jobidraw",
        "jobname",
        "ncpus",
        "nnodes",
        "nodelist",
        "partition",
        "planned",
        "priority",
        "qos",
        "reason",
        "reqcpus",
        "reqgres",
        "reqmem",
        "reqnodes",
        "reqtres",
        "reserved",
        "restarts",
        "start",
        "state",
        "submit",
        "suspended",
        "timelimit",
        "timelimitraw",
        "totalcpu",
        "user",
        "wckey",
        "workdir",
    ]
)


class SlurmReader:
    """Reads sacct's parsable output."""

    name = "slurm"
    title = "Slurm: sacct -P, any fields (JobID, State, Submit, Start, End, AllocTRES, ...)"

    def score(self, head: Head) -> int:
        """Sure where the columns are sacct's and split by `|`."""
        mine = head.lower & KNOWN
        if "jobid" not in head.lower and "jobidraw" not in head.lower:
            return 0
        return min(40 + 8 * len(mine), 98) if head.delimiter == "|" else min(20 + 4 * len(mine), 60)

    def read(self, store: Store, head: Head, options: ReadOptions) -> None:
        """Adds one row a job; steps are counted and left out, broken lines are fixed or rejected."""
        columns = list(head.columns)
        if columns and columns[-1] == "":  # sacct -p ends every line with the delimiter
            columns[-1] = "_trailing"
        if not options.fields and not {c.lower() for c in columns} & {"jobid", "jobidraw"}:
            raise InputError(
                "the file has no header with JobID",
                where=str(head.path),
                hint="Export with a header, or name the fields: --fields JobID,State,Submit,Start,End,AllocTRES",
            )
        if not {c.lower() for c in columns} & {"submit", "start", "end", "elapsed", "elapsedraw"}:
            raise InputError(
                "the export has no times",
                where=str(head.path),
                hint="Export them: sacct -P -a -S 2024-01-01 --format=JobID,JobName,User,Account,Partition,State,ExitCode,"
                "Submit,Start,End,Elapsed,NNodes,NCPUS,AllocTRES,NodeList",
            )
        quote = "" if head.delimiter == "|" else '"'
        table = read_delimited(store, head, columns, header=not options.fields, quote=quote)
        raw = store.fresh("sacct")
        job_id = table.find("JobIDRaw", "JobID") or ""
        store.con.execute(f"CREATE TABLE {raw} AS SELECT * FROM {table.source}")
        fix_names(store, table, raw, head)
        # the second header of concatenated exports
        store.con.execute(f"DELETE FROM {raw} WHERE lower({job_id}) IN ('jobid', 'jobidraw')")
        steps = int(store.one(f"SELECT count(*) FROM {raw} WHERE contains({job_id}, '.')")[0])
        if steps:
            store.note(Note("info", "lines of job steps: left out", steps, source=head.path.name))
        kept = Delimited(f"(SELECT * FROM {raw} WHERE NOT contains(coalesce({job_id}, ''), '.'))", table.columns,
                         table.rejects, table.scans)  # fmt: skip
        stage(store, draft_of(store, kept, head, options), head.path.name, options.zone)
        collect_rejects(store, table, head.path.name)
        store.con.execute(f"DROP TABLE {raw}")
        if options.zone == "UTC":
            store.note(
                Note(
                    "assumption",
                    "sacct prints local times without a zone: taken as UTC (set --timezone, for example "
                    "--timezone Europe/Berlin, if the cluster's clock is another)",
                    source=head.path.name,
                )
            )


FREE_TEXT = ("jobname", "submitline", "comment", "admincomment", "systemcomment", "workdir", "wckey")
"""Fields in which people may write a `|`."""


def fix_names(store: Store, table: Delimited, raw: str, head: Head) -> None:
    """Joins the pieces of free text that contains the delimiter back together, where the rest then fits."""
    exists = store.one(f"SELECT count(*) FROM duckdb_tables() WHERE table_name = {literal(table.rejects)}")[0]
    if not exists or head.delimiter != "|":
        return
    fixed, lines = [], []
    for line, whole in store.query(
        f"SELECT line, any_value(csv_line) FROM {table.rejects} WHERE error_type = 'TOO MANY COLUMNS' GROUP BY line"
    ):
        row = join_lines(str(whole).rstrip("\r\n").split("|"), table.columns)
        if row:
            fixed.append([p or None for p in row])
            lines.append(line)
    if fixed:
        marks = ", ".join("?" * len(table.columns))
        store.con.executemany(f"INSERT INTO {raw} VALUES ({marks})", fixed)
        store.con.execute(f"DELETE FROM {table.rejects} WHERE line IN ({', '.join(map(str, lines))})")
        store.note(
            Note("repaired", "text that contains '|': joined again", len(fixed), source=head.path.name)
        )


def join_lines(parts: list[str], columns: tuple[str, ...]) -> list[str] | None:
    """The fields of a line with too many pieces: the surplus is spread over the free-text columns until state and
    times are where they belong; None where no way fits, or too many would have to be tried."""
    lower = [c.lower() for c in columns]
    free = [i for i, c in enumerate(lower) if c in FREE_TEXT]
    surplus = len(parts) - len(columns)
    if not free or surplus < 1 or surplus > 40:
        return None
    checks = [(i, TIME if c in ("submit", "start", "end", "eligible") else STATE) for i, c in enumerate(lower)
              if c in ("submit", "start", "end", "eligible", "state")]  # fmt: skip
    for n, way in enumerate(combinations_with_replacement(free, surplus)):
        if n > 5000:
            return None
        out, at = [], 0
        for i in range(len(columns)):
            more = way.count(i)
            out.append("|".join(parts[at : at + 1 + more]))
            at += 1 + more
        if all(pattern.fullmatch(out[i]) for i, pattern in checks):
            return out
    return None


def draft_of(store: Store, t: Delimited, head: Head, options: ReadOptions) -> Draft:
    """The draft for whatever fields there are."""
    columns: dict[str, str] = {}
    reads: list[tuple[str, str, str]] = []
    job = t.find("JobIDRaw", "JobID") or "NULL"
    shown = t.find("JobID", "JobIDRaw") or "NULL"
    columns["job_id"] = text(shown if t.find("JobID") else job)
    for schema, fields in (
        ("user", ("User",)),
        ("team", ("Account", "Group")),
        ("name", ("JobName",)),
        ("partition", ("Partition",)),
    ):
        if c := t.find(*fields):
            columns[schema] = text(c)
    cluster = t.find("Cluster")
    fallback = literal(options.cluster or "slurm")
    columns["cluster"] = (
        fallback if options.cluster or not cluster else f"coalesce({text(cluster)}, {fallback})"
    )
    for schema, field in (("submit_utc", "Submit"), ("start_utc", "Start"), ("end_utc", "End")):
        if c := t.find(field):
            columns[schema] = instant(c)
            reads.append((f"no time: {field}", c, schema))
    if (nodes := t.find("NNodes", "AllocNodes", "ReqNodes")) is not None:
        columns["node_num"] = f"try_cast({nodes} AS INTEGER)"
    if (cpus := t.find("AllocCPUS", "NCPUS", "ReqCPUS")) is not None:
        columns["cpu_num"] = f"try_cast({cpus} AS DOUBLE)"
    columns["gpu_num"] = gpus_sql(store, t, head)
    if mem := memory_sql(t, nodes, cpus):
        columns["mem_gib"] = mem
    if code := t.find("ExitCode", "DerivedExitCode"):
        columns["exit_code"] = f"try_cast(split_part({code}, ':', 1) AS INTEGER)"
        columns["exit_signal"] = f"nullif(try_cast(split_part({code}, ':', 2) AS INTEGER), 0)"
    if (hosts := t.find("NodeList")) is not None:
        columns["nodes"] = hosts_sql(store, t.source, hosts)
    state = t.find("State")
    if state is None:
        store.note(Note("missing", "no State field: every job counts as UNKNOWN", source=head.path.name))
    duration = None
    if raw := t.find("ElapsedRaw"):
        duration = f"try_cast({raw} AS DOUBLE)"
    elif (elapsed := t.find("Elapsed")) is not None:
        duration = elapsed_sql(elapsed)
    queue = elapsed_sql(waited) if (waited := t.find("Planned", "Reserved")) else None
    start = t.find("Start")
    if start and duration and t.find("End"):
        # a job cancelled while it waited has Start = End or none, and no time on a node
        never = f"({missing(start)})"
        duration = f"CASE WHEN {never} THEN NULL ELSE {duration} END"
    if (suspended := t.find("Suspended")) is not None and duration:
        store.note(
            Note("info", "time in which jobs were suspended counts as run time", source=head.path.name)
        )
        _ = suspended
        duration = None
    return Draft(
        t.source, columns, text(state) if state else None, queue, duration, reads=reads, text=t.whole()
    )


def gpus_sql(store: Store, t: Delimited, head: Head) -> str:
    """GPUs from AllocTRES, else AllocGRES (times nodes), else ReqTRES, else ReqGRES; NULL if there is none of them."""
    tres, gres = t.find("AllocTRES"), t.find("AllocGRES")
    req_tres, req_gres = t.find("ReqTRES"), t.find("ReqGRES")
    nodes = t.find("NNodes", "AllocNodes", "ReqNodes")
    per = f"coalesce(try_cast({nodes} AS DOUBLE), 1)" if nodes else "1"
    options = []
    if tres:
        options.append(f"CASE WHEN coalesce({tres}, '') <> '' THEN {tres_gpus(tres)} END")
    if gres:
        options.append(f"CASE WHEN coalesce({gres}, '') <> '' THEN {gres_gpus(gres)} * {per} END")
    if req_tres:
        options.append(f"CASE WHEN coalesce({req_tres}, '') <> '' THEN {tres_gpus(req_tres)} END")
    if req_gres:
        options.append(f"CASE WHEN coalesce({req_gres}, '') <> '' THEN {gres_gpus(req_gres)} * {per} END")
    if not options:
        store.note(
            Note(
                "missing",
                "no field gives GPUs: add AllocTRES (or ReqTRES, AllocGRES on old versions) to sacct --format",
                source=head.path.name,
            )
        )
        return "CAST(NULL AS DOUBLE)"
    if not tres and not gres:
        store.note(
            Note(
                "assumption", "GPUs that were asked for stand for GPUs that were held", source=head.path.name
            )
        )
    return f"coalesce({', '.join(options)}, 0)"


def tres_gpus(column: str) -> str:
    """GPUs of a TRES list: gres/gpu=4, else the sum of gres/gpu:a100=4; 0 where it names none."""
    total = f"try_cast(regexp_extract({column}, 'gres/gpu=([0-9]+)', 1) AS DOUBLE)"
    typed = f"list_sum(list_transform(regexp_extract_all({column}, 'gres/gpu:[^=,]+=([0-9]+)', 1), lambda x: try_cast(x AS DOUBLE)))"
    return f"coalesce({total}, {typed}, 0)"


def gres_gpus(column: str) -> str:
    """GPUs per node of a GRES list: gpu:4, gpu:a100:4, gres:gpu:4; 0 where it names none."""
    found = f"regexp_extract_all({column}, '(?:^|[,: ])gpu(?::[A-Za-z_][^:,()]*)?(?::([0-9]+))?', 1)"
    return f"coalesce(list_sum(list_transform({found}, lambda x: coalesce(try_cast(nullif(x, '') AS DOUBLE), 1))), 0)"


def memory_sql(t: Delimited, nodes: str | None, cpus: str | None) -> str | None:
    """Memory in GiB from AllocTRES's mem=, else ReqMem, per core (trailing c) or per node (n) on old versions."""
    unit = "CASE upper(regexp_extract({c}, '{p}', 2)) WHEN 'K' THEN 1.0/1048576 WHEN 'M' THEN 1.0/1024 WHEN 'G' THEN 1.0 WHEN 'T' THEN 1024.0 WHEN 'P' THEN 1048576.0 ELSE 1.0/1024 END"
    out = []
    for field in ("AllocTRES", "ReqTRES"):
        if c := t.find(field):
            p = "mem=([0-9.]+)([KMGTP]?)"
            out.append(f"try_cast(regexp_extract({c}, '{p}', 1) AS DOUBLE) * {unit.format(c=c, p=p)}")
    if c := t.find("ReqMem"):
        p = "^([0-9.]+)([KMGTP]?)"
        times = f"CASE WHEN ends_with({c}, 'n') THEN {f'try_cast({nodes} AS DOUBLE)' if nodes else '1'} WHEN ends_with({c}, 'c') THEN {f'try_cast({cpus} AS DOUBLE)' if cpus else '1'} ELSE 1 END"
        out.append(f"try_cast(regexp_extract({c}, '{p}', 1) AS DOUBLE) * {unit.format(c=c, p=p)} * {times}")
    return f"coalesce({', '.join(out)})" if out else None


def elapsed_sql(column: str) -> str:
    """Seconds of [days-]hours:minutes:seconds[.fraction] or minutes:seconds."""
    p = "^(?:([0-9]+)-)?(?:([0-9]+):)?([0-9]+):([0-9.]+)$"
    part = [
        f"coalesce(try_cast(nullif(regexp_extract({column}, '{p}', {i}), '') AS DOUBLE), 0)"
        for i in (1, 2, 3, 4)
    ]
    return f"CASE WHEN regexp_matches({column}, '{p}') THEN {part[0]} * 86400 + {part[1]} * 3600 + {part[2]} * 60 + {part[3]} END"


def hosts_sql(store: Store, source: str, column: str) -> str:
    """The expanded list of hosts of each row, by a table of the different lists."""
    lists = store.query(f"SELECT DISTINCT {column} FROM {source} WHERE NOT {missing(column)}")
    table = store.fresh("hosts")
    store.con.execute(f"CREATE TABLE {table} (list VARCHAR, hosts VARCHAR[])")
    rows = [(r[0], list(expand_hosts(r[0]))) for r in lists if r[0] != "None assigned"]
    if rows:
        import pyarrow as pa

        arrow = pa.table(
            {
                "list": pa.array([r[0] for r in rows]),
                "hosts": pa.array([r[1] for r in rows], pa.list_(pa.string())),
            }
        )
        store.con.register("hosts_arrow", arrow)
        store.con.execute(f"INSERT INTO {table} SELECT * FROM hosts_arrow")
        store.con.unregister("hosts_arrow")
    return f"(SELECT any_value(hosts) FROM {table} h WHERE h.list = {column})"


def expand_hosts(text: str) -> Iterator[str]:
    """The names of a host list: gpu[01-03,07],login -> gpu01 gpu02 gpu03 gpu07 login (hostlist(5))."""
    for piece in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        yield from expand_one(piece)


def expand_one(piece: str) -> Iterator[str]:
    """The names of one element of a host list, with any number of brackets."""
    m = re.search(r"\[([^\]]*)\]", piece)
    if not m:
        yield piece
        return
    for part in m[1].split(","):
        low, dash, high = part.partition("-")
        if dash and low.isdigit() and high.isdigit() and int(high) - int(low) < 1_000_000:
            names = [str(i).zfill(len(low)) for i in range(int(low), int(high) + 1)]
        else:
            names = [part]
        for n in names:
            yield from expand_one(piece[: m.start()] + n + piece[m.end() :])
