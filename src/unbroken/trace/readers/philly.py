"""Philly's cluster_job_log: JSON, a list of scheduling attempts for each job."""

from __future__ import annotations

from ...samples.tables import Note
from ..store import Store, literal
from .base import Head, ReadOptions
from .delimited import instant
from .staging import Draft, stage


class PhillyReader:
    """Reads cluster_job_log."""

    name = "philly"
    title = "Philly: cluster_job_log (JSON)"

    def score(self, head: Head) -> int:
        """Sure where its keys are seen."""
        if head.is_json and '"attempts"' in head.text and '"jobid"' in head.text and '"vc"' in head.text:
            return 95
        return 0

    def read(self, store: Store, head: Head, options: ReadOptions) -> None:
        """Adds one row a job: from the start of its first attempt, the time of all its attempts together."""
        kind = "STRUCT(start_time VARCHAR, end_time VARCHAR, detail STRUCT(ip VARCHAR, gpus VARCHAR[])[])[]"
        raw = (
            f"(SELECT *, list_transform(attempts, lambda a: {span('a')}) AS spans, "
            "list_transform(attempts, lambda a: coalesce(list_sum(list_transform(a.detail, lambda d: len(d.gpus))), 0)) "
            "AS gpus "
            f"FROM read_json({literal(str(head.path))}, maximum_object_size=67108864, columns={{status: 'VARCHAR', "
            f"vc: 'VARCHAR', jobid: 'VARCHAR', attempts: '{kind}', submitted_time: 'VARCHAR', user: 'VARCHAR'}}))"
        )

        def clean(column: str) -> str:
            return (
                f"CASE WHEN {column} IS NULL OR {column} IN ('None', '') THEN NULL ELSE {instant(column)} END"
            )

        last = "attempts[len(attempts)]"
        draft = Draft(
            source=raw,
            columns={
                "job_id": "jobid",
                "cluster": literal(options.cluster or "Philly"),
                "user": '"user"',
                "team": "vc",
                "submit_utc": clean("submitted_time"),
                "start_utc": clean("attempts[1].start_time"),
                "end_utc": clean(f"{last}.end_time"),
                "node_num": f"CAST(len({last}.detail) AS INTEGER)",
                "gpu_num": "CAST(list_max(gpus) AS DOUBLE)",
                "nodes": f"list_transform({last}.detail, lambda d: d.ip)",
            },
            state_word=f"CASE WHEN len(attempts) > 0 AND ({last}.end_time IS NULL OR {last}.end_time = 'None') "
            "THEN 'RUNNING' ELSE status END",
            checks=(
                (
                    "no time: submitted_time",
                    f"submitted_time IS NOT NULL AND {clean('submitted_time')} IS NULL",
                ),
            ),
            text="concat_ws('|', jobid, status, submitted_time, CAST(attempts AS VARCHAR))",
        )
        stage(store, draft, head.path.name, options.zone)
        many = store.one(f"SELECT count(*) FILTER (len(attempts) > 1), count(*) FROM {raw}")
        store.note(
            Note(
                "assumption",
                "jobs with several attempts: one row, from the first start to the last end",
                int(many[0]),
                int(many[1]),
                head.path.name,
            )
        )
        if options.zone == "UTC":
            store.note(
                Note(
                    "assumption",
                    "Philly's job log gives no time zone: taken as UTC (hours of the day may be shifted; set "
                    "--timezone America/Los_Angeles for local time)",
                    source=head.path.name,
                )
            )


def span(attempt: str) -> str:
    """Seconds of one attempt."""
    return f"date_diff('second', try_cast({attempt}.start_time AS TIMESTAMP), try_cast({attempt}.end_time AS TIMESTAMP))"
