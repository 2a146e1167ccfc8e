"""NVLink's counters of a GPU: how often its links were trained again, sent again, or saw a wrong checksum.

The three are kept apart because they do not mean the same. A recovery is a link that lost its partner and was trained
again: rare on a sound machine. A replay is a packet sent again, and a CRC error is one received with a wrong checksum:
the link repairs both by itself, and at 100 Gbit/s a lane some are expected (they rise with the traffic on healthy
pairs); their rate says something, their number does not. Fields that carry throughput or ECC corrections are not read.

Hopper answers one field a link and counter, asked for all links in one call (nvml.h, field 161-163, scope = link);
older GPUs give totals (fields 38, 45, 52, 59) or nvmlDeviceGetNvLinkErrorCounter, one call each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

LinkRead = Callable[[], list[tuple[str, float]]]

BY_LINK: Mapping[str, str] = {
    "NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY": "nvlink_replays_total",
    "NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY": "nvlink_recoveries_total",
    "NVML_FI_DEV_NVLINK_ERROR_DL_CRC": "nvlink_crc_errors_total",
}
TOTALS: Mapping[str, str] = {
    "NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": "nvlink_replays_total",
    "NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": "nvlink_recoveries_total",
    "NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": "nvlink_crc_errors_total",
    "NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": "nvlink_crc_errors_total",
}
COUNTERS: Mapping[str, str] = {
    "NVML_NVLINK_ERROR_DL_REPLAY": "nvlink_replays_total",
    "NVML_NVLINK_ERROR_DL_RECOVERY": "nvlink_recoveries_total",
    "NVML_NVLINK_ERROR_DL_CRC_FLIT": "nvlink_crc_errors_total",
    "NVML_NVLINK_ERROR_DL_CRC_DATA": "nvlink_crc_errors_total",
}
METRICS = tuple(sorted(set(BY_LINK.values())))
VALUE_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""The member of nvmlValue_t for each nvmlValueType_t."""

Field = int | tuple[int, int]
"""A field's number, or (number, scope)."""


def links_up(nvml: Any, handle: Any) -> list[int]:
    """The NVLinks of a GPU that are up."""
    up = []
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 0)):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED:
                up.append(link)
        except nvml.NVMLError:
            break
    return up


def link_counters(nvml: Any, handle: Any) -> LinkRead | None:
    """A call that reads the counters of a GPU's links, each summed over its links; None if there are none."""
    up = links_up(nvml, handle)
    if not up:
        return None
    by_link: dict[Field, str] = {
        (number, link): metric for number, metric in _numbers(nvml, BY_LINK) for link in up
    }
    totals: dict[Field, str] = dict(_numbers(nvml, TOTALS))
    for asked in (by_link, totals):
        answering = _answering(nvml, handle, asked)
        if answering:
            return _field_reader(nvml, handle, answering)
    return _one_by_one(nvml, handle, up)


def _numbers(nvml: Any, names: Mapping[str, str]) -> list[tuple[int, str]]:
    return [(getattr(nvml, name), metric) for name, metric in names.items() if hasattr(nvml, name)]


def _answering(nvml: Any, handle: Any, asked: Mapping[Field, str]) -> dict[Field, str]:
    if not asked:
        return {}
    try:
        answers = nvml.nvmlDeviceGetFieldValues(handle, list(asked))
    except nvml.NVMLError:
        return {}
    return {
        f: metric
        for (f, metric), a in zip(asked.items(), answers, strict=True)
        if a.nvmlReturn == nvml.NVML_SUCCESS
    }


def _field_reader(nvml: Any, handle: Any, fields: Mapping[Field, str]) -> LinkRead:
    ask, metrics = list(fields), list(fields.values())

    def read() -> list[tuple[str, float]]:
        sums: dict[str, float] = {}
        for metric, a in zip(metrics, nvml.nvmlDeviceGetFieldValues(handle, ask), strict=True):
            if a.nvmlReturn == nvml.NVML_SUCCESS:
                sums[metric] = sums.get(metric, 0.0) + getattr(a.value, VALUE_TYPES[a.valueType])
        return list(sums.items())

    return read


def _one_by_one(nvml: Any, handle: Any, up: list[int]) -> LinkRead | None:
    plan: list[tuple[int, int, str]] = []
    for counter, metric in _numbers(nvml, COUNTERS):
        for link in up:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, counter)
                plan.append((link, counter, metric))
    if not plan:
        return None

    def read() -> list[tuple[str, float]]:
        sums: dict[str, float] = {}
        for link, counter, metric in plan:
            count = nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, counter)
            sums[metric] = sums.get(metric, 0.0) + count
        return list(sums.items())

    return read
