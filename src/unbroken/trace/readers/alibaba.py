"""Alibaba's traces: PAI (cluster-trace-gpu-v2020, three tables) and the pods of cluster-trace-gpu-v2023."""

from __future__ import annotations

from pathlib import Path

from ...errors import InputError
from ...samples.tables import Note
from ..store import Store, literal
from .base import Head, ReadOptions, peek
from .delimited import collect_rejects, read_delimited
from .staging import Draft, stage
from .table import read_mapped

JOB = ("job_name", "inst_id", "user", "status", "start_time", "end_time")
TASK = ("job_name", "task_name", "inst_num", "status", "start_time", "end_time", "plan_cpu", "plan_mem", "plan_gpu",
        "gpu_type")  # fmt: skip


class PaiReader:
    """Reads pai_job_table.csv together with pai_task_table.csv beside it."""

    name = "pai"
    title = "Alibaba PAI: pai_job_table.csv with pai_task_table.csv beside it"

    def score(self, head: Head) -> int:
        """Sure by the file's name or, where there is a header, by the columns."""
        if head.path.name.startswith("pai_job_table") or set(JOB) <= head.lower:
            return 90
        return 0

    def read(self, store: Store, head: Head, options: ReadOptions) -> None:
        """Adds one row a job: GPUs and cores summed over its tasks, start when its first task starts."""
        tasks = beside(head.path, "pai_task_table")
        if tasks is None:
            raise InputError(
                "pai_task_table.csv, which holds the GPUs of the jobs, is not beside the job table",
                where=str(head.path),
                hint="Put both files into one folder",
            )
        job_head, task_head = peek(head.path), peek(tasks)
        job = read_delimited(store, job_head, JOB, header=set(JOB) <= job_head.lower)
        task = read_delimited(store, task_head, TASK, header=set(TASK) <= task_head.lower)
        agg = store.fresh("pai_tasks")
        store.con.execute(
            f"""CREATE TABLE {agg} AS SELECT job_name AS task_job,
                min(try_cast(start_time AS DOUBLE)) AS first_start,
                sum(try_cast(inst_num AS DOUBLE) * coalesce(try_cast(plan_gpu AS DOUBLE), 0)) / 100 AS gpus,
                sum(try_cast(inst_num AS DOUBLE) * coalesce(try_cast(plan_cpu AS DOUBLE), 0)) / 100 AS cpus,
                sum(try_cast(inst_num AS DOUBLE) * coalesce(try_cast(plan_mem AS DOUBLE), 0)) AS mem,
                any_value(gpu_type) AS gpu_type, string_agg(DISTINCT task_name, '+') AS roles
            FROM {task.source} GROUP BY job_name"""
        )

        def second(column: str) -> str:
            return f"make_timestamp(CAST({column} * 1e6 AS BIGINT))"

        begin, end = "try_cast(start_time AS DOUBLE)", "try_cast(end_time AS DOUBLE)"
        draft = Draft(
            source=f"(SELECT * FROM {job.source} LEFT JOIN {agg} ON job_name = task_job)",
            columns={
                "job_id": "inst_id",
                "cluster": literal(options.cluster or "PAI"),
                "user": '"user"',
                "name": "roles",
                "submit_utc": second(begin),
                "start_utc": second("first_start"),
                "end_utc": second(end),
                "gpu_num": "gpus",
                "cpu_num": "cpus",
                "mem_gib": "mem",
                "partition": "gpu_type",
            },
            state_word="status",
            checks=(
                ("no time: start_time", f"start_time IS NOT NULL AND {begin} IS NULL"),
                ("no time: end_time", f"end_time IS NOT NULL AND {end} IS NULL"),
            ),
            text=job.whole(),
            state_extra={"TERMINATED": "COMPLETED"},
        )
        stage(store, draft, head.path.name)
        collect_rejects(store, job, head.path.name)
        collect_rejects(store, task, tasks.name)
        store.note(
            Note(
                "assumption",
                "PAI's times are seconds from a hidden day: hours and weekdays are true in UTC+8, dates are not",
                source=head.path.name,
            )
        )


class PodsReader:
    """Reads openb_pod_list_*.csv."""

    name = "gpu2023"
    title = "Alibaba gpu-2023: openb_pod_list_*.csv"

    def score(self, head: Head) -> int:
        """Sure where the columns are the released ones."""
        need = {"name", "cpu_milli", "num_gpu", "gpu_milli", "pod_phase", "creation_time", "deletion_time"}
        return 95 if need <= head.lower else 0

    def read(self, store: Store, head: Head, options: ReadOptions) -> None:
        """Adds one row a pod; a pod with one GPU may hold a thousandth of it and up."""
        mapping = {
            "job_id": "name",
            "state": "pod_phase",
            "submit": "creation_time",
            "start": "scheduled_time",
            "end": "deletion_time",
            "partition": "gpu_spec",
            "team": "qos",
        }
        overrides = {
            "gpu_num": "try_cast(num_gpu AS DOUBLE) * coalesce(try_cast(gpu_milli AS DOUBLE), 1000) / 1000",
            "cpu_num": "try_cast(cpu_milli AS DOUBLE) / 1000",
            "mem_gib": "try_cast(memory_mib AS DOUBLE) / 1024",
        }
        mapping = {k: v for k, v in mapping.items() if v in head.lower}
        read_mapped(
            store,
            head,
            options,
            mapping,
            overrides=overrides,
            # the released pods were deleted at deletion_time, whatever phase was last seen
            state_extra={"RUNNING": "UNKNOWN"},
            default_cluster="gpu-2023",
        )
        store.note(
            Note(
                "assumption",
                "a pod that was last seen Running and has a deletion time ended then, its final state unknown",
                source=head.path.name,
            )
        )


def beside(path: Path, stem: str) -> Path | None:
    """The file of that stem in the same folder."""
    for p in sorted(path.parent.glob(f"{stem}*.csv*")):
        return p
    return None
