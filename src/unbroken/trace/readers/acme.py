"""The released traces of Acme (Seren and Kalos), and Helios, whose columns are the same with a virtual cluster.

In Kalos the released `duration` is end minus submit, in Seren end minus start, although the schema of both says
end minus start; here it is always end minus start, and the difference is counted and said. `stop_time` of a
cancelled Kalos job and `fail_time` of a failed one are the end seen from inside.
"""

from __future__ import annotations

from ..store import Store
from .base import Head, ReadOptions
from .table import cluster_from, read_mapped

COMMON = {
    "job_id": "job_id",
    "user": "user",
    "nodes": "node_num",
    "gpus": "gpu_num",
    "cpus": "cpu_num",
    "type": "type",
    "state": "state",
    "submit": "submit_time",
    "start": "start_time",
    "end": "end_time",
    "duration": "duration",
    "queue": "queue",
}


class AcmeReader:
    """Reads trace_seren.csv and trace_kalos.csv."""

    name = "acme"
    title = "Acme: trace_seren.csv, trace_kalos.csv"

    def score(self, head: Head) -> int:
        """Sure where the columns are the released ones."""
        need = {"job_id", "gpu_num", "type", "state", "submit_time", "start_time", "end_time", "gpu_time"}
        return 95 if need <= head.lower else 0

    def read(self, store: Store, head: Head, options: ReadOptions) -> None:
        """Adds the jobs."""
        kalos = {"fail_time", "stop_time"} <= head.lower or "mem_per_pod_gb" in head.lower
        mapping = {k: c for k, c in COMMON.items() if c in head.lower}
        overrides = {}
        if "mem_per_pod_gb" in head.lower:
            overrides["mem_gib"] = 'try_cast("mem_per_pod_GB" AS DOUBLE) * try_cast(node_num AS DOUBLE)'
        read_mapped(
            store,
            head,
            options,
            mapping,
            overrides=overrides,
            duration_is_end_minus_submit=kalos,
            default_cluster="Kalos" if kalos else cluster_from(head.path),
        )


class HeliosReader:
    """Reads Helios' cluster_log.csv."""

    name = "helios"
    title = "Helios: cluster_log.csv"

    def score(self, head: Head) -> int:
        """Sure where the columns are the released ones."""
        need = {
            "job_id",
            "vc",
            "gpu_num",
            "state",
            "submit_time",
            "start_time",
            "end_time",
            "duration",
            "queue",
        }
        return 95 if need <= head.lower else 0

    def read(self, store: Store, head: Head, options: ReadOptions) -> None:
        """Adds the jobs; the folder's name (Venus, Earth, ...) is the cluster's."""
        mapping = {k: c for k, c in COMMON.items() if c in head.lower} | {"team": "vc"}
        read_mapped(store, head, options, mapping, default_cluster=cluster_from(head.path))
