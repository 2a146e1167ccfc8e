"""GPUs are read through NVML and GPM, whatever is missing, lost or flooding."""

from __future__ import annotations

import pytest

from unbroken.errors import UnbrokenError
from unbroken.telemetry.gpu import SLOW, GpuSampler, load_nvml
from unbroken.telemetry.reading import Reading
from unbroken.testing.nvml import FakeGpu, FakeNvml
from unbroken.trace.schema import METRICS


def values(readings: list[Reading], gpu: int = 0) -> dict[str, float]:
    return {r.metric: r.value for r in readings if r.gpu == gpu}


def test_every_reading_has_a_known_metric_and_the_right_unit() -> None:
    sampler = GpuSampler(FakeNvml([FakeGpu(energy_j=123.456, nvlink_errors=7)]))
    sampler.read(0.0)
    for _ in range(SLOW - 1):
        sampler.read(1.0)
    v = values(sampler.read(2.0))
    assert set(v) <= set(METRICS)
    assert v["gpu_power_w"] == 400.0 and v["gpu_energy_j"] == pytest.approx(123.456)
    assert v["gpu_mem_used_pct"] == 75.0 and v["gpu_mem_used_gib"] == 60.0
    assert v["sm_active_pct"] == 88.5 and v["tensor_active_pct"] == 41.25
    assert v["nvlink_errors_total"] == 7
    assert set(sampler.coverage().metrics) == set(v) | {"xid"} and not sampler.coverage().missing


def test_gpm_bytes_are_not_mebibytes() -> None:
    gpu = FakeGpu(gpm_values={"NVLINK_TOTAL_TX_PER_SEC": 2.0})
    sampler = GpuSampler(FakeNvml([gpu]))
    sampler.read(0.0)
    assert values(sampler.read(1.0))["nvlink_tx_bytes_per_s"] == 2 * 2**20


def test_gpm_samples_are_apart_and_freed() -> None:
    nvml = FakeNvml([FakeGpu(), FakeGpu()])
    sampler = GpuSampler(nvml)
    assert "sm_active_pct" not in values(sampler.read(0.0))
    assert "sm_active_pct" not in values(sampler.read(0.05))
    assert "sm_active_pct" in values(sampler.read(0.2), gpu=1)
    sampler.close()
    assert nvml.live_samples == 0


def test_what_is_missing_is_named_and_not_asked_again() -> None:
    old = FakeNvml([FakeGpu(gpm=False, mem_temp_c=None, nvlink_fields=False, links=2, nvlink_errors=3)])
    old.events_supported = False
    sampler = GpuSampler(old)
    missing = dict(sampler.coverage().missing)
    assert {"sm_active_pct", "gpu_mem_temp_c", "xid"} <= set(missing) and "Hopper" in missing["sm_active_pct"]
    v = values(sampler.read(0.0))
    assert v["nvlink_errors_total"] == 3 and "gpu_mem_temp_c" not in v and "gpu_energy_j" in v
    old.calls = 0
    sampler.read(1.0)
    assert old.calls == 7  # six values and one batch of fields


def test_slow_values_are_read_seldom() -> None:
    sampler = GpuSampler(FakeNvml([FakeGpu()]))
    seen = ["ecc_corrected_total" in values(sampler.read(float(i))) for i in range(2 * SLOW)]
    assert seen == [i % SLOW == 0 for i in range(2 * SLOW)]


def test_a_lost_gpu_hides_neither_itself_nor_the_others() -> None:
    nvml = FakeNvml([FakeGpu(), FakeGpu(power_w=61)])
    sampler = GpuSampler(nvml)
    sampler.read(0.0)
    nvml.gpus[0].lost = True
    nvml.gpus[0].xids += [79, 74]
    readings = sampler.read(1.0)
    assert values(readings)["gpu_lost"] == 1.0 and "gpu_power_w" not in values(readings)
    assert values(readings, 1)["gpu_power_w"] == 61.0
    assert [r.value for r in readings if r.metric == "xid" and r.gpu == 0] == [79.0, 74.0]
    nvml.gpus[0].lost = False
    assert "gpu_power_w" in values(sampler.read(2.0))


def test_a_flood_of_events_does_not_hold_the_tick() -> None:
    nvml = FakeNvml([FakeGpu(xids=[31] * 1000)])
    sampler = GpuSampler(nvml)
    assert sum(r.metric == "xid" for r in sampler.read(0.0)) == 64
    assert sum(r.metric == "xid" for r in sampler.read(1.0)) == 64


def test_mixed_gpus() -> None:
    sampler = GpuSampler(FakeNvml([FakeGpu(gpm=False), FakeGpu()]))
    sampler.read(0.0)
    readings = sampler.read(1.0)
    assert "sm_active_pct" not in values(readings, 0) and "sm_active_pct" in values(readings, 1)


def test_no_driver_is_a_clear_error() -> None:
    try:
        load_nvml()
    except UnbrokenError as e:
        assert "driver" in str(e) or "nvidia-ml-py" in str(e)
    else:
        pytest.skip("this machine has a GPU")


def test_the_real_library_has_every_name_that_is_used() -> None:
    """No GPU is needed to find a misspelt constant."""
    import inspect
    import re

    import pynvml

    from unbroken.telemetry import gpu

    used = set(re.findall(r"\b(?:n|nvml|self\._nvml)\.(nvml\w+|NVML\w*|c_nvml\w+)", inspect.getsource(gpu)))
    used |= {constant for _, constant, _ in gpu.GPM_METRICS}
    used |= {f for table in (gpu.FAST_FIELDS, gpu.SLOW_FIELDS) for _, names, _ in table for f in names}
    assert len(used) > 40
    assert {u for u in used if not hasattr(pynvml, u)} == set()
    assert len(gpu.GPM_METRICS) <= pynvml.NVML_GPM_METRIC_MAX
    assert [
        getattr(pynvml, f"NVML_VALUE_TYPE_{t}") for t in ("DOUBLE", "UNSIGNED_INT", "UNSIGNED_LONG_LONG")
    ] == [0, 1, 3]
    assert set(gpu._TYPES) == {name for name, _ in pynvml.c_nvmlValue_t._fields_}
