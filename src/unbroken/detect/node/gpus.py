"""GPUs by NVML: lost ones, errors of their memory, rows that could not be remapped, slowdowns by the hardware, NVLinks."""

from __future__ import annotations

from typing import Any

from .counters import count_link_errors, describe_counts
from .result import CheckResult, State

_SLOWED = {0x08: "the hardware slows it down", 0x40: "it is too hot", 0x80: "the power brake is on"}
"""Bits of the clocks' event reasons that no load explains (nvml.h, nvmlClocksEventReasons)."""


def check_gpus(nvml: Any | None, why_not: str = "") -> list[CheckResult]:
    """Each GPU's own word. `nvml` is the `pynvml` module or its fake, None where it cannot be had, which `why_not` explains."""
    if nvml is None:
        return [CheckResult("gpus", State.NOT_CHECKED, why_not or "NVML cannot be read")]
    found: list[CheckResult] = []
    count = nvml.nvmlDeviceGetCount()
    for index in range(count):
        found += _check_gpu(nvml, index)
    return found or [CheckResult("gpus", State.NOT_CHECKED, "NVML knows of no GPU")]


def _check_gpu(nvml: Any, index: int) -> list[CheckResult]:
    device = f"gpu {index}"
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name = nvml.nvmlDeviceGetName(handle)
        nvml.nvmlDeviceGetMemoryInfo(handle)  # the driver answers for a lost one with an error
    except nvml.NVMLError as e:
        return [CheckResult("gpu", State.BAD, f"it does not answer: {e}", device)]
    text = name if isinstance(name, str) else name.decode()
    found = [CheckResult("gpu", State.GOOD, text, device)]
    for what, ask in (
        ("ecc", _check_ecc),
        ("rows", _check_rows),
        ("clocks", _check_clocks),
        ("nvlink", _check_links),
    ):
        try:
            state, text = ask(nvml, handle)
        except (nvml.NVMLError, AttributeError) as e:  # an older driver, or pynvml, lacks the call
            state, text = State.NOT_CHECKED, f"the driver does not say: {e}"
        found.append(CheckResult(what, state, text, device))
    return found


def _check_ecc(nvml: Any, handle: Any) -> tuple[State, str]:
    (value,) = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL])
    if value.nvmlReturn != nvml.NVML_SUCCESS:
        return State.NOT_CHECKED, "ECC is off, or not supported"
    errors = int(value.value.ullVal)
    if errors:
        return State.BAD, f"{errors} uncorrected memory errors since the driver was loaded: reset the GPU"
    return State.GOOD, "no uncorrected memory error since the driver was loaded"


def _check_rows(nvml: Any, handle: Any) -> tuple[State, str]:
    corrected, uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    if failed:
        return State.BAD, "a row of its memory could not be remapped: replace the GPU"
    if pending:
        return State.BAD, "a row of its memory waits to be remapped: reset the GPU"
    return State.GOOD, f"{corrected + uncorrected} rows remapped"


def _check_clocks(nvml: Any, handle: Any) -> tuple[State, str]:
    reasons = int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    slowed = [text for bit, text in _SLOWED.items() if reasons & bit]
    if slowed:
        return State.BAD, ", ".join(slowed)
    return State.GOOD, "no slowdown by the hardware"


def _check_links(nvml: Any, handle: Any) -> tuple[State, str]:
    up, down = 0, []
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 0)):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED:
                up += 1
            else:
                down.append(link)
        except nvml.NVMLError:
            break
    if not up:
        return State.NOT_CHECKED, "it has no NVLink that is up"
    if down:
        return State.BAD, f"{up} NVLinks are up, and {', '.join(map(str, down))} are not"
    return State.GOOD, f"{up} NVLinks are up{describe_counts(count_link_errors(nvml, handle))}"
