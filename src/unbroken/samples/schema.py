"""The one schema of `unbroken trace` and `unbroken telemetry`: jobs, nodes, samples, incidents.

Every reader yields these tables and every statistic takes them. They live in Parquet or in DuckDB. Times are
timestamps in UTC with microseconds and end in `_utc`; other quantities carry their unit at the end of their
name (`_s`, `_gib`, `_pct`, `_w`). NULL means "the source does not say", never zero.

Samples are narrow: one row a reading. A metric that we do not know is legal; a known one has the unit that
`METRICS` gives. Files are written sorted by metric, node, gpu, time where that is cheap: a statistic then reads
the row groups of its metric alone.

Version 1. A column is only ever added (as nullable, at the end); a changed meaning gets a new name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VERSION = 1
"""Written into the Parquet metadata under `METADATA_KEY`; readers refuse a higher one."""

METADATA_KEY = "unbroken.trace.schema"

REJECTED_FILE = "set_aside.csv"
"""What `convert` writes beside the tables: rows that no table holds. Passed over where the folder is read."""


@dataclass(frozen=True)
class Column:
    """A column of a table: `type` is DuckDB's name, `meaning` one sentence, `required` that NULL is an error."""

    name: str
    type: str
    meaning: str
    required: bool = False


@dataclass(frozen=True)
class Table:
    """A table of the schema, its columns in the order of the files."""

    name: str
    meaning: str
    columns: tuple[Column, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The column names, in order."""
        return tuple(c.name for c in self.columns)

    def column(self, name: str) -> Column:
        """The column of that name; KeyError if there is none."""
        for c in self.columns:
            if c.name == name:
                return c
        raise KeyError(name)

    def arrow(self) -> Any:
        """The table as a `pyarrow.Schema`, with the version in its metadata. Imports pyarrow."""
        import pyarrow as pa

        types: dict[str, Any] = {
            "VARCHAR": pa.string(),
            "TIMESTAMP": pa.timestamp("us"),
            "DOUBLE": pa.float64(),
            "FLOAT": pa.float32(),
            "BIGINT": pa.int64(),
            "INTEGER": pa.int32(),
            "SMALLINT": pa.int16(),
            "VARCHAR[]": pa.list_(pa.string()),
        }
        fields = [pa.field(c.name, types[c.type]) for c in self.columns]
        return pa.schema(fields, metadata={METADATA_KEY: f"{self.name} {VERSION}"})


JOBS = Table(
    "jobs",
    "One row for each job that was submitted, whatever became of it.",
    (
        Column("job_id", "VARCHAR", "The scheduler's id; unique within a cluster.", required=True),
        Column("cluster", "VARCHAR", "The cluster's name."),
        Column("user", "VARCHAR", "Who submitted it."),
        Column("team", "VARCHAR", "Account, virtual cluster, namespace or group that pays for it."),
        Column("name", "VARCHAR", "The job's name as its owner gave it."),
        Column("type", "VARCHAR", "Workload type, one of TYPES; NULL until it is inferred."),
        Column("state", "VARCHAR", "Final state, one of STATES."),
        Column("state_raw", "VARCHAR", "The state in the source's own words."),
        Column("reason", "VARCHAR", "Failure reason (one of the 29, Hang, LossSpike, Unknown) where known."),
        Column("submit_utc", "TIMESTAMP", "When it entered the queue."),
        Column("start_utc", "TIMESTAMP", "When it first had its resources."),
        Column("end_utc", "TIMESTAMP", "When it gave them back."),
        Column("queue_s", "DOUBLE", "Seconds from submit to start."),
        Column("duration_s", "DOUBLE", "Seconds from start to end."),
        Column("node_num", "INTEGER", "Nodes it held."),
        Column("gpu_num", "DOUBLE", "GPUs it held; fractions where GPUs are shared; 0 for a CPU job."),
        Column("cpu_num", "DOUBLE", "CPU cores it held, over all nodes."),
        Column("mem_gib", "DOUBLE", "Host memory it asked for, over all nodes."),
        Column("exit_code", "INTEGER", "Exit code, where the source gives one."),
        Column("exit_signal", "INTEGER", "Signal that ended it, where the source gives one."),
        Column("nodes", "VARCHAR[]", "Names of the nodes it ran on."),
        Column("partition", "VARCHAR", "Partition, queue or GPU type it asked for."),
        Column("stop_utc", "TIMESTAMP", "When it last did work, if it stalled before its end (idle tail)."),
        Column("source", "VARCHAR", "File that the row came from."),
    ),
)

NODES = Table(
    "nodes",
    "One row for each node.",
    (
        Column("node", "VARCHAR", "The node's name.", required=True),
        Column("cluster", "VARCHAR", "The cluster's name."),
        Column("gpu_num", "INTEGER", "GPUs in the node."),
        Column("gpu_model", "VARCHAR", "What GPUs they are."),
        Column("cpu_num", "INTEGER", "CPU cores."),
        Column("mem_gib", "DOUBLE", "Host memory."),
        Column("driver", "VARCHAR", "Version of the GPU driver."),
        Column("kernel", "VARCHAR", "Version of the operating system's kernel."),
        Column("first_utc", "TIMESTAMP", "When it was first seen."),
        Column("last_utc", "TIMESTAMP", "When it was last seen."),
    ),
)

SAMPLES = Table(
    "samples",
    "One row for each reading of a metric: narrow, so that any source fits.",
    (
        Column("time_utc", "TIMESTAMP", "When it was read.", required=True),
        Column("cluster", "VARCHAR", "The cluster's name."),
        Column("node", "VARCHAR", "The node's name (address, where the source has only that)."),
        Column("gpu", "SMALLINT", "Index of the GPU in the node; NULL for the host, a NIC, a disk."),
        Column("device", "VARCHAR", "NIC, disk, NVLink, power supply or mode it belongs to; else NULL."),
        Column("metric", "VARCHAR", "What was read: a key of METRICS, or any other name.", required=True),
        Column("value", "DOUBLE", "The reading, in the metric's unit."),
    ),
)

INCIDENTS = Table(
    "incidents",
    "One row for each interruption, from `unbroken run`, `unbroken diagnose` or a node's fault log.",
    (
        Column("incident_id", "VARCHAR", "Unique within its source.", required=True),
        Column("cluster", "VARCHAR", "The cluster's name."),
        Column("job_id", "VARCHAR", "The job or run it interrupted, where known."),
        Column("node", "VARCHAR", "The faulty node, where known."),
        Column("gpu", "SMALLINT", "The faulty GPU's index in the node, where known."),
        Column("time_utc", "TIMESTAMP", "When it happened."),
        Column("outcome", "VARCHAR", "The verdict's outcome: failed, hung, loss_spike, ..."),
        Column("category", "VARCHAR", "Infrastructure, Framework or Script."),
        Column(
            "reason", "VARCHAR", "One of the 29 reasons, Hang, LossSpike, Unknown, or the source's own word."
        ),
        Column("gpu_num", "DOUBLE", "GPUs of the job that it interrupted."),
        Column("to_failure_s", "DOUBLE", "Seconds from the (re)start of the job to the failure."),
        Column("lost_s", "DOUBLE", "Seconds of wall time that it cost: work done again and restart."),
        Column("action", "VARCHAR", "What was done: restart, restart_elsewhere, rollback_skip, stop, none."),
        Column("source", "VARCHAR", "File that the row came from."),
    ),
)

TABLES: Mapping[str, Table] = {t.name: t for t in (JOBS, NODES, SAMPLES, INCIDENTS)}

STATES = ("COMPLETED", "CANCELLED", "FAILED", "RUNNING", "PENDING", "UNKNOWN")
"""Final states. TIMEOUT, NODE_FAIL, OUT_OF_MEMORY, PREEMPTED and BOOT_FAIL count as FAILED, as in the study;
`jobs.state_raw` keeps the source's word."""


TYPES = ("Pretrain", "SFT", "MLLM", "Eval", "Debug", "Other", "CPU")
"""Workload types of the study, and CPU for jobs without a GPU."""

METRICS: Mapping[str, str] = {
    # GPU. "util" is NVML's: the share of time with any kernel running; "active" is the counters' own.
    "gpu_util_pct": "GPU busy: share of time with any kernel running, percent",
    "sm_active_pct": "SM activity: share of SM-cycles with a warp resident, percent",
    "sm_occupancy_pct": "resident warps over the maximum, percent",
    "tensor_active_pct": "tensor-core pipe activity, percent",
    "dram_active_pct": "device memory bandwidth used, percent",
    "fp64_active_pct": "FP64 pipe activity, percent",
    "fp32_active_pct": "FP32 pipe activity, percent",
    "fp16_active_pct": "FP16 pipe activity, percent",
    "gpu_mem_used_pct": "device memory used, percent of all",
    "gpu_mem_used_gib": "device memory used, GiB",
    "gpu_power_w": "GPU board power, watts",
    "gpu_energy_j": "energy counter since the driver was loaded, joules (monotonic)",
    "gpu_temp_c": "GPU core temperature, Celsius",
    "gpu_mem_temp_c": "device memory temperature, Celsius",
    "sm_clock_mhz": "SM clock, MHz",
    "mem_clock_mhz": "memory clock, MHz",
    "throttle_reasons": "NVML's bit mask of clock event reasons",
    "nvlink_tx_bytes_per_s": "bytes sent over NVLink, per second",
    "nvlink_rx_bytes_per_s": "bytes received over NVLink, per second",
    "pcie_tx_bytes_per_s": "bytes sent over PCIe, per second",
    "pcie_rx_bytes_per_s": "bytes received over PCIe, per second",
    "ecc_corrected_total": "corrected memory errors since the driver was loaded (monotonic)",
    "ecc_uncorrected_total": "uncorrected memory errors since the driver was loaded (monotonic)",
    "remapped_rows_total": "rows remapped for errors (monotonic)",
    "nvlink_recoveries_total": "NVLinks trained again since the driver was loaded (monotonic)",
    "nvlink_replays_total": "packets that NVLinks sent again, repaired by the link (monotonic)",
    "nvlink_crc_errors_total": "packets with a wrong checksum on NVLinks, repaired by the link (monotonic)",
    "xid": "an XID event; the value is its number, one row an event",
    # Host.
    "host_cpu_util_pct": "CPU time not idle, percent of all cores",
    "host_mem_used_pct": "host memory not available, percent of all",
    "host_mem_used_gib": "host memory not available, GiB",
    "host_load1": "load average over one minute",
    "nic_tx_bytes_per_s": "bytes sent by a NIC (device), per second",
    "nic_rx_bytes_per_s": "bytes received by a NIC (device), per second",
    "ib_tx_bytes_per_s": "bytes sent by an InfiniBand port (device), per second",
    "ib_rx_bytes_per_s": "bytes received by an InfiniBand port (device), per second",
    "disk_read_bytes_per_s": "bytes read from a disk (device), per second",
    "disk_write_bytes_per_s": "bytes written to a disk (device), per second",
    # Server power, from IPMI or its like.
    "node_power_w": "power of the whole server, watts",
    "cpu_power_w": "power of all CPUs of the server, watts",
    "gpus_power_w": "power of all GPUs of the server, watts",
    "mem_power_w": "power of the server's memory, watts",
    "fan_power_w": "power of the server's fans, watts",
    "psu_loss_w": "power lost in the power supplies, watts",
    "inlet_temp_c": "air temperature at the server's inlet, Celsius",
}
"""Known metrics and their meaning; the unit is the end of the name."""
