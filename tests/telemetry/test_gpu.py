"""GPUs are read through NVML and GPM, whatever is missing, lost or flooding."""

from __future__ import annotations

import pytest

from unbroken.errors import UnbrokenError
from unbroken.samples.schema import METRICS
from unbroken.telemetry.samplers.gpu import (
    GPU_SHARE,
    MEDIUM_S,
    SLOW_S,
    SLOW_SHARE,
    SLOWEST_S,
    GpuSampler,
    load_nvml,
)
from unbroken.telemetry.samplers.reading import Reading
from unbroken.testing.nvml import FakeGpu, FakeNvml


def values(readings: list[Reading], gpu: int = 0) -> dict[str, float]:
    return {r.metric: r.value for r in readings if r.gpu == gpu}


def costing(nvml: FakeNvml, seconds: float) -> list[float]:
    """Makes reading a GPU cost that much CPU time; the one item of what it returns is what was spent so far."""
    spent, ask = [0.0], nvml.nvmlDeviceGetUtilizationRates

    def slow(h: int) -> object:
        spent[0] += seconds
        return ask(h)

    nvml.nvmlDeviceGetUtilizationRates = slow  # type: ignore[method-assign]
    return spent


def test_every_reading_has_a_known_metric_and_the_right_unit() -> None:
    gpu = FakeGpu(energy_j=123.456, nvlink_replays=7, nvlink_recoveries=1, nvlink_crc=3572)
    sampler = GpuSampler(FakeNvml([gpu]))
    sampler.read(0.0)
    v = values(sampler.read(SLOWEST_S))
    assert set(v) <= set(METRICS)
    assert v["gpu_power_w"] == 400.0 and v["gpu_energy_j"] == pytest.approx(123.456)
    assert v["gpu_mem_used_pct"] == 75.0 and v["gpu_mem_used_gib"] == 60.0
    assert v["sm_active_pct"] == 88.5 and v["tensor_active_pct"] == 41.25
    assert v["nvlink_replays_total"] == 7 and v["nvlink_recoveries_total"] == 1
    assert v["nvlink_crc_errors_total"] == 3572
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
    old = FakeNvml([FakeGpu(gpm=False, mem_temp_c=None, nvlink_by="call", links=2, nvlink_replays=3)])
    old.events_supported = False
    sampler = GpuSampler(old)
    missing = dict(sampler.coverage().missing)
    assert {"sm_active_pct", "gpu_mem_temp_c", "xid"} <= set(missing) and "Hopper" in missing["sm_active_pct"]
    v = values(sampler.read(0.0))
    assert v["nvlink_replays_total"] == 3 and "gpu_mem_temp_c" not in v and "gpu_energy_j" in v
    old.calls = 0
    sampler.read(1.0)
    assert old.calls == 4


@pytest.mark.parametrize("way", ["link", "total", "call"])
def test_link_counters_whatever_the_driver_offers(way: str) -> None:
    gpu = FakeGpu(nvlink_by=way, links=18, nvlink_replays=1, nvlink_recoveries=2, nvlink_crc=3)
    nvml = FakeNvml([gpu])
    v = values(GpuSampler(nvml).read(0.0))
    found = [v[f"nvlink_{k}_total"] for k in ("replays", "recoveries", "crc_errors")]
    assert found == [1, 2, 3]


def test_no_link_up_is_named() -> None:
    sampler = GpuSampler(FakeNvml([FakeGpu(links=0)]))
    assert "nvlink_replays_total" in dict(sampler.coverage().missing)
    assert "nvlink_replays_total" not in values(sampler.read(0.0))


def test_a_tick_makes_few_calls() -> None:
    """Six for each GPU (four values, a GPM sample, its metrics) and one look for events."""
    nvml = FakeNvml([FakeGpu(), FakeGpu()])
    sampler = GpuSampler(nvml, timer=lambda: 0.0)
    sampler.read(0.0)
    sampler.read(1.0)
    nvml.calls = 0
    for i in range(2, 62):
        sampler.read(float(i))
    every_tick, medium, slow = 60 * (2 * 6 + 1), 60 / MEDIUM_S * 2 * 3, 60 / SLOW_S * 2 * 3
    assert nvml.calls == every_tick + medium + slow


def test_slow_values_are_read_seldom() -> None:
    sampler = GpuSampler(FakeNvml([FakeGpu()]), timer=lambda: 0.0)
    seen = ["ecc_corrected_total" in values(sampler.read(float(i))) for i in range(2 * int(SLOW_S))]
    assert seen == [i % SLOW_S == 0 for i in range(2 * int(SLOW_S))]


def test_a_slow_driver_is_asked_less_often() -> None:
    """Slow calls together stay within their share of a core, however long the driver takes over one."""
    nvml = FakeNvml([FakeGpu(), FakeGpu()])
    spent = [0.0]
    ask = nvml.nvmlDeviceGetFieldValues

    def slow(h: int, ids: list[int | tuple[int, int]]) -> list[object]:
        spent[0] += 0.0005 * len(ids) if len(ids) > 2 else 0.0
        return ask(h, ids)

    nvml.nvmlDeviceGetFieldValues = slow  # type: ignore[method-assign]
    sampler = GpuSampler(nvml, timer=lambda: spent[0])
    spent[0] = 0.0
    seen = [i for i in range(1200) if "nvlink_replays_total" in values(sampler.read(float(i)), gpu=1)]
    assert seen[0] == 0 and 1200 / SLOWEST_S <= len(seen) <= 1200 / SLOW_S / 2
    assert 0 < spent[0] / 1200 < SLOW_SHARE


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_gpus_take_turns_where_the_driver_takes_long(gpus: int) -> None:
    """Eight milliseconds of CPU time a GPU: no tick rate of all of them, but the share of a core, and each its turn."""
    nvml = FakeNvml([FakeGpu() for _ in range(gpus)])
    spent = costing(nvml, 0.008)
    sampler = GpuSampler(nvml, timer=lambda: spent[0])
    spent[0] = 0.0
    seen = [0] * gpus
    for i in range(3600):
        for r in sampler.read(float(i)):
            if r.metric == "gpu_power_w":
                assert r.gpu is not None
                seen[r.gpu] += 1
    assert 0.98 * GPU_SHARE < spent[0] / 3600 < 1.02 * GPU_SHARE
    assert max(seen) - min(seen) <= 1 and sum(seen) == pytest.approx(3600 * GPU_SHARE / 0.008, rel=0.02)
    assert sampler.turns == 3600 * gpus and sampler.held_back == sampler.turns - sum(seen)


def test_a_quick_driver_is_read_at_every_tick() -> None:
    nvml = FakeNvml([FakeGpu() for _ in range(8)])
    spent = costing(nvml, 0.0004)
    sampler = GpuSampler(nvml, timer=lambda: spent[0])
    for i in range(600):
        nvml.gpus[3].xids.append(31)
        found = sampler.read(float(i))
        assert len({r.gpu for r in found if r.metric == "gpu_power_w"}) == 8
        assert any(r.metric == "xid" for r in found)
    assert sampler.held_back == 0


def test_events_are_read_even_when_no_gpu_has_its_turn() -> None:
    nvml = FakeNvml([FakeGpu()])
    spent = costing(nvml, 1.0)
    sampler = GpuSampler(nvml, timer=lambda: spent[0])
    sampler.read(0.0)
    nvml.gpus[0].xids.append(79)
    assert [r.metric for r in sampler.read(1.0)] == ["xid"]


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

    from unbroken.telemetry.samplers import gpm, gpu, links

    used = set(
        re.findall(
            r"\b(?:n|nvml|self\._nvml)\.(nvml\w+|NVML\w*|c_nvml\w+)",
            inspect.getsource(gpu) + inspect.getsource(gpm) + inspect.getsource(links),
        )
    )
    used |= {constant for _, constant, _ in gpm.GPM_METRICS}
    used |= {*links.BY_LINK, *links.TOTALS, *links.COUNTERS}
    used |= {f for table in (gpu.MEDIUM_FIELDS, gpu.SLOW_FIELDS) for _, names, _ in table for f in names}
    assert len(used) > 40
    assert {u for u in used if not hasattr(pynvml, u)} == set()
    assert len(gpm.GPM_METRICS) <= pynvml.NVML_GPM_METRIC_MAX
    assert [
        getattr(pynvml, f"NVML_VALUE_TYPE_{t}") for t in ("DOUBLE", "UNSIGNED_INT", "UNSIGNED_LONG_LONG")
    ] == [0, 1, 3]
    assert set(links.VALUE_TYPES) == {name for name, _ in pynvml.c_nvmlValue_t._fields_}
