"""Any delimited table of jobs: column names by mapping or by the names that people give them.

Acme, Helios, gpu-2023 pods and every table with a mapping go through here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from ...errors import InputError, UsageError
from ...samples.schema import TYPES
from ...samples.tables import Note
from ..store import Store
from .base import Head, ReadOptions
from .delimited import (
    Delimited,
    collect_rejects,
    instant,
    number,
    read_delimited,
    text,
    zoneless,
)
from .staging import Draft, stage

KEYS: Mapping[str, tuple[str, str]] = {
    "job": ("job_id", "text"),
    "job_id": ("job_id", "text"),
    "cluster": ("cluster", "text"),
    "user": ("user", "text"),
    "team": ("team", "text"),
    "name": ("name", "text"),
    "type": ("type", "type"),
    "state": ("state", "state"),
    "reason": ("reason", "text"),
    "submit": ("submit_utc", "time"),
    "start": ("start_utc", "time"),
    "end": ("end_utc", "time"),
    "stop": ("stop_utc", "time"),
    "queue": ("queue_s", "queue"),
    "duration": ("duration_s", "duration"),
    "nodes": ("node_num", "integer"),
    "gpus": ("gpu_num", "number"),
    "cpus": ("cpu_num", "number"),
    "mem_gib": ("mem_gib", "number"),
    "exit_code": ("exit_code", "integer"),
    "partition": ("partition", "text"),
    "node_list": ("nodes", "list"),
}
"""The keys of `--map KEY=COLUMN`: the schema column that each fills, and how its text is read. The names of the
schema's own columns may be used as keys too."""

SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "job_id": ("job_id", "jobid", "job", "id", "uid", "app_id", "task_id"),
    "cluster": ("cluster", "cluster_name"),
    "user": ("user", "user_id", "username", "owner", "uid_name"),
    "team": ("team", "vc", "account", "group", "project", "namespace", "queue_name", "org"),
    "name": ("name", "job_name", "jobname"),
    "type": ("type", "job_type", "workload", "workload_type", "category"),
    "state": ("state", "status", "final_state", "final_status", "job_state", "pod_phase", "phase"),
    "reason": ("reason", "failure_reason"),
    "submit": ("submit_time", "submit_utc", "submitted_time", "submit", "submission_time", "created", "creation_time",
               "create_time", "queued_at", "submitted_at", "timestamp"),
    "start": ("start_time", "start_utc", "start", "started", "started_at", "scheduled_time", "begin", "begin_time"),
    "end": ("end_time", "end_utc", "end", "finish_time", "finished", "finished_at", "completion_time", "deletion_time"),
    "stop": ("stop_utc",),
    "queue": ("queue_s", "queue", "queue_time", "wait_time", "wait", "queue_delay"),
    "duration": ("duration_s", "duration", "run_time", "runtime", "elapsed", "elapsed_s", "elapsedraw", "duration_sec"),
    "nodes": ("node_num", "num_nodes", "nnodes", "n_nodes"),
    "gpus": ("gpu_num", "gpus", "num_gpus", "num_gpu", "n_gpus", "gpu_count", "ngpus", "gpu"),
    "cpus": ("cpu_num", "cpus", "num_cpus", "num_cpu", "n_cpus", "ncpus", "cpu"),
    "exit_code": ("exit_code", "exitcode"),
    "partition": ("partition", "gpu_type", "gpu_spec", "gpu_model", "queue_partition"),
    "node_list": ("node_list", "nodelist"),
}  # fmt: skip
"""The column names under which tables usually carry what the keys mean."""

TYPE_WORDS: Mapping[str, str] = {
    "pretrain": "Pretrain", "pretraining": "Pretrain", "train": "Pretrain", "training": "Pretrain",
    "sft": "SFT", "finetune": "SFT", "fine-tune": "SFT", "finetuning": "SFT", "rlhf": "SFT", "alignment": "SFT",
    "mllm": "MLLM", "multimodal": "MLLM", "eval": "Eval", "evaluation": "Eval", "benchmark": "Eval",
    "debug": "Debug", "debugging": "Debug", "interactive": "Debug", "other": "Other", "cpu": "CPU",
}  # fmt: skip


class TableReader:
    """Reads any delimited table, by mapping or by usual names."""

    name = "table"
    title = "any delimited table (--map key=column)"

    def score(self, head: Head) -> int:
        """Sure of nothing, possible where a time and something else of a job are there."""
        if not head.columns or head.is_json:
            return 0
        have = set(guess(head.columns))
        if not have & {"submit", "start", "end"} or len(have) < 3:
            return 5
        return 20 + min(len(have), 10)

    def read(self, store: Store, head: Head, options: ReadOptions) -> None:
        """Reads with the user's mapping over what the names suggest."""
        mapping = {**guess(head.columns), **check_mapping(options.mapping, head)}
        if options.mapping or mapping:
            store.note(
                Note(
                    "assumption",
                    "columns taken as: " + ", ".join(f"{k} = {v}" for k, v in mapping.items()),
                    source=head.path.name,
                )
            )
        unused = [c for c in head.columns if c not in mapping.values()]
        if unused:
            store.note(Note("info", "columns not used: " + ", ".join(unused[:20]), source=head.path.name))
        read_mapped(store, head, options, mapping)


def guess(columns: tuple[str, ...]) -> dict[str, str]:
    """Key -> column, where a column has a usual name; one column serves one key."""
    lower = {c.lower().replace(" ", "_"): c for c in reversed(columns)}
    found: dict[str, str] = {}
    for key, names in SYNONYMS.items():
        for n in names:
            if n in lower and lower[n] not in found.values():
                found[key] = lower[n]
                break
    return found


def check_mapping(mapping: Mapping[str, str], head: Head) -> dict[str, str]:
    """The user's mapping, its keys known and its columns in the file; raises UsageError otherwise."""
    lower = {c.lower(): c for c in head.columns}
    by_schema = {schema: key for key, (schema, _) in KEYS.items() if key != "job"}
    out = {}
    for key, column in mapping.items():
        k = by_schema.get(key, key)
        k = "job_id" if k == "job" else k
        if k not in KEYS:
            near = difflib.get_close_matches(key, KEYS, 1)
            raise UsageError(
                f"--map knows no '{key}'",
                hint=f"Did you mean '{near[0]}'?" if near else f"Keys: {', '.join(KEYS)}",
            )
        if column.lower() not in lower:
            near = difflib.get_close_matches(column, head.columns, 1)
            raise UsageError(
                f"the file has no column '{column}'",
                where=str(head.path),
                hint=f"Did you mean '{near[0]}'?" if near else f"Its columns: {', '.join(head.columns[:30])}",
            )
        out[k] = lower[column.lower()]
    return out


def read_mapped(
    store: Store,
    head: Head,
    options: ReadOptions,
    mapping: Mapping[str, str],
    *,
    overrides: Mapping[str, str] | None = None,
    duration_is_end_minus_submit: bool = False,
    state_extra: Mapping[str, str] | None = None,
    default_cluster: str | None = None,
) -> None:
    """Stages a delimited file by a mapping key -> column; `overrides` are schema column -> SQL over the file."""
    keys = set(mapping)
    if not keys & {"submit", "start", "end", "duration"}:
        raise InputError(
            "no column of the file is a time or a duration",
            where=str(head.path),
            hint="Name them: --map submit=COLUMN,start=COLUMN,end=COLUMN,gpus=COLUMN,state=COLUMN",
        )
    table = read_delimited(store, head, head.columns, header=not options.fields)
    draft = mapped_draft(table, mapping, head, options, overrides or {}, state_extra or {}, default_cluster)
    if duration_is_end_minus_submit and draft.duration_s and "end" in keys and "submit" in keys:
        note_end_minus_submit(store, draft, head, options)
        reads = [r for r in draft.reads if r[2] != "_duration"]
        draft = Draft(**{**draft.__dict__, "duration_s": None, "reads": reads})
    for key, what in (("state", "final state"), ("gpus", "number of GPUs"), ("user", "user")):
        if key not in keys and KEYS[key][0] not in (overrides or {}):
            store.note(Note("missing", f"no column gives the {what}", source=head.path.name))
    if "submit" not in keys and "queue" not in keys:
        store.note(
            Note("missing", "no column gives the time of submission: no queue times", source=head.path.name)
        )
    stage(store, draft, head.path.name, options.zone)
    collect_rejects(store, table, head.path.name)


def mapped_draft(
    table: Delimited,
    mapping: Mapping[str, str],
    head: Head,
    options: ReadOptions,
    overrides: Mapping[str, str],
    state_extra: Mapping[str, str],
    default_cluster: str | None,
) -> Draft:
    """The draft of a mapped file."""
    from ..store import name as sql_name

    columns: dict[str, str] = {}
    state = queue = duration = None
    times: list[str] = []
    reads: list[tuple[str, str, str]] = []
    for key, column in mapping.items():
        schema, kind = KEYS[key]
        c = sql_name(column)
        match kind:
            case "text":
                columns[schema] = text(c)
            case "type":
                columns[schema] = type_sql(c)
            case "time":
                columns[schema] = instant(c)
                reads.append((f"no time: {column}", c, schema))
                times.append(c)
            case "number":
                columns[schema] = number(c)
                reads.append((f"no number: {column}", c, schema))
            case "integer":
                columns[schema] = f"CAST(round({number(c)}) AS INTEGER)"
                reads.append((f"no number: {column}", c, schema))
            case "list":
                columns[schema] = f"string_split_regex({text(c)}, '[,; ]+')"
            case "state":
                state = text(c)
            case "queue":
                queue = number(c)
                reads.append((f"no number: {column}", c, "_queue"))
            case "duration":
                duration = number(c)
                reads.append((f"no number: {column}", c, "_duration"))
    columns.update(overrides)
    if options.cluster:
        columns["cluster"] = "'" + options.cluster.replace("'", "''") + "'"
    elif "cluster" not in columns:
        guess_name = default_cluster or cluster_from(head.path)
        columns["cluster"] = "'" + guess_name.replace("'", "''") + "'"
    mixed = " OR ".join(zoneless(t) for t in times) if times else None
    return Draft(
        table.source,
        columns,
        state,
        queue,
        duration,
        reads=reads,
        text=table.whole(),
        zone_missing=mixed,
        state_extra=state_extra,
    )


def type_sql(column: str) -> str:
    """A workload type from text: the study's names in any case, common synonyms, else as it is written."""
    cases = " ".join(f"WHEN '{k}' THEN '{v}'" for k, v in TYPE_WORDS.items())
    plain = ", ".join(f"'{t}'" for t in TYPES)
    return (
        f"CASE WHEN {column} IN ({plain}) THEN {column} WHEN {column} IS NULL THEN NULL "
        f"ELSE CASE lower(trim({column})) {cases} ELSE trim({column}) END END"
    )


def cluster_from(path: Path) -> str:
    """A cluster's name from a file's name: trace_seren.csv -> Seren."""
    stem = path.name.split(".")[0]
    for prefix in ("trace_", "jobs_", "sacct_"):
        stem = stem.removeprefix(prefix)
    if stem in ("cluster_log", "cluster_job_log", "jobs", "trace"):
        stem = path.resolve().parent.name
    return stem[:1].upper() + stem[1:] if stem.islower() else stem


def note_end_minus_submit(store: Store, draft: Draft, head: Head, options: ReadOptions) -> None:
    """Counts how many rows carry end minus submit as their duration, and says what is used instead."""
    from ..store import literal

    store.con.execute(f"SET TimeZone = {literal(options.zone)}")
    c = draft.columns
    n, of = store.one(
        f"SELECT count(*) FILTER (abs(d - date_diff('second', s, e)) <= 2 AND abs(d - date_diff('second', b, e)) > 2), "
        f"count(d) FROM (SELECT {draft.duration_s} AS d, {c['submit_utc']} AS s, "
        f"{c.get('start_utc', 'NULL')} AS b, {c['end_utc']} AS e FROM {draft.source})"
    )
    store.con.execute("SET TimeZone = 'UTC'")
    store.note(
        Note(
            "difference",
            "the file's duration column is end minus submit (it contains the queue), although its description says "
            "end minus start: end minus start is used here, the published figures used the column",
            int(n),
            int(of),
            head.path.name,
        )
    )
