"""How others name what we measure: their metric, our metric, the factor into our unit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ReadingSource:
    """A file to read, and what it does not say itself."""

    path: Path
    cluster: str | None = None
    metric: str | None = None
    """Our metric, where the file names none."""
    gpu_memory_gib: float | None = None
    """Memory of a GPU, for shares of it."""
    memory: str = "1GiB"
    """Memory that the reading may take."""


DCGM: dict[str, tuple[str, float]] = {
    # dcgm-exporter's default counters; ratios are 0-1 there. Units from DCGM's field identifiers.
    "DCGM_FI_DEV_GPU_UTIL": ("gpu_util_pct", 1.0),
    "DCGM_FI_DEV_MEM_COPY_UTIL": ("gpu_mem_copy_util_pct", 1.0),
    "DCGM_FI_DEV_FB_USED": ("gpu_mem_used_gib", 1 / 1024),
    "DCGM_FI_DEV_FB_FREE": ("gpu_mem_free_gib", 1 / 1024),
    "DCGM_FI_DEV_POWER_USAGE": ("gpu_power_w", 1.0),
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": ("gpu_energy_j", 1e-3),
    "DCGM_FI_DEV_GPU_TEMP": ("gpu_temp_c", 1.0),
    "DCGM_FI_DEV_MEMORY_TEMP": ("gpu_mem_temp_c", 1.0),
    "DCGM_FI_DEV_SM_CLOCK": ("sm_clock_mhz", 1.0),
    "DCGM_FI_DEV_MEM_CLOCK": ("mem_clock_mhz", 1.0),
    "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": ("throttle_reasons", 1.0),
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": ("ecc_corrected_total", 1.0),
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": ("ecc_uncorrected_total", 1.0),
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": ("remapped_rows_corrected_total", 1.0),
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": ("remapped_rows_uncorrected_total", 1.0),
    "DCGM_FI_DEV_XID_ERRORS": ("xid", 1.0),
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": ("gpu_engine_active_pct", 100.0),
    "DCGM_FI_PROF_SM_ACTIVE": ("sm_active_pct", 100.0),
    "DCGM_FI_PROF_SM_OCCUPANCY": ("sm_occupancy_pct", 100.0),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": ("tensor_active_pct", 100.0),
    "DCGM_FI_PROF_PIPE_FP64_ACTIVE": ("fp64_active_pct", 100.0),
    "DCGM_FI_PROF_PIPE_FP32_ACTIVE": ("fp32_active_pct", 100.0),
    "DCGM_FI_PROF_PIPE_FP16_ACTIVE": ("fp16_active_pct", 100.0),
    "DCGM_FI_PROF_DRAM_ACTIVE": ("dram_active_pct", 100.0),
    "DCGM_FI_PROF_PCIE_TX_BYTES": ("pcie_tx_bytes_per_s", 1.0),
    "DCGM_FI_PROF_PCIE_RX_BYTES": ("pcie_rx_bytes_per_s", 1.0),
    "DCGM_FI_PROF_NVLINK_TX_BYTES": ("nvlink_tx_bytes_per_s", 1.0),
    "DCGM_FI_PROF_NVLINK_RX_BYTES": ("nvlink_rx_bytes_per_s", 1.0),
}

ACME: dict[str, tuple[str, float]] = {
    # The release's files are named so; its ratios were multiplied by 100 and rounded to 3 decimals before.
    "GPU_UTIL": ("gpu_util_pct", 1.0),
    "MEM_COPY_UTIL": ("gpu_mem_copy_util_pct", 1.0),
    "FB_USED": ("gpu_mem_used_gib", 1 / 1024),
    "FB_FREE": ("gpu_mem_free_gib", 1 / 1024),
    "POWER_USAGE": ("gpu_power_w", 1.0),
    "GPU_TEMP": ("gpu_temp_c", 1.0),
    "MEMORY_TEMP": ("gpu_mem_temp_c", 1.0),
    "MEM_CLOCK": ("mem_clock_mhz", 1.0),
    "SM_CLOCK": ("sm_clock_mhz", 1.0),
    "SM_ACTIVE": ("sm_active_pct", 1.0),
    "SM_OCCUPANCY": ("sm_occupancy_pct", 1.0),
    "PIPE_TENSOR_ACTIVE": ("tensor_active_pct", 1.0),
    "DRAM_ACTIVE": ("dram_active_pct", 1.0),
    "XID_ERRORS": ("xid", 1.0),
    "NODE_CPU_UTILIZATION": ("host_cpu_util_pct", 1.0),
    "NODE_MEMORY_UTILIZATION": ("host_mem_used_pct", 1.0),
    "NODE_IB_SEND": ("ib_tx_bytes_per_s", 1e6),
    "NODE_IB_RECEIVE": ("ib_rx_bytes_per_s", 1e6),
}

IPMI: dict[str, str] = {
    # Columns of power tables, lower case with underscores, as found in BMC exports and in the release.
    "sys_total_power": "node_power_w",
    "total_power": "node_power_w",
    "system_power": "node_power_w",
    "sys_power": "node_power_w",
    "pwr_consumption": "node_power_w",
    "power": "node_power_w",
    "cpu_power": "cpu_power_w",
    "cpu_total_power": "cpu_power_w",
    "gpu_power": "gpus_power_w",
    "gpu_total_power": "gpus_power_w",
    "mem_power": "mem_power_w",
    "memory_power": "mem_power_w",
    "fan_power": "fan_power_w",
    "fan_total_power": "fan_power_w",
    "psu_loss": "psu_loss_w",
    "inlet_temp": "inlet_temp_c",
    "inlet_temperature": "inlet_temp_c",
}

_PLACE = re.compile(
    r"(?P<node>\d{1,3}(?:\.\d{1,3}){3}|[A-Za-z][\w.]*(?:-[A-Za-z]+\d+)*?)"
    r"(?::\d{2,5})?(?:\.(?P<again>\d+))?(?:[-_/:](?:gpu|nvidia)?(?P<gpu>\d{1,2})|[-_/:](?P<device>[A-Za-z]\w*))?"
)


def place(name: str, per_gpu: bool) -> tuple[str, int | None, str | None, bool]:
    """(node, GPU, device, whether it is a repeated column) from the name of a column.

    `10.140.0.131-3` is a GPU, `10.140.0.131-mlx5_0` a port, `10.140.0.131.1` what pandas makes of a column that was
    there twice: for a metric of GPUs the second GPU of that server, else a repetition.
    """
    m = _PLACE.fullmatch(name.strip())
    if not m:
        return name.strip(), None, None, False
    gpu = int(m["gpu"]) if m["gpu"] else None
    if m["again"]:
        return (m["node"], int(m["again"]), None, False) if per_gpu else (m["node"], gpu, m["device"], True)
    return m["node"], gpu, m["device"], False
